"""Measures variants of the same work.

The variants run in turn, in one process, in an order that is reversed every round, so that a machine that becomes
slower slows all of them. Ratios and differences are taken within a round; their medians and spreads are reported.
`in_pairs` measures a difference that is small compared with the whole, between runs next to each other. CPU is user and
system time of this process with all its threads; servers are other processes. The garbage collector is on, as in a
user's process; every run starts with no objects for it to examine.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass

__all__ = [
    "COLLECTED_AFTER",
    "USUAL",
    "Sample",
    "Series",
    "Spread",
    "Variant",
    "alternate",
    "collected_seldom",
    "in_pairs",
    "seldom_collected",
]

USUAL = "collector as Python has it"
COLLECTED_AFTER = 50_000
"""New objects before the collector runs, in a program that moves millions of messages: the best setting for both sides.
With Python's 700, the collector examines every message, because messages live longer than that."""

Variant = Callable[[], AbstractAsyncContextManager[Callable[[], Awaitable[object]]]]
"""Prepares a run when it is entered and cleans up when it is left; only what it yields is measured."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run."""

    count: int
    seconds: float
    cpu: float

    @property
    def rate(self) -> float:
        """Messages per second."""
        return self.count / self.seconds

    @property
    def cost(self) -> float:
        """CPU microseconds per message."""
        return self.cpu / self.count * 1e6


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        return cls(statistics.median(numbers), min(numbers), max(numbers))


@dataclass(frozen=True, slots=True)
class Series:
    """The runs of one variant, round by round."""

    samples: Sequence[Sample]

    @property
    def rate(self) -> Spread:
        return Spread.of([sample.rate for sample in self.samples])

    @property
    def cost(self) -> Spread:
        return Spread.of([sample.cost for sample in self.samples])

    def times_rate_of(self, other: Series) -> Spread:
        """The ratio of the rates."""
        return Spread.of([a.rate / b.rate for a, b in zip(self.samples, other.samples, strict=True)])

    def cost_above(self, other: Series) -> Spread:
        """CPU microseconds per message above the other's."""
        return Spread.of([a.cost - b.cost for a, b in zip(self.samples, other.samples, strict=True)])


async def alternate(variants: Mapping[str, Variant], *, count: int, rounds: int) -> dict[str, Series]:
    """Run each variant once per round.

    :param count: number of messages of a run.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in variants}
    with _old_objects_left_alone():
        for number in range(rounds):
            names = list(variants) if number % 2 == 0 else list(variants)[::-1]
            for name in names:
                samples[name].append(await _measure(variants[name], count))
    return {name: Series(runs) for name, runs in samples.items()}


async def in_pairs(
    base: Variant, variants: Mapping[str, Variant], *, count: int, rounds: int
) -> dict[str, tuple[Series, Series]]:
    """Run each variant once per round, right after the base, or right before it in every other round.

    :returns: for each variant, its own runs and the base's runs next to them.
    """
    samples: dict[str, tuple[list[Sample], list[Sample]]] = {name: ([], []) for name in variants}
    with _old_objects_left_alone():
        for number in range(rounds):
            for name, variant in variants.items():
                pair = ((variant, samples[name][0]), (base, samples[name][1]))
                for work, runs in pair if number % 2 else pair[::-1]:
                    runs.append(await _measure(work, count))
    return {name: (Series(own), Series(beside)) for name, (own, beside) in samples.items()}


@contextmanager
def _old_objects_left_alone() -> Generator[None]:
    """Freeze old objects until the end, so that runs do not start by collecting them."""
    try:
        yield
    finally:
        gc.unfreeze()


async def _measure(variant: Variant, count: int) -> Sample:
    async with variant() as run:
        gc.collect()
        gc.freeze()
        started, cpu_started = time.perf_counter(), time.process_time()
        await run()
        cpu, seconds = time.process_time() - cpu_started, time.perf_counter() - started
    return Sample(count, seconds, cpu)


def seldom_collected(variant: Variant) -> Variant:
    """The variant with a collector that runs rarely."""

    @asynccontextmanager
    async def seldom() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        with collected_seldom():
            async with variant() as run:
                yield run

    return seldom


@contextmanager
def collected_seldom() -> Generator[None]:
    """The collector runs rarely within the block."""
    usual = gc.get_threshold()
    gc.set_threshold(COLLECTED_AFTER, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
