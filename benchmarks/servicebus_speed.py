"""Service Bus next to azure-servicebus on the same test double. One process, one event loop, the same messages.

The double is this project's own and runs on loopback: the ratios show what the clients cost; no rate is Azure's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from azure.servicebus import ServiceBusMessage
from azure.servicebus.aio import ServiceBusReceiver

import broker
from benchmarks.latency import Pipe, measure_latency, our_way
from benchmarks.measure import Variant, alternate
from benchmarks.raw_servicebus import RawServiceBus, complete_at_once, complete_in_turn, publish, receive_and_complete
from benchmarks.report import Finding, Section
from benchmarks.subscribed import (
    FILLED,
    TARGET,
    consume,
    publish_batches,
    subscription_with,
    with_messages,
)
from tests.servers.servicebus import ServiceBusDouble

__all__ = ["measure_servicebus"]

_BATCH = 500
_IN_TURN = "azure-servicebus, complete_message in turn"
_AT_ONCE = "azure-servicebus, one private request per batch"
_RAW_BATCHES = "azure-servicebus, ServiceBusMessageBatch"


async def measure_servicebus(scale: float, rounds: int) -> Section:
    """Consume with acks, and publish until accepted."""
    section = Section(
        "Service Bus beside azure-servicebus, on a test double",
        "Ratios of messages per second on the project's own test double, which is not the service. Every message has "
        "an id and an attribute; each is completed, or accepted. The client's best form settles by a private call.",
        "times as fast",
    )
    double = await asyncio.to_thread(ServiceBusDouble().start)
    try:
        raw = RawServiceBus(f"127.0.0.1:{double.port}", double.key)
        async with broker.connect(f"{double.url}&deduplication_window=0") as bus:
            for name in (FILLED, TARGET):
                await bus.admin.ensure_topic(name)
            await _consuming(section, bus, raw, max(300, int(4000 * scale)), rounds)
            await _publishing(section, bus, raw, max(300, int(8000 * scale)), rounds)
            await _latency(section, bus, raw, scale, rounds)
        await raw.close()
    finally:
        await asyncio.to_thread(double.close)
    return section


async def _consuming(section: Section, bus: broker.Bus, raw: RawServiceBus, count: int, rounds: int) -> None:
    variants: dict[str, Variant] = {
        "ours, batches": _ours(bus, count),
        _AT_ONCE: _raw(bus, raw, count, complete_at_once),
        _IN_TURN: _raw(bus, raw, count, complete_in_turn),
    }
    series = await alternate(variants, count=count, rounds=rounds)
    section.runs.update({f"consume: {name}": runs for name, runs in series.items()})
    for name in (_AT_ONCE, _IN_TURN):
        ratio = series["ours, batches"].times_rate_of(series[name])
        section.findings.append(Finding(f"consume and ack by batch / {name}", ratio, "x", at_least=0.9))


async def _publishing(section: Section, bus: broker.Bus, raw: RawServiceBus, count: int, rounds: int) -> None:
    async with raw.sender(TARGET) as sender:
        variants: dict[str, Variant] = {
            "ours, publish_batch": with_messages(count, partial(publish_batches, bus.topic(TARGET), _BATCH)),
            _RAW_BATCHES: with_messages(count, partial(publish, sender)),
        }
        series = await alternate(variants, count=count, rounds=rounds)
    section.runs.update({f"publish: {name}": runs for name, runs in series.items()})
    ratio = series["ours, publish_batch"].times_rate_of(series[_RAW_BATCHES])
    section.findings.append(Finding(f"publish_batch / {_RAW_BATCHES}", ratio, "x", at_least=0.9))


def _ours(bus: broker.Bus, count: int) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with (
            subscription_with(bus, FILLED, count) as name,
            bus.messages(FILLED, subscription=name, max_outstanding=2 * _BATCH) as inbox,
        ):
            yield partial(consume, inbox, count, batch=_BATCH)

    return variant


def _raw(
    bus: broker.Bus, raw: RawServiceBus, count: int, work: Callable[[ServiceBusReceiver, int], Awaitable[None]]
) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with subscription_with(bus, FILLED, count) as name, raw.receiver(FILLED, name) as receiver:
            yield partial(work, receiver, count)

    return variant


async def _latency(section: Section, bus: broker.Bus, raw: RawServiceBus, scale: float, rounds: int) -> None:
    ours = our_way(bus, FILLED, partial(subscription_with, bus, FILLED, 0))

    @asynccontextmanager
    async def bare() -> AsyncGenerator[Pipe]:
        one_at_a_time = asyncio.Lock()
        async with (
            subscription_with(bus, FILLED, 0) as name,
            raw.receiver(FILLED, name) as receiver,
            raw.sender(FILLED) as sender,
        ):

            async def send(body: bytes) -> None:
                async with one_at_a_time:
                    await sender.send_messages(ServiceBusMessage(body))

            yield Pipe(send, partial(receive_and_complete, receiver))

    await measure_latency(section, {"ours": ours, _IN_TURN: bare}, scale, rounds)
