"""Order per key over a broken connection: lost messages are redelivered at once, before newer ones."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from broker.driver.contract import MessageSource
from broker.errors import ConnectionFailed
from broker.messages import Message, Outcome
from broker.outbound import OutboundMessage
from broker_jetstream.backend import JetStreamBackend
from tests.jetstream.conftest import Open
from tests.jetstream.support import make_topic, publish, receive, settle_all, subscribe
from tests.servers.nats import NatsServer
from tests.servers.proxy import Proxy

LEASE = 30.0


@pytest.fixture
async def proxy(nats_server: NatsServer) -> AsyncIterator[Proxy]:
    with Proxy(nats_server.port) as proxy:
        yield proxy


def numbers(messages: list[Message[bytes]]) -> list[int]:
    return [int(message.data or b"") for message in messages]


def numbered(first: int, last: int) -> list[OutboundMessage]:
    return [OutboundMessage((b"%d" % number).rjust(1000), b"key") for number in range(first, last)]


async def until_cut(source: MessageSource, proxy: Proxy, number: int) -> list[Message[bytes]]:
    """Fetch until the connection breaks in the middle of `number` messages."""
    found: list[Message[bytes]] = []
    async with asyncio.timeout(60):
        while not proxy.cuts:
            # The break itself raises an error.
            with contextlib.suppress(ConnectionFailed):
                found += await source.fetch(number, 1 << 20, 0.2)
    return found


async def again(source: MessageSource, number: int) -> list[Message[bytes]]:
    """Fetch `number` messages, over all breaks."""
    found: list[Message[bytes]] = []
    async with asyncio.timeout(2 * LEASE):
        while len(found) < number:
            with contextlib.suppress(ConnectionFailed):
                found += await source.fetch(number - len(found), 1 << 20, 1.0)
    return found


@pytest.mark.parametrize("fast", [True, False])
async def test_messages_lost_with_the_connection_are_redelivered_first(
    open_backend: Open, proxy: Proxy, topic: str, fast: bool
) -> None:
    other = await open_backend()
    backend = await open_backend(servers=(proxy.url,), lease_seconds=LEASE, fast_path=fast)
    await make_topic(other, topic)
    await publish(other, topic, *numbered(0, 100))
    source = await subscribe(backend, topic, ordered_by_key=True)
    begin = time.monotonic()
    proxy.cut(after_bytes=30_000)
    found = await until_cut(source, proxy, 100)
    await publish(other, topic, *numbered(100, 150))
    found += await again(source, 150 - len(found))
    assert numbers(found) == list(range(150))
    assert time.monotonic() - begin < LEASE
    assert {message.delivery_attempt for message in found} == {1, 2}


async def test_a_second_cut_during_the_redelivery(open_backend: Open, proxy: Proxy, topic: str) -> None:
    other = await open_backend()
    backend = await open_backend(servers=(proxy.url,), lease_seconds=LEASE)
    await make_topic(other, topic)
    await publish(other, topic, *numbered(0, 100))
    source = await subscribe(backend, topic, ordered_by_key=True)
    proxy.cut(after_bytes=30_000)
    found = await until_cut(source, proxy, 100)
    proxy.cut(after_bytes=30_000)
    await publish(other, topic, *numbered(100, 150))
    found += await again(source, 150 - len(found))
    assert proxy.cuts == 2
    assert numbers(found) == list(range(150))


async def test_messages_of_another_consumer_are_not_nakked(open_backend: Open, proxy: Proxy, topic: str) -> None:
    other = await open_backend(lease_seconds=LEASE)
    backend = await open_backend(servers=(proxy.url,), lease_seconds=LEASE)
    await make_topic(other, topic)
    mine, theirs = [await subscribe(each, topic, ordered_by_key=True) for each in (backend, other)]
    await publish(other, topic, *numbered(0, 30))
    found = [(await receive(source, 10)) for source in (mine, theirs, mine)]
    assert [numbers(each) for each in found] == [[*range(10)], [*range(10, 20)], [*range(20, 30)]]
    await _settle(mine, found[0] + found[2])
    await publish(other, topic, *numbered(30, 40))
    leased = await receive(theirs, 10)
    proxy.cut()
    await publish(other, topic, *numbered(40, 50))
    assert numbers(await again(mine, 10)) == list(range(40, 50))
    assert await theirs.settle(settle_all(leased, Outcome.ACK)) == [None] * 10


async def _settle(source: MessageSource, messages: list[Message[bytes]]) -> None:
    assert await source.settle(settle_all(messages, Outcome.ACK)) == [None] * len(messages)


async def test_a_pull_requests_no_more_bytes_than_the_fetch(both_ways: JetStreamBackend, topic: str) -> None:
    await make_topic(both_ways, topic)
    source = await subscribe(both_ways, topic)
    await publish(both_ways, topic, *numbered(0, 20), OutboundMessage(b"21".rjust(9000)), OutboundMessage(b"22"))
    found: list[Message[bytes]] = []
    while len(found) < 22:
        batch = await source.fetch(100, 5000, 30)
        assert 1 <= len(batch) <= 4
        found += batch
        lag = await both_ways.admin().lag(topic, "billing")
        assert lag.unsettled is not None
        # A pull of 5000 bytes has room for four, of which some may still be in flight.
        assert len(found) <= lag.unsettled < len(found) + 4
    assert numbers(found) == [*range(20), 21, 22]
