"""Pub/Sub beside Google's clients on the same emulator. One process, one event loop, the same messages.

The emulator gives a stream 100 messages each 50 ms whoever asks: consuming is measured by unary pulls, and the
high-level client, which has streams only, is slowed by that too. Topics retain nothing, since the emulator's memory is
small.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count as counting

import broker
from benchmarks.measure import Variant, alternate
from benchmarks.null_backend import BODY
from benchmarks.raw_pubsub import RawPubSub, high_level
from benchmarks.report import Finding, Section
from tests.servers.pubsub import PROJECT, PubSubServer

__all__ = ["measure_pubsub"]

_BATCH = 1000
_FILLED = "bench.filled"
_TARGET = "bench.target"
_numbers = counting()


async def measure_pubsub(scale: float, rounds: int) -> Section:
    """Consume with acks, and publish with ids."""
    section = Section(
        "Pub/Sub beside Google's clients",
        "Ratios of messages per second on Google's emulator. Every message has an id and an attribute; each is "
        "acked, or its id awaited. The bare loops are raw protobuf over grpc.aio.",
        "times as fast",
    )
    server = await asyncio.to_thread(PubSubServer().start)
    try:
        raw = RawPubSub(server.host)
        async with broker.connect(f"{server.url}&topic_retention=0") as bus:
            for name in (_FILLED, _TARGET):
                await bus.admin.ensure_topic(name)
            await _consuming(section, bus, raw, server.host, max(1000, int(20_000 * scale)), rounds)
            await _publishing(section, bus, raw, max(1000, int(20_000 * scale)), rounds)
        await raw.close()
    finally:
        await asyncio.to_thread(server.close)
    return section


async def _consuming(section: Section, bus: broker.Bus, raw: RawPubSub, host: str, count: int, rounds: int) -> None:
    variants: dict[str, Variant] = {
        "ours, batches": _ours(bus, count),
        "raw protobuf, Pull + Acknowledge": _filled(
            bus, count, lambda name: raw.pull_and_acknowledge(_path(name), count)
        ),
    }
    series = await alternate(variants, count=count, rounds=2 * rounds if rounds > 1 else 1)
    section.runs.update({f"consume: {name}": runs for name, runs in series.items()})
    ratio = series["ours, batches"].times_rate_of(series["raw protobuf, Pull + Acknowledge"])
    section.findings.append(Finding("consume and ack by batch / raw protobuf", ratio, "x", at_least=0.9))
    few = max(500, count // 10)
    slow: dict[str, Variant] = {
        "ours, batches": _ours(bus, few),
        "SubscriberClient.subscribe": _filled(
            bus, few, lambda name: asyncio.to_thread(high_level, host, _path(name), few)
        ),
    }
    few_series = await alternate(slow, count=few, rounds=rounds)
    section.runs["consume: SubscriberClient.subscribe"] = few_series["SubscriberClient.subscribe"]
    ratio = few_series["ours, batches"].times_rate_of(few_series["SubscriberClient.subscribe"])
    section.findings.append(Finding("consume and ack by batch / SubscriberClient", ratio, "x", at_least=10.0))


def _path(name: str) -> str:
    return f"projects/{PROJECT}/subscriptions/{name}~{_FILLED}"


@asynccontextmanager
async def _subscription(bus: broker.Bus, count: int) -> AsyncGenerator[str]:
    """A subscription of its own with so many messages."""
    name = f"bench-{next(_numbers)}"
    await bus.admin.ensure_subscription(_FILLED, name, start="latest")
    await bus.topic(_FILLED).publish_batch(_messages(count))
    try:
        yield name
    finally:
        await bus.admin.delete_subscription(_FILLED, name)


def _filled(bus: broker.Bus, count: int, work: Callable[[str], Awaitable[None]]) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with _subscription(bus, count) as name:
            yield partial(work, name)

    return variant


def _ours(bus: broker.Bus, count: int) -> Variant:
    """A consumer that is open already: on the emulator a close waits for the last pull, which no raw loop does."""

    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with (
            _subscription(bus, count) as name,
            bus.messages(_FILLED, subscription=name, max_outstanding=4000) as inbox,
        ):
            yield partial(_consume, inbox, count)

    return variant


async def _consume(inbox: broker.BatchedMessageStream, count: int) -> None:
    async for batch in inbox.batches(_BATCH):
        count -= len(batch)
        await batch.ack()
        if count <= 0:
            break


async def _publishing(section: Section, bus: broker.Bus, raw: RawPubSub, count: int, rounds: int) -> None:
    path = f"projects/{PROJECT}/topics/{_TARGET}"

    async def publish(messages: list[broker.OutboundMessage]) -> None:
        for start in range(0, count, _BATCH):
            await bus.topic(_TARGET).publish_batch(messages[start : start + _BATCH])

    async def enqueue(messages: list[broker.OutboundMessage]) -> None:
        topic = bus.topic(_TARGET)
        receipts = [await topic.enqueue(message) for message in messages]
        await topic.flush()
        if not all(receipt.result().id for receipt in receipts):
            raise RuntimeError("A message has no id")

    variants: dict[str, Variant] = {
        "ours, publish_batch": _with_messages(count, publish),
        "ours, enqueue": _with_messages(count, enqueue),
        "raw protobuf, Publish": _with_messages(count, partial(raw.publish, path)),
    }
    series = await alternate(variants, count=count, rounds=2 * rounds if rounds > 1 else 1)
    section.runs.update({f"publish: {name}": runs for name, runs in series.items()})
    for name, bar in (("publish_batch", 0.9), ("enqueue", None)):
        ratio = series[f"ours, {name}"].times_rate_of(series["raw protobuf, Publish"])
        section.findings.append(Finding(f"{name} / raw protobuf", ratio, "x", at_least=bar))


def _messages(count: int) -> list[broker.OutboundMessage]:
    run = next(_numbers)
    return [broker.OutboundMessage(BODY, attributes={"type": "created"}, id=f"{run}-{index}") for index in range(count)]


def _with_messages(count: int, work: Callable[[list[broker.OutboundMessage]], Awaitable[None]]) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        yield partial(work, _messages(count))

    return variant
