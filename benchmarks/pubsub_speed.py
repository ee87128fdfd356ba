"""Pub/Sub next to Google's clients on the same emulator. One process, one event loop, the same messages.

The emulator sends 100 messages each 50 ms on a stream. So consuming is measured with unary pulls, and the high-level
client, which only streams, is slow here. Topics retain nothing, because the emulator's memory is small.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import broker
from benchmarks.latency import Pipe, measure_latency, our_way
from benchmarks.measure import Variant, alternate
from benchmarks.raw_pubsub import RawPubSub, high_level
from benchmarks.report import Finding, Section
from benchmarks.subscribed import (
    FILLED,
    TARGET,
    consume,
    enqueue,
    publish_batches,
    subscription_with,
    with_messages,
)
from tests.servers.pubsub import PROJECT, PubSubServer

__all__ = ["measure_pubsub"]

_BATCH = 1000


async def measure_pubsub(scale: float, rounds: int) -> Section:
    """Consume with acks, and publish with ids."""
    section = Section(
        "Pub/Sub beside Google's clients",
        "Ratios of messages per second on Google's emulator. Every message has an id and an attribute; each is "
        "acked, or its id awaited. The bare loops are raw protobuf over grpc.aio: 1.1 µs of CPU a message beside gRPC "
        "itself. On top of it a message and its size take 0.6 µs, a settlement 0.3 µs, and a fate for each 0.9 µs. The "
        "emulator answers a pull with 100 messages, so that the calls are most of either. Publishing, ours writes each "
        "message into its request, where the bare loop makes it apart and has it copied.",
        "times as fast",
    )
    server = await asyncio.to_thread(PubSubServer().start)
    try:
        raw = RawPubSub(server.host)
        async with broker.connect(f"{server.url}&topic_retention=0") as bus:
            for name in (FILLED, TARGET):
                await bus.admin.ensure_topic(name)
            await _consuming(section, bus, raw, server.host, max(1000, int(20_000 * scale)), rounds)
            await _publishing(section, bus, raw, max(1000, int(20_000 * scale)), rounds)
            await _latency(section, bus, raw, scale, rounds)
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
    return f"projects/{PROJECT}/subscriptions/{name}~{FILLED}"


def _topic_path(topic: str) -> str:
    return f"projects/{PROJECT}/topics/{topic}"


def _filled(bus: broker.Bus, count: int, work: Callable[[str], Awaitable[None]]) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with subscription_with(bus, FILLED, count) as name:
            yield partial(work, name)

    return variant


def _ours(bus: broker.Bus, count: int) -> Variant:
    """A consumer that is already open. On the emulator a close waits for the last pull; no raw loop does that."""

    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with (
            subscription_with(bus, FILLED, count) as name,
            bus.messages(FILLED, subscription=name, max_outstanding=4000) as inbox,
        ):
            yield partial(consume, inbox, count, batch=_BATCH)

    return variant


async def _publishing(section: Section, bus: broker.Bus, raw: RawPubSub, count: int, rounds: int) -> None:
    path = _topic_path(TARGET)
    variants: dict[str, Variant] = {
        "ours, publish_batch": with_messages(count, partial(publish_batches, bus.topic(TARGET), _BATCH)),
        "ours, enqueue": with_messages(count, partial(enqueue, bus.topic(TARGET))),
        "raw protobuf, Publish": with_messages(count, partial(raw.publish, path)),
    }
    series = await alternate(variants, count=count, rounds=2 * rounds if rounds > 1 else 1)
    section.runs.update({f"publish: {name}": runs for name, runs in series.items()})
    for name, bar in (("publish_batch", 0.9), ("enqueue", None)):
        ratio = series[f"ours, {name}"].times_rate_of(series["raw protobuf, Publish"])
        section.findings.append(Finding(f"{name} / raw protobuf", ratio, "x", at_least=bar))


async def _latency(section: Section, bus: broker.Bus, raw: RawPubSub, scale: float, rounds: int) -> None:
    ours = our_way(bus, FILLED, partial(subscription_with, bus, FILLED, 0))

    @asynccontextmanager
    async def bare() -> AsyncGenerator[Pipe]:
        async with subscription_with(bus, FILLED, 0) as name:
            yield Pipe(lambda body: raw.publish_body(_topic_path(FILLED), body), partial(raw.take, _path(name)))

    await measure_latency(section, {"ours": ours, "raw protobuf, Pull + Acknowledge": bare}, scale, rounds)
