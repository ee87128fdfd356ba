"""Runs of blocking work in turn, and the CPU and memory of Spark's processes.

The works of a comparison run in turn, in an order that is reversed every round; ratios are taken within a round. CPU is
that of this process, of Spark's JVM and of all its Python processes, without the brokers. Linux only.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import Sample, Series

__all__ = ["Done", "Memory", "Work", "in_turn", "memory_of", "tree_of"]

_TICK = os.sysconf("SC_CLK_TCK")


class Done(NamedTuple):
    """The part of a run that counts, if not all of it does."""

    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Work:
    """One way to do the work of a comparison.

    :ivar rows: number of rows of a run.
    :ivar run: gets the result of `prepare`; a returned `Done` is the part that counts.
    :ivar prepare: runs before; not measured.
    """

    rows: int
    run: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None


def in_turn(
    works: Mapping[str, Work], rounds: int, roots: Callable[[], list[int]], *, uncounted: int = 0
) -> dict[str, Series]:
    """Run each work once per round.

    :param roots: processes whose CPU counts besides this one's, with that of all their descendants.
    :param uncounted: warm-up rounds, which are not reported.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in works}
    for number in range(uncounted + rounds):
        for name in list(works) if number % 2 == 0 else list(works)[::-1]:
            samples[name].append(_measure(works[name], roots))
    return {name: Series(runs[uncounted:]) for name, runs in samples.items()}


def _measure(work: Work, roots: Callable[[], list[int]]) -> Sample:
    prepared = work.prepare()
    gc.collect()
    cpu = _cpu(roots())
    started = time.perf_counter()
    done = work.run(prepared)
    seconds = time.perf_counter() - started
    used = max(0.0, _cpu(roots()) - cpu)
    if isinstance(done, Done):
        return Sample(done.rows, done.seconds, used * done.rows / work.rows)
    return Sample(work.rows, seconds, used)


def tree_of(root: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        fields = _stat(path)
        if fields:
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


class Memory(NamedTuple):
    """Proportional set size (PSS) of processes, in MiB."""

    jvm: float
    python: float
    processes: int


def memory_of(jvm: int) -> Memory:
    """The memory of the JVM and of its Python processes."""
    sizes = {process: _pss(process) for process in tree_of(jvm)}
    below = [size for process, size in sizes.items() if process != jvm and size]
    return Memory(sizes[jvm], sum(below), len(below))


def _pss(process: int) -> float:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


def _cpu(roots: list[int]) -> float:
    processes = {process for root in roots for process in tree_of(root)}
    ticks = sum(
        sum(map(int, fields[11:15])) for each in processes if (fields := _stat(Path(f"/proc/{each}/stat")))
    )  # its own time, and that of ended children
    return time.process_time() + ticks / _TICK


def _stat(path: Path) -> list[str]:
    """The fields after the name; empty if the process has ended."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
