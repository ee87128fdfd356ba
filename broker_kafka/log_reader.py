"""`KafkaLogReader`: reads of a partition by position, without a group; nothing is left on the cluster.

A read ends by what the broker says, never by arithmetic: at the first record at or above `stop`, or at the end of the
partition as the client reports it. So neither transaction markers, nor aborted transactions, nor what compaction or
retention removed at the end of the range makes it wait. Only committed records are seen; the end of the log is where
the oldest open transaction begins, and brokers close a transaction a moment after they answer its commit.

*Concurrency.* Any number of reads; each has a client of its own, which is used again by a later one. The next batch is
fetched while the caller handles the last. Behind a range that was read a client fetches on for a second, as far as its
queue allows, and a read that begins there has that: so what is read a range after the other, of up to four partitions,
is fetched once. Such a range that comes whole at once may be one that the broker has removed since, but is of no topic
that was made anew over this connection. *Cancellation.* A read that is cancelled or left half-way gives its client
back. *Failure.* A position that retention removed raises OffsetOutOfRange, also in the middle of a read; a broker that
says nothing for the request timeout raises OperationTimeout.
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

__all__ = ["KafkaLogReader"]

_KEEP: Final = 4
_STOP: Final = 5.0
_FETCH_WAIT: Final = 5
_SOON: Final = 0.05
"""Seconds in which a broker that is there, and near, sends a range that is there."""
_GROUP: Final = f"{EPHEMERAL_PREFIX}log-reader"
"""The client library wants a group's name; no group of it is ever joined or committed to."""


class KafkaLogReader:
    """Implements `LogReaderSpi`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._idle: list[ReaderThread] = []
        self._all: set[ReaderThread] = set()
        self._closed = False

    async def partitions(self, topic: str) -> Sequence[int]:
        return [place.partition for place in await partitions_of(self._connection, topic)]

    async def bounds(self, topic: str) -> Mapping[int, Bounds]:
        return await topic_bounds(self._connection, topic)

    async def position_at(self, topic: str, time: datetime) -> Mapping[int, int]:
        """By the records' timestamps, which are the broker's where the topic says LogAppendTime."""
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
            # Who has its end already need not ask whether the range is there, which takes longer than a small read.
            if not _is_whole(ahead):
                await self._check(place, start, stop)
            in_order = True
            chunk = await ahead
            ahead = None
            while not chunk.done:
                # The next batch comes while the caller has this one.
                ahead = asyncio.ensure_future(thread.take(max_records))
                yield chunk.records
                chunk = await ahead
                ahead = None
            thread.go_on(place, stop)
            healthy = True
            await self._release(thread)
            if chunk.records:
                yield chunk.records
        finally:
            if not healthy:
                await asyncio.shield(self._break_off(thread, ahead, keep=in_order))

    async def close(self) -> None:
        """End all clients; reads that are under way raise Closed."""
        self._closed = True
        self._idle.clear()
        threads, self._all = list(self._all), set[ReaderThread]()
        await asyncio.gather(*(thread.stop(_STOP) for thread in threads))

    async def _check(self, place: TopicPartition, start: int, stop: int) -> None:
        """Refuse a range that the log does not have.

        :raises NotFound: there is no such partition.
        :raises OffsetOutOfRange: it does not hold the range.
        """
        if place not in await partitions_of(self._connection, place.topic):
            raise NotFound(
                f"Topic {place.topic!r} has no partition {place.partition}", advice="Ask `partitions(topic)`"
            )
        bounds = (await bounds_of(self._connection, [place]))[place]
        if start < bounds.first or max(start, stop) > bounds.next:
            where = f"{place.topic!r}[{place.partition}]"
            raise OffsetOutOfRange(f"{where} holds {bounds.first} to {bounds.next}; {start} to {stop} was asked for")

    async def _acquire(self, place: TopicPartition, start: int) -> ReaderThread:
        """A client for a read that begins here."""
        if self._closed:
            raise Closed("The log reader is closed", advice="Use it within `async with`")
        for thread in [each for each in self._idle if each.failure is not None]:
            self._idle.remove(thread)
            self._all.discard(thread)
        for thread in self._idle:
            thread.forget(place.topic, self._connection.changed.get(place.topic, 0.0))
        # Of those that are of the same use the newest, but of those that fetch for other reads the oldest.
        found = max(reversed(self._idle), key=lambda each: each.use(place, start), default=None)
        if found is not None and found.use(place, start) is Use.OF_ANOTHER:
            found = self._idle[0] if len(self._all) >= _KEEP else None
        if found is not None:
            self._idle.remove(found)
            return found
        config = self._connection.client_config("consumer") | {
            "group.id": _GROUP,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            # A fetch that waits at the end of one read would hold up the first fetch of the next.
            "fetch.wait.max.ms": _FETCH_WAIT,
        }
        thread = ReaderThread(config, self._connection.settings.request_timeout)
        self._all.add(thread)
        try:
            await thread.start()
        except BaseException:
            self._all.discard(thread)
            await thread.stop(_STOP)
            raise
        return thread

    async def _release(self, thread: ReaderThread) -> None:
        if self._closed:
            await self._drop(thread)
            return
        self._idle.append(thread)
        if len(self._idle) > _KEEP:
            await self._drop(self._idle.pop(0))

    async def _break_off(self, thread: ReaderThread, ahead: asyncio.Task[Chunk] | None, *, keep: bool) -> None:
        """A read ended before its end: its client is kept only if it is in order.

        :param keep: whether it may be; a client remembers for a while that a topic is missing.
        """
        thread.abandon()
        if ahead is not None:
            ahead.cancel()
            # Whatever becomes of it concerns nobody any more.
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
    """Whether this brought all of its range."""
    return beginning.done() and beginning.exception() is None and beginning.result().done
