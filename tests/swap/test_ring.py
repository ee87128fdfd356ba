"""A topic is copied from broker to broker, and returns to the first with the same messages."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AsyncExitStack
from itertools import cycle
from uuid import uuid4

import pytest

import broker
from broker.outbound import OutboundMessage
from broker.testing.areas.fidelity import HOSTILE
from tests.swap.brokers import URLS

COPIER = "copier"
KEYS = tuple(b"key-%d" % number for number in range(7))
PLAIN = 300
SECONDS = 120.0

Copy = tuple[str, bytes | None, bytes | None, dict[str, str]]
"""Id, key, body, attributes."""


def copy_of(message: broker.Message[bytes] | OutboundMessage) -> Copy:
    return message.id or "", message.key, message.data, dict(message.attributes)


def messages(largest: int) -> list[OutboundMessage]:
    """Messages of every kind; `largest` is the maximum size of a body in bytes."""
    bodies = [b"", b"\0", bytes(range(256)), b"x" * 100_000, b"y" * largest]
    kinds: list[tuple[bytes, dict[str, str]]] = [(body, {}) for body in bodies]
    kinds += [(b"hostile", {"value": text, "empty": ""}) for text in HOSTILE]
    kinds += [(b"%d" % number, {"number": str(number)}) for number in range(PLAIN)]
    keyed = [(body, key, attributes) for (body, attributes), key in zip(kinds, cycle(KEYS))]
    keyed += [(b"no key", None, {}), (b"an empty key", b"", {}), (b"bytes", b"\xff\0\x80", {})]
    return [
        OutboundMessage(body, key, attributes, id=f"id-{number}")
        for number, (body, key, attributes) in enumerate(keyed)
    ]


def in_order(copies: Iterable[Copy]) -> dict[bytes, list[str]]:
    """The ids of each key."""
    order: defaultdict[bytes, list[str]] = defaultdict(list)
    for message_id, key, _, _ in copies:
        if key is not None:
            order[key].append(message_id)
    return order


async def copy_on(source: broker.Bus, target: broker.Bus, topics: list[str], count: int) -> None:
    """Forward each message of one broker to the next, in order by key, and ack it after its receipt."""

    async def hand_on(message: broker.Message[bytes]) -> None:
        await target.topic(topics[1]).publish(OutboundMessage.from_message(message))
        done.add(message.id)
        if len(done) == count:
            inbox.stop()

    done: set[str] = set()
    async with source.messages(topics[0], subscription=COPIER, ordered_by_key=True) as inbox:
        async with asyncio.timeout(SECONDS):
            await inbox.receive(hand_on, concurrency=16)


async def read_all(bus: broker.Bus, topic: str, count: int) -> list[Copy]:
    """All messages of the topic, each once, in order of arrival."""
    found: dict[str, Copy] = {}
    async with bus.messages(topic, subscription=COPIER, ordered_by_key=True) as inbox:
        async with asyncio.timeout(SECONDS):
            while len(found) < count:
                message = await inbox.next_message(timeout=SECONDS)
                assert message is not None
                found.setdefault(message.id, copy_of(message))
                await message.ack()
    return list(found.values())


@pytest.mark.deep
@pytest.mark.xdist_group("pulsar")
async def test_a_topic_goes_around_all_brokers(capsys: pytest.CaptureFixture[str]) -> None:
    async with AsyncExitStack() as stack:
        ring = [await stack.enter_async_context(broker.connect(make())) for make in URLS.values()]
        # Back to the first, as another topic.
        ring.append(ring[0])
        name = f"ring.{uuid4().hex[:12]}"
        topics = [f"{name}.{number}" for number in range(len(ring))]
        for bus, topic in zip(ring, topics, strict=True):
            await bus.admin.ensure_topic(topic)
            await bus.admin.ensure_subscription(topic, COPIER)
        bodies = [bus.capabilities.publish.limits.body for bus in ring]
        sent = messages(min(size for size in bodies if size is not None) - 4096)
        await ring[0].topic(topics[0]).publish_batch(sent)
        for number in range(len(ring) - 1):
            await copy_on(ring[number], ring[number + 1], topics[number : number + 2], len(sent))
        found = await read_all(ring[-1], topics[-1], len(sent))
    came = {copy[0]: copy for copy in found}
    differing = [copy[0] for copy in map(copy_of, sent) if came.get(copy[0]) != copy]
    before, after = in_order(map(copy_of, sent)), in_order(found)
    disordered = [key for key, ids in before.items() if after.get(key) != ids]
    with capsys.disabled():
        sys.stdout.write(
            f"\naround {', '.join(URLS)} and back: {len(sent)} sent, {len(found)} came, {len(differing)} differ, "
            f"{len(disordered)} keys out of order\n"
        )
    assert differing == []
    assert disordered == []
    assert len(found) == len(sent)
