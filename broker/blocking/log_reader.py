"""`LogReader` without `await`: reads a topic's log by position, without a group, from any number of threads.

*Cancellation.* A loop that is left, or interrupted, loses nothing, since nothing was settled. *Failure.* What the log
does not hold raises `OffsetOutOfRange`, never a silent gap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from broker.blocking.portal import Portal
from broker.blocking.settling import BlockingRecordBatch
from broker.driver.contract import Bounds, Span
from broker.reading import log_reader as asynchronous

__all__ = ["LogReader"]


class LogReader:
    """What `bus.log` is."""

    def __init__(self, reader: asynchronous.LogReaderFacade, portal: Portal) -> None:
        self._reader = reader
        self._portal = portal

    def partitions(self, topic: str) -> Sequence[int]:
        """The numbers of the topic's partitions. :raises TopicNotFound: there is no such topic."""
        return self._portal.call(self._reader.partitions, topic)

    def bounds(self, topic: str) -> Mapping[int, Bounds]:
        """The first readable offset of each partition, and the position after its last.

        :raises TopicNotFound: there is no such topic.
        """
        return self._portal.call(self._reader.bounds, topic)

    def position_at(self, topic: str, time: datetime) -> Mapping[int, int]:
        """The first position of each partition whose broker time is not before `time`; the end if there is none.

        :raises ConfigurationError: the time has no timezone.
        :raises Unsupported: the backend cannot search by time.
        """
        return self._portal.call(self._reader.position_at, topic, time)

    def spans(self, topic: str, partition: int, start: int, stop: int) -> Sequence[Span]:
        """Where between two positions records lie, for planning; offsets that count records are one span of step 1.

        :raises NotFound: there is no such topic or partition.
        """
        return self._portal.call(self._reader.spans, topic, partition, start, stop)

    def read(
        self, topic: str, partition: int, start: int | None = None, stop: int | None = None, *, max_records: int = 1000
    ) -> Iterator[BlockingRecordBatch[bytes]]:
        """The records with start <= offset < stop, in batches of at most `max_records`.

        None as start or stop is the bound that the log has when the reading begins. It ends when all below `stop` were
        read and never waits for records that are not there yet. The records cannot be committed.

        :raises OffsetOutOfRange: retention removed `start`, or `stop` lies beyond the end.
        :raises NotFound: there is no such topic or partition.
        :raises ConfigurationError: the arguments contradict each other.
        """
        return self._iterate(self._reader.read(topic, partition, start, stop, max_records=max_records))

    def _iterate(self, batches: Any) -> Iterator[BlockingRecordBatch[bytes]]:
        try:
            while (batch := self._portal.call(anext, batches, None)) is not None:
                yield BlockingRecordBatch(batch, self._portal)
        finally:
            # Left early it is closed on its own loop, soon: this may be the garbage collector, in any thread.
            self._portal.spawn(batches.aclose)
