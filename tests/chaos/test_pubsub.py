"""Pub/Sub's server, connections and consumers are killed, cut and frozen; every message is accounted for."""

from __future__ import annotations

import asyncio
import uuid

import pytest

import broker
from broker.errors import BrokerError, SubscriptionNotFound
from broker.hooks import Connected, Disconnected, Event
from broker.testing.waiting import bodies, eventually, numbered, take, until_seen
from broker.testing.worker import Worker
from tests.servers.proxy import Proxy
from tests.servers.pubsub import new_server, shared_server

pytestmark = pytest.mark.deep
PATIENCE = 60.0
COUNT = 600


def _name() -> str:
    return f"chaos.{uuid.uuid4().hex[:12]}"


async def test_killed_consumers_lose_nothing_under_load():
    url, topic = f"{shared_server().url}&lease_seconds=2", _name()
    async with broker.connect(url) as bus:
        await bus.admin.ensure_topic(topic)
        await bus.admin.ensure_subscription(topic, "readers")
        workers = [await Worker.start(url, topic, "readers", 1_000_000) for _ in range(2)]
        sent: list[bytes] = []
        enough = asyncio.Event()
        publishing = asyncio.ensure_future(_publish_until(enough, bus, topic, sent))
        handled: list[bytes] = []
        for worker in workers:
            await worker.until_acked(300, 3 * PATIENCE)
            await worker.kill()
            handled += worker.handled
        enough.set()
        await publishing
        rest = set(sent) - set(handled)
        async with bus.messages(topic, subscription="readers") as inbox:
            seen = bodies([*await until_seen(inbox, rest, PATIENCE), *await _drained(inbox)])
        assert set(seen) | set(handled) == set(sent)
        # Acks are not confirmed: a worker may have died before it sent those of its last pull.
        assert len(set(seen) & set(handled)) + len(handled) - len(set(handled)) <= 100 * len(workers)
        assert (await bus.admin.lag(topic, "readers")).waiting == 0


async def _drained(inbox: broker.MessageIterator) -> list[broker.Message[bytes]]:
    """Receive and ack until no message comes for longer than a lease."""
    found: list[broker.Message[bytes]] = []
    while message := await inbox.next_message(timeout=2.5):
        await message.ack()
        found.append(message)
    return found


async def _publish_until(enough: asyncio.Event, bus: broker.Bus, topic: str, sent: list[bytes]) -> None:
    while not enough.is_set():
        batch = numbered(20, f"b{len(sent)}")
        await bus.topic(topic).publish_batch(batch)
        sent += batch
        await asyncio.sleep(0.02)


async def test_consumers_of_a_killed_server_end_when_it_returns_empty():
    topic, events = _name(), list[Event]()
    with new_server() as server:
        async with broker.connect(f"{server.url}&publish_timeout=5&request_timeout=5&settle_timeout=1") as bus:
            bus.hooks.listen(events.append)
            await bus.admin.ensure_topic(topic)
            async with bus.messages(topic, subscription="readers") as inbox:
                await bus.topic(topic).publish(b"before")
                await take(inbox, 1, PATIENCE)
                await asyncio.to_thread(server.kill)
                with pytest.raises(BrokerError) as raised:
                    await bus.topic(topic).publish(b"lost")
                assert raised.value.retriable
                await asyncio.to_thread(server.start)
                # The emulator has lost its entities, and the consumer must not wait for ever.
                with pytest.raises(SubscriptionNotFound):
                    await inbox.next_message(timeout=PATIENCE)
            await bus.admin.ensure_topic(topic)
            async with bus.messages(topic, subscription="readers") as inbox:
                await bus.topic(topic).publish(b"after")
                assert bodies(await take(inbox, 1, PATIENCE)) == {b"after": 1}
    assert any(isinstance(event, Disconnected) for event in events)
    assert any(isinstance(event, Connected) and event.again for event in events)


async def test_a_connection_cut_in_the_middle_of_acks_loses_nothing():
    server, topic = shared_server(), _name()
    with Proxy(server.port) as proxy:
        url = server.url.replace(server.host, f"127.0.0.1:{proxy.port}")
        async with broker.connect(f"{url}&lease_seconds=2") as bus:
            await bus.admin.ensure_topic(topic)
            await bus.admin.ensure_subscription(topic, "readers")
            await bus.topic(topic).publish_batch(numbered(COUNT))
            seen: set[bytes | None] = set()
            async with bus.messages(topic, subscription="readers") as inbox:
                async with asyncio.timeout(3 * PATIENCE):
                    while len(seen) < COUNT:
                        batch = await inbox.next_batch(50, timeout=1.0)
                        seen.update(message.data for message in batch)
                        acking = asyncio.ensure_future(batch.ack())
                        if len(seen) % 3 == 0:
                            await asyncio.sleep(0)
                            proxy.cut()
                        await acking

            async def is_done() -> bool:
                return (await bus.admin.lag(topic, "readers")).waiting == 0

            async with bus.messages(topic, subscription="readers") as inbox:
                await _drained(inbox)
                await eventually(is_done, PATIENCE, "a lag of zero")
    assert seen == set(numbered(COUNT))
    assert proxy.cuts


async def test_a_publish_waits_for_a_reconnect():
    """Calls that were never sent are retried without risk of duplicates."""
    server, topic = shared_server(), _name()
    with Proxy(server.port) as proxy:
        url = server.url.replace(server.host, f"127.0.0.1:{proxy.port}")
        async with broker.connect(f"{url}&reconnect_wait=1") as bus:
            await bus.admin.ensure_topic(topic)
            await bus.topic(topic).publish(b"before")
            proxy.refuse()
            try:
                await eventually(lambda: proxy.refusals > 0, PATIENCE, "a connection is refused")
                publishing = asyncio.create_task(bus.topic(topic).publish(b"after"))
                refusals = proxy.refusals
                await eventually(lambda: proxy.refusals > refusals, PATIENCE, "another is refused")
                assert not publishing.done()
            finally:
                proxy.refuse(False)
            assert (await publishing).id
