"""A followed log: a reader of Pulsar per partition, without end; nothing stays on the broker.

A reader skips removed messages silently. So the ledgers of the log are compared whenever a reader passes into another
ledger, and until then its records wait: retention removes whole ledgers, and a recreated topic has others. Pulsar has
no identity of a topic, so its recreation, too, raises OffsetOutOfRange.

*Concurrency.* Everything runs on the loop; each reader has a thread that only receives. *Failure.* The client
reconnects by itself, and records that come again are dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from broker import BrokerError, OffsetOutOfRange, Record, TopicPartition
from broker.driver import Backoff
from broker_pulsar.chunked_messages import start_id
from broker_pulsar.client import Message as NativeMessage
from broker_pulsar.client import Reader, has_more, open_reader, pulsar
from broker_pulsar.connection import Connection
from broker_pulsar.errors import translate
from broker_pulsar.log_reader import PulsarLogReader, make_record
from broker_pulsar.log_stats import read_bounds, removed
from broker_pulsar.message_ids import PER_LEDGER, is_beyond
from broker_pulsar.names import TopicPath
from broker_pulsar.receiving import Receiver, ReceivingSource

__all__ = ["FollowingLogReader", "PulsarLogFollower"]

_BATCH: Final = 1000
_BUFFERED: Final = 2000
"""Buffered records of a partition above which none are received."""
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0


class _ReaderConsumer:
    """A reader with the methods of a consumer that `Receiver` calls."""

    def __init__(self, reader: Reader) -> None:
        self.reader: Final = reader

    def receive(self, milliseconds: int) -> NativeMessage:
        return self.reader.read_next(milliseconds)

    def batch_receive(self) -> list[NativeMessage]:
        """What is there, without waiting."""
        found: list[NativeMessage] = []
        try:
            while len(found) < _BATCH:
                found.append(self.reader.read_next(0))
        except pulsar.Timeout:
            pass
        return found

    def close(self) -> None:
        self.reader.close()


class _Partition:
    """One partition.

    :param end: where the log ended when the reader was opened.
    :param stats: `internalStats` of the log at that time.
    :ivar reached: everything below it was returned, or is gone.
    :ivar checking: whether the ledgers are being compared; meanwhile no record is returned.
    """

    def __init__(
        self, place: TopicPartition, log: TopicPath, receiver: Receiver, position: int, end: int, stats: Any
    ) -> None:
        self.place: Final = place
        self.log: Final = log
        self.receiver: Final = receiver
        self.end: Final = end
        self.stats: Mapping[str, Any] = stats
        self.reached = self.next = position
        self.checking = False
        self.buffer: deque[Record[Any]] = deque()

    def add(self, messages: Sequence[NativeMessage]) -> list[tuple[int, int]]:
        """Buffer new records; returns the ranges between two ledgers in which records may be missing."""
        topic, number = self.place
        gaps: list[tuple[int, int]] = []
        for raw in messages:
            record = make_record(topic, number, raw, raw.message_id())
            if record.offset < self.next:
                continue  # After a reconnect, or before the position within its batch.
            if record.offset // PER_LEDGER != self.next // PER_LEDGER:
                gaps.append((self.next, record.offset))
            self.next = record.offset + 1
            self.buffer.append(record)
        return gaps


class PulsarLogFollower(ReceivingSource):
    """Implements `LogFollowerSpi`."""

    def __init__(self, connection: Connection, topic: str, *, on_close: Callable[[ReceivingSource], object]) -> None:
        super().__init__(connection, f"Following topic {topic!r}", on_close)
        self._topic = topic
        self._partitions: dict[int, _Partition] = {}
        self._by_receiver: dict[Receiver, _Partition] = {}
        self._turn = 0

    async def open(self, positions: Mapping[int, int]) -> None:
        """Open the readers.

        :raises OffsetOutOfRange: a log does not hold a position.
        :raises TopicNotFound: the topic does not exist.
        """
        await self.add(positions)
        self._unwatch.append(self._connection.monitor.add(self._is_connected))

    async def add(self, positions: Mapping[int, int]) -> None:
        await asyncio.gather(*(self._add(number, position) for number, position in positions.items()))
        self._waker.wake()

    async def _add(self, number: int, position: int) -> None:
        place = TopicPartition(self._topic, number)
        log = await self._connection.log(self._topic, number)
        bounds, stats = await read_bounds(self._connection, log)
        if position < bounds.first or is_beyond(position, bounds.next):
            raise OffsetOutOfRange(
                f"{self._topic!r}[{number}] holds {bounds.first} to {bounds.next}; cannot follow it from {position}"
            )
        client = self._connection.client
        start = await start_id(self._connection, place, position)
        compacted = self._connection.reads_compacted(self._topic, position, bounds.first)
        try:
            reader = await self._connection.create(
                lambda: open_reader(client, log, start, compacted=compacted), lambda reader: reader.close()
            )
        except Exception as error:
            raise translate(error, f"Reading {log.url!r}") from error
        receiver = Receiver(_ReaderConsumer(reader), self, self._what)
        partition = _Partition(place, log, receiver, position, bounds.next, stats)
        self._partitions[number] = self._by_receiver[receiver] = partition
        if self._closed:
            await receiver.close(self._connection)
        receiver.request()

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        until = self._loop.time() + wait
        records = await self._wait_for(lambda: self._take(max_records, max_bytes), wait)
        if not records and self._loop.time() >= until:
            await self._look_for_ends()
        return records

    def _take(self, max_records: int, max_bytes: int) -> list[Record[Any]]:
        full = [each for each in self._partitions.values() if each.buffer and not each.checking]
        records: list[Record[Any]] = []
        if not full:
            return records
        self._turn += 1
        first = self._turn % len(full)
        for partition in full[first:] + full[:first]:
            buffer = partition.buffer
            while buffer and len(records) < max_records and (not records or buffer[0].size <= max_bytes):
                record = buffer.popleft()
                max_bytes -= record.size
                partition.reached = record.offset + 1
                records.append(record)
            if len(buffer) < _BUFFERED:
                partition.receiver.request()
        return records

    async def _look_for_ends(self) -> None:
        """Find out whether partitions that have not reached their end, and whose records are gone, have."""
        patience = self._connection.settings.request_timeout
        for partition in tuple(self._partitions.values()):
            if partition.reached >= partition.end or partition.buffer or self._closed:
                continue
            receiver = partition.receiver
            more = await receiver.call(partial(has_more, receiver.consumer.reader, patience, receiver.is_open))
            if not more and not partition.buffer:
                partition.reached = partition.end

    def arrived(self, receiver: Receiver, messages: Sequence[NativeMessage]) -> None:
        partition = self._by_receiver.get(receiver)
        if partition is None or self._closed:
            return
        if (gaps := partition.add(messages)) and not partition.checking:
            partition.checking = True
            self._tasks.spawn(self._check_ledgers(partition, gaps))
        if len(partition.buffer) < _BUFFERED:
            receiver.request()
        self._waker.wake()

    async def _check_ledgers(self, partition: _Partition, gaps: Sequence[tuple[int, int]]) -> None:
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            try:
                now = await self._connection.internal_stats(partition.log)
                break
            except BrokerError as error:
                if not error.retriable:
                    self._fail(error)
                    return
                await asyncio.sleep(backoff.next())
        before, partition.stats = partition.stats, now
        for start, stop in gaps:
            if removed(before, now, start, stop):
                # Its records are returned no more.
                self._fail(
                    OffsetOutOfRange(
                        f"Retention removed records of {partition.log.url!r} between {start} and {stop} before they "
                        "were read, or the topic was recreated",
                        advice="Set a longer retention on the topic, or read faster",
                    )
                )
                return
        partition.checking = False
        self._waker.wake()

    def reached(self, partition: int) -> int:
        return self._partitions[partition].reached

    async def close(self) -> None:
        if self._closed:
            return
        self._stop()
        await asyncio.gather(*(each.receiver.close(self._connection) for each in self._partitions.values()))
        self._on_close(self)

    def _is_connected(self) -> bool:
        return all(each.receiver.consumer.reader.is_connected() for each in self._partitions.values())

    def _request(self) -> None:
        for partition in self._partitions.values():
            if len(partition.buffer) < _BUFFERED:
                partition.receiver.request()

    async def _check_exists(self) -> None:
        for number in self._partitions:
            await self._connection.internal_stats(await self._connection.log(self._topic, number))


class FollowingLogReader(PulsarLogReader):
    """Implements `LogReaderSpi` and `FollowsLogs`.

    :param opened: the open parts of the backend, which closes them.
    """

    def __init__(self, connection: Connection, opened: set[Any]) -> None:
        super().__init__(connection)
        self._opened = opened

    async def follow(self, topic: str, positions: Mapping[int, int]) -> PulsarLogFollower:
        follower = PulsarLogFollower(self._connection, topic, on_close=self._opened.discard)
        self._opened.add(follower)
        try:
            await follower.open(positions)
        except BaseException:
            await follower.close()
            raise
        return follower
