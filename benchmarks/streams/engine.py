"""CPU of the engine per message: decode, read a row, write it, publish a message, checkpoint.

No broker is in it: messages come from memory, and outputs are made and dropped. The rows are written to the store.
"""

from __future__ import annotations

import cProfile
import gc
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any, Final

from benchmarks.measure import Spread, collected_seldom
from benchmarks.report import Finding, Section, Table
from benchmarks.streams.stage import state_directory
from benchmarks.streams.works import click, counting, windowed
from broker import Json
from broker_streams import Group, Lmdb, Memory, MsgPack, RocksDb, Sqlite
from broker_streams.context import Incoming
from broker_streams.engine import PartitionEngine
from broker_streams.stores.store import Store, StoreFactory

__all__ = ["measure_engine", "run_engine"]

_KEYS: Final = 10_000
_CHECKPOINT: Final = 10_000
_CHUNK: Final = 500
_SHOWN: Final = 14
"""Functions in the profile."""
_BAR: Final = 200_000
_STORES: Final[tuple[StoreFactory, ...]] = (Lmdb(), Memory(), RocksDb(), Sqlite())
_WORKS: Final[tuple[tuple[str, Callable[[], Group]], ...]] = (
    ("row and output, JSON", lambda: counting(Json)),
    ("row and output, MessagePack", lambda: counting(MsgPack)),
    ("tumbling window, JSON", lambda: windowed(Json)),
    ("tumbling window, MessagePack", lambda: windowed(MsgPack)),
)


async def measure_engine(scale: float, rounds: int) -> list[Section]:
    """Measure the engine with each store."""
    count = max(2000, int(200_000 * scale))
    section = Section(
        "The engine, without a broker",
        "Messages per second of CPU: decode a click, read the row of its user, write it, publish a message (or count "
        f"in a window); {_KEYS:,} users, a synced write of the store every {_CHECKPOINT:,} messages. Inputs are JSON; "
        "rows and outputs are what the name says. The engine reads back every row that it writes.",
        "messages per second of CPU",
    )
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with collected_seldom():
        for _ in range(rounds):
            for factory in _STORES:
                for what, make in _WORKS if factory.format == "lmdb" else _WORKS[:1]:
                    found.setdefault((factory.format, what), []).append(run_engine(make(), factory, count))
    for (store, what), runs in found.items():
        rates = Spread.of([1e6 / (handling + writing) for handling, writing in runs])
        barred = store == "lmdb" and what.startswith("row")
        section.findings.append(Finding(f"{store}, {what}", rates, "/s", at_least=_BAR if barred else None))
    section.tables.append(
        Table(
            ("CPU µs per message", "engine", "write to the store"),
            [
                (f"{store}, {what}", *(f"{Spread.of(part).median:.2f}" for part in zip(*runs, strict=True)))
                for (store, what), runs in found.items()
            ],
        )
    )
    section.tables.append(_profile(max(2000, count // 4)))
    return [section]


def _profile(count: int) -> Table:
    """The functions in which the first of the works spends its time; the profiler makes small functions look larger."""
    profile = cProfile.Profile()
    profile.runcall(run_engine, counting(Json), Lmdb(), count)
    own: dict[str, float] = {}
    for entry in profile.getstats():
        if name := _function(entry.code):
            own[name] = own.get(name, 0.0) + entry.inlinetime
    total = sum(own.values())
    return Table(
        ("lmdb, row and output, JSON, profiled: function", "share of the time"),
        [
            (name, f"{100 * own[name] / total:.0f} %")
            for name in sorted(own, key=own.__getitem__, reverse=True)[:_SHOWN]
        ],
    )


def _function(code: CodeType | str) -> str:
    """The name of a function; empty if the function belongs to the benchmark."""
    if isinstance(code, str):
        return "" if "gc." in code else f"`{code.strip('<>')}`"
    file = Path(code.co_filename)
    return "" if "benchmarks" in file.parts else f"`{code.co_name}` of `{file.name}`"


def run_engine(group: Group, factory: StoreFactory, count: int, keys: int = _KEYS) -> tuple[float, float]:
    """CPU microseconds per message in the engine, and in the writes of the store."""
    messages = [
        Incoming("source", number, b"user-%d" % (number * 7919 % keys), click(number), 1_000_000 + number, None)
        for number in range(count)
    ]
    gc.collect()
    gc.freeze()
    with _opened(factory) as store:
        engine = PartitionEngine(group, 0, store, now=time.time, sleep=_never)
        writing = 0.0
        started = time.process_time()
        for start in range(0, count, _CHECKPOINT):
            for first in range(start, min(start + _CHECKPOINT, count), _CHUNK):
                run_now(engine.handle(messages[first : first + _CHUNK]))
            effects = engine.take()
            began = time.process_time()
            store.write({"rows": effects.rows, "due": effects.due}, {"checkpoint": effects.checkpoint.pack()})
            writing += time.process_time() - began
            engine.settled(effects)
        spent = time.process_time() - started
    gc.unfreeze()
    return (spent - writing) / count * 1e6, writing / count * 1e6


@contextmanager
def _opened(factory: StoreFactory) -> Generator[Store]:
    with state_directory() as directory:
        store = factory.open(directory, "bench")
        try:
            yield store
        finally:
            store.close()


def run_now(coroutine: Coroutine[Any, Any, object]) -> None:
    """Run a coroutine that does not wait."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise RuntimeError("The engine waits")


async def _never(seconds: float) -> None:
    raise RuntimeError("The engine sleeps")
