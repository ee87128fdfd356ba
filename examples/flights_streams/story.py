"""The demo: three members handle the flights, one of them is killed, another joins, and a view watches.

The members are ready before the first flight is published. The last flights are published when the newcomer has
partitions, so that it has something to do however quick the others are. The first error cancels everything and is
raised.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import broker
from examples.flights.data import Flight, read_airlines
from examples.flights.lives import LifeEnded
from examples.flights_pipeline.comparison import Compared
from examples.flights_streams import member, viewer
from examples.flights_streams.board import Board
from examples.flights_streams.expected import compare_all, expect
from examples.flights_streams.groups import GROUPS
from examples.flights_streams.lives import Life
from examples.flights_streams.member import MemberReport, Recovery
from examples.flights_streams.publishing import cut, publish_flights, publish_tables
from examples.flights_streams.results import Results
from examples.flights_streams.topics import PARTITIONS, make_topics
from examples.flights_streams.viewer import ViewReport

__all__ = ["Outcome", "Sample", "run_demo"]

_MEMBERS: Final = 3
_BEFORE_KILL: Final = 0.5
"""Share of the flights that is published before a member is killed."""
_BEFORE_JOIN: Final = 0.9
"""Share that is published before the newcomer is ready."""
_KILL_AT: Final = 0.35
"""Share of the flights in the table at which a member is killed."""
_JOIN_AT: Final = 0.55
"""Share at which another member is started, once the partitions of the killed one are taken over."""
_SAMPLE_SECONDS: Final = 0.25
_STALL_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class Sample:
    """How far everything was at a moment.

    :ivar seconds: since the first flight was published.
    :ivar published: flights that have an aircraft, confirmed by the broker.
    :ivar counted: flights in the rows of the view.
    :ivar handled: flights in the checkpoints of each member, by name.
    """

    seconds: float
    published: int
    counted: int
    handled: dict[str, int]


@dataclass(slots=True)
class Outcome:
    """The result of the demo.

    :ivar flights: all flights; `with_aircraft` of them have an aircraft.
    :ivar killed_at, joined_at: seconds since the first flight.
    :ivar counted_at_kill: flights in the view then.
    :ivar recoveries: by member, in order.
    :ivar taken_over: recoveries of the other members after the kill.
    :ivar newcomer: the last report of the member that joined.
    :ivar guarantee: of the members, and `how` they have it.
    :ivar writes_once: whether the broker has outputs exactly once where it has rows so.
    :ivar late: departures that came after their hour had closed.
    """

    flights: int
    with_aircraft: int
    killed_at: float = 0.0
    joined_at: float = 0.0
    counted_at_kill: int = 0
    samples: list[Sample] = field(default_factory=list[Sample])
    recoveries: dict[str, list[Recovery]] = field(default_factory=dict[str, list[Recovery]])
    taken_over: int = 0
    newcomer: MemberReport = field(default_factory=MemberReport)
    guarantee: str = ""
    how: str = ""
    writes_once: bool = False
    late: int = 0
    results: Results = field(default_factory=Results)
    compared: list[Compared] = field(default_factory=list[Compared])
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def failures(self) -> list[str]:
        """The failed checks; empty if all passed."""
        results, exactly_once = self.results, self.guarantee == "exactly_once"
        checks = {
            "a member was killed while it worked": 0 < self.counted_at_kill < self.with_aircraft,
            "the others took over its partitions": self.taken_over > 0,
            "the newcomer handled flights": self.newcomer.flights > 0,
            "no departure was late": self.late == 0,
            "no flight was handled twice": results.again == 0 or not exactly_once,
            "no hour and no alert was written twice": results.copies == 0 or not (exactly_once and self.writes_once),
        }
        return [promise for promise, holds in checks.items() if not holds] + [
            difference for each in self.compared for difference in each.differences
        ]


class _News:
    """Wakes those who wait for a condition."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def pulse(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()


class _Demo:
    def __init__(self, url: str, flights: Sequence[Flight], directory: Path, board: Board) -> None:
        self._flights = flights
        self._board = board
        self._news = _News()
        self._published = 0
        self._began = time.time()
        names = [f"member {number}" for number in range(1, _MEMBERS + 2)]
        self._members = [
            Life(
                url,
                name,
                member.__name__,
                name.replace(" ", "-"),
                str(directory / name.replace(" ", "-")),
                kind=MemberReport,
                heard=self._news.pulse,
            )
            for name in names
        ]
        self._viewer = Life(url, "the view", viewer.__name__, kind=ViewReport, heard=self._news.pulse)
        self._outcome = Outcome(len(flights), sum(flight.aircraft is not None for flight in flights))

    async def run(self, bus: broker.Bus) -> Outcome:
        outcome = self._outcome
        started = time.perf_counter()
        publish = bus.capabilities.publish
        outcome.writes_once = publish.transactions or publish.atomic_tables
        await make_topics(bus)
        await publish_tables(bus)
        async with AsyncExitStack() as stack:
            stack.enter_context(self._board.shown())
            async with asyncio.TaskGroup() as tasks:
                self._stack, self._tasks = stack, tasks
                *members, newcomer = self._members
                for life in members:
                    await self._start(life)
                await self._news.until(lambda: all(_is_ready(life) for life in members))
                await self._start(self._viewer)
                await self._news.until(lambda: self._viewer.report is not None)
                following = tasks.create_task(outcome.results.follow(bus, self._news.pulse))
                outcome.seconds["set up"] = time.perf_counter() - started
                self._began, began = time.time(), time.perf_counter()
                watching = tasks.create_task(self._watch())
                await self._play(bus, members[0], newcomer)
                outcome.seconds["handled"] = time.perf_counter() - began
                watching.cancel()
                self._show()
                for life in (*members[1:], newcomer, self._viewer):
                    await life.stop()
                following.cancel()
        await self._check(bus)
        outcome.seconds["in all"] = time.perf_counter() - started
        return outcome

    async def _play(self, bus: broker.Bus, victim: Life[MemberReport], newcomer: Life[MemberReport]) -> None:
        outcome, news = self._outcome, self._news
        first, second, last = cut(self._flights, _BEFORE_KILL, _BEFORE_JOIN)
        publishing = self._tasks.create_task(self._publish(bus, first))
        await news.until(lambda: self._counted >= _KILL_AT * outcome.with_aircraft)
        outcome.counted_at_kill = self._counted
        await victim.kill()
        outcome.killed_at = self._seconds
        self._board.say(
            f"{victim.name}, process {victim.pid}, was killed with SIGKILL; it had {_partitions(victim.report)}"
        )
        await publishing
        publishing = self._tasks.create_task(self._publish(bus, second))
        await news.until(lambda: self._counted >= _JOIN_AT * outcome.with_aircraft and self._all_is_taken_over())
        await self._start(newcomer)
        await news.until(lambda: _is_ready(newcomer))
        outcome.joined_at = self._seconds
        self._board.say(f"{newcomer.name}, process {newcomer.pid}, has joined, and has {_partitions(newcomer.report)}")
        await publishing
        await self._publish(bus, last)
        ends = {flight.carrier: f"{flight.scheduled[:13]}:00:00Z" for flight in self._flights}
        hours = outcome.results.hours
        await news.until(lambda: self._counted >= outcome.with_aircraft and all(end in hours for end in ends.items()))

    async def _publish(self, bus: broker.Bus, flights: Sequence[Flight]) -> None:
        place = 0

        def confirmed(count: int) -> None:
            nonlocal place
            self._published += sum(flight.aircraft is not None for flight in flights[place : place + count])
            place += count

        await publish_flights(bus, flights, confirmed)

    async def _start(self, life: Life[MemberReport] | Life[ViewReport]) -> None:
        await self._stack.enter_async_context(life.alive())
        self._tasks.create_task(life.hear())

    async def _watch(self) -> None:
        """Take samples, and show them, until cancelled.

        :raises LifeEnded: nothing has happened for long.
        """
        results, samples = self._outcome.results, self._outcome.samples
        moved, before = time.monotonic(), (0, 0, 0)
        while True:
            handled = {life.name: life.report.flights for life in self._members if life.report is not None}
            samples.append(Sample(self._seconds, self._published, self._counted, handled))
            self._show()
            now = (self._published, self._counted, len(results.hours))
            if now != before:
                moved, before = time.monotonic(), now
            elif time.monotonic() - moved > _STALL_SECONDS:
                raise LifeEnded(
                    f"Nothing has happened for {_STALL_SECONDS:.0f} s: {now[0]:,} flights are published, {now[1]:,} "
                    f"counted, and {now[2]:,} hours closed"
                )
            await asyncio.sleep(_SAMPLE_SECONDS)

    def _show(self) -> None:
        self._board.show(self._published, self._counted, self._outcome.results, self._members, self._viewer)

    async def _check(self, bus: broker.Bus) -> None:
        outcome = self._outcome
        began = time.perf_counter()
        await outcome.results.read_table(bus)
        expected = await asyncio.to_thread(expect, len(self._flights), read_airlines())
        outcome.compared = compare_all(expected, outcome.results)
        reports = {life.name: life.report or MemberReport() for life in self._members}
        outcome.recoveries = {name: report.recoveries for name, report in reports.items()}
        killed = self._began + outcome.killed_at
        outcome.taken_over = sum(
            recovery.at > killed for life in self._members[1:-1] for recovery in outcome.recoveries[life.name]
        )
        outcome.newcomer = reports[self._members[-1].name]
        outcome.guarantee, outcome.how = outcome.newcomer.guarantee, outcome.newcomer.how
        outcome.late = sum(report.late for report in reports.values())
        outcome.seconds["compared"] = time.perf_counter() - began

    def _all_is_taken_over(self) -> bool:
        """Whether the members that live handle all partitions."""
        reports = [life.report for life in self._members if life.report is not None and not life.killed]
        return all(
            {number for report in reports for number in report.partitions.get(group.name, ())} == set(range(PARTITIONS))
            for group in GROUPS
        )

    @property
    def _counted(self) -> int:
        return 0 if self._viewer.report is None else self._viewer.report.flights

    @property
    def _seconds(self) -> float:
        return time.time() - self._began


async def run_demo(url: str, flights: Sequence[Flight], directory: Path, board: Board) -> Outcome:
    """Run the whole demo on the broker at `url`.

    :param directory: for the stores; of this run only.
    :raises LifeEnded: a process ended on its own, or nothing happens any more.
    :raises BrokerError: the broker failed.
    """
    async with broker.connect(url) as bus:
        return await _Demo(url, flights, directory, board).run(bus)


def _is_ready(life: Life[MemberReport]) -> bool:
    return life.report is not None and life.report.ready


def _partitions(report: MemberReport | None) -> str:
    partitions = {} if report is None else report.partitions
    return " and ".join(f"{len(numbers)} of {group.rpartition('.')[2]}" for group, numbers in partitions.items())
