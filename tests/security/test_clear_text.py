"""Credentials without TLS: one warning that names the setting, and none on the loopback."""

from __future__ import annotations

import logging

import pytest

import broker
from broker.driver import Warned, warn_of_clear_text
from broker.errors import BrokerError, InvalidSetting
from broker.hooks import Event, Hooks
from broker_servicebus.settings import ServiceBusSettings
from tests.servers.server_process import hold_port

HERE = "0.0.0.0"  # noqa: S104 - to connect to, not to listen on
"""An address of this machine that is not on the loopback."""
LOGIN = "security_protocol=SASL_PLAINTEXT&connect_timeout=0.5"
PULSAR = "connect_timeout=0.5&request_timeout=1"


async def warnings_of(url: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a connect warns of; it fails, because nothing listens."""
    caplog.clear()
    events: list[Event] = []
    bus = broker.connect(url)
    bus.hooks.listen(events.append)
    with caplog.at_level(logging.WARNING, "broker"), pytest.raises(BrokerError):
        async with bus:
            pass
    emitted = [event.text for event in events if isinstance(event, Warned)]
    assert [record.getMessage() for record in caplog.records if "in clear" in record.getMessage()] == emitted
    assert not any("s3cret" in text for text in emitted)
    return emitted


@pytest.mark.parametrize(
    ("url", "setting", "advice"),
    [
        ("pulsar://{0}?token=s3cret&" + PULSAR, "token", "use pulsar+ssl://"),
        ("pulsar://127.0.0.1:1,{0}?token_file=/none&" + PULSAR, "token_file", "use pulsar+ssl://"),
        ("pulsar+ssl://{0}?admin_url=http://{0}&token=s3cret&" + PULSAR, "token", "https:// in admin_url"),
        ("kafka://ann:s3cret@{0}?" + LOGIN, "sasl_password", "security_protocol=SASL_SSL"),
        ("kafka://ann:s3cret@{0}?sasl_mechanism=SCRAM-SHA-256&" + LOGIN, "sasl_password", "security_protocol=SASL_SSL"),
        ("servicebus://ann:s3cret@{0}?emulator=true&connect_timeout=0.5", "key", "loopback"),
    ],
)
async def test_credentials_without_tls_warn_once(
    url: str, setting: str, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    with hold_port() as held:
        port = held.getsockname()[1]
        (text,) = await warnings_of(url.format(f"{HERE}:{port}"), caplog)
        assert f"setting {setting!r} are sent in clear to {HERE}:{port}" in text
        assert advice in text
        assert not await warnings_of(url.format(f"127.0.0.1:{port}"), caplog)


@pytest.mark.parametrize(
    "url",
    [
        "pulsar://{0}?" + PULSAR,
        "pulsar+ssl://{0}?token=s3cret&" + PULSAR,
        "kafka://{0}?connect_timeout=0.5",
        "kafka://ann:s3cret@{0}?connect_timeout=0.5",
        "servicebus://ann:s3cret@{0}?connect_timeout=0.5",
    ],
)
async def test_others_do_not_warn(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with hold_port() as held:
        assert not await warnings_of(url.format(f"{HERE}:{held.getsockname()[1]}"), caplog)


@pytest.mark.parametrize("server", ["localhost", "LOCALHOST:1", "127.8.8.8:1", "[::1]:9092"])
def test_the_loopback(server: str) -> None:
    events: list[Event] = []
    hooks = Hooks()
    hooks.listen(events.append)
    warn_of_clear_text(hooks, "token", [server], "do something")
    assert not events
    warn_of_clear_text(hooks, "token", [server, "localhost.example:1", "[::2]:1"], "do something")
    assert events == [
        Warned(
            text="The credentials of setting 'token' are sent in clear to localhost.example:1, [::2]:1: do something"
        )
    ]


def test_the_management_of_service_bus_needs_tls() -> None:
    login = "servicebus://policy:s3cret@mine.example?admin_endpoint="
    with pytest.raises(InvalidSetting, match=r"admin_endpoint.*https://") as caught:
        ServiceBusSettings.from_url(f"{login}http://mine.example")
    assert "s3cret" not in str(caught.value)
    ServiceBusSettings.from_url(f"{login}https://mine.example")
    ServiceBusSettings.from_url(f"{login}http://mine.example&emulator=true")


@pytest.mark.parametrize(
    ("part", "emulated"),
    [
        ("UseDevelopmentEmulator=true", True),
        ("usedevelopmentemulator=true", True),
        ("UseDevelopmentEmulator=false", False),
        ("SharedAccessKey=UseDevelopmentEmulator=true", False),
    ],
)
def test_an_emulator_is_what_the_client_uses_without_tls(part: str, emulated: bool) -> None:
    from azure.servicebus._base_handler import _parse_conn_str

    text = f"Endpoint=sb://mine.example;SharedAccessKeyName=n;SharedAccessKey=k;{part};"
    assert (
        ServiceBusSettings.from_url(f"servicebus:?connection_string={text.replace('=', '%3D')}").is_emulator is emulated
    )
    assert _parse_conn_str(text)[-1] is emulated
