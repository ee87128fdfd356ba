"""`LogFollower`: reads partitions of a topic's log without end and without a group, and tells when it has caught up.

Every `_LOOK_SECONDS` it looks for new partitions, and whether the topic is still the same.

*Concurrency.* One event loop; several tasks may read, and each record goes to one of them. *Cancellation.* Cancelling a
call loses no record. *Failure.* A retriable error is an event, and the follower fetches again from where it was. Any
other error is raised once, after all earlier records were handed over, except that records that may be those of a
recreated topic are dropped; then the follower counts as closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from types import TracebackType
from typing import Any, Final, Literal, Protocol, Self, cast

from broker.checks import check_choice, check_count, check_patience, is_whole, refused
from broker.driver.concurrency import check_loop
from broker.driver.contract import Bounds, LogReaderSpi
from broker.driver.optional import FollowsLogs, LogFollowerSpi
from broker.errors import (
    BackendError,
    BrokerError,
    Closed,
    ConfigurationError,
    NotAuthorized,
    NotFound,
    OffsetOutOfRange,
    TopicNotFound,
    TopicRecreated,
)
from broker.hooks import Hooks, logger
from broker.reading.record_fetcher import RecordFetcher
from broker.records import Record, RecordBatch, RecordsOfRuns

__all__ = ["FollowingReader", "Identity", "LogFollower", "Others", "check_followed"]

Others = Literal["earliest", "latest"]
"""Where the partitions begin that have no position."""

Identity = Callable[[str], Awaitable[str | None]]
"""Returns the identity of a topic, as `TopicInfo.identity`."""

_MAX_BUFFERED: Final = 10_000
_MAX_BUFFERED_BYTES: Final = 64 * 1024 * 1024
_LOOK_SECONDS: Final = 2.0
_CLOSE_SECONDS: Final = 5.0
_RECORDS_BETWEEN_YIELDS: Final = 256


class FollowingReader(LogReaderSpi, FollowsLogs, Protocol):
    """The log reader of a backend that can follow."""


class _State(IntEnum):
    NEW = 0
    OPENING = 1
    OPEN = 2
    CLOSING = 3
    CLOSED = 4


class _Fetcher(RecordFetcher):
    """Wakes the waiting calls after every fetch: one without a record may have reached the end of a partition."""

    def _delivered(self, fetched: Sequence[object], counts: Any) -> None:
        super()._delivered(fetched, counts)
        self.wake()


class LogFollower:
    """A followed log; created by `bus.log.follow`, opened and closed by `async with`.

    :param identity: returns the topic's identity, by which a recreated topic is noticed.
    :param check: raises an error if the bus cannot be used.
    """

    def __init__(
        self,
        reader: FollowingReader,
        topic: str,
        positions: Mapping[int, int] | None,
        others: Others | None,
        *,
        hooks: Hooks,
        identity: Identity,
        check: Callable[[], None],
    ) -> None:
        self._reader = reader
        self._topic = topic
        self._positions = dict(positions or {})
        self._others: Others | None = "earliest" if positions is None and others is None else others
        self._hooks = hooks
        self._ask_identity = identity
        self._check_bus = check
        self._state = _State.NEW
        self._loop: asyncio.AbstractEventLoop | None = None
        self._identity: str | None = None
        self._followed: set[int] = set()
        self._ends: dict[int, int] = {}
        """Of the partitions that are not known to have been fetched up to the end that they had at the start."""
        self._fetched: dict[int, int] = {}
        """Of the partitions that were: how many records, of all partitions, must be handed over until it shows."""
        self._handed_over = self._since_yield = 0
        self._ended: Exception | None = None
        self._closing: asyncio.Task[None] | None = None

    # -- opening and closing -------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Find the positions, and begin to fetch.

        :raises NotFound: the topic, or one of the partitions, does not exist.
        :raises OffsetOutOfRange: the log does not hold a position.
        """
        if self._state is not _State.NEW:
            raise Closed("A followed log opens once", advice="Create a new one with bus.log.follow(...)")
        self._check_bus()
        self._loop = asyncio.get_running_loop()
        self._state = _State.OPENING
        self._fetcher = _Fetcher(
            admits=lambda partition: True,
            topic=self._topic,
            hooks=self._hooks,
            max_records=_MAX_BUFFERED,
            max_bytes=_MAX_BUFFERED_BYTES,
        )
        try:
            # Before the bounds, so that a topic which is recreated in between is noticed.
            with suppress(NotAuthorized):
                self._identity = await self._ask_identity(self._topic)
            bounds = await self._reader.bounds(self._topic)
            positions = self._begin(bounds)
            self._source: LogFollowerSpi = await self._reader.follow(self._topic, positions)
        except BaseException:
            self._state = _State.CLOSED
            raise
        self._followed = set(positions)
        self._ends = {number: bounds[number].next for number in positions}
        self._begins = positions
        if self._state is not _State.OPENING:
            await self._source.close()
            raise self._not_open()
        self._state = _State.OPEN
        self._fetcher.start(self._source)
        self._looking = asyncio.create_task(self._look_again(), name="broker-follow-look")
        logger.info("Following %s: %d partitions", self._topic, len(positions))
        return self

    def _begin(self, bounds: Mapping[int, Bounds]) -> dict[int, int]:
        """The position of each partition to follow."""
        begin: dict[int, int] = {}
        if self._others is not None:
            latest = self._others == "latest"
            begin = {number: each.next if latest else each.first for number, each in bounds.items()}
        for number, position in self._positions.items():
            if number not in bounds:
                raise NotFound(
                    f"Topic {self._topic!r} has no partition {number}",
                    advice="Call `bus.log.partitions(topic)` for the list",
                )
            begin[number] = position
        return begin

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop: waiting calls raise Closed, iterations end. May be called twice; leaves nothing on the broker."""
        check_loop(self._loop)
        if self._state <= _State.OPENING:
            self._state = _State.CLOSED
        if self._state is _State.CLOSED:
            return
        if self._closing is None:
            self._state = _State.CLOSING
            self._closing = asyncio.create_task(self._close(), name="broker-follow-close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        deadline = asyncio.get_running_loop().time() + _CLOSE_SECONDS
        self._looking.cancel()
        try:
            self._fetcher.stop()
            await self._fetcher.stopped(deadline)
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._source.close()
        except (BrokerError, TimeoutError) as error:
            logger.warning("Closing the followed log %r failed: %s", self._topic, str(error) or "no answer in time")
        finally:
            self._state = _State.CLOSED
            self._fetcher.cancel()
            self._fetcher.buffer.clear()
            logger.info("Stopped following %s: %d records handed over", self._topic, self._handed_over)

    @property
    def closed(self) -> bool:
        """Whether the follower was closed, or ended by an error."""
        return self._state > _State.OPEN or self._ended is not None

    @property
    def healthy(self) -> bool:
        """Whether the follower is open and its last fetch succeeded."""
        return self._state is _State.OPEN and self._fetcher.error is None and not self._fetcher.failing

    # -- reading -------------------------------------------------------------------------------------------

    @property
    def behind(self) -> frozenset[int]:
        """The partitions that have not caught up yet.

        A partition has caught up when all records that the log held at the start were handed over, or have gone since.
        Partitions that are added later are never behind.
        """
        return frozenset(self._ends.keys() | self._fetched.keys())

    async def next_batch(self, max_records: int = 1000, timeout: float | None = None) -> RecordBatch[bytes]:
        """The available records, 1 to `max_records`; an empty batch after `timeout` idle seconds.

        An empty batch also comes once when partitions have caught up and no record comes with that; see `behind`.

        :raises TopicRecreated: the topic was deleted and recreated: positions mean other records.
        :raises TopicNotFound: the topic was deleted.
        :raises OffsetOutOfRange: retention removed records before they were read.
        :raises Closed: the follower was closed.
        """
        check_count("max_records", max_records)
        check_patience("timeout", timeout)
        self._check_open()
        if self._since_yield >= _RECORDS_BETWEEN_YIELDS:
            # A caller that finds the buffer full never suspends: let the fetch loop and other tasks run.
            self._since_yield = 0
            await asyncio.sleep(0)
        time = asyncio.get_running_loop().time
        deadline = None if timeout is None else time() + timeout
        fetcher = self._fetcher
        while True:
            self._check_open()
            if len(fetcher.buffer):
                return self._hand_over(max_records)
            if self._note_progress():
                return RecordBatch(())
            if fetcher.error is not None:
                self._ended = fetcher.error
                raise await self._named(fetcher.error)
            left = None if deadline is None else deadline - time()
            if left is not None and left <= 0:
                return RecordBatch(())
            self._since_yield = 0
            await fetcher.arrival(left)

    def batches(self, max_records: int = 1000) -> AsyncIterator[RecordBatch[bytes]]:
        """Iterate over batches of records until the follower is closed. Leaving the loop loses no record.

        A batch is empty when partitions have caught up and no record came with that; see `behind`.
        """
        check_count("max_records", max_records)
        return _Batches(self, max_records)

    def _hand_over(self, max_records: int) -> RecordBatch[bytes]:
        buffer = self._fetcher.buffer
        records: Sequence[Record[Any]]
        if buffer.unmade:
            records = RecordsOfRuns([(run, 0) for run in buffer.pop_runs(max_records)], None)
        else:
            records = buffer.pop(max_records)
        # Before the records count as handed over: some of those that remain may lie beyond the ends.
        self._handed_over += len(records)
        self._since_yield += len(records)
        self._note_progress()
        return RecordBatch(records)

    def _note_progress(self) -> bool:
        """Find out which partitions have caught up; returns whether one has."""
        if self._ends:
            total = self._handed_over + len(self._fetcher.buffer)
            for number, end in tuple(self._ends.items()):
                if self._begins[number] >= end:
                    self._fetched[number] = 0
                elif self._source.reached(number) >= end:
                    # What was fetched before is in the buffer, which is first in, first out.
                    self._fetched[number] = total
                else:
                    continue
                del self._ends[number]
        if not self._fetched:
            return False
        over = [number for number, count in self._fetched.items() if count <= self._handed_over]
        for number in over:
            del self._fetched[number]
        return bool(over)

    def give_back(self, records: Sequence[Record[bytes]]) -> None:
        """Hand these over again, before all others; for a caller that could not take its last batch."""
        if not self.closed:
            self._handed_over -= len(records)
            self._fetcher.buffer.put_back(records)
            self._fetcher.wake()

    # -- new partitions, recreated topics ------------------------------------------------------------------

    async def _look_again(self) -> None:
        missing = False
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self._check_identity()
                if self._others is not None:
                    await self._look_for_partitions()
                missing = False
            except BrokerError as error:
                # A broker may not know a new topic yet: look again.
                first_miss = type(error) is TopicNotFound and not missing
                missing = type(error) is TopicNotFound
                if not error.retriable and not first_miss:
                    self._fetcher.fail(error)
                    return
                logger.debug("Following %r: %s", self._topic, error)
            except Exception as error:
                self._fetcher.fail(BackendError(f"The backend failed to describe {self._topic!r}", native=error))
                return

    async def _check_identity(self) -> None:
        """:raises TopicRecreated: the topic is not the one that was opened."""
        if self._identity is not None and await self._ask_identity(self._topic) != self._identity:
            raise TopicRecreated(f"Topic {self._topic!r} was deleted and recreated while it was followed")

    async def _look_for_partitions(self) -> None:
        added = [number for number in await self._reader.partitions(self._topic) if number not in self._followed]
        if added:
            bounds = await self._reader.bounds(self._topic)
            await self._source.add({number: bounds[number].first for number in added if number in bounds})
            self._followed.update(added)
            logger.info("Following new partitions %s of %s", added, self._topic)

    async def _named(self, error: Exception) -> Exception:
        """The error, or that of a recreated topic if this is its cause."""
        if isinstance(error, (NotFound, OffsetOutOfRange)) and not isinstance(error, TopicRecreated):
            try:
                await self._check_identity()
            except TopicRecreated as found:
                return found
            except BrokerError:
                return error
        return error

    def _check_open(self) -> None:
        check_loop(self._loop)
        if self._state is not _State.OPEN or self._ended is not None:
            raise self._not_open()

    def _not_open(self) -> Closed:
        if self._state is _State.NEW:
            return Closed("The followed log is not open", advice="Use it as `async with bus.log.follow(...) as log:`")
        return Closed("The followed log is closed", advice="Create a new one with bus.log.follow(...)")


class _Batches(AsyncIterator[RecordBatch[bytes]]):
    __slots__ = ("_follower", "_max_records")

    def __init__(self, follower: LogFollower, max_records: int) -> None:
        self._follower = follower
        self._max_records = max_records

    async def __anext__(self) -> RecordBatch[bytes]:
        try:
            return await self._follower.next_batch(self._max_records)
        except Closed:
            if self._follower.closed:
                raise StopAsyncIteration from None
            raise


def check_followed(positions: object, others: object) -> None:
    """Check the arguments of `follow`.

    :raises ConfigurationError: an argument has the wrong type or value, or no partition is named.
    :raises OffsetOutOfRange: a position is negative.
    """
    if others is not None:
        check_choice("others", others, ("earliest", "latest"))
    if positions is None:
        return
    if not isinstance(positions, Mapping):
        raise refused("positions", positions, "{partition: position}, or None")
    given = cast("Mapping[object, object]", positions)
    if not given and others is None:
        raise ConfigurationError(
            "positions names no partition", advice='Name one, or give others="earliest" or "latest"'
        )
    for number, position in given.items():
        if not is_whole(number):
            raise refused("positions", number, "partitions that partitions(topic) names")
        if not is_whole(position):
            raise refused(f"positions[{number}]", position, "an offset")
        if position < 0:
            raise OffsetOutOfRange(f"Position {position} of partition {number} lies before the first")
