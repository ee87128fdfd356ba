"""Settings: values of a URL, values that are refused, and the use of every setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from broker.driver.contract import RecordSubscription, TopicPartition
from broker.errors import InvalidSetting, UnknownSetting
from broker.hooks import Hooks
from broker.messages import Outcome
from broker.outbound import OutboundMessage
from broker_jetstream.backend import JetStreamBackend
from broker_jetstream.settings import JetStreamSettings
from tests.jetstream.support import GroupListener, make_topic, publish, read, receive, settle_all, subscribe
from tests.servers.nats import NatsServer, shared_server

HANDLED_ELSEWHERE = {
    # Tested where they act: test_security, test_embedded, test_admin and the tests of each mechanism.
    **dict.fromkeys(("embedded", "user", "password", "token", "nkey_seed", "nkey_seed_file", "creds_file"), "security"),
    **dict.fromkeys(
        ("tls_ca", "tls_cert", "tls_key", "tls_key_password", "tls_hostname", "tls_handshake_first"), "security"
    ),
    **dict.fromkeys(("partitions", "storage", "replicas", "deduplication_window"), "admin"),
    **dict.fromkeys(
        ("publish_timeout", "publish_resend", "request_timeout", "settle_timeout", "owner_timeout"), "faults"
    ),
    **dict.fromkeys(("lease_seconds", "fast_path"), "messages"),
}


def test_credentials_of_servers_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = JetStreamSettings(servers=("nats://ann:s3cr3t@one:4222", "nats://s3cr3t@two"))
    assert settings.servers[0] == "nats://ann:s3cr3t@one:4222"
    shown = {info.name: info.value for info in settings.explain()}["servers"]
    assert shown == "nats://ann:***@one:4222,nats://***@two"
    assert "s3cr3t" not in f"{settings!r} {settings}"
    assert "nats://ann:***@one:4222" in repr(settings)
    with pytest.raises(InvalidSetting) as twice:
        JetStreamSettings.from_url("nats://one?servers=nats://ann:s3cr3t@two")
    with pytest.raises(InvalidSetting) as split:
        JetStreamSettings.from_url("nats:?servers=nats://ann:a,s3cr3t@two")
    monkeypatch.setenv("BROKER_NATS_SERVERS", '["nats://ann:s3cr3t@one:4222"]')
    with pytest.raises(InvalidSetting) as listed:
        JetStreamSettings()
    for refused in (twice, split, listed):
        assert "s3cr3t" not in f"{refused.value} {refused.value!r}"
        assert "***" in str(refused.value)


def test_urls() -> None:
    settings = JetStreamSettings.from_url("nats://one,two:5000?lease_seconds=12.5&fast_path=false&storage=memory")
    assert settings.servers == ("nats://one:4222", "nats://two:5000")
    assert (settings.lease_seconds, settings.fast_path, settings.storage) == (12.5, False, "memory")
    assert JetStreamSettings.from_url("tls://one").servers == ("tls://one:4222",)
    assert JetStreamSettings.from_url("tls://one").ssl_context() is not None
    assert JetStreamSettings.from_url("nats://one").ssl_context() is None
    assert JetStreamSettings.from_url("nats://").servers == ("nats://127.0.0.1:4222",)
    assert JetStreamSettings.from_url("embedded:").embedded == ""
    assert JetStreamSettings.from_url("embedded:///var/lib/x").embedded == "/var/lib/x"
    assert JetStreamSettings.from_url("nats://one").embedded is None
    login = JetStreamSettings.from_url("nats://ann:pw@one")
    assert (login.user, login.password and login.password.get_secret_value()) == ("ann", "pw")
    assert "pw@" not in login.url


@pytest.mark.parametrize(
    "url",
    [
        "nats://one/path",
        "embedded://host/dir",
        "nats://one?lease_seconds=soon",
        "nats://one?lease_seconds=-1",
        "nats://one?storage=tape",
        "nats://one?token=a&nkey_seed=SUABC",
        "nats://ann:pw@one?token=t",
        "nats://one?user=ann",
        "nats://one?tls_key=/k.pem",
        "nats://one?pull_heartbeat=20",
        "nats://one?inbox_prefix=a.*",
        "nats://one?partitions=0",
        "nats://one?lease_seconds=1e12",
        "nats://one?deduplication_window=1e10",
        "nats://one?pull_expires=1e10",
        "nats://one?pull_heartbeat=1e10&pull_expires=2e10",
        "nats://one?owner_timeout=1e10",
    ],
)
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidSetting):
        JetStreamSettings.from_url(url)


def test_unknown_settings_suggest_the_nearest() -> None:
    with pytest.raises(UnknownSetting, match="lease_seconds"):
        JetStreamSettings.from_url("nats://one?lease_second=1")


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e400"])
def test_seconds_are_finite(value: str) -> None:
    with pytest.raises(InvalidSetting, match="connect_timeout"):
        JetStreamSettings.from_url(f"nats://one?connect_timeout={value}")


VALUES: dict[str, Any] = {
    "name": "my-name",
    "inbox_prefix": "_MINE.here",
    "connect_timeout": 3.5,
    "reconnect_wait": 0.35,
    "ping_interval": 7.5,
    "max_outstanding_pings": 5,
    "publish_window": 77,
    "max_ack_pending": 1234,
    "pull_expires": 21.0,
    "pull_heartbeat": 1.5,
    "domain": None,
}


async def test_every_setting_is_used(topic: str) -> None:
    server = shared_server()
    settings = JetStreamSettings(servers=(server.url,), **VALUES)
    assert set(JetStreamSettings.model_fields) == {"servers", *VALUES, *HANDLED_ELSEWHERE}
    backend = JetStreamBackend(settings, Hooks())
    await backend.open()
    try:
        transport = backend._connection._transport
        assert transport is not None
        options = transport.client.options
        assert options["name"] == "my-name"
        assert options["connect_timeout"] == 3.5
        assert options["reconnect_time_wait"] == 0.35
        assert options["ping_interval"] == 7.5
        assert options["max_outstanding_pings"] == 5
        assert options["max_reconnect_attempts"] == -1
        assert options["allow_reconnect"] is True
        assert backend._connection.inbox.prefix.startswith(b"_MINE.here.")
        assert str(transport.client.new_inbox()).startswith("_MINE.here.")
        pulls: list[bytes] = []
        original = backend._connection.send

        async def watch(messages: Any) -> None:
            pulls.extend(message.data for message in messages)
            await original(messages)

        backend._connection.send = watch
        await make_topic(backend, topic)
        source = await subscribe(backend, topic)
        await source.fetch(5, 100, 0.05)
        info = await backend.admin().describe_subscription(topic, "billing")
        assert info.native["config"]["max_ack_pending"] == 1234
        assert any(b'"expires":21000000000' in pull and b'"idle_heartbeat":1500000000' in pull for pull in pulls)
    finally:
        await backend.close()


async def test_a_domain_changes_the_api_subjects(topic: str, tmp_path: Path) -> None:
    with NatsServer(f'jetstream {{ domain: hub, store_dir: "{tmp_path}" }}', jetstream=False) as hub:
        backend = JetStreamBackend(JetStreamSettings(servers=(hub.url,), domain="hub"), Hooks())
        await backend.open()
        try:
            assert backend._connection.api_subject("INFO") == "$JS.hub.API.INFO"
            await make_topic(backend, topic)
            await publish(backend, topic, OutboundMessage(b"x"))
            source = await subscribe(backend, topic, confirm_acks=True)
            found = await receive(source, 1)
            assert (found[0].delivery_attempt, found[0].broker_time is not None) == (1, True)
            assert await source.settle(settle_all(found, Outcome.ACK)) == [None]
            group = await backend.join(RecordSubscription(topics=[topic], group="audit"), GroupListener())
            (record,) = await read(group, 1)
            assert await group.commit({TopicPartition(topic, 0): record.offset + 1}) == {TopicPartition(topic, 0): None}
        finally:
            await backend.close()
