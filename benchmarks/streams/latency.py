"""From the input to the committed output, at a fixed rate, in checkpoint intervals.

Messages are sent by the clock, whether earlier ones have arrived or not, so that a stall delays all messages behind it.
Each carries the time at which it was due; publisher, processor and reader are one process with one clock.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

import msgspec

from benchmarks.measure import Spread
from benchmarks.report import Finding, Section, Table
from benchmarks.streams.stage import PARTITIONS, Stage, open_stage, state_directory
from broker import Json, OutboundMessage, RecordConsumer
from broker_streams import Context, Group, Input, Lmdb, Output, Persist, Processor

__all__ = ["measure_latency"]

_RATE: Final = 500
_SECONDS: Final = 10.0
_INTERVALS: Final = (0.1, 1.0)
_BAR: Final = 2.0
_PATIENCE: Final = 120.0


class _Sent(msgspec.Struct):
    due: float


async def measure_latency(scale: float, rounds: int) -> list[Section]:
    """Measure on Kafka and on JetStream."""
    section = Section(
        "Latency",
        "From the time at which a message was due at its publisher to the arrival of the committed output at a "
        f"reader, {_RATE} messages a second, {PARTITIONS} partitions: the 99th percentile in checkpoint intervals. A "
        "message that comes just after a checkpoint waits for a whole interval; the rest is the checkpoint itself, and "
        "the ways to and from the broker.",
        "checkpoint intervals",
    )
    rows: list[tuple[str, str, str]] = []
    for name in ("kafka", "jetstream"):
        async with open_stage(name) as stage:
            for interval in _INTERVALS:
                runs = [await _delays(stage, interval, max(0.5, _SECONDS * scale)) for _ in range(rounds)]
                middle = Spread.of([run[len(run) // 2] for run in runs])
                late = Spread.of([run[len(run) * 99 // 100] for run in runs])
                section.findings.append(
                    Finding(
                        f"p99, {name}, a checkpoint each {interval:g} s",
                        Spread(late.median / interval, late.least / interval, late.most / interval),
                        "intervals",
                        at_most=_BAR,
                    )
                )
                rows.append(
                    (f"{name}, each {interval:g} s", f"{middle.median * 1e3:.0f} ms", f"{late.median * 1e3:.0f} ms")
                )
    section.tables.append(Table(("From input to committed output", "p50", "p99"), rows))
    return [section]


async def _delays(stage: Stage, interval: float, seconds: float) -> list[float]:
    """Seconds of each message, sorted."""
    source = await stage.topic()
    async with stage.target() as target:
        totals, sent = Persist(Json(int)), Output(target, Json(_Sent))

        def on_message(ctx: Context, message: _Sent) -> None:
            ctx[totals] = (ctx[totals] or 0) + 1
            ctx.emit(sent, key=ctx.key, value=message)

        group = Group(stage.unique("latency"), Input(source, Json(_Sent), on_message), totals, sent)
        with state_directory() as directory:
            async with (
                Processor(
                    stage.bus, group, state_dir=directory, store=Lmdb(), checkpoint_interval=interval
                ) as processor,
                stage.bus.records(target, group=stage.unique("reader"), codec=Json(_Sent)) as reader,
            ):
                await processor.ready()
                late: list[float] = []
                # The first messages open connections on both sides.
                await _publish(stage, source, 8)
                await _read(reader, late, 8)
                late.clear()
                count = int(_RATE * seconds)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(_read(reader, late, count))
                    start = time.perf_counter()
                    for number in range(count):
                        due = start + number / _RATE
                        await asyncio.sleep(due - time.perf_counter())
                        tasks.create_task(_send(stage, source, number, due))
    await stage.bus.admin.delete_topic(source)
    return sorted(late)


async def _publish(stage: Stage, source: str, count: int) -> None:
    for number in range(count):
        await _send(stage, source, number, time.perf_counter())


async def _send(stage: Stage, source: str, number: int, due: float) -> None:
    data = Json(_Sent).encode(_Sent(due))
    await stage.bus.topic(source).publish(OutboundMessage(data, f"key-{number % 1000}"))


async def _read(reader: RecordConsumer[_Sent], late: list[float], count: int) -> None:
    async with asyncio.timeout(_PATIENCE):
        while len(late) < count:
            batch = await reader.next_batch(1000, timeout=1.0)
            now = time.perf_counter()
            late += [now - message.due for (message,) in batch.rows("payload")]
