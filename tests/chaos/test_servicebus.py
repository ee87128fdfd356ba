"""Consumers of Service Bus, and its double, are killed while they hold locks; every message is accounted for."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter

import pytest

import broker
from broker.outbound import OutboundMessage
from broker.testing.waiting import numbered
from broker.testing.worker import Worker
from tests.servers.servicebus import ServiceBusDouble, missing, shared_double

pytestmark = pytest.mark.deep
PATIENCE = 90.0
LOCK_SECONDS = 5.0
KEYS = 8


def _name() -> str:
    return f"chaos.{uuid.uuid4().hex[:12]}"


@pytest.fixture
def double() -> ServiceBusDouble:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    found = shared_double()
    found.fault()
    return found


@pytest.mark.parametrize("sessions", [False, True], ids=["messages", "sessions"])
async def test_killed_consumers_lose_nothing_under_load(double: ServiceBusDouble, sessions: bool):
    url, topic = f"{double.url}&lease_seconds={LOCK_SECONDS:g}&session_idle=0.1", _name()
    async with broker.connect(url) as bus:
        await bus.admin.ensure_topic(topic)
        await bus.admin.ensure_subscription(topic, "readers", requires_session=sessions)
        sent: list[bytes] = []
        # A backlog, so that a killed worker has fetched more than it has handled.
        for _ in range(40):
            await _publish_more(bus, topic, sent)
        workers = [await Worker.start(url, topic, "readers", 1_000_000) for _ in range(2)]
        enough = asyncio.Event()
        publishing = asyncio.ensure_future(_publish_until(enough, bus, topic, sent))
        handled: list[bytes] = []
        for worker in workers:
            await worker.until_acked(60, PATIENCE)
            await worker.kill()
            handled += worker.handled
        enough.set()
        await publishing
        # A worker prints a message after its confirmed ack, so a printed message is not redelivered.
        rest = set(sent) - set(handled)
        assert rest, "everything was handled, so that nothing was put to the test"
        seen: Counter[bytes] = Counter()
        order: list[bytes] = []
        attempts: set[int] = set()
        async with bus.messages(topic, subscription="readers", ordered_by_key=sessions) as inbox:
            async with asyncio.timeout(PATIENCE):
                # Both workers may have died between an ack and its line.
                while len(seen) < len(rest) - len(workers) or (await bus.admin.lag(topic, "readers")).waiting:
                    batch = await inbox.next_batch(100, timeout=0.5)
                    order += [message.data or b"" for message in batch]
                    seen.update(message.data or b"" for message in batch)
                    attempts.update(message.delivery_attempt or 0 for message in batch)
                    await batch.ack()
    assert len(handled) == len(set(handled))
    assert not set(seen) & set(handled)
    assert set(seen) <= rest
    assert len(rest - set(seen)) <= len(workers)
    assert set(seen.values()) == {1}
    assert max(attempts) > 1, "the killed workers held no message, so nothing was tested"
    if sessions:
        for key in range(KEYS):
            ours = [body for body in order if _key_of(body) == key]
            assert ours == sorted(ours)


async def _publish_until(enough: asyncio.Event, bus: broker.Bus, topic: str, sent: list[bytes]) -> None:
    while not enough.is_set():
        await _publish_more(bus, topic, sent)
        await asyncio.sleep(0.04)


async def _publish_more(bus: broker.Bus, topic: str, sent: list[bytes]) -> None:
    batch = numbered(16, f"b{len(sent):06}")
    await bus.topic(topic).publish_batch([OutboundMessage(body, key=f"key-{_key_of(body)}") for body in batch])
    sent += batch


def _key_of(body: bytes) -> int:
    return int(body[-6:]) % KEYS
