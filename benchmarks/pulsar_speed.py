"""Pulsar next to pulsar-client on the same standalone. One process, the same messages; raw loops run in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import broker
from benchmarks.latency import Pipe, measure_latency, our_way
from benchmarks.measure import Variant, alternate
from benchmarks.raw_pulsar import RawPulsar
from benchmarks.report import Finding, Section
from benchmarks.subscribed import (
    FILLED,
    TARGET,
    consume,
    enqueue,
    messages_of,
    new_name,
    with_messages,
)
from broker.driver.contract import Start
from tests.servers.pulsar import PulsarServer

__all__ = ["measure_pulsar"]

_BATCH = 1000
_RAW = "client, receive + batch_receive + acknowledge"


async def measure_pulsar(scale: float, rounds: int) -> Section:
    """Consume with acks, and publish with ids."""
    section = Section(
        "Pulsar beside pulsar-client",
        "Ratios of messages per second on a standalone. Every message has an id and an attribute and no key; each is "
        "acked, or its id awaited. The bare loops are pulsar-client in its quickest form, in a thread; they keep its "
        "ids as they are, while each of our receipts tells an offset: 2.7 µs of CPU, most of it for four questions to "
        "the client's id.",
        "times as fast",
    )
    server = await asyncio.to_thread(PulsarServer().start)
    try:
        async with broker.connect(server.url) as bus:
            for name in (FILLED, TARGET):
                await bus.admin.ensure_topic(name)
            raw = await asyncio.to_thread(RawPulsar, server.service_url, _path(TARGET))
            try:
                count = max(1000, int(50_000 * scale))
                await _consuming(section, bus, raw, count, rounds)
                await _publishing(section, bus, raw, count, rounds)
                await _latency(section, bus, raw, scale, rounds)
            finally:
                await asyncio.to_thread(raw.close)
    finally:
        await asyncio.to_thread(server.close)
    return section


def _path(topic: str) -> str:
    return f"persistent://public/default/{topic}-partition-0"


async def _consuming(section: Section, bus: broker.Bus, raw: RawPulsar, count: int, rounds: int) -> None:
    for _ in range(0, count, _BATCH):
        await bus.topic(FILLED).publish_batch(messages_of(_BATCH))

    @asynccontextmanager
    async def ours() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with (
            _subscription(bus, FILLED) as name,
            bus.messages(FILLED, subscription=name, max_outstanding=4000) as inbox,
        ):
            yield partial(consume, inbox, count, batch=_BATCH)

    @asynccontextmanager
    async def bare() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with _subscription(bus, FILLED) as name:
            consumer = await asyncio.to_thread(raw.subscribe, _path(FILLED), name)

            async def work() -> None:
                await asyncio.to_thread(raw.receive_and_acknowledge, consumer, count)

            try:
                yield work
            finally:
                await asyncio.to_thread(consumer.close)

    variants: dict[str, Variant] = {"ours, batches": ours, _RAW: bare}
    series = await alternate(variants, count=count, rounds=rounds)
    section.runs.update({f"consume: {name}": runs for name, runs in series.items()})
    ratio = series["ours, batches"].times_rate_of(series[_RAW])
    section.findings.append(Finding("consume and ack by batch / pulsar-client", ratio, "x", at_least=0.9))


@asynccontextmanager
async def _subscription(bus: broker.Bus, topic: str, start: Start = "earliest") -> AsyncGenerator[str]:
    name = new_name()
    await bus.admin.ensure_subscription(topic, name, start=start)
    try:
        yield name
    finally:
        await bus.admin.delete_subscription(topic, name)


async def _publish_batches(topic: broker.Topic, messages: list[broker.OutboundMessage]) -> None:
    """Publish all batches concurrently, as the raw loop does."""
    await asyncio.gather(
        *(topic.publish_batch(messages[start : start + _BATCH]) for start in range(0, len(messages), _BATCH))
    )


async def _publishing(section: Section, bus: broker.Bus, raw: RawPulsar, count: int, rounds: int) -> None:
    async def bare(messages: list[broker.OutboundMessage]) -> None:
        await asyncio.to_thread(raw.publish, messages)

    variants: dict[str, Variant] = {
        "ours, publish_batch": with_messages(count, partial(_publish_batches, bus.topic(TARGET))),
        "ours, enqueue": with_messages(count, partial(enqueue, bus.topic(TARGET))),
        "client, send_async with callbacks": with_messages(count, bare),
    }
    series = await alternate(variants, count=count, rounds=rounds)
    section.runs.update({f"publish: {name}": runs for name, runs in series.items()})
    for name, bar in (("publish_batch", 0.9), ("enqueue", None)):
        ratio = series[f"ours, {name}"].times_rate_of(series["client, send_async with callbacks"])
        section.findings.append(Finding(f"{name} / pulsar-client with callbacks", ratio, "x", at_least=bar))


async def _latency(section: Section, bus: broker.Bus, raw: RawPulsar, scale: float, rounds: int) -> None:
    ours = our_way(bus, TARGET, partial(_subscription, bus, TARGET, "latest"))

    @asynccontextmanager
    async def bare() -> AsyncGenerator[Pipe]:
        async with _subscription(bus, TARGET, "latest") as name:
            consumer = await asyncio.to_thread(raw.subscribe, _path(TARGET), name)

            async def receive(arrived: Callable[[bytes | None], None]) -> None:
                await asyncio.to_thread(raw.receive_one, consumer, arrived)

            try:
                yield Pipe(raw.publish_body, receive)
            finally:
                await asyncio.to_thread(consumer.close)

    await measure_latency(section, {"ours": ours, "client, send_async + receive": bare}, scale, rounds)
