"""`OffsetCommitter`: commits the offsets from which a tracker has to read its markers after a restart.

It commits after so many markers, so long after the first of them, on a revocation and on close. *Concurrency.* On the
loop; one commit at a time. *Cancellation.* A commit that was begun goes on. *Failure.* Each partition has its own
result; an offset that was not stored is sent again with the next commit.
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
    """When to commit. Pure; times are local monotonic milliseconds.

    :param markers: how many markers are read again after a crash at most, beside those of open messages.
    :param after_ms: how long a marker waits for a commit at most.
    """

    def __init__(self, *, markers: int = 10_000, after_ms: int = 1_000) -> None:
        self._markers: Final = markers
        self._after: Final = after_ms
        self._waiting = 0
        self._since = 0

    def read(self, count: int, at: int) -> None:
        """Count markers that were read at this time."""
        if count and not self._waiting:
            self._since = at
        self._waiting += count

    def is_due(self, at: int) -> bool:
        """Whether to commit now."""
        return self._waiting >= self._markers or (self._waiting > 0 and at - self._since >= self._after)

    def committed(self) -> None:
        """Count from zero again."""
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
        self._uncommitted = asyncio.Event()
        self._due = asyncio.Event()
        self._committing = asyncio.Lock()

    def read(self, count: int) -> None:
        """Count markers that were read."""
        at = _now()
        self._schedule.read(count, at)
        self._uncommitted.set()
        if self._schedule.is_due(at):
            self._due.set()

    async def run(self) -> None:
        """Commit when it is time, until cancelled."""
        while True:
            await self._uncommitted.wait()
            try:
                async with asyncio.timeout(self._after):
                    await self._due.wait()
            except TimeoutError:
                pass
            self._uncommitted.clear()
            self._due.clear()
            self._schedule.committed()
            try:
                await self.commit(self._tracked())
            except BrokerError as error:
                logger.info("Positions of markers are committed later: %s", error)
                self.read(1)

    async def commit(self, tracked: Iterable[TrackedPartition]) -> None:
        """Commit the new offsets of these partitions.

        :raises BrokerError: none was stored.
        """
        async with self._committing:
            sent = {
                each.place: (state, offset)
                for each in tracked
                if (state := each.state) is not None and (offset := state.to_commit()) is not None
            }
            if not sent:
                return
            answer = await self._thread.commit([NativePartition(*place, at) for place, (_, at) in sent.items()])
            self._counts.commits += 1
            for place, (state, offset) in sent.items():
                error = answer.get(place)
                if place in answer and error is None:
                    state.committed(offset)
                else:
                    logger.info("The position of markers %s[%d] is committed later: %s", *place, error)


def _now() -> int:
    return int(1000 * monotonic())
