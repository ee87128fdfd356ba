"""`KafkaLogReader`: reads partitions by position, without a group; nothing is left on the cluster.

A read ends where the broker ends it: at the first record at or above `stop`, or at the end of the partition as the
client reports it. So a read does not wait for transaction markers, aborted transactions, or records that compaction or
retention removed at the end of the range. Only committed records are read; the log ends where the oldest open
transaction begins, and brokers close a transaction a moment after they answer its commit.

*Concurrency.* Any number of reads, each with a client of its own, which later reads use again. The next batch is
fetched while the caller handles the last. After a range the client fetches ahead for a second, as far as its queue
allows, and a read that begins there gets those records: consecutive range reads of up to four partitions fetch each
record once. Such records may have been removed from the log since, but a topic that was recreated over this connection
is read again. *Cancellation.* A read that is cancelled or abandoned frees its client. *Failure.* A position that
retention removed raises OffsetOutOfRange, also in the middle of a read; a broker that sends nothing for the request
timeout raises OperationTimeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from broker import Bounds, BrokerError, Closed, NotFound, OffsetOutOfRange, Record, TopicPartition
from broker_kafka.client.log_fetcher import Chunk, ReaderThread, Use
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import bounds_of, partitions_of, positions_at, topic_bounds
from broker_kafka.cluster.names import EPHEMERAL_PREFIX
from broker_kafka.log_follower import KafkaLogFollower

__all__ = ["KafkaLogReader"]

_KEEP: Final = 4
_STOP: Final = 5.0
_FETCH_WAIT: Final = 5
_SOON: Final = 0.05
"""Seconds in which a healthy, near broker sends a range that exists."""
_GROUP: Final = f"{EPHEMERAL_PREFIX}log-reader"
"""The client library requires a group name; the group is never joined or committed to."""


class KafkaLogReader:
    """Implements `LogReaderSpi` and `FollowsLogs`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._idle: list[ReaderThread] = []
        self._all: set[ReaderThread] = set()
        self._followers: set[KafkaLogFollower] = set()
        self._closed = False

    async def partitions(self, topic: str) -> Sequence[int]:
        return [place.partition for place in await partitions_of(self._connection, topic)]

    async def bounds(self, topic: str) -> Mapping[int, Bounds]:
        return await topic_bounds(self._connection, topic)

    async def position_at(self, topic: str, time: datetime) -> Mapping[int, int]:
        """By the timestamps of records; a topic with LogAppendTime has those of the broker."""
        found = await positions_at(self._connection, await partitions_of(self._connection, topic), time)
        return {place.partition: position for place, position in found.items()}

    async def read(
        self, topic: str, partition: int, start: int, stop: int, max_records: int
    ) -> AsyncIterator[Sequence[Record[Any]]]:
        place = TopicPartition(topic, partition)
        if not 0 <= start < stop:
            await self._check(place, start, stop)
            return
        thread = await self._acquire(place, start)
        ahead: asyncio.Task[Chunk] | None = asyncio.ensure_future(thread.begin(place, start, stop, max_records))
        healthy = in_order = False
        try:
            await asyncio.wait((ahead,), timeout=_SOON)
            # A range that came whole needs no check, which takes longer than a small read.
            if not _is_whole(ahead):
                await self._check(place, start, stop)
            in_order = True
            chunk = await ahead
            ahead = None
            while not chunk.done:
                # The next batch is fetched while the caller handles this one.
                ahead = asyncio.ensure_future(thread.take(max_records))
                yield chunk.records
                chunk = await ahead
                ahead = None
            thread.fetch_ahead(place, stop)
            healthy = True
            await self._release(thread)
            if chunk.records:
                yield chunk.records
        finally:
            if not healthy:
                await asyncio.shield(self._break_off(thread, ahead, keep=in_order))

    async def follow(self, topic: str, positions: Mapping[int, int]) -> KafkaLogFollower:
        self._check_open()
        follower = KafkaLogFollower(self._connection, self._client_config(), topic, on_close=self._followers.discard)
        self._followers.add(follower)
        try:
            await follower.open(positions)
        except BaseException:
            await follower.close()
            raise
        return follower

    async def close(self) -> None:
        """Close all clients; running reads raise Closed."""
        self._closed = True
        self._idle.clear()
        await asyncio.gather(*(follower.close() for follower in tuple(self._followers)))
        threads, self._all = list(self._all), set[ReaderThread]()
        await asyncio.gather(*(thread.stop(_STOP) for thread in threads))

    async def _check(self, place: TopicPartition, start: int, stop: int) -> None:
        """Check that the log holds a range.

        :raises NotFound: the partition does not exist.
        :raises OffsetOutOfRange: the log does not hold the range.
        """
        if place not in await partitions_of(self._connection, place.topic):
            raise NotFound(
                f"Topic {place.topic!r} has no partition {place.partition}", advice="See `partitions(topic)`"
            )
        bounds = (await bounds_of(self._connection, [place]))[place]
        if start < bounds.first or max(start, stop) > bounds.next:
            where = f"{place.topic!r}[{place.partition}]"
            raise OffsetOutOfRange(f"{where} holds {bounds.first} to {bounds.next}, not {start} to {stop}")

    async def _acquire(self, place: TopicPartition, start: int) -> ReaderThread:
        """A client for a read that begins here."""
        self._check_open()
        for thread in [each for each in self._idle if each.failure is not None]:
            self._idle.remove(thread)
            self._all.discard(thread)
        for thread in self._idle:
            thread.forget(place.topic, self._connection.changed.get(place.topic, 0.0))
        # Of equally useful clients the newest; of those that fetch ahead for other reads the oldest.
        found = max(reversed(self._idle), key=lambda each: each.use(place, start), default=None)
        if found is not None and found.use(place, start) is Use.OF_ANOTHER:
            found = self._idle[0] if len(self._all) >= _KEEP else None
        if found is not None:
            self._idle.remove(found)
            return found
        # A fetch that waits at the end of one read would delay the first fetch of the next.
        config = self._client_config() | {"fetch.wait.max.ms": _FETCH_WAIT}
        thread = ReaderThread(config, self._connection.settings.request_timeout)
        self._all.add(thread)
        try:
            await thread.start()
        except BaseException:
            self._all.discard(thread)
            await thread.stop(_STOP)
            raise
        return thread

    def _client_config(self) -> dict[str, Any]:
        return self._connection.client_config("consumer") | {
            "group.id": _GROUP,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
        }

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("The log reader is closed", advice="Use it within `async with`")

    async def _release(self, thread: ReaderThread) -> None:
        if self._closed:
            await self._drop(thread)
            return
        self._idle.append(thread)
        if len(self._idle) > _KEEP:
            await self._drop(self._idle.pop(0))

    async def _break_off(self, thread: ReaderThread, ahead: asyncio.Task[Chunk] | None, *, keep: bool) -> None:
        """A read was abandoned: keep its client, if it is healthy.

        :param keep: whether to keep it; a client remembers a missing topic for a while.
        """
        thread.abandon()
        if ahead is not None:
            ahead.cancel()
            await asyncio.wait((ahead,))
            if not ahead.cancelled():
                ahead.exception()
        if not keep:
            await self._drop(thread)
            return
        try:
            thread.end()
            await self._release(thread)
        except BrokerError:
            await self._drop(thread)

    async def _drop(self, thread: ReaderThread) -> None:
        self._all.discard(thread)
        await thread.stop(_STOP)


def _is_whole(beginning: asyncio.Task[Chunk]) -> bool:
    """Whether the first chunk was the whole range."""
    return beginning.done() and beginning.exception() is None and beginning.result().done
