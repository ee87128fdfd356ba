"""`LogReader` without `await`: reads the log of a topic by position, without a group, from any thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from broker.blocking.portal import Portal
from broker.blocking.settling import BlockingRecordBatch
from broker.driver.contract import Bounds
from broker.driver.optional import Span
from broker.reading import log_reader as asynchronous

__all__ = ["LogReader"]


class LogReader:
    """The type of `bus.log`."""

    def __init__(self, reader: asynchronous.LogReaderFacade, portal: Portal) -> None:
        self._reader = reader
        self._portal = portal

    def partitions(self, topic: str) -> Sequence[int]:
        """The numbers of the topic's partitions.

        :raises TopicNotFound: the topic does not exist.
        """
        return self._portal.call(self._reader.partitions, topic)

    def bounds(self, topic: str) -> Mapping[int, Bounds]:
        """The first readable offset of each partition, and the position after its last record.

        :raises TopicNotFound: the topic does not exist.
        """
        return self._portal.call(self._reader.bounds, topic)

    def position_at(self, topic: str, time: datetime) -> Mapping[int, int]:
        """The first position of each partition whose broker time is not before `time`, otherwise the end.

        :raises ConfigurationError: the time has no timezone.
        :raises Unsupported: the backend cannot search by time.
        """
        return self._portal.call(self._reader.position_at, topic, time)

    def spans(self, topic: str, partition: int, start: int, stop: int) -> Sequence[Span]:
        """The spans of offsets between two positions that hold records, for planning. Dense offsets are one span.

        :raises NotFound: the topic or partition does not exist.
        """
        return self._portal.call(self._reader.spans, topic, partition, start, stop)

    def read(
        self, topic: str, partition: int, start: int | None = None, stop: int | None = None, *, max_records: int = 1000
    ) -> Iterator[BlockingRecordBatch[bytes]]:
        """The records with start <= offset < stop, in batches of at most `max_records`.

        None as start or stop is the bound of the log at the start of the read. The read never waits for new records.
        The records cannot be committed. Leaving or interrupting the loop has no effect on the log.

        :raises OffsetOutOfRange: retention removed `start`, or `stop` is beyond the end.
        :raises NotFound: the topic or partition does not exist.
        :raises ConfigurationError: the arguments contradict each other.
        """
        return self._iterate(self._reader.read(topic, partition, start, stop, max_records=max_records))

    def _iterate(self, batches: Any) -> Iterator[BlockingRecordBatch[bytes]]:
        try:
            while (batch := self._portal.call(anext, batches, None)) is not None:
                yield BlockingRecordBatch(batch, self._portal)
        finally:
            # The garbage collector may run this in any thread, so the close runs later on the loop.
            self._portal.spawn(batches.aclose)
