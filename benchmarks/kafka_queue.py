"""Kafka as a queue: throughput of markers and share groups, and the lateness of redeliveries.

They run next to a plain consumer that commits each batch, and to the bare loop of the protocol on confluent-kafka. Our
tracker runs in the consumer's process, as it does for users. The clock starts when a consumer has joined and holds its
first batch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import broker
from benchmarks import raw_queue
from benchmarks.kafka_stage import BODY, KafkaStage, open_kafka
from benchmarks.measure import Series, Spread, Variant, alternate
from benchmarks.report import Finding, Section

__all__ = ["measure_queue"]

_COUNTS: Final = {1: 200, 10: 2_000, 100: 20_000, 500: 60_000}
"""Number of messages of a run, by batch size."""
_MOST: Final = max(_COUNTS)
_AHEAD: Final = {1: 10_000, 10: 20_000, 100: 40_000}
"""Like `_COUNTS`, for a consumer with the default `max_outstanding`."""
_OUTSTANDING: Final = 1000
"""The default `max_outstanding`."""
_SHARED: Final = 20_000
_BESIDE: Final = {"queue=offsets": "offsets", "queue=share": "share"}
_DELAY: Final = 2.0
_DELAYED: Final = 500
_STORM: Final = 10_000
_PATIENCE: Final = 120.0


async def measure_queue(scale: float, rounds: int) -> Section:
    """Messages per second of each engine next to the bare protocol, and the lateness of redeliveries."""
    section = Section(
        "Kafka as a queue",
        f"Messages of {len(BODY)} B, one consumer, taken by 1, 10, 100 or {_MOST}, each acked. The bare protocol loop "
        "is confluent-kafka alone: consume, all STARTs, wait, one commit, all ENDs on one thread. It writes a record "
        "for each marker and tracks none; ours puts many in one, and tracks them in its process unless that is done "
        "elsewhere (`queue_tracker=false`; here no tracker runs meanwhile). `queue=share` waits "
        "for the brokers' answers to its acks. A consumer starts what it may hold, `max_outstanding`, and hands over "
        "what it is asked for. Here that is twice what is taken, so that a START is of no more; `started ahead` means "
        f"{_OUTSTANDING}, the default. Lateness is what one nacked with a delay of {_DELAY:g} s takes beyond that.",
    )
    async with open_kafka() as stage:
        by_size: dict[int, Series] = {}
        for most, full in _COUNTS.items():
            by_size[most] = await _by(section, stage, most, max(2 * most, int(full * scale)), rounds)
        for most, full in _AHEAD.items():
            await _ahead(section, stage, most, max(2 * most, int(full * scale)), rounds)
        section.findings.append(
            Finding(
                f"queue=markers: taken by {_MOST} / taken one by one",
                by_size[_MOST].times_rate_of(by_size[1]),
                "x",
                at_least=30,
            )
        )
        await _beside(section, stage, max(2 * _MOST, int(_SHARED * scale)), rounds)
        await _late(section, stage, max(20, int(_DELAYED * scale)), rounds)
        await _storm(section, stage, max(100, int(_STORM * scale)))
    return section


async def _by(section: Section, stage: KafkaStage, most: int, count: int, rounds: int) -> Series:
    topic = stage.filled(count, headers=False)
    variants: dict[str, Variant] = {
        "ours": _ours(stage, "markers", topic, count, most),
        "in transactions": _ours(stage, "markers&queue_transactions=true", topic, count, most),
        "bare loop": _bare(stage, topic, count, most),
    }
    if most == _MOST:
        variants["plain"] = _plain(stage, topic, count)
        variants["untracked"] = _ours(stage, "markers&queue_tracker=false", topic, count, most)
    series = await alternate(variants, count=count, rounds=rounds)
    section.runs[f"queue=markers, by {most}"] = series["ours"]
    section.runs[f"queue=markers, queue_transactions, by {most}"] = series["in transactions"]
    section.runs[f"bare protocol loop, by {most}"] = series["bare loop"]
    bar = 0.6 if most == _MOST else None
    what = f"queue=markers / bare protocol loop, by {most}"
    section.findings.append(Finding(what, series["ours"].times_rate_of(series["bare loop"]), "x", at_least=bar))
    if "untracked" in series:
        section.runs[f"queue=markers, tracked elsewhere, by {most}"] = series["untracked"]
        what = f"queue=markers, tracked elsewhere / bare protocol loop, by {most}"
        ratio = series["untracked"].times_rate_of(series["bare loop"])
        section.findings.append(Finding(what, ratio, "x", at_least=bar))
    what = f"queue_transactions / without, by {most}"
    section.findings.append(Finding(what, series["in transactions"].times_rate_of(series["ours"]), "x"))
    if "plain" in series:
        plain = series["plain"]
        section.runs[f"plain consumer, a commit for each {most}"] = plain
        section.findings.append(
            Finding(f"queue=markers / plain consumer, by {most}", series["ours"].times_rate_of(plain), "x")
        )
    return series["ours"]


async def _ahead(section: Section, stage: KafkaStage, most: int, count: int, rounds: int) -> None:
    topic = stage.filled(count, headers=False)
    variants = {
        "ours": _ours(stage, "markers", topic, count, most, ahead=True),
        "bare loop": _bare(stage, topic, count, most),
    }
    series = await alternate(variants, count=count, rounds=rounds)
    section.runs[f"queue=markers, started ahead, by {most}"] = series["ours"]
    what = f"queue=markers, started ahead / bare protocol loop, by {most}"
    section.findings.append(Finding(what, series["ours"].times_rate_of(series["bare loop"]), "x", at_least=0.6))


async def _beside(section: Section, stage: KafkaStage, count: int, rounds: int) -> None:
    topic = stage.filled(count, headers=False)
    variants = {name: _ours(stage, queue, topic, count, _MOST) for name, queue in _BESIDE.items()}
    variants["plain"] = _plain(stage, topic, count)
    series = await alternate(variants, count=count, rounds=rounds)
    for name in _BESIDE:
        section.runs[f"{name}, by {_MOST}"] = series[name]
        ratio = series[name].times_rate_of(series["plain"])
        section.findings.append(Finding(f"{name} / plain consumer, by {_MOST}", ratio, "x"))


# -- variants ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _inbox(stage: KafkaStage, queue: str, topic: str, outstanding: int) -> AsyncGenerator[broker.MessageConsumer]:
    name = stage.name(queue.partition("&")[0])
    async with (
        broker.connect(f"{stage.url}?queue={queue}") as bus,
        bus.messages(topic, subscription=name, max_outstanding=outstanding) as inbox,
    ):
        yield inbox


def _ours(stage: KafkaStage, queue: str, topic: str, count: int, most: int, *, ahead: bool = False) -> Variant:
    """:param ahead: whether STARTs are written ahead of deliveries, as by default."""

    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with _inbox(stage, queue, topic, _OUTSTANDING if ahead else 2 * most) as inbox:
            first = await inbox.next_batch(most)
            left = count - len(first)

            async def run() -> None:
                nonlocal left
                await first.ack()
                while left > 0:
                    batch = await inbox.next_batch(most)
                    left -= len(batch)
                    await batch.ack()

            yield run

    return variant


def _bare(stage: KafkaStage, topic: str, count: int, most: int) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with stage.target() as markers:
            consumer, producer = stage.consumer(), stage.producer()
            consumer.subscribe([topic])
            left = count - len(raw_queue.take(consumer, most))

            async def run() -> None:
                raw_queue.protocol_loop(consumer, producer, markers, left, most=most)

            yield run
            consumer.close()

    return variant


def _plain(stage: KafkaStage, topic: str, count: int) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        consumer = stage.consumer()
        consumer.subscribe([topic])
        left = count - len(raw_queue.take(consumer, _MOST))

        async def run() -> None:
            raw_queue.consume_and_commit(consumer, left, most=_MOST)

        yield run
        consumer.close()

    return variant


# -- redelivery ----------------------------------------------------------------------------------------------


async def _late(section: Section, stage: KafkaStage, count: int, rounds: int) -> None:
    halves: list[float] = []
    lasts: list[float] = []
    for _ in range(rounds):
        late = sorted(await _redelivered(stage, count))
        halves.append(1e3 * late[len(late) // 2])
        lasts.append(1e3 * late[min(len(late) - 1, len(late) * 99 // 100)])
    section.findings += [
        Finding(f"nack(delay={_DELAY:g}), {count} messages: lateness, p50", Spread.of(halves), "ms"),
        Finding(f"nack(delay={_DELAY:g}), {count} messages: lateness, p99", Spread.of(lasts), "ms"),
    ]


async def _storm(section: Section, stage: KafkaStage, count: int) -> None:
    late = await _redelivered(stage, count)
    section.findings.append(Finding(f"{count} messages due at once: the last is late by", Spread.of([max(late)]), "s"))


async def _redelivered(stage: KafkaStage, count: int) -> list[float]:
    """Nack each message once with a delay; return by how many seconds each was late."""
    topic = stage.filled(count, headers=False, body=lambda number: b"%d" % number)
    most = min(count, _MOST)
    async with _inbox(stage, "markers", topic, 2 * count) as inbox:
        nacked: dict[bytes | None, float] = {}
        while len(nacked) < count:
            batch = await inbox.next_batch(most)
            await asyncio.gather(*map(partial(_nack, nacked), batch))
        late: list[float] = []
        until = time.perf_counter() + _PATIENCE
        while len(late) < count:
            batch = await inbox.next_batch(most, timeout=_PATIENCE)
            now = time.perf_counter()
            late += [now - nacked[message.data] - _DELAY for message in batch]
            await batch.ack()
            if now > until:
                raise RuntimeError(f"Only {len(late)} of {count} messages came again")
    return late


async def _nack(nacked: dict[bytes | None, float], message: broker.Message) -> None:
    nacked[message.data] = time.perf_counter()
    await message.nack(delay=_DELAY)
