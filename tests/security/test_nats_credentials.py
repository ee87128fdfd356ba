"""Credentials for NATS: a warning where they go without TLS, and none for an embedded server."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import broker
from broker.cli.errors import Exit
from broker.errors import ConnectionFailed, InvalidSetting
from broker.hooks import Event, Hooks, Warned
from broker_jetstream.connection import Connection
from broker_jetstream.settings import JetStreamSettings
from tests.cli.conftest import InnerCli
from tests.jetstream.support import until
from tests.security.hostile_nats import HostileNats

# The machine itself under an address that is not its loopback, so that no test leaves the machine. Nobody listens.
ELSEWHERE = "0.0.0.0:1"
CLEAR = {
    "a password": ("nats://ann:s3cret@{}", "password"),
    "a token": ("nats://s3cret@{}", "token"),
    "a token as a parameter": ("nats://{}?token=s3cret", "token"),
    "of a server": ("nats:?servers=nats://ann:s3cret@{}", "servers"),
    "one of several servers": ("nats:?servers=nats://127.0.0.1:1,nats://s3cret@{}", "servers"),
}
QUIET = {
    "loopback": "nats://ann:s3cret@127.0.0.1:1",
    "localhost": "nats://ann:s3cret@localhost:1",
    "loopback of IPv6": "nats://s3cret@[::1]:1",
    "TLS": "tls://ann:s3cret@{}",
    "TLS by a setting": "nats://ann:s3cret@{}?tls_hostname=nats.example.org",
    "no credentials": "nats://{}",
    "a signature": "nats://{}?nkey_seed_file=/nowhere",
}


async def warnings_of(url: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of opening, which are events and in the log."""
    hooks, events = Hooks(), list[Event]()
    hooks.listen(events.append)
    connection = Connection(JetStreamSettings.from_url(url), hooks)
    with caplog.at_level(logging.WARNING, "broker"), pytest.raises((ConnectionFailed, InvalidSetting)):
        await connection.open()
    texts = [event.text for event in events if isinstance(event, Warned)]
    assert [record.getMessage() for record in caplog.records if record.name == "broker"] == texts
    assert "s3cret" not in "".join(texts)
    return texts


@pytest.mark.parametrize("case", CLEAR.values(), ids=CLEAR.keys())
async def test_credentials_in_clear_are_reported(case: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    url, setting = case
    # Nobody answers, so the warning comes before anything is sent.
    (text,) = await warnings_of(url.format(ELSEWHERE), caplog)
    assert repr(setting) in text and ELSEWHERE in text and "tls://" in text


@pytest.mark.parametrize("url", QUIET.values(), ids=QUIET.keys())
async def test_other_credentials_are_not(url: str, caplog: pytest.LogCaptureFixture) -> None:
    assert await warnings_of(url.format(ELSEWHERE), caplog) == []


async def test_the_warning_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    async with HostileNats() as server:
        connection = Connection(JetStreamSettings.from_url(f"nats://ann:s3cret@0.0.0.0:{server.port}"), Hooks())
        with caplog.at_level(logging.WARNING, "broker"):
            await connection.open()
            await connection.close()
        assert len([record for record in caplog.records if "in clear" in record.getMessage()]) == 1


async def test_a_server_that_a_server_names_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    async with HostileNats() as other:
        address = f"0.0.0.0:{other.port}"
        with caplog.at_level(logging.WARNING, "broker"):
            async with HostileNats(connect_urls=[address]) as server:
                url = f"nats://ann:s3cret@127.0.0.1:{server.port}?reconnect_wait=0.01"
                connection = Connection(JetStreamSettings.from_url(url), Hooks())
                await connection.open()
            await until(lambda: len(other.connects) == 1)
            other.cut()
            await until(lambda: len(other.connects) == 2)
            await connection.close()
    (text,) = [record.getMessage() for record in caplog.records if "in clear" in record.getMessage()]
    assert "'password'" in text and address in text
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize(
    ("query", "setting"),
    [
        ("token=s3cret", "token"),
        ("user=ann&password=s3cret", "user"),
        ("nkey_seed=s3cret", "nkey_seed"),
        ("nkey_seed_file=/nowhere", "nkey_seed_file"),
        ("creds_file=/nowhere", "creds_file"),
        ("tls_ca=/nowhere", "tls_ca"),
        ("tls_hostname=nats.invalid", "tls_hostname"),
        ("tls_handshake_first=true", "tls_handshake_first"),
        ("servers=nats://nats.invalid", "servers"),
    ],
)
def test_an_embedded_server_takes_no_credentials(query: str, setting: str, tmp_path: Path) -> None:
    for url in ("embedded:", f"embedded://{tmp_path}"):
        with pytest.raises(InvalidSetting) as caught:
            JetStreamSettings.from_url(f"{url}?{query}")
        assert repr(setting) in str(caught.value) and "from url" in str(caught.value)
        assert "s3cret" not in f"{caught.value} {caught.value!r}"


def test_an_embedded_server_takes_no_login_in_its_url() -> None:
    for login in ("ann:s3cret@", "s3cret@"):
        with pytest.raises(InvalidSetting) as caught:
            JetStreamSettings.from_url(f"embedded://{login}/var/lib/app")
        assert "s3cret" not in str(caught.value)


def test_arguments_and_files_are_refused_too(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="argument"):
        JetStreamSettings(embedded="", token="s3cret")  # pyright: ignore[reportArgumentType]
    path = tmp_path / "broker.toml"
    path.write_text('embedded = ""\ntoken = "s3cret"\n')
    with pytest.raises(InvalidSetting, match=r"broker\.toml"):
        JetStreamSettings.from_toml(path)


async def test_an_embedded_server_ignores_the_environment_of_other_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"USER": "ann", "PASSWORD": "s3cret", "TLS_CA": "/nowhere", "SERVERS": "tls://nats.invalid"}
    for name, value in given.items():
        monkeypatch.setenv(f"BROKER_NATS_{name}", value)
    async with broker.connect("embedded:") as bus:
        assert (await bus.health()).ok


def test_the_command_line_shows_the_warning() -> None:
    result = InnerCli(f"nats://ann:s3cret@{ELSEWHERE}")("topics", "list", code=Exit.NO_CONNECTION)
    assert "in clear" in result.err
    assert "s3cret" not in result.err + result.text
