"""CPU that the facade adds to the SPI, per message.

Each way of consuming and publishing runs right next to a loop over the SPI that does the same, on the same backend and
messages, in batches of up to 500; `publish` is compared one message at a time. Both include opening and closing.
Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import broker
from benchmarks.measure import Sample, Series, Variant, in_pairs
from benchmarks.receiving import BATCH, over_the_spi, receive
from benchmarks.report import Finding, Section
from benchmarks.stages import FILLED, TARGET, Stage, open_stage

__all__ = ["measure_facade"]

_Consume = Callable[[Stage, str, int], Awaitable[None]]
_CONSUME_BARS = {"receive(handler)": 8.0, "async for, async with": 12.0, "batches, batch.ack()": 1.0}
_PUBLISH_BARS = {"publish": 4.0, "publish_batch": 1.5, "enqueue": 5.0}


async def measure_facade(scale: float, rounds: int) -> Section:
    """Measure all ways, on the null backend, in memory and on JetStream."""
    section = Section(
        "What the facade adds",
        "CPU microseconds per message on top of the same work over the SPI by batches of up to 500 (`publish`: one by "
        "one). Every run has a run over the SPI right beside it, and a difference is taken within such a pair.",
        "added CPU, µs per message",
    )
    # Many short rounds where the facade is a small part of the cost.
    for name, messages, times in (("null", 100_000, 1), ("memory", 40_000, 3), ("jetstream", 40_000, 3)):
        count = max(500, int(messages * scale))
        number = times * rounds if rounds > 1 else 1
        async with open_stage(name, count) as stage:
            await _consuming(section, stage, count, number)
            await _publishing(section, stage, max(500, count // 2), number)
    return section


# -- consuming -------------------------------------------------------------------------------------------


async def _consuming(section: Section, stage: Stage, count: int, rounds: int) -> None:
    works: dict[str, _Consume] = {
        "receive(handler)": _receive,
        "async for, async with": _iterate,
        "batches, batch.ack()": _batches,
    }
    variants = {name: _on_subscription(stage, count, work) for name, work in works.items()}
    base = _on_subscription(stage, count, _spi_consume)
    _add(section, stage, "SPI", await in_pairs(base, variants, count=count, rounds=rounds), _CONSUME_BARS)


def _on_subscription(stage: Stage, count: int, work: _Consume) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with stage.subscription() as subscription:
            yield partial(work, stage, subscription, count)

    return variant


async def _spi_consume(stage: Stage, subscription: str, count: int) -> None:
    await over_the_spi(stage.bus, FILLED, subscription, count)


async def _receive(stage: Stage, subscription: str, count: int) -> None:
    await receive(stage.bus, FILLED, subscription, count)


async def _iterate(stage: Stage, subscription: str, count: int) -> None:
    async with stage.bus.messages(FILLED, subscription=subscription) as inbox:
        async for message in inbox:
            async with message:
                count -= 1
            if not count:
                break


async def _batches(stage: Stage, subscription: str, count: int) -> None:
    async with stage.bus.messages(FILLED, subscription=subscription) as inbox:
        async for batch in inbox.batches(BATCH):
            count -= len(batch)
            await batch.ack()
            if not count:
                break


# -- publishing ------------------------------------------------------------------------------------------


async def _publishing(section: Section, stage: Stage, count: int, rounds: int) -> None:
    # Single messages cost a round trip each, so there are fewer.
    single = count if stage.name == "null" else max(100, count // 10)
    in_turn = {"publish": await _publishing_in_turn(stage, single, rounds)}
    _add(section, stage, "SPI, one by one", in_turn, _PUBLISH_BARS)
    base = _to_target(stage, count, _spi_publish_batches)
    many = {
        "publish_batch": _to_target(stage, count, _publish_batches),
        "enqueue": _to_target(stage, count, _enqueue),
    }
    _add(section, stage, "SPI, by 500", await in_pairs(base, many, count=count, rounds=rounds), _PUBLISH_BARS)


def _to_target(
    stage: Stage, count: int, work: Callable[[Stage, list[broker.OutboundMessage]], Awaitable[None]]
) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        await stage.empty()
        yield partial(work, stage, stage.messages(count))

    return variant


async def _publishing_in_turn(stage: Stage, count: int, rounds: int) -> tuple[Series, Series]:
    """Alternate messages over the SPI and the facade, because round trips vary more than the added cost.

    A round's cost is the median over its messages, times their number.
    """
    spi: list[Sample] = []
    facade: list[Sample] = []
    clock, wall = time.process_time_ns, time.perf_counter_ns
    for _ in range(rounds):
        await stage.empty()
        target, topic = stage.bus.backend.publish_target(TARGET), stage.bus.topic(TARGET)
        costs: tuple[list[int], list[int]] = ([], [])
        times: tuple[list[int], list[int]] = ([], [])
        for index, message in enumerate(stage.messages(2 * count)):
            way = index % 2
            began, cpu = wall(), clock()
            if way:
                await topic.publish(message)
            else:
                await target.publish((message,))
            costs[way].append(clock() - cpu)
            times[way].append(wall() - began)
        await target.close()
        for samples, cost, took in zip((spi, facade), costs, times, strict=True):
            samples.append(Sample(count, statistics.median(took) * count / 1e9, statistics.median(cost) * count / 1e9))
    return Series(facade), Series(spi)


async def _spi_publish_batches(stage: Stage, messages: list[broker.OutboundMessage]) -> None:
    target = stage.bus.backend.publish_target(TARGET)
    for start in range(0, len(messages), BATCH):
        await target.publish(messages[start : start + BATCH])
    await target.close()


async def _publish_batches(stage: Stage, messages: list[broker.OutboundMessage]) -> None:
    topic = stage.bus.topic(TARGET)
    for start in range(0, len(messages), BATCH):
        await topic.publish_batch(messages[start : start + BATCH])


async def _enqueue(stage: Stage, messages: list[broker.OutboundMessage]) -> None:
    topic = stage.bus.topic(TARGET)
    receipts: list[asyncio.Future[broker.Receipt]] = []
    for message in messages:
        receipts.append(await topic.enqueue(message))  # noqa: PERF401  # awaiting the call is the back-pressure
    await topic.flush()
    if not all(receipt.done() and receipt.exception() is None for receipt in receipts):
        raise RuntimeError("Something was not published")


def _add(
    section: Section, stage: Stage, base: str, pairs: dict[str, tuple[Series, Series]], bars: dict[str, float]
) -> None:
    bases = [sample for _, beside in pairs.values() for sample in beside.samples]
    section.runs[f"{stage.name}: {base}"] = Series(bases)
    for name, (runs, beside) in pairs.items():
        section.runs[f"{stage.name}: {name}"] = runs
        section.findings.append(Finding(f"{name}, {stage.name}", runs.cost_above(beside), "µs", at_most=bars[name]))
