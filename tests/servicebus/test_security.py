"""TLS, WebSockets and credentials, as a namespace of Azure requires them, in front of the double."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

import broker
from broker.errors import AuthenticationFailed, BrokerError, ConnectionFailed
from broker.hooks import Disconnected, Event
from broker.testing.waiting import eventually, take
from tests.servers.certificates import Authority
from tests.servers.proxy import Proxy
from tests.servers.servicebus import ServiceBusDouble
from tests.servers.servicebus.gateway import tls_in_front_of, websocket_in_front_of

SECONDS = 20.0


class Gates(NamedTuple):
    """Ports of the double behind TLS.

    :ivar common: parameters of every URL.
    """

    amqps: int
    websocket: int
    common: str
    authority: Path


@pytest.fixture
async def gates(double: ServiceBusDouble, tmp_path: Path) -> AsyncIterator[Gates]:
    authority = Authority(tmp_path)
    issued = authority.certificate("127.0.0.1")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(issued.file, issued.key)
    async with AsyncExitStack() as stack:
        amqps = await stack.enter_async_context(tls_in_front_of(double.port, tls))
        websocket = await stack.enter_async_context(websocket_in_front_of(double.port, tls))
        admin = await stack.enter_async_context(tls_in_front_of(double.admin_port, tls))
        yield Gates(amqps, websocket, f"connect_timeout=5&admin_endpoint=https://127.0.0.1:{admin}", authority.file)


@pytest.mark.parametrize("way", ["amqps", "websocket"])
async def test_messages_over_tls(gates: Gates, double: ServiceBusDouble, topic: str, way: str):
    more = f"custom_endpoint=127.0.0.1:{getattr(gates, way)}&tls_ca={gates.authority}"
    transport = "&transport=websocket" if way == "websocket" else ""
    url = f"servicebus://RootManageSharedAccessKey:{double.key}@127.0.0.1?{gates.common}&{more}{transport}"
    async with broker.connect(url) as bus:
        await bus.admin.ensure_topic(topic)
        async with bus.messages(topic, subscription="billing") as inbox:
            await bus.topic(topic).publish(b"x" * 100_000, key="k")
            (message,) = await take(inbox, 1, SECONDS)
            assert (len(message.data or b""), message.key) == (100_000, b"k")
            await message.ack()
        assert (await bus.admin.lag(topic, "billing")).waiting == 0


@pytest.mark.parametrize("way", ["amqps", "websocket"])
async def test_a_publish_waits_for_an_unreachable_gateway(gates: Gates, double: ServiceBusDouble, topic: str, way: str):
    transport = "&transport=websocket" if way == "websocket" else ""
    with Proxy(getattr(gates, way)) as proxy:
        more = f"custom_endpoint=127.0.0.1:{proxy.port}&tls_ca={gates.authority}{transport}"
        url = f"servicebus://RootManageSharedAccessKey:{double.key}@127.0.0.1?{gates.common}&{more}"
        async with broker.connect(url) as bus:
            events: list[Event] = []
            bus.hooks.listen(events.append)
            await bus.admin.ensure_topic(topic)
            async with bus.messages(topic, subscription="billing") as inbox:
                await bus.topic(topic).publish(b"before")
                await (await take(inbox, 1, SECONDS))[0].ack()
                proxy.refuse()
                publishing = asyncio.ensure_future(bus.topic(topic).publish(b"after"))
                await eventually(lambda: any(isinstance(event, Disconnected) for event in events), SECONDS, "the break")
                await asyncio.wait({publishing}, timeout=0.5)
                proxy.refuse(False)
                await publishing
                assert [message.data for message in await take(inbox, 1, SECONDS)] == [b"after"]


async def test_a_certificate_of_an_unknown_authority_is_reported(gates: Gates, double: ServiceBusDouble):
    url = f"servicebus://RootManageSharedAccessKey:{double.key}@127.0.0.1?{gates.common}"
    with pytest.raises(ConnectionFailed) as raised:
        async with broker.connect(f"{url}&custom_endpoint=127.0.0.1:{gates.amqps}"):
            pass
    assert "certificate" in str(raised.value).lower()


async def test_a_wrong_key_is_reported_over_tls(gates: Gates):
    url = f"servicebus://RootManageSharedAccessKey:wrong@127.0.0.1?{gates.common}&tls_ca={gates.authority}"
    with pytest.raises(AuthenticationFailed):
        async with broker.connect(f"{url}&custom_endpoint=127.0.0.1:{gates.amqps}"):
            pass


async def test_a_missing_default_credential_is_reported(gates: Gates, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    # No credentials of the developer, and no requests for an identity of the machine.
    for name in ("AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_TENANT_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "EnvironmentCredential")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(BrokerError) as raised:
        async with broker.connect(
            f"servicebus://127.0.0.1?{gates.common}&tls_ca={gates.authority}&custom_endpoint=127.0.0.1:{gates.amqps}"
        ):
            pass
    assert isinstance(raised.value, AuthenticationFailed), repr(raised.value)
    assert "EnvironmentCredential" in str(raised.value) or "credential" in str(raised.value).lower()
