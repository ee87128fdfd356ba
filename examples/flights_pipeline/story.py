"""The demo: publish, run Spark, kill all of it half-way, restart it, and compare the output.

Publishing and the first life of Spark run concurrently. The first error cancels both and is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final

import broker
from broker_spark.pipeline import BatchReport
from broker_spark.pipeline.definition import AVAILABLE_NOW
from examples.flights.data import Flight
from examples.flights.screen import Screen
from examples.flights_pipeline.comparison import Compared, compare_all
from examples.flights_pipeline.corruption import Corrupted, corrupted
from examples.flights_pipeline.lives import SparkLife
from examples.flights_pipeline.pipelines import NAMES, checkpoint
from examples.flights_pipeline.plain import compute
from examples.flights_pipeline.publishing import publish
from examples.flights_pipeline.results import Results, read_results
from examples.flights_pipeline.topics import make_topics
from examples.flights_pipeline.transforms import JOINED

__all__ = ["Outcome", "rows_of_a_batch", "run_demo"]

_BATCHES: Final = 6
_LEAST_ROWS: Final = 250
_KILL_AFTER: Final = 0.4
"""Share of all work after which Spark is killed."""
_LOOK_SECONDS: Final = 0.02


@dataclass(slots=True)
class Outcome:
    """The result of the demo.

    :ivar published: messages that the broker confirmed, including corrupted ones.
    :ivar killed: names of the killed processes.
    :ivar committed: rows of reported batches when Spark was killed, by pipeline.
    :ivar cut_off: the interrupted batch of each pipeline.
    :ivar second: reports of the second life.
    :ivar most_copies: maximum number of copies: the rows of the interrupted batches, or 0 if the broker deduplicates.
    """

    flights: int
    spoilt: list[Corrupted]
    published: int
    killed: list[str]
    committed: dict[str, int]
    cut_off: dict[str, int]
    second: list[BatchReport]
    most_copies: int
    results: Results
    compared: list[Compared]
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def failures(self) -> list[str]:
        """The failed checks; empty if all passed."""
        total = self.flights + len(self.spoilt)
        first = {pipeline: min(r.batch for r in self.second if r.pipeline == pipeline) for pipeline in self.cut_off}
        checks = {
            "every message is published": self.published == total,
            "Spark was killed while it worked": 0 < sum(self.committed.values()) < total * len(NAMES),
            "a batch was under way when it was killed": bool(self.cut_off),
            "what was cut off was done first": first == self.cut_off,
            "each message that does not decode has one dead letter": self.results.letters_again == 0,
            f"at most {self.most_copies:,} messages are there twice": self.results.copies <= self.most_copies,
        }
        return [promise for promise, holds in checks.items() if not holds] + [
            difference for each in self.compared for difference in each.differences
        ]


def rows_of_a_batch(messages: int) -> int:
    """Rows per batch, so that a pipeline has a handful of batches."""
    return max(_LEAST_ROWS, -(-messages // _BATCHES))


async def run_demo(url: str, flights: Sequence[Flight], directory: Path, screen: Screen) -> Outcome:
    """Run the whole demo on the broker at `url`.

    :param directory: for checkpoints and files; of this run only.
    :raises LifeEnded: Spark failed.
    :raises BrokerError: the broker failed.
    """
    started = perf_counter()
    spoilt = list(corrupted(flights))
    total = len(flights) + len(spoilt)
    rows = rows_of_a_batch(total)
    progress = _Progress(screen, total)
    seconds: dict[str, float] = {}
    async with broker.connect(url) as bus:
        await make_topics(bus)
        with screen.progress({"published": total} | dict.fromkeys(NAMES, total)):
            async with asyncio.TaskGroup() as tasks:
                publishing = tasks.create_task(_publish(bus, flights, spoilt, screen, seconds))
                first = SparkLife(url, directory, rows, "", progress.take)
                killed = await _first_life(first, progress, directory, screen, seconds)
                cut_off = _cut_off(directory)
                screen.say(f"Killed with SIGKILL: {_processes(killed)}; {_batches(cut_off)} running")
            committed = dict(progress.rows)
            second = SparkLife(url, directory, rows, AVAILABLE_NOW, progress.take)
            await _second_life(second, screen, seconds)
            progress.complete()
        screen.say("Comparing the output with a plain computation over the tables of the package")
        began = perf_counter()
        expected = await asyncio.to_thread(compute, len(flights), JOINED)
        results = await read_results(bus, directory)
        compared = await asyncio.to_thread(compare_all, expected, spoilt, results)
        seconds["compared"] = perf_counter() - began
    seconds["in all"] = perf_counter() - started
    return Outcome(
        len(flights),
        spoilt,
        publishing.result(),
        killed,
        committed,
        cut_off,
        second.reports,
        0 if bus.capabilities.publish.deduplication else len(cut_off) * rows,
        results,
        compared,
        seconds,
    )


class _Progress:
    """Rows of committed batches, by pipeline."""

    def __init__(self, screen: Screen, total: int) -> None:
        self.rows = dict.fromkeys(NAMES, 0)
        self.half = asyncio.Event()
        self._screen = screen
        self._total = total

    def take(self, report: BatchReport) -> None:
        self.rows[report.pipeline] += report.rows_in
        self._screen.advance(report.pipeline, self.rows[report.pipeline])
        if all(self.rows.values()) and sum(self.rows.values()) >= _KILL_AFTER * self._total * len(NAMES):
            self.half.set()

    def complete(self) -> None:
        """Fill the bars: a batch may have been committed but not reported when Spark was killed."""
        for name in NAMES:
            self._screen.advance(name, self._total)


async def _publish(
    bus: broker.Bus, flights: Sequence[Flight], spoilt: Sequence[Corrupted], screen: Screen, seconds: dict[str, float]
) -> int:
    began = perf_counter()
    published = await publish(bus, flights, spoilt, partial(screen.advance, "published"))
    seconds["published"] = perf_counter() - began
    return published


async def _first_life(
    life: SparkLife, progress: _Progress, directory: Path, screen: Screen, seconds: dict[str, float]
) -> list[str]:
    """Kill Spark half-way. Returns the names of its processes."""
    async with life.alive():
        await _begin(life, "Spark starts", screen, seconds)
        began = perf_counter()
        await life.outlive(_half_way(progress, directory))
        seconds["first life"] = perf_counter() - began
        return await life.kill()


async def _half_way(progress: _Progress, directory: Path) -> None:
    """Wait until enough is done and a batch is running."""
    await progress.half.wait()
    while not _cut_off(directory):  # noqa: ASYNC110 - only files show it
        await asyncio.sleep(_LOOK_SECONDS)


async def _second_life(life: SparkLife, screen: Screen, seconds: dict[str, float]) -> None:
    """Let Spark finish."""
    async with life.alive():
        await _begin(life, "Spark starts again", screen, seconds)
        began = perf_counter()
        await life.end()
        seconds["second life"] = perf_counter() - began


async def _begin(life: SparkLife, what: str, screen: Screen, seconds: dict[str, float]) -> None:
    began = perf_counter()
    await life.ready()
    took = perf_counter() - began
    seconds["starts of Spark"] = seconds.get("starts of Spark", 0.0) + took
    screen.say(f"{what}: process {life.pid}, ready after {took:.0f} s")


def _cut_off(directory: Path) -> dict[str, int]:
    """Batches that were planned but not committed, from the checkpoints."""
    found: dict[str, int] = {}
    for name in NAMES:
        offsets, commits = (_batches_in(checkpoint(directory, name) / kind) for kind in ("offsets", "commits"))
        if offsets > commits:
            found[name] = max(offsets)
    return found


def _batches_in(directory: Path) -> set[int]:
    return {int(path.name) for path in directory.glob("*") if path.name.isdecimal()}


def _processes(names: Sequence[str]) -> str:
    return f"{len(names)} processes ({', '.join(sorted(set(names)))})"


def _batches(cut_off: dict[str, int]) -> str:
    return ", ".join(f"batch {batch} of {name}" for name, batch in cut_off.items()) or "no batch"
