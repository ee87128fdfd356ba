"""`broker doctor`: settings with their origin, secrets masked, the connection, the capabilities, the advice."""

from __future__ import annotations


def test_all_is_well(cli):
    report = cli("doctor", "--json").json
    assert report["ok"]
    assert report["round_trip_seconds"] >= 0
    assert report["source"] == "BROKER_URL"
    assert report["capabilities"]["publish.limits.body"] is None or report["capabilities"]["publish.limits.body"] > 0
    assert {"name", "value", "origin", "accepts", "description"} <= set(report["settings"][0])
    assert report["versions"]["anybroker"]
    text = cli("doctor").text
    assert "All is well" in text
    assert "messages.native_delay" in text


def test_secrets_are_masked_and_origins_shown(memory, monkeypatch):
    monkeypatch.setenv("BROKER_NATS_TOKEN", "env-secret")
    url = "nats://127.0.0.1:1?connect_timeout=1"
    result = memory("doctor", "--url", url, "--json", code=4)
    report = result.json
    assert not report["ok"]
    assert report["source"] == "--url"
    settings = {line["name"]: line for line in report["settings"]}
    assert settings["token"]["value"] == "***"
    assert settings["token"]["origin"] == "environment BROKER_NATS_TOKEN"
    assert settings["connect_timeout"]["origin"] == "url"
    assert report["error"]["type"] == "ConnectionFailed"
    assert report["error"]["advice"]
    text = memory("doctor", "--url", url, code=4)
    for seen in (result.text, result.err, text.text, text.err):
        assert "env-secret" not in seen
    assert "environment BROKER_NATS_TOKEN" in text.text
    assert text.err.startswith("broker: ")


def test_settings_from_a_file(memory, tmp_path):
    path = tmp_path / "broker.toml"
    path.write_text('[nats]\nservers = ["nats://127.0.0.1:1"]\nconnect_timeout = 1\n')
    memory.url = ""
    settings = memory("--config", str(path), "doctor", "--json", code=4).json["settings"]
    assert {line["name"]: line["origin"] for line in settings}["connect_timeout"] == f"file {path}"
    assert "only the scheme" in memory("--config", str(path), "--url", "nats://x", "topics", "list", code=2).err
    path.write_text(f'[nats]\n[inmem]\nname = "{tmp_path.name}"\n')
    assert "2 tables" in memory("--config", str(path), "topics", "list", code=2).err
    assert "--url nats:" in memory("--config", str(path), "topics", "list", code=2).err
    bare = tmp_path / "bare.toml"
    bare.write_text('name = "x"\n')
    assert "has no table. Put the settings into a table" in memory("--config", str(bare), "topics", "list", code=2).err
    assert memory("--config", str(path), "--url", "inmem:", "topics", "list", "--json").json == []
    assert "cannot be read" in memory("--config", str(tmp_path / "none"), "topics", "list", code=2).err


def test_a_bad_setting_is_reported_before_connecting(memory):
    assert "Did you mean" in memory("doctor", "--url", "nats://localhost?tokn=x", code=2).err
    memory.url = ""
    assert "--url" in memory("doctor", code=2).err
