"""Settings: URLs, invalid combinations, and how each setting reaches the client."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import trustme
from azure.servicebus import ServiceBusMessageBatch, TransportType
from azure.servicebus.exceptions import MessageSizeExceededError
from pydantic import SecretStr

import broker
from broker.errors import ConfigurationError, InvalidSetting
from broker.hooks import Hooks
from broker.outbound import OutboundMessage
from broker_servicebus import ServiceBusSettings, private_api
from broker_servicebus.codec import encode
from broker_servicebus.connection import Connection

HOST = "mine.servicebus.windows.net"


async def client_of(url: str) -> tuple[Any, Any]:
    """The client's and the administration client's own settings."""
    connection = Connection(ServiceBusSettings.from_url(url), Hooks())
    connection._create_clients()
    try:
        return connection.client, connection.admin
    finally:
        await connection.close()


def test_the_url_gives_host_and_key():
    settings = ServiceBusSettings.from_url(f"servicebus://policy:s%2Fe@{HOST}?max_sessions=3")
    assert (settings.namespace, settings.key_name, settings.max_sessions) == (HOST, "policy", 3)
    assert settings.key is not None
    assert settings.key.get_secret_value() == "s/e"
    assert "s/e" not in repr(settings)
    assert "s%2Fe" not in settings.url


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (f"servicebus://policy@{HOST}", "belong together"),
        (f"servicebus://{HOST}/path", "takes no path"),
        (f"servicebus://p:k@{HOST}?sas_token=x", "one way to authenticate"),
        (f"servicebus://{HOST}?connection_string=x", "names the namespace itself"),
        (f"servicebus://{HOST}?emulator=true", "needs a key"),
        ("servicebus://p:k@127.0.0.1?emulator=true&transport=websocket", "plain AMQP"),
        (f"servicebus://p:k%3B@{HOST}", "key contains ';'"),
        (f"servicebus://p%3B:k@{HOST}", "key_name contains ';'"),
        (f"servicebus://p:k@{HOST}?proxy=me:hidden@h:1", "proxy names a user or a password, .*; write host:port$"),
        (f"servicebus://p:k@{HOST}?proxy=host", "has no port"),
        (f"servicebus://p:k@{HOST}?proxy=host:http", "proxy 'host:http' is not an address; write host:port"),
        (f"servicebus://p:k@{HOST}?proxy=:8080", "proxy ':8080' is not an address"),
        (f"servicebus://p:k@{HOST}?custom_endpoint=host:99999", "custom_endpoint 'host:99999' is not an address"),
        (f"servicebus://p:k@{HOST}?custom_endpoint=", "custom_endpoint '' is not an address"),
        (f"servicebus://p:k@{HOST}?admin_endpoint=http://host:x", "admin_endpoint 'http://host:x' has no port"),
        (f"servicebus://{HOST}?sas_token=", "sas_token is empty"),
        (f"servicebus://p:k@{HOST}?admin_endpoint=mine", "admin_endpoint"),
        (f"servicebus://p:k@{HOST}?lease_seconds=301", "lease_seconds"),
        (f"servicebus://p:k@{HOST}?lease_seconds=4.9", r"lease_seconds is 4\.9; .* 5 to 300 .* give 5 or more"),
        (f"servicebus://p:k@{HOST}?max_delivery_count=2001", "max_delivery_count"),
        (f"servicebus://p:k@{HOST}?deduplication_window=19", "deduplication_window is 19; .* 20 seconds"),
    ],
)
def test_invalid_settings_are_refused(url: str, message: str):
    with pytest.raises(ConfigurationError, match=message):
        ServiceBusSettings.from_url(url)


def test_an_emulator_may_have_shorter_locks():
    url = "servicebus://p:k@127.0.0.1?emulator=true&lease_seconds=0.5"
    assert ServiceBusSettings.from_url(url).lock_seconds == 0.5
    text = "Endpoint=sb://127.0.0.1;SharedAccessKeyName=p;SharedAccessKey=k;UseDevelopmentEmulator=true;"
    assert ServiceBusSettings(connection_string=SecretStr(text), lease_seconds=0.5).lock_seconds == 0.5


@pytest.mark.parametrize("url", ["servicebus:", "servicebus:?connection_string=SharedAccessKey%3Dk"])
def test_a_namespace_is_required(url: str):
    with pytest.raises(InvalidSetting, match="No namespace is given"):
        broker.connect(url)


@pytest.mark.parametrize("text", [f"Endpoint=sb://{HOST}", f"Endpoint=sb://{HOST};SharedAccessKey=verysecret"])
async def test_an_incomplete_connection_string_is_refused(text: str):
    connection = Connection(ServiceBusSettings(connection_string=SecretStr(text)), Hooks())
    with pytest.raises(InvalidSetting, match=r"'connection_string' cannot be used.*SharedAccessKeyName=") as raised:
        await connection.open()
    assert "verysecret" not in str(raised.value)


async def test_an_unusable_file_of_certificates_is_refused(tmp_path: Path):
    other = tmp_path / "other.pem"
    other.write_text("no certificate")
    for path in (other, tmp_path / "none.pem"):
        connection = Connection(ServiceBusSettings.from_url(f"servicebus://p:k@{HOST}?tls_ca={path}"), Hooks())
        with pytest.raises(InvalidSetting, match=f"'tls_ca' .*{path.name}.*PEM file"):
            await connection.open()


def test_a_url_names_one_namespace():
    with pytest.raises(InvalidSetting, match=r"one namespace, but 'h1,h2:5671' is given.*a bus of its own"):
        ServiceBusSettings.from_url("servicebus://policy:verysecret@h1,h2:5671")


def test_a_secret_is_not_in_an_error():
    with pytest.raises(InvalidSetting) as raised:
        ServiceBusSettings.from_url(f"servicebus://policy:verysecret@{HOST}?max_sessions=0")
    assert "verysecret" not in str(raised.value)


async def test_transport_and_endpoints_reach_the_client(tmp_path: Path):
    authority = tmp_path / "authority.pem"
    trustme.CA().cert_pem.write_to_path(str(authority))
    client, _ = await client_of(f"servicebus://p:k@{HOST}?transport=websocket&tls_ca={authority}&request_timeout=3")
    assert client._config.transport_type is TransportType.AmqpOverWebsocket
    assert client._connection_verify == str(authority)
    assert client._config.try_timeout == 3.0
    client, _ = await client_of(f"servicebus://p:k@{HOST}?proxy=gate:8080")
    assert client._config.http_proxy == {"proxy_hostname": "gate", "proxy_port": 8080}
    assert client._config.transport_type is TransportType.AmqpOverWebsocket
    client, admin = await client_of(f"servicebus://p:k@{HOST}?custom_endpoint=gate:5000&admin_endpoint=https://there")
    assert client._config.custom_endpoint_hostname == "gate"
    assert admin.fully_qualified_namespace == "there"
    client, _ = await client_of("servicebus://p:k@127.0.0.1:5000?emulator=true")
    assert client._config.use_tls is False


async def test_credentials_reach_the_client():
    client, _ = await client_of(f"servicebus://p:k@{HOST}")
    assert (client._credential.policy, client._credential.key) == ("p", "k")
    signature = "SharedAccessSignature%20sr%3Dx%26sig%3Dy%26se%3D1%26skn%3Dz"
    client, _ = await client_of(f"servicebus://{HOST}?sas_token={signature}")
    assert client._credential.token.startswith("SharedAccessSignature sr=x")
    settings = ServiceBusSettings(
        connection_string=f"Endpoint=sb://{HOST}/;SharedAccessKeyName=p;SharedAccessKey=k"  # pyright: ignore[reportArgumentType]
    )
    connection = Connection(settings, Hooks())
    assert connection.host == HOST


async def test_without_a_key_the_default_credential_is_used():
    from azure.identity.aio import DefaultAzureCredential

    client, admin = await client_of(f"servicebus://{HOST}")
    assert isinstance(client._credential, DefaultAzureCredential)
    assert admin._credential is client._credential


def test_the_installed_client_has_the_private_calls(monkeypatch: pytest.MonkeyPatch):
    assert private_api.available()
    private_api.available.cache_clear()
    try:
        monkeypatch.setitem(private_api._CALLS, "_renew_locks", ("self", "other"))
        assert not private_api.available()
        settings = ServiceBusSettings.from_url(f"servicebus://p:k@{HOST}")
        assert not Connection(settings, Hooks()).fast
    finally:
        private_api.available.cache_clear()


def test_the_private_call_fills_a_batch_as_the_client_does():
    messages = [
        OutboundMessage(b"plain", id="a"),
        OutboundMessage(b"x" * 300, key=b"k", attributes={"type": "made"}),
        OutboundMessage(None, key=b"k", id="long" * 40, ttl=1.5),
    ]
    encoded = [encode(message)[0] for message in messages]
    ours, theirs = ServiceBusMessageBatch(10_000), ServiceBusMessageBatch(10_000)
    for message in encoded:
        private_api.add(ours, message)
        theirs.add_message(message)
    untyped: Any = (ours, theirs)
    assert untyped[0]._message == untyped[1]._message
    assert untyped[0]._messages == untyped[1]._messages
    assert (len(ours), ours.size_in_bytes) == (len(theirs), theirs.size_in_bytes)


def test_the_private_call_ends_a_batch_where_the_client_does():
    first, second = (encode(OutboundMessage(b"x" * 100, id=name))[0] for name in ("a", "b"))
    room = ServiceBusMessageBatch(10_000)
    for message in (first, second):
        room.add_message(message)
    exact, small = ServiceBusMessageBatch(room.size_in_bytes), ServiceBusMessageBatch(room.size_in_bytes - 1)
    for batch in (exact, small):
        private_api.add(batch, first)
    private_api.add(exact, second)
    with pytest.raises(MessageSizeExceededError):
        private_api.add(small, second)
    assert (len(exact), len(small)) == (2, 1)


def test_a_client_without_tracing_has_no_private_calls(monkeypatch: pytest.MonkeyPatch):
    private_api.available.cache_clear()
    try:
        monkeypatch.setitem(sys.modules, "azure.servicebus._common.tracing", None)
        monkeypatch.delattr("azure.servicebus._common.tracing")
        assert not private_api.available()
    finally:
        private_api.available.cache_clear()
