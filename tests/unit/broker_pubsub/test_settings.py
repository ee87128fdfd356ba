"""Settings from URLs and the environment, invalid combinations, and missing credentials."""

from __future__ import annotations

from pathlib import Path

import pytest

import broker
from broker.errors import AuthenticationFailed, InvalidSetting, UnknownSetting
from broker_pubsub import PubSubSettings


def test_the_host_is_the_project(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PUBSUB_EMULATOR_HOST", raising=False)
    settings = PubSubSettings.from_url("pubsub://my-project?emulator_host=localhost:8085&lease_seconds=5")
    assert (settings.project_id, settings.server) == ("my-project", "localhost:8085")
    assert PubSubSettings.from_url("pubsub://my-project").server == "pubsub.googleapis.com:443"


def test_the_environment_variables_of_google_are_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", "localhost:1234")
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "their-project")
    settings = PubSubSettings.from_url("pubsub:")
    assert (settings.project_id, settings.server) == ("their-project", "localhost:1234")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("pubsub://my-project?lease_seconds=5", "the service accepts 10 to 600"),
        ("pubsub://my-project?lease_seconds=20.5", "whole seconds"),
        ("pubsub://my-project?topic_retention=5", "600 or more"),
        ("pubsub://my-project?emulator_host=localhost", "emulator_host"),
        ("pubsub://my-project?emulator_host=localhost:1&impersonate=a@b", "exclude each other"),
        ("pubsub://my-project?emulator_host=localhost:1&tls_ca=ca.pem", "emulator_host and tls_ca exclude"),
        ("pubsub://my-project?emulator_host=localhost:1&quota_project=p", "emulator_host and quota_project exclude"),
        ("pubsub://my-project?connect_timeout=1e9", "connect_timeout.*at most 86400"),
        ("pubsub://my-project?publish_timeout=1e308", "publish_timeout.*at most 86400"),
        ("pubsub://P", "project"),
        ("pubsub://my-project/path", "takes no path"),
        ("pubsub://my-project:80", "one project, but 'my-project:80' is given.*emulator_host=host:port"),
        ("pubsub://my-project,other", "one project, but 'my-project,other'"),
    ],
)
def test_invalid_settings_are_refused(url: str, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PUBSUB_EMULATOR_HOST", raising=False)
    with pytest.raises(InvalidSetting, match=message):
        PubSubSettings.from_url(url)


def test_a_missing_project_is_reported_before_any_io(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)
    with pytest.raises(InvalidSetting, match="pubsub://my-project"):
        broker.connect("pubsub:")
    with pytest.raises(UnknownSetting, match="emulator_host"):
        broker.connect("pubsub://my-project?emulator=x")


async def test_a_missing_credentials_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PUBSUB_EMULATOR_HOST", raising=False)
    missing = tmp_path / "none.json"
    with pytest.raises(InvalidSetting, match=r"credentials_file.*none\.json"):
        async with broker.connect(f"pubsub://my-project?credentials_file={missing}"):
            pass


async def test_missing_default_credentials_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("PUBSUB_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with pytest.raises(AuthenticationFailed, match="emulator_host"):
        async with broker.connect("pubsub://my-project"):
            pass
