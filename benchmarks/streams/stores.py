"""What a row costs in each store: batches of rows as a checkpoint writes them, reads of random keys, all rows."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Final

from benchmarks.report import Section, Table
from benchmarks.streams.stage import state_directory
from broker_streams import Lmdb, Memory, RocksDb, Sqlite, Store, StoreFactory
from broker_streams.stores.directory import StateDirectory

__all__ = ["measure_stores"]

_BATCH: Final = 1000
_VALUE: Final = 100
_STORES: Final[tuple[StoreFactory, ...]] = (Memory(), Lmdb(), RocksDb(), Sqlite())
_COLUMNS: Final = ("put", "overwrite", "put, unsynced", "get_many", "get", "items", "count")


async def measure_stores(scale: float, rounds: int) -> list[Section]:
    """Measure each store."""
    rows = max(2000, int(100_000 * scale))
    section = Section(
        "Stores",
        f"CPU microseconds per row, and wall time in brackets: {rows:,} rows of {_VALUE} bytes under random keys, "
        f"written and read {_BATCH:,} at a time, but `get`, which reads one; all rows in order; the count.",
    )
    keys = [b"user-%012d" % number for number in range(rows)]
    random.Random(1).shuffle(keys)
    lines: list[tuple[str, ...]] = []
    with state_directory() as path, StateDirectory(path, "benchmark") as directory:
        for factory in _STORES:
            runs = [list(_measured(directory, factory, keys, f"{factory.format}-{number}")) for number in range(rounds)]
            columns = zip(*runs, strict=True)
            lines.append((factory.format, *(_median(column) for column in columns)))
    section.tables.append(Table(("Store", *_COLUMNS), lines))
    return [section]


def _median(costs: tuple[tuple[float, float], ...]) -> str:
    cpu, wall = (statistics.median(part) for part in zip(*costs, strict=True))
    return f"{cpu:.2f} ({wall:.1f})"


def _measured(
    directory: StateDirectory, factory: StoreFactory, keys: list[bytes], name: str
) -> Iterator[tuple[float, float]]:
    store = directory.open(factory, f"{name}.synced")
    yield _timed(lambda: _write(store, keys, durable=True), len(keys))
    yield _timed(lambda: _write(store, keys, durable=True), len(keys))
    unsynced = directory.open(factory, f"{name}.unsynced")
    yield _timed(lambda: _write(unsynced, keys, durable=False), len(keys))
    unsynced.close()
    asked = random.Random(2).choices(keys, k=len(keys))
    yield _timed(lambda: [store.get_many("rows", batch) for batch in _batches(asked)], len(keys))
    yield _timed(lambda: [store.get("rows", key) for key in asked], len(keys))
    yield _timed(lambda: sum(1 for _ in store.items("rows")), len(keys))
    yield _timed(lambda: store.count("rows"), len(keys))
    store.close()


def _write(store: Store, keys: list[bytes], durable: bool) -> None:
    for batch in _batches(keys):
        store.write({"rows": {key: os.urandom(_VALUE) for key in batch}}, {"position": batch[0]}, durable=durable)


def _batches(keys: list[bytes]) -> Iterator[list[bytes]]:
    return (keys[first : first + _BATCH] for first in range(0, len(keys), _BATCH))


def _timed(call: Callable[[], object], count: int) -> tuple[float, float]:
    """Microseconds of CPU and of time per row."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return cpu / count * 1e6, wall / count * 1e6
