"""`OffsetCommitter`: commits the offsets from which a tracker has to read its markers after a restart.

It commits after so many markers, so long after the first of them, on a revocation and on close. *Concurrency.* On the
loop; one commit at a time. *Cancellation.* A commit that has begun continues. *Failure.* Each partition has its own
result; an offset that was not stored is sent again with the next commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from confluent_kafka import TopicPartition as NativePartition

from broker import BrokerError
from broker.driver import logger, pause
from broker_kafka.offsets.kafka import CommittingClient
from broker_kafka.queue.tracker.tracked_partition import TrackedPartition
from broker_kafka.queue.tracker.tracker_state import TrackerCounts, TrackerOptions

__all__ = ["OffsetCommitter"]


class OffsetCommitter:
    """:param thread: of the member.
    :param tracked: the partitions that it has.
    """

    def __init__(
        self,
        thread: CommittingClient,
        tracked: Callable[[], Iterable[TrackedPartition]],
        options: TrackerOptions,
        counts: TrackerCounts,
    ) -> None:
        self._thread = thread
        self._tracked = tracked
        self._options: Final = options
        self._counts = counts
        self._uncommitted = 0
        """How many markers were read since the last commit began."""
        self._any = asyncio.Event()
        """Set while a marker is uncommitted."""
        self._due = asyncio.Event()
        self._committing = asyncio.Lock()

    def read(self, count: int) -> None:
        """Count markers that were read."""
        if count:
            self._uncommitted += count
            self._any.set()
            if self._uncommitted >= self._options.commit_markers:
                self._due.set()

    async def run(self) -> None:
        """Commit when it is time, until cancelled."""
        while True:
            await self._any.wait()
            await pause(self._options.commit_after, self._due)
            self._uncommitted = 0
            self._any.clear()
            self._due.clear()
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
            results = await self._thread.commit([NativePartition(*place, at) for place, (_, at) in sent.items()])
            self._counts.commits += 1
            for place, (state, offset) in sent.items():
                error = results.get(place)
                if place in results and error is None:
                    state.committed(offset)
                else:
                    logger.info("The position of markers %s[%d] is committed later: %s", *place, error)
