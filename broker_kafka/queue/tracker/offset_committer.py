"""When offsets are committed: after so many markers, or so long after the first that is not committed. Pure.

`OffsetCommitter`: stores from where the markers are to be read after a restart.

It commits after so many markers, so long after the first of them, and when it is asked to: on a revocation and on
close. *Concurrency.* On the loop; one commit at a time. *Cancellation.* A commit that was begun is carried out.
*Failure.* Each partition has its own answer; what was not stored is offered again with the next commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Final

from confluent_kafka import TopicPartition as NativePartition

from broker import BrokerError
from broker.driver import logger
from broker_kafka.offsets.kafka import CommittingClient
from broker_kafka.queue.tracker.tracked_partition import TrackedPartition
from broker_kafka.queue.tracker.tracker_state import TrackerCounts, TrackerOptions

__all__ = ["CommitSchedule", "OffsetCommitter"]


class CommitSchedule:
    """:param markers: how many markers at most are read again after a crash, beside those that are open.
    :param after_ms: how long a marker waits for that at most.
    """

    def __init__(self, *, markers: int = 10_000, after_ms: int = 1_000) -> None:
        self._markers: Final = markers
        self._after: Final = after_ms
        self._waiting = 0
        self._since = 0

    def read(self, count: int, at: int) -> None:
        """So many markers were read at this local time."""
        if count and not self._waiting:
            self._since = at
        self._waiting += count

    def is_due(self, at: int) -> bool:
        """Whether to commit now. A revocation and a close commit at once, without asking."""
        return self._waiting >= self._markers or (self._waiting > 0 and at - self._since >= self._after)

    def committed(self) -> None:
        """All was offered for a commit; what failed is offered again with the next."""
        self._waiting = 0


class OffsetCommitter:
    """:param thread: of the member.
    :param tracked: the partitions that it has.
    """

    def __init__(
        self,
        thread: CommittingClient,
        tracked: Callable[[], Sequence[TrackedPartition]],
        options: TrackerOptions,
        counts: TrackerCounts,
    ) -> None:
        self._thread = thread
        self._tracked = tracked
        self._after: Final = options.commit_after
        self._counts = counts
        self._schedule = CommitSchedule(markers=options.commit_markers, after_ms=int(1000 * options.commit_after))
        self._some = asyncio.Event()
        self._due = asyncio.Event()
        self._committing = asyncio.Lock()

    def read(self, count: int) -> None:
        """So many markers were read."""
        at = _now()
        self._schedule.read(count, at)
        self._some.set()
        if self._schedule.is_due(at):
            self._due.set()

    async def run(self) -> None:
        """Commit when it is time, until cancelled."""
        while True:
            await self._some.wait()
            try:
                async with asyncio.timeout(self._after):
                    await self._due.wait()
            except TimeoutError:
                pass
            self._some.clear()
            self._due.clear()
            self._schedule.committed()
            try:
                await self.commit(self._tracked())
            except BrokerError as error:
                logger.info("Positions of markers are committed later: %s", error)
                self.read(1)

    async def commit(self, tracked: Iterable[TrackedPartition]) -> None:
        """Commit what is new of these.

        :raises BrokerError: none of it was stored.
        """
        async with self._committing:
            offered = {
                each.place: (each, partition, offset)
                for each in tracked
                if (partition := each.partition) is not None and (offset := partition.to_commit()) is not None
            }
            if not offered:
                return
            answer = await self._thread.commit([NativePartition(*place, at) for place, (_, _, at) in offered.items()])
            self._counts.commits += 1
            for place, (_, partition, offset) in offered.items():
                error = answer.get(place)
                if place in answer and error is None:
                    partition.committed(offset)
                else:
                    logger.info("The position of markers %s[%d] is committed later: %s", *place, error)


def _now() -> int:
    return int(1000 * monotonic())
