"""Growth of memory while millions of messages with many keys go through the engine into LMDB.

The pages of LMDB's file that are in memory belong to the system, which takes them back when it needs them; they are
shown apart from the memory of the process itself.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Final

from benchmarks.measure import Spread
from benchmarks.report import Curve, Finding, Section
from benchmarks.streams.engine import run_now
from benchmarks.streams.stage import state_directory
from benchmarks.streams.works import click, counting
from broker_streams import Lmdb
from broker_streams.context import Incoming
from broker_streams.engine import PartitionEngine

__all__ = ["measure_memory", "measure_memory_in_full"]

_STEPS: Final = 20
_CHECKPOINT: Final = 10_000
_CHUNK: Final = 500
_BAR: Final = 16.0


async def measure_memory(scale: float, rounds: int) -> list[Section]:
    """The shorter form: a million messages with a hundred thousand keys."""
    return [await _measure(int(1_000_000 * scale), int(100_000 * scale))]


async def measure_memory_in_full(scale: float, rounds: int) -> list[Section]:
    """Ten million messages with a million keys, whatever the number of rounds."""
    return [await _measure(int(10_000_000 * scale), int(1_000_000 * scale))]


async def _measure(count: int, keys: int) -> Section:
    section = Section(
        "Memory",
        f"Memory of the process, in MiB above what it was when every key had been seen once: {count:,} messages with "
        f"{keys:,} keys in turn through the engine into LMDB, a checkpoint every {_CHECKPOINT:,}. Dashed: pages of "
        "LMDB's file in memory, which the system takes back when it needs them.",
    )
    own: list[tuple[float, float]] = []
    mapped: list[tuple[float, float]] = []
    with state_directory() as directory:
        store = Lmdb().open(directory, "memory")
        engine = PartitionEngine(counting(), 0, store, now=time.time, sleep=_never)
        done = 0
        for step in range(_STEPS):
            until = count * (step + 1) // _STEPS
            while done < until:
                end = min(done + _CHECKPOINT, until)
                for first in range(done, end, _CHUNK):
                    run_now(engine.handle([_message(n, keys) for n in range(first, min(first + _CHUNK, end))]))
                done = end
                effects = engine.take()
                rows, meta = {"rows": effects.rows, "due": effects.due}, {"checkpoint": effects.checkpoint.pack()}
                # As a processor does, but for one in some seconds.
                store.write(rows, meta, durable=False)
                engine.settled(effects)
            anonymous, file = _resident()
            own.append((done, anonymous))
            mapped.append((done, file))
        store.close()
    seen = [(at, size) for at, size in own if at > keys]
    base = seen[0][1]
    grown = [size - base for _, size in seen[1:]]
    section.findings.append(
        Finding(f"memory grown over {count - int(seen[0][0]):,} messages", Spread.of(grown), "MiB", at_most=_BAR)
    )
    start = own[0][1]
    section.curves += [
        Curve("memory of the process", [(at / 1e6, size - start) for at, size in own]),
        Curve("pages of LMDB", [(at / 1e6, size - mapped[0][1]) for at, size in mapped], beside=True),
    ]
    section.curve_axes = ("million messages", "MiB above the start")
    return section


def _message(number: int, keys: int) -> Incoming:
    # A step that has no divisor in common with the number of keys scatters them.
    return Incoming("source", number, b"user-%d" % (number * 7919 % keys), click(number), 1_000_000 + number, None)


def _resident() -> tuple[float, float]:
    """MiB of this process in memory: its own, and of files."""
    status = Path("/proc/self/status").read_text()
    found = {name: int(size) / 1024 for name, size in re.findall(r"^(Rss\w+):\s+(\d+) kB$", status, re.MULTILINE)}
    return found["RssAnon"], found["RssFile"]


async def _never(seconds: float) -> None:
    raise RuntimeError("The engine sleeps")
