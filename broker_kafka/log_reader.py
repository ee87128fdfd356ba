"""`KafkaLogReader`: reads of a partition by position, without a group; nothing is left on the cluster.

A read ends by what the broker says, never by arithmetic: at the first record at or above `stop`, or at the end of the
partition as the client reports it. So neither transaction markers, nor aborted transactions, nor what compaction or
retention removed at the end of the range makes it wait. Only committed records are seen; the end of the log is where
the oldest open transaction begins, and brokers close a transaction a moment after they answer its commit.

*Concurrency.* Any number of reads; each has a client of its own, which is used again by a later one. The next batch is
fetched while the caller handles the last. *Cancellation.* A read that is cancelled or left half-way gives its client
back. *Failure.* A position that retention removed raises OffsetOutOfRange, also in the middle of a read; a broker that
says nothing for the request timeout raises OperationTimeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from threading import Event
from time import monotonic
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import Message as NativeRecord
from confluent_kafka import TopicPartition as NativePartition

from broker.errors import BrokerError, Closed, NotFound, OffsetOutOfRange, OperationTimeout
from broker.records import Record, RecordsOfRuns
from broker.spi import Bounds, TopicPartition
from broker_kafka.connection import Connection
from broker_kafka.errors import translate
from broker_kafka.lifeline import Lifeline
from broker_kafka.names import EPHEMERAL_PREFIX
from broker_kafka.opening import open_consumer
from broker_kafka.owner import OwnerThread
from broker_kafka.positions import bounds_of, partitions_of, positions_at, topic_bounds
from broker_kafka.runs import NativeRun

__all__ = ["KafkaLogReader"]

_POLL: Final = 0.2
_KEEP: Final = 4
_STOP: Final = 5.0
_FETCH_WAIT: Final = 5
_MOST: Final = 1_000_000
"""More the client library refuses to give at once."""
_SOON: Final = 0.05
"""Seconds in which a broker that is there, and near, sends a range that is there."""
_GROUP: Final = f"{EPHEMERAL_PREFIX}log-reader"
"""The client library wants a group's name; no group of it is ever joined or committed to."""

_NOT_OURS: Final = frozenset(
    {KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError._MAX_POLL_EXCEEDED, KafkaError._ALL_BROKERS_DOWN}
)


class _Chunk:
    """What one turn of a read brought."""

    __slots__ = ("done", "records")

    def __init__(self, records: Sequence[Record[Any]], done: bool) -> None:
        self.records = records
        self.done = done


class _ReaderThread(OwnerThread[Consumer]):
    """A client that reads one range at a time."""

    def __init__(self, config: Mapping[str, Any], patience: float) -> None:
        super().__init__("broker-kafka-log-reader", Lifeline(config))
        self._config = config
        self._patience = patience
        self._place = TopicPartition("", -1)
        self._stop_at = 0
        self._left = self._reading = Event()
        """Set when nobody waits for the records of the newest read, and of the one that is carried out."""

    def _open(self) -> Consumer:
        return open_consumer(self._config, self._lifeline)

    def _turn(self, client: Consumer) -> None:
        self._serve(client, None)

    def _shut(self, client: Consumer) -> None:
        self._lifeline.let_go()
        client.close()

    async def begin(self, place: TopicPartition, start: int, stop: int, most: int) -> _Chunk:
        """Read this range from now on; its first records, as of `take`."""
        left = self._left = Event()

        def begin(client: Consumer) -> _Chunk:
            self._place, self._stop_at, self._reading = place, stop, left
            client.assign([NativePartition(*place, start)])
            return self._take(client, most)

        try:
            return await self.call(begin)
        except KafkaException as error:
            raise translate(error, f"Reading {place.topic!r}") from error

    async def take(self, most: int) -> _Chunk:
        """The next records of the range; it waits for the first, which is there."""
        return await self.call(lambda client: self._take(client, most))

    def abandon(self) -> None:
        """Nobody waits for the records any more."""
        self._left.set()

    def end(self) -> None:
        """Fetch no more of the range, from now on or a moment later; a range that is begun next comes after it."""
        self.tell(lambda client: client.unassign())

    def _take(self, client: Consumer, most: int) -> _Chunk:
        most = min(most, _MOST)
        # Beginning with what is there: a timeout makes the library wait until the batch is full.
        messages = client.consume(most, 0.0)
        deadline = monotonic() + self._patience
        last: BrokerError | None = None
        while True:
            records, done, last = self._sort(messages, last)
            if records or done:
                return _Chunk(records, done)
            if self._stopping or self._reading.is_set():
                raise Closed("The log reader was closed")
            if monotonic() >= deadline:
                raise last or OperationTimeout(
                    f"No broker sent the records of {self._place.topic!r}[{self._place.partition}] "
                    f"for {self._patience:g} s"
                )
            message = client.poll(_POLL)
            messages = [] if message is None else [message, *client.consume(max(0, most - 1), 0.0)]

    def _sort(
        self, messages: Sequence[NativeRecord], last: BrokerError | None
    ) -> tuple[Sequence[Record[Any]], bool, BrokerError | None]:
        """The records of the range, whether it ended, and the last error that will pass."""
        topic, partition = self._place
        found: list[Any] = [message for message in messages if message.error() is None]
        done = False
        if len(found) < len(messages):
            for message in messages:
                error = message.error()
                if error is None:
                    continue
                end = message.offset()
                if error.code() != KafkaError._PARTITION_EOF:
                    last = self._explain(message, error) or last
                elif end is not None and end >= self._stop_at:
                    done = True
        if found and found[-1].offset() >= self._stop_at - 1:
            done = True
            found = [message for message in found if message.offset() < self._stop_at]
        # Who asks for columns has no use for the records themselves, which are made when somebody looks at them.
        return RecordsOfRuns([(NativeRun(topic, partition, found), 0)] if found else [], None), done, last

    def _explain(self, message: NativeRecord, error: KafkaError) -> BrokerError | None:
        """An error that will pass, or None; any other is raised."""
        if error.code() in _NOT_OURS:
            return None
        where = f"{self._place.topic!r}[{self._place.partition}]"
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise OffsetOutOfRange(
                f"The log of {where} does not hold position {message.offset()} any more", native=KafkaException(error)
            )
        found = translate(error, f"Reading {where}")
        if not found.retriable:
            raise found
        return found


class KafkaLogReader:
    """Implements `broker.spi.LogReaderSpi`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._idle: list[_ReaderThread] = []
        self._all: set[_ReaderThread] = set()
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
        thread = await self._acquire()
        ahead: asyncio.Task[_Chunk] | None = asyncio.ensure_future(thread.begin(place, start, stop, max_records))
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
        threads, self._all = list(self._all), set[_ReaderThread]()
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

    async def _acquire(self) -> _ReaderThread:
        if self._closed:
            raise Closed("The log reader is closed", advice="Use it within `async with`")
        while self._idle:
            thread = self._idle.pop()
            if thread.failure is None:
                return thread
            self._all.discard(thread)
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
        thread = _ReaderThread(config, self._connection.settings.request_timeout)
        self._all.add(thread)
        try:
            await thread.start()
        except BaseException:
            self._all.discard(thread)
            await thread.stop(_STOP)
            raise
        return thread

    async def _release(self, thread: _ReaderThread) -> None:
        thread.end()
        if not self._closed and len(self._idle) < _KEEP:
            self._idle.append(thread)
        else:
            await self._drop(thread)

    async def _break_off(self, thread: _ReaderThread, ahead: asyncio.Task[_Chunk] | None, *, keep: bool) -> None:
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
            await self._release(thread)
        except BrokerError:
            await self._drop(thread)

    async def _drop(self, thread: _ReaderThread) -> None:
        self._all.discard(thread)
        await thread.stop(_STOP)


def _is_whole(beginning: asyncio.Task[_Chunk]) -> bool:
    """Whether this brought all of its range."""
    return beginning.done() and beginning.exception() is None and beginning.result().done
