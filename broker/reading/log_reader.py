"""`LogReaderFacade`, the type of `bus.log`: reads a topic's log by position, without a group.

*Concurrency.* Any number of reads may run at once, independently. *Cancellation.* Cancelling a call, or leaving a loop,
loses nothing, since reads settle nothing: read again from the last offset + 1. *Failure.* A position outside the log
raises `OffsetOutOfRange`; there are no silent gaps. Other errors of the backend are raised unchanged.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from typing import cast

from broker.capabilities import RecordCapabilities
from broker.checks import check_count, check_time, is_whole, refused
from broker.driver.contract import Bounds, LogReaderSpi
from broker.driver.optional import ReportsSpans, Span
from broker.errors import ConfigurationError, NotFound, OffsetOutOfRange, Unsupported
from broker.hooks import Hooks
from broker.names import check_name
from broker.reading.log_follower import FollowingReader, Identity, LogFollower, Others, check_followed
from broker.records import RecordBatch

__all__ = ["LogReaderFacade"]


class LogReaderFacade:
    """Implements `LogReader`.

    :param capabilities: of the backend's records; None if they are unknown.
    :param check: raises an error if the bus cannot be used.
    :param identity: returns the identity of a topic.
    :param remember: called with each follower, which the bus closes.
    """

    def __init__(
        self,
        reader: LogReaderSpi,
        capabilities: RecordCapabilities | None = None,
        check: Callable[[], None] = lambda: None,
        *,
        hooks: Hooks | None = None,
        identity: Identity | None = None,
        remember: Callable[[LogFollower], object] = lambda follower: None,
    ) -> None:
        self._open_reader = reader
        self._capabilities = capabilities
        self._check = check
        self._hooks = hooks or Hooks()
        self._identity = identity or _no_identity
        self._remember = remember

    async def partitions(self, topic: str) -> Sequence[int]:
        """The numbers of the topic's partitions.

        :raises TopicNotFound: the topic does not exist.
        """
        return await self._reader.partitions(check_name(topic, "topic"))

    async def bounds(self, topic: str) -> Mapping[int, Bounds]:
        """The first readable offset of each partition, and the position after its last record.

        :raises TopicNotFound: the topic does not exist.
        """
        return await self._reader.bounds(check_name(topic, "topic"))

    async def position_at(self, topic: str, time: datetime) -> Mapping[int, int]:
        """The first position of each partition whose broker time is not before `time`, otherwise the end.

        :raises ConfigurationError: the time has no timezone, or is not a datetime.
        :raises Unsupported: the backend cannot search by time.
        """
        check_time("time", time)
        if self._capabilities is not None and not self._capabilities.position_at:
            raise Unsupported("This backend cannot search its log by time", advice="Search by broker_time in read(...)")
        return await self._reader.position_at(check_name(topic, "topic"), time)

    async def spans(self, topic: str, partition: int, start: int, stop: int) -> Sequence[Span]:
        """The spans of offsets between two positions that hold records, for planning. Dense offsets are one span.

        :raises NotFound: the topic or partition does not exist.
        """
        check_name(topic, "topic")
        if not isinstance(self._reader, ReportsSpans):
            return [Span(start, stop, 1)] if start < stop else []
        return await self._reader.spans(topic, partition, start, stop)

    def read(
        self, topic: str, partition: int, start: int | None = None, stop: int | None = None, *, max_records: int = 1000
    ) -> AsyncIterator[RecordBatch[bytes]]:
        """The records with start <= offset < stop, in batches of at most `max_records`.

        None as start or stop is the bound of the log at the start of the read. The read never waits for new records.
        The records cannot be committed.

        :raises OffsetOutOfRange: retention removed `start`, or `stop` is beyond the end.
        :raises NotFound: the topic or partition does not exist.
        :raises ConfigurationError: the arguments contradict each other.
        """
        check_name(topic, "topic")
        if not is_whole(partition):
            raise refused("partition", partition, "a number that partitions(topic) names")
        for name, offset in (("start", start), ("stop", stop)):
            if offset is not None and not is_whole(offset):
                raise refused(name, offset, "an offset, or None")
        check_count("max_records", max_records)
        if start is not None and start < 0:
            raise OffsetOutOfRange(f"Position {start} lies before the first")
        if start is not None and stop is not None and stop < start:
            raise ConfigurationError(f"stop {stop} lies below start {start}", advice="Give start <= stop")
        return self._read(topic, partition, start, stop, max_records)

    def follow(
        self, topic: str, positions: Mapping[int, int] | None = None, *, others: Others | None = None
    ) -> LogFollower:
        """The records from these positions on, without end and without a group. Does no I/O: `async with` opens it.

        `async with bus.log.follow("orders", {0: 17}) as log: async for batch in log.batches(): ...`

        :param positions: the partitions to follow, each with the offset to begin at; None is all partitions, from their
            first record on.
        :param others: where partitions that `positions` does not name begin: "earliest" or "latest". Partitions that
            are added later are followed, too, from their first record on. None follows only what is named.
        :raises ConfigurationError: an argument is invalid.
        :raises OffsetOutOfRange: a position is negative; opening checks the rest.
        :raises Unsupported: the backend cannot follow its log.
        """
        check_name(topic, "topic")
        check_followed(positions, others)
        if self._capabilities is None or not self._capabilities.follow:
            raise Unsupported("This backend cannot follow its log", advice="Call bus.log.read(...) again and again")
        follower = LogFollower(
            cast("FollowingReader", self._reader),
            topic,
            positions,
            others,
            hooks=self._hooks,
            identity=self._identity,
            check=self._check,
        )
        self._remember(follower)
        return follower

    async def _read(
        self, topic: str, partition: int, start: int | None, stop: int | None, max_records: int
    ) -> AsyncGenerator[RecordBatch[bytes]]:
        if start is None or stop is None:
            bounds = (await self._reader.bounds(topic)).get(partition)
            if bounds is None:
                raise NotFound(
                    f"Topic {topic!r} has no partition {partition}", advice="Call `partitions(topic)` for the list"
                )
            first, following = bounds
            start = first if start is None else start
            # The reader refuses a start beyond the end; it must not become an empty range.
            stop = max(start, following) if stop is None else stop
        if stop < start:
            raise OffsetOutOfRange(f"Topic {topic!r}[{partition}] begins at {start}, above stop {stop}")
        async for records in self._reader.read(topic, partition, start, stop, max_records):
            if records:
                yield RecordBatch(records)

    @property
    def _reader(self) -> LogReaderSpi:
        self._check()
        return self._open_reader


async def _no_identity(topic: str) -> None:
    return None
