"""The accounts: what became of each job, beside what had to. Pure; it believes what is in the topics, and nobody."""

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
    :ivar attempts: how often it was tried.
    :ivar time: when it was written, by the clock of its worker.
    """

    id: str
    reason: str
    attempts: int
    time: datetime


@dataclass(frozen=True, slots=True)
class Deaths:
    """What may have a job done twice.

    :ivar killed: the workers that were killed, and when.
    :ivar lost: by worker, the ids of jobs whose lease it lost, as it told.
    """

    killed: Mapping[str, datetime] = field(default_factory=dict[str, datetime])
    lost: Mapping[str, Collection[str]] = field(default_factory=dict[str, Collection[str]])

    def cause(self, result: Done) -> str:
        """Why somebody else may have got the job too: "lost", "killed", or nothing that is known."""
        if result.id in self.lost.get(result.worker, ()):
            return "lost"
        return "killed" if result.worker in self.killed else ""


@dataclass(slots=True)
class Twice:
    """Results that are there more than once, and why.

    :ivar killed: a worker was killed between a result and its END.
    :ivar lost: a worker lost its lease, and had done the job all the same.
    :ivar unexplained: the jobs of which nothing says why.
    """

    killed: int = 0
    lost: int = 0
    unexplained: list[str] = field(default_factory=list[str])

    @property
    def count(self) -> int:
        return self.killed + self.lost + len(self.unexplained)

    def count_in(self, job: str, cause: str) -> None:
        """One more, by its cause."""
        self.lost += cause == "lost"
        self.killed += cause == "killed"
        if not cause:
            self.unexplained.append(job)


class Accounts:
    """:param expected: the fate of each job, by the id of its message.
    :ivar strange: results that are nobody's.
    """

    def __init__(self, expected: Mapping[str, Fate]) -> None:
        self.expected = expected
        self.strange = 0
        self._done: dict[str, list[Done]] = {}
        self._letters: dict[str, list[Letter]] = {}

    def take_done(self, done: Done) -> None:
        """The next result, in the order of their topic."""
        self.strange += done.id not in self.expected
        self._done.setdefault(done.id, []).append(done)

    def take_letter(self, letter: Letter) -> None:
        """The next dead letter, likewise."""
        self.strange += letter.id not in self.expected
        self._letters.setdefault(letter.id, []).append(letter)

    # -- how far it is -------------------------------------------------------------------------------------

    @property
    def done(self) -> int:
        """Jobs that were done."""
        return len(self._done)

    @property
    def dead(self) -> int:
        """Jobs that have a dead letter."""
        return len(self._letters)

    @property
    def settled(self) -> int:
        """Jobs that have a result."""
        return len(self._done.keys() | self._letters.keys())

    @property
    def is_complete(self) -> bool:
        """Whether every job has a result."""
        return not self.lost

    # -- how it came out -----------------------------------------------------------------------------------

    @property
    def lost(self) -> list[str]:
        """Jobs without any result."""
        return [job for job in self.expected if job not in self._done and job not in self._letters]

    @property
    def reasons(self) -> Counter[str]:
        """How many jobs were given up for which reason."""
        return Counter(letters[0].reason.partition(":")[0] for letters in self._letters.values())

    @property
    def most_attempts(self) -> int:
        """Of the job that was delivered most often."""
        return max((result.attempt for results in self._done.values() for result in results), default=0)

    def failures(self, deaths: Deaths) -> list[str]:
        """What does not hold; empty if all is well."""
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
        """The results too many. Of those of one job all but one are by workers that were killed, or lost its lease."""
        twice = Twice()
        for job, results in self._done.items():
            # The one that needs no cause comes first, if there is one; which was written first tells nothing.
            for cause in sorted(deaths.cause(result) for result in results)[1:]:
                twice.count_in(job, cause)
        return twice

    def dead_twice(self, deaths: Deaths) -> Twice:
        """The dead letters too many, which name no worker: its lease was lost, or there was a kill between the two."""
        twice = Twice()
        lost = {job for jobs in deaths.lost.values() for job in jobs}
        for job, letters in self._letters.items():
            for letter, following in pairwise(letters):
                killed = any(letter.time <= killed_at <= following.time for killed_at in deaths.killed.values())
                twice.count_in(job, "lost" if job in lost else "killed" if killed else "")
        return twice

    def _too_early(self) -> Iterator[str]:
        """Jobs that were done, or given up, at a delivery at which they were not to be."""
        for job, fate in self.expected.items():
            attempts = [result.attempt for result in self._done.get(job, ())]
            attempts += [letter.attempts for letter in self._letters.get(job, ())]
            if any(attempt < fate.least for attempt in attempts):
                yield job
