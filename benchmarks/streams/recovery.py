"""Recovery of a table into LMDB, and reads of a view."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from benchmarks.measure import Spread, Variant, alternate
from benchmarks.report import Finding, Section
from benchmarks.streams.processing import per_cpu_second
from benchmarks.streams.stage import PARTITIONS, Stage, open_stage, state_directory
from benchmarks.streams.works import Row
from broker import Json, OutboundMessage
from broker_streams import Lmdb, Memory, StoreFactory, View
from broker_streams.recovery import TableCopy

__all__ = ["measure_recovery"]

_BARS: Final[Mapping[str, float]] = {"kafka": 180_000, "jetstream": 100_000}
_VIEWED: Final = 100_000
_GETS: Final = 100_000
_GET_BAR: Final = 3.0


async def measure_recovery(scale: float, rounds: int) -> list[Section]:
    """Measure on Kafka and on JetStream; the view is read on JetStream."""
    section = Section(
        "Recovery",
        f"Rows per second of CPU of this process: {PARTITIONS} partitions of a table with rows of 100 bytes are read "
        "into empty LMDB stores, one after the other, as a processor does with a partition that it is given.",
        "rows per second of CPU",
    )
    views = Section(
        "Views", f"CPU of `view.get` with a random key of {_VIEWED:,} rows; the value is decoded JSON.", "CPU µs"
    )
    for name, bar in _BARS.items():
        async with open_stage(name) as stage:
            count = max(2000, int(200_000 * scale))
            table = await _table(stage, count)
            series = await alternate({name: _recovering(stage, table, count)}, count=count, rounds=rounds)
            section.runs[f"{name}, recovery"] = series[name]
            section.findings.append(
                Finding(f"{name}, recovery into LMDB", per_cpu_second(series[name]), "/s", at_least=bar)
            )
            if name == "jetstream":
                await _views(views, stage, scale, rounds)
    return [section, views]


async def _table(stage: Stage, count: int) -> str:
    table = await stage.topic(compacted=True)

    def rows(start: int, stop: int) -> list[OutboundMessage]:
        return [OutboundMessage(b"%0100d" % number, b"user-%012d" % number) for number in range(start, stop)]

    await stage.fill(table, count, rows)
    return table


def _recovering(stage: Stage, table: str, count: int) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        with state_directory() as directory:
            stores = [Lmdb().open(directory, f"{table}-{number}") for number in range(PARTITIONS)]

            async def run() -> None:
                for number, store in enumerate(stores):
                    await TableCopy(stage.bus, table, store, (number,), own=True).recover()

            yield run
            found = sum(store.count("rows") for store in stores)
            for store in stores:
                store.close()
            if found != count:
                raise RuntimeError(f"{found} of {count} rows were recovered")

    return variant


async def _views(section: Section, stage: Stage, scale: float, rounds: int) -> None:
    rows, gets = max(1000, int(_VIEWED * scale)), max(1000, int(_GETS * scale))
    table = await stage.topic(compacted=True)

    def made(start: int, stop: int) -> list[OutboundMessage]:
        return [
            OutboundMessage(b'{"clicks":%d,"spent":12}' % number, f"user-{number}") for number in range(start, stop)
        ]

    await stage.fill(table, rows, made)
    asked = [f"user-{number}" for number in random.Random(1).choices(range(rows), k=gets)]
    factories: tuple[StoreFactory, ...] = (Memory(), Lmdb())
    for factory in factories:
        with state_directory() as directory:
            async with View(stage.bus, table, Json(Row), store=factory, state_dir=directory) as view:
                await view.ready()
                costs = [_gets(view, asked) for _ in range(rounds)]
        section.findings.append(Finding(f"view.get, {factory.format}", Spread.of(costs), "µs", at_most=_GET_BAR))


def _gets(view: View[Row], asked: list[str]) -> float:
    """CPU microseconds of a get."""
    get = view.get
    began = time.process_time()
    for key in asked:
        get(key)
    return (time.process_time() - began) / len(asked) * 1e6
