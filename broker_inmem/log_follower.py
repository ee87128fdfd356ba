"""A followed log of an in-memory server: published records and ends of transactions wake it.

A topic that was recreated, even while the connection was broken, is noticed at once, and so is a removed position. Used
on one event loop; the server may wake it from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from broker import Closed, OffsetOutOfRange, Record, TopicRecreated
from broker.driver import Event
from broker_inmem.connection import Connection
from broker_inmem.entries import as_record
from broker_inmem.fetching import Fetching
from broker_inmem.log_reader import InmemLogReader
from broker_inmem.partition_log import PartitionLog
from broker_inmem.server import Broker

__all__ = ["FollowingLogReader", "InmemLogFollower"]


class InmemLogFollower(Fetching[Record[Any]]):
    """Implements `LogFollowerSpi`.

    :raises TopicNotFound: the topic does not exist.
    :raises OffsetOutOfRange: the log does not hold a position.
    """

    def __init__(
        self,
        broker: Broker,
        connection: Connection,
        topic: str,
        positions: Mapping[int, int],
        *,
        emit: Callable[[Event], object],
        on_close: Callable[[InmemLogFollower], object],
    ) -> None:
        super().__init__(broker, connection, emit)
        self._name = topic
        self._on_close = on_close
        self._positions: dict[int, int] = {}
        self._turn = 0
        with broker.lock:
            connection.check()
            if broker.faults.armed:
                broker.faults.check("open", topic)
            self._topic = broker.topic(topic, broker.clock.time())
            self._add(positions)
            self._number = broker.number()
            connection.sources[self._number] = self

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        return await self._fetch(max_records, max_bytes, wait)

    def reached(self, partition: int) -> int:
        return self._positions[partition]

    async def add(self, positions: Mapping[int, int]) -> None:
        with self._broker.lock:
            self._check_open()
            self._add(positions)
        self._waker.wake()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._broker.lock:
            self._connection.sources.pop(self._number, None)
        self._interrupted = True
        self._waker.wake()
        self._on_close(self)

    # Called under the server's lock.

    def _add(self, positions: Mapping[int, int]) -> None:
        for number, position in positions.items():
            log = self._topic.partitions[number]
            if not log.first <= position <= log.stable:
                raise OffsetOutOfRange(
                    f"{self._name!r}[{number}] holds {log.first} to {log.stable}; cannot follow it from {position}"
                )
        self._positions.update(positions)

    def _closed_error(self) -> Closed:
        return Closed(f"The followed log {self._name!r} was closed")

    def _take(self, most: int, max_bytes: int, now: float) -> list[Record[Any]]:
        if self._broker.faults.armed:
            self._broker.faults.check("fetch", self._name)
        if self._broker.topic(self._name, now) is not self._topic:
            raise TopicRecreated(f"Topic {self._name!r} was deleted and recreated while it was followed")
        logs = self._topic.partitions
        # Before anything is read: an error must not take records with it.
        for number, position in self._positions.items():
            self._check_first(number, position, logs[number])
        records: list[Record[Any]] = []
        size = 0
        order = list(self._positions)
        self._turn = (self._turn + 1) % len(order)
        for number in order[self._turn :] + order[: self._turn]:
            before = self._positions[number]
            entries, position = logs[number].read(before, most - len(records), max_bytes - size, now, committed=True)
            self._positions[number] = position
            if position > before:
                # Also without a record: the core asks how far each partition was read.
                self._interrupted = True
            records += map(as_record, entries)
            size += sum([entry.size for entry in entries])
            if len(records) >= most or size >= max_bytes:
                break
        return records

    def _check_first(self, number: int, position: int, log: PartitionLog) -> None:
        if position < log.first:
            raise OffsetOutOfRange(
                f"Retention removed {self._name!r}[{number}] from {position} to {log.first} before it was read",
                advice="Set a longer retention on the topic, or read faster",
            )

    def _watch(self) -> float | None:
        self._topic.watchers.add(self._waker)
        return self._broker.next_due((self._name,))

    def _stop_watching(self) -> None:
        self._topic.watchers.discard(self._waker)


class FollowingLogReader(InmemLogReader):
    """Implements `LogReaderSpi` and `FollowsLogs`.

    :param opened: the open parts of the backend, which closes them.
    """

    def __init__(
        self, broker: Broker, connection: Connection, emit: Callable[[Event], object], opened: set[Any]
    ) -> None:
        super().__init__(broker, connection)
        self._emit = emit
        self._opened = opened

    async def follow(self, topic: str, positions: Mapping[int, int]) -> InmemLogFollower:
        follower = InmemLogFollower(
            self._broker, self._connection, topic, positions, emit=self._emit, on_close=self._opened.discard
        )
        self._opened.add(follower)
        return follower
