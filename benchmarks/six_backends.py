"""One program on six backends: its rates, and the cost of the facade and of idle waiting.

The same code runs on one URL after the other, on the servers of the tests; Service Bus is the project's own double.
Client and server share this machine, so the rates say little about a cluster. The ratios to the raw clients are in the
sections of the backends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import broker
from benchmarks.latency import RATE, latency_of, median_of, our_way
from benchmarks.measure import Series, Spread, Variant, alternate, in_pairs
from benchmarks.receiving import over_the_spi, receive
from benchmarks.report import Finding, Section, Table
from benchmarks.steadiness import idle_shares
from benchmarks.subscribed import consume, publish_batches, subscription_with, with_messages
from tests.swap.brokers import URLS

__all__ = ["measure_six"]

_BATCH = 500
_TOPIC = "bench.six"
_SETTINGS = {"pubsub": "topic_retention=0", "servicebus": "deduplication_window=0"}
"""The emulator's memory is small, so topics retain nothing; the double is slow at deduplication, so it is off."""
_COUNTS = {
    "inmem": 50_000,
    "jetstream": 50_000,
    "kafka": 100_000,
    "pubsub": 10_000,
    "pulsar": 20_000,
    "servicebus": 20_000,
}
"""Enough that the first few, which are fetched one by one, do not count, and that the cost of `receive` exceeds the
noise: a message of Service Bus takes 70 µs below it."""
_IDLE_SECONDS = 4.0


async def measure_six(scale: float, rounds: int) -> Section:
    """Measure each backend."""
    section = Section(
        "One program on six backends",
        "CPU microseconds per message that `receive` adds to the SPI, and what an idle consumer takes of a core. "
        "Every message has an id and an attribute; each is acked, or its receipt awaited. Below: thousands of messages "
        f"a second, and the time from publish to consumer at {RATE} a second.",
        "added CPU, µs per message; idle, %",
    )
    rows: list[tuple[str, ...]] = []
    for name, url in URLS.items():
        settings = _SETTINGS.get(name)
        address = await asyncio.to_thread(url)
        if settings is not None:
            address += ("&" if "?" in address else "?") + settings
        async with broker.connect(address) as bus:
            await bus.admin.ensure_topic(_TOPIC, partitions=1)
            count = max(200, int(_COUNTS[name] * scale))
            rows.append(await _row(section, bus, name, count, scale, rounds))
    section.tables.append(
        Table(
            ("Backend", "publish_batch, k/s", "consume and ack by batch, k/s", f"p50 at {RATE}/s", f"p99 at {RATE}/s"),
            rows,
        )
    )
    return section


async def _row(section: Section, bus: broker.Bus, name: str, count: int, scale: float, rounds: int) -> tuple[str, ...]:
    works: dict[str, Variant] = {
        "publish_batch": with_messages(count, partial(publish_batches, bus.topic(_TOPIC), _BATCH)),
        "batches": _open(bus, count),
    }
    series = await alternate(works, count=count, rounds=rounds)
    received, beside = (
        await in_pairs(
            _on_messages(bus, count, over_the_spi),
            {"receive": _on_messages(bus, count, receive)},
            count=count,
            rounds=2 * rounds if rounds > 1 else 1,
        )
    )["receive"]
    series |= {"receive(handler)": received, "SPI": beside}
    section.runs.update({f"{name}: {what}": runs for what, runs in series.items()})
    section.findings += [
        Finding(f"receive(handler) on top of the SPI, {name}", received.cost_above(beside), "µs", at_most=8.0),
        Finding(f"an idle consumer, {name}", await _idle(bus, scale, rounds), "%", at_most=1.0),
    ]
    late = [
        await latency_of(our_way(bus, _TOPIC, partial(subscription_with, bus, _TOPIC, 0)), scale) for _ in range(rounds)
    ]
    rates = (series["publish_batch"], series["batches"])
    return (name, *map(_thousands, rates), *(median_of(numbers) for numbers in zip(*late, strict=True)))


def _thousands(series: Series) -> str:
    return f"{series.rate.median / 1e3:.1f}"


def _open(bus: broker.Bus, count: int) -> Variant:
    """A consumer that has received its first message."""

    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with (
            subscription_with(bus, _TOPIC, count + 1) as name,
            bus.messages(_TOPIC, subscription=name, max_outstanding=4000) as inbox,
        ):
            first = await inbox.next_message()
            if first is None:
                raise RuntimeError("Nothing came")
            await first.ack()
            yield partial(consume, inbox, count, batch=_BATCH)

    return variant


def _on_messages(bus: broker.Bus, count: int, work: Callable[[broker.Bus, str, str, int], Awaitable[None]]) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with subscription_with(bus, _TOPIC, count) as name:
            yield partial(work, bus, _TOPIC, name, count)

    return variant


async def _idle(bus: broker.Bus, scale: float, rounds: int) -> Spread:
    async with subscription_with(bus, _TOPIC, 0) as name, bus.messages(_TOPIC, subscription=name) as inbox:
        return Spread.of(await idle_shares(inbox.next_message(), max(0.5, _IDLE_SECONDS * scale), min(rounds, 3)))
