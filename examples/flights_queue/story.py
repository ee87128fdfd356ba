"""The demo: publish jobs, let workers do them, kill two workers, and check the accounts.

Everything runs concurrently. The first error cancels everything, kills all workers and is raised.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import broker
from examples.flights.data import Flight
from examples.flights_queue.accounts import Accounts, Deaths
from examples.flights_queue.auditor import Auditor, count_jobs
from examples.flights_queue.board import Board
from examples.flights_queue.fates import expected, unreadable
from examples.flights_queue.lives import WorkerLife
from examples.flights_queue.publishing import publish
from examples.flights_queue.topics import make_topics
from examples.flights_queue.watching import Snapshot, held_by, look, open_leases

__all__ = ["KILLS", "Outcome", "run_demo"]

KILLS: Final = (0.3, 0.6)
"""Shares of finished jobs at which a worker is killed."""
_LOOK_SECONDS: Final = 0.5


@dataclass(slots=True)
class Outcome:
    """The result of the demo.

    :ivar published: jobs that the broker confirmed.
    :ivar held: jobs held by each worker just before it was killed, by name.
    :ivar totals: sum of the workers' last reports.
    :ivar republished: messages republished by the trackers.
    :ivar left: leases and jobs left open at the end.
    """

    accounts: Accounts
    published: int
    deaths: Deaths
    held: dict[str, int]
    totals: Counter[str]
    republished: int
    left: Snapshot
    seconds: float

    @property
    def failures(self) -> list[str]:
        """The failed checks; empty if all passed."""
        checks = {
            "every job is published": self.published == len(self.accounts.expected),
            "two workers were killed while they held jobs": len(self.held) == len(KILLS) and all(self.held.values()),
            "nothing is open at the end": self.left.is_empty,
        }
        return [promise for promise, holds in checks.items() if not holds] + self.accounts.failures(self.deaths)


async def run_demo(url: str, flights: Sequence[Flight], workers: int, work_seconds: float, board: Board) -> Outcome:
    """Run the whole demo on the broker at `url`.

    :param work_seconds: duration of a job.
    :raises LifeEnded: a worker ended on its own.
    :raises BrokerError: the broker failed.
    """
    started = perf_counter()
    spoilt = unreadable(flights)
    accounts = Accounts(expected(flights, spoilt))
    auditor = Auditor(accounts)
    lives = [WorkerLife(url, f"worker {number}", work_seconds) for number in range(1, workers + 1)]
    held: dict[str, int] = {}

    def confirmed(count: int) -> None:
        board.published = count

    async with broker.connect(url) as bus, AsyncExitStack() as stack:
        await make_topics(bus, workers)
        stack.enter_context(board.shown())
        async with asyncio.TaskGroup() as tasks:
            auditing = tasks.create_task(auditor.run(bus))
            for life in lives:
                await stack.enter_async_context(life.alive())
                tasks.create_task(life.hear())
            for life in lives:
                await life.ready.wait()
            watching = tasks.create_task(_watch(bus, accounts, lives, board))
            publishing = tasks.create_task(publish(bus, flights, spoilt, confirmed))
            for share in KILLS:
                await auditor.settled(int(share * len(accounts.expected)))
                await _kill_one(bus, accounts, lives, held, board)
            left = await watching
            for life in lives:
                if life.killed_at is None:
                    await life.stop()
            await auditor.finish(bus)
            await auditing
        board.show(left, accounts, lives)
        republished = await count_jobs(bus) - publishing.result()
    totals: Counter[str] = Counter()
    for life in lives:
        totals.update(redelivered=life.report.redelivered, delayed=life.report.delayed, failed=life.report.failed)
    deaths = Deaths(
        {life.name: life.killed_at for life in lives if life.killed_at is not None},
        {life.name: set(life.report.lost) for life in lives},
    )
    return Outcome(accounts, publishing.result(), deaths, held, totals, republished, left, perf_counter() - started)


async def _watch(bus: broker.Bus, accounts: Accounts, lives: Sequence[WorkerLife], board: Board) -> Snapshot:
    """Update the board until every job has a result and nothing is open."""
    empty = 0
    while True:
        was_complete = accounts.is_complete
        snapshot = await look(bus)
        board.show(snapshot, accounts, lives)
        # Twice in a row: a message republished between the two queries of a look appears in neither.
        empty = empty + 1 if was_complete and snapshot.is_empty else 0
        if empty == 2:
            return snapshot
        await asyncio.sleep(_LOOK_SECONDS)


async def _kill_one(
    bus: broker.Bus, accounts: Accounts, lives: Sequence[WorkerLife], held: dict[str, int], board: Board
) -> None:
    """Kill the worker that holds the most jobs; none if all jobs finish first."""
    living = [life for life in lives if life.killed_at is None]
    while not accounts.is_complete:
        leases = await open_leases(bus)
        victim = max(living, key=lambda life: held_by(leases, life.pid))
        count = held_by(leases, victim.pid)
        if count:
            await victim.kill()
            held[victim.name] = count
            board.say(f"{victim.name}, process {victim.pid}, was killed with SIGKILL; it held {count:,} jobs")
            return
