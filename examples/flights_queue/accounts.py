"""Compares the result of each job with the expected one, from the contents of the topics alone. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise

from examples.flights_queue.fates import Fate
from examples.flights_queue.topics import Done

__all__ = ["Accounts", "Deaths", "Letter", "Twice"]


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter.

    :ivar id: of the job.
    :ivar attempts: number of attempts.
    :ivar time: when the letter was written, by the worker's clock.
    """

    id: str
    reason: str
    attempts: int
    time: datetime


@dataclass(frozen=True, slots=True)
class Deaths:
    """Reasons for a second result.

    :ivar killed: killed workers, and when.
    :ivar lost: ids of jobs whose lease was lost, by the worker that reported it.
    """

    killed: Mapping[str, datetime] = field(default_factory=dict[str, datetime])
    lost: Mapping[str, Collection[str]] = field(default_factory=dict[str, Collection[str]])

    def cause(self, result: Done) -> str:
        """Why another worker may have received the job too: "lost", "killed" or "" for no known reason."""
        if result.id in self.lost.get(result.worker, ()):
            return "lost"
        return "killed" if result.worker in self.killed else ""


@dataclass(slots=True)
class Twice:
    """Duplicate results by cause.

    :ivar killed: a worker was killed between its result and its ack.
    :ivar lost: a worker finished a job after it had lost the lease.
    :ivar unexplained: ids of jobs without a known cause.
    """

    killed: int = 0
    lost: int = 0
    unexplained: list[str] = field(default_factory=list[str])

    @property
    def count(self) -> int:
        return self.killed + self.lost + len(self.unexplained)

    def count_in(self, job: str, cause: str) -> None:
        """Count one duplicate."""
        self.lost += cause == "lost"
        self.killed += cause == "killed"
        if not cause:
            self.unexplained.append(job)


class Accounts:
    """:param expected: the fate of each job, by the id of its message.
    :ivar strange: results of unknown jobs.
    """

    def __init__(self, expected: Mapping[str, Fate]) -> None:
        self.expected = expected
        self.strange = 0
        self._done: dict[str, list[Done]] = {}
        self._letters: dict[str, list[Letter]] = {}

    def take_done(self, done: Done) -> None:
        """Add the next result, in topic order."""
        self.strange += done.id not in self.expected
        self._done.setdefault(done.id, []).append(done)

    def take_letter(self, letter: Letter) -> None:
        """Add the next dead letter, in topic order."""
        self.strange += letter.id not in self.expected
        self._letters.setdefault(letter.id, []).append(letter)

    # -- progress ------------------------------------------------------------------------------------------

    @property
    def done(self) -> int:
        """Number of jobs with a result."""
        return len(self._done)

    @property
    def dead(self) -> int:
        """Number of jobs with a dead letter."""
        return len(self._letters)

    @property
    def settled(self) -> int:
        """Number of jobs with a result or a dead letter."""
        return len(self._done.keys() | self._letters.keys())

    @property
    def is_complete(self) -> bool:
        """Whether every job has a result or a dead letter."""
        return not self.lost

    # -- results -------------------------------------------------------------------------------------------

    @property
    def lost(self) -> list[str]:
        """Jobs with neither."""
        return [job for job in self.expected if job not in self._done and job not in self._letters]

    @property
    def reasons(self) -> Counter[str]:
        """Number of dead-lettered jobs by reason."""
        return Counter(letters[0].reason.partition(":")[0] for letters in self._letters.values())

    @property
    def most_attempts(self) -> int:
        """The highest attempt of any result."""
        return max((result.attempt for results in self._done.values() for result in results), default=0)

    def failures(self, deaths: Deaths) -> list[str]:
        """The failed checks; empty if all passed."""
        wrong = [job for job, fate in self.expected.items() if (job in self._letters) != fate.is_dead]
        both = self._done.keys() & self._letters.keys()
        rash = list(self._too_early())
        unexplained = self.done_twice(deaths).unexplained + self.dead_twice(deaths).unexplained
        checks = {
            "no job is lost": self.lost,
            "no job is both done and dead": both,
            "every job that can be done is done, and every other one is a dead letter": wrong,
            "what was delayed or failed was delivered as often as it had to be": rash,
            "what is there twice is explained by a death or a lost lease": unexplained,
        }
        found = [f"{promise}: {len(jobs):,} are, such as {min(jobs)}" for promise, jobs in checks.items() if jobs]
        return [*found, f"{self.strange:,} results are of no job"] if self.strange else found

    def done_twice(self, deaths: Deaths) -> Twice:
        """Duplicate results. Each but one per job needs a cause: a killed worker or a lost lease."""
        twice = Twice()
        for job, results in self._done.items():
            # A result without a cause counts as the original; the order in the topic does not matter.
            for cause in sorted(deaths.cause(result) for result in results)[1:]:
                twice.count_in(job, cause)
        return twice

    def dead_twice(self, deaths: Deaths) -> Twice:
        """Duplicate dead letters. They name no worker: the lease was lost, or a worker was killed between the two."""
        twice = Twice()
        lost = {job for jobs in deaths.lost.values() for job in jobs}
        for job, letters in self._letters.items():
            for letter, following in pairwise(letters):
                killed = any(letter.time <= killed_at <= following.time for killed_at in deaths.killed.values())
                twice.count_in(job, "lost" if job in lost else "killed" if killed else "")
        return twice

    def _too_early(self) -> Iterator[str]:
        """Jobs with a result or a dead letter at too low an attempt."""
        for job, fate in self.expected.items():
            attempts = [result.attempt for result in self._done.get(job, ())]
            attempts += [letter.attempts for letter in self._letters.get(job, ())]
            if any(attempt < fate.least for attempt in attempts):
                yield job
