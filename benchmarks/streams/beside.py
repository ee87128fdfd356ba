"""Quix Streams and Faust beside it: the same works on the same Kafka, each a process on one core.

*Words*: lines are split into words, which go through a topic by their keys and are counted. *Clicks*: the clicks of a
user are counted and summed, and each new sum is published. All three write changelogs. Each has an environment of its
own in `build/`, made from the versions pinned in `quix.txt` and `faust.txt`; where those cannot be installed, the
section says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.measure import Sample, Series, Spread
from benchmarks.report import Finding, Section, Table
from benchmarks.streams.processing import per_cpu_second
from benchmarks.streams.stage import Stage, open_stage, state_directory
from benchmarks.streams.works import clicks
from broker import OutboundMessage
from tests.servers.process import ChildProcess

__all__ = ["measure_beside"]

_HERE: Final = Path(__file__).parent
_ROOT: Final = _HERE.parents[1]
_PARTITIONS: Final = 2
_KEYS: Final = 10_000
_WORDS: Final = 8
_AIM: Final = 4.0
_INTERVAL: Final = 1.0
_CHECKPOINT: Final = 10_000
_CORE: Final = 0
_PATIENCE: Final = 300.0


class _Found(NamedTuple):
    """What a program has measured.

    :ivar loop: CPU seconds of the event loop's thread; only ours measures these.
    """

    sample: Sample
    loop: float


class _Failed(Exception):
    """A program or an installation failed."""


@dataclass(frozen=True, slots=True)
class _Contender:
    """A library in an environment of its own.

    :ivar share: of the messages that ours gets, so that all take about as long.
    """

    name: str
    program: str
    pinned: str
    share: float
    guarantee: str

    async def python(self) -> str:
        """The interpreter of its environment, which is made if it is not there."""
        place = _ROOT / "build" / "beside" / self.pinned.removesuffix(".txt")
        python, done = place / "bin" / "python", place / "installed.txt"
        pinned = (_HERE / self.pinned).read_text()
        if not done.exists() or done.read_text() != pinned:
            await _run(sys.executable, "-m", "venv", str(place))
            await _run(str(python), "-m", "pip", "install", "--quiet", "--requirement", str(_HERE / self.pinned))
            done.write_text(pinned)
        return str(python)


_CONTENDERS: Final = (
    _Contender("Quix Streams, exactly once, RocksDB", "child_quix.py", "quix.txt", 0.2, "exactly_once"),
    _Contender("Faust, exactly once, in memory", "child_faust.py", "faust.txt", 0.1, "exactly_once"),
    _Contender("Faust, at least once, in memory", "child_faust.py", "faust.txt", 0.1, "at_least_once"),
)
_OURS: Final = "ours, exactly once, LMDB"


async def measure_beside(scale: float, rounds: int) -> list[Section]:
    """Measure both works with all three."""
    section = Section(
        "Quix Streams and Faust beside it",
        "Messages per second of CPU, each in a process of its own on one core, on one Kafka, from the first message to "
        "the commit of the last: with changelogs, two partitions, a checkpoint each second or after "
        f"{_CHECKPOINT:,} messages. Words: lines of {_WORDS} words, each of which counts as a message. Clicks: JSON "
        f"in, a row, JSON out; {_KEYS:,} users.",
        "times as fast",
    )
    pythons: dict[_Contender, str] = {}
    for contender in _CONTENDERS:
        try:
            pythons[contender] = await contender.python()
        except _Failed as error:
            section.text += f" {contender.name}: not installed ({error})."
    async with open_stage("kafka") as stage:
        rows = [
            await _compare(section, stage, work, max(2000, int(count * scale)), rounds, pythons)
            for work, count in (("words", 20_000), ("clicks", 100_000))
        ]
    bars = [f"bar by {contender.name}" for contender in _CONTENDERS]
    section.tables.append(Table(("CPU µs per message of ours", "all", "event loop", "other threads", *bars), rows))
    return [section]


async def _compare(
    section: Section, stage: Stage, work: str, count: int, rounds: int, pythons: Mapping[_Contender, str]
) -> tuple[str, ...]:
    """Measure one work; returns where the CPU of ours goes, beside what the bar leaves."""
    source = await stage.topic(_PARTITIONS)
    await stage.fill(source, count, _lines if work == "words" else lambda start, stop: clicks(start, stop, _KEYS))
    ours: list[Sample] = []
    loops: list[float] = []
    theirs: dict[_Contender, list[Sample]] = {contender: [] for contender in pythons}
    for _ in range(rounds):
        command = (sys.executable, "-m", "benchmarks.streams.child")
        found = await _child(stage, work, source, count, command, "")
        ours.append(found.sample)
        loops.append(1e6 * found.loop / found.sample.count)
        for contender, python in pythons.items():
            some = max(500, int(count * contender.share))
            command = (python, str(_HERE / contender.program))
            if contender in theirs:
                try:
                    found = await _child(stage, work, source, some, command, contender.guarantee)
                    theirs[contender].append(found.sample)
                except _Failed as error:
                    section.text += f" {contender.name}, {work}: did not run ({error})."
                    del theirs[contender]
    section.runs[f"{work}: {_OURS}"] = mine = Series(ours)
    section.findings.append(Finding(f"{work}: {_OURS}", per_cpu_second(mine), "/s"))
    for contender, samples in theirs.items():
        section.runs[f"{work}: {contender.name}"] = series = Series(samples)
        ratio = Series([Sample(1, each.cost, 1.0) for each in mine.samples]).times_rate_of(
            Series([Sample(1, each.cost, 1.0) for each in samples])
        )
        section.findings += [
            Finding(f"{work}: {contender.name}", per_cpu_second(series), "/s"),
            Finding(f"{work}: ours / {contender.name}", ratio, "x", at_least=_AIM),
        ]
    whole, loop = mine.cost.median, Spread.of(loops).median
    cells = [f"{each:.2f}" for each in (whole, loop, whole - loop)]
    for contender in _CONTENDERS:
        ran = section.runs.get(f"{work}: {contender.name}")
        cells.append("—" if ran is None else f"{ran.cost.median / _AIM:.2f}")
    return work, *cells


def _lines(start: int, stop: int) -> list[OutboundMessage]:
    """Lines of words, each word one of `_KEYS`."""
    return [
        OutboundMessage(
            " ".join(f"word-{(number * _WORDS + at) * 7919 % _KEYS}" for at in range(_WORDS)).encode(), f"line-{number}"
        )
        for number in range(start, stop)
    ]


async def _child(stage: Stage, work: str, source: str, count: int, command: Sequence[str], guarantee: str) -> _Found:
    """Run a program on the messages, on one core."""
    words = _WORDS if work == "words" else 1
    async with stage.target(_PARTITIONS) as target:
        with state_directory() as directory:
            job = {
                "source": source,
                "target": target,
                "group": stage.unique(f"beside-{work}"),
                "lines": count,
                "words": count * words,
                "directory": str(directory),
                "interval": _INTERVAL,
                "checkpoint": _CHECKPOINT,
                "partitions": _PARTITIONS,
                "guarantee": guarantee,
            }
            printed = await _run(*command, work, stage.bootstrap, json.dumps(job), core=_CORE)
    found: dict[str, Any] = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    return _Found(Sample(count * words, found["seconds"], found["cpu"]), found.get("loop", 0.0))


async def _run(*command: str, core: int | None = None) -> str:
    """Run a program to its end, or until this process ends; return what it printed.

    :raises _Failed: it failed, or took too long.
    """
    return await asyncio.to_thread(_run_now, command, core)


def _run_now(command: Sequence[str], core: int | None) -> str:
    with tempfile.NamedTemporaryFile() as log:
        process = ChildProcess(command, Path(log.name))
        if core is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, {core})
        deadline = time.monotonic() + _PATIENCE
        while process.return_code is None and time.monotonic() < deadline:
            time.sleep(0.1)
        late = process.return_code is None
        process.end(signal.SIGKILL, 10.0)
        printed = Path(log.name).read_text(errors="replace")
    if late:
        raise _Failed(f"it took longer than {_PATIENCE:.0f} s")
    if process.return_code != 0:
        lines = printed.strip().splitlines() or [f"status {process.return_code}"]
        raise _Failed(lines[-1][:200])
    return printed
