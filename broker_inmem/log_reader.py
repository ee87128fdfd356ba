"""Reads of the committed log of an in-memory server, without a group.

Calls do not suspend, except for one turn of the loop between batches. Each batch has the entries that are committed at
that moment. A read that retention overtakes raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from broker import Bounds, NotFound, OffsetOutOfRange, Record
from broker_inmem.connection import Connection
from broker_inmem.entries import as_record
from broker_inmem.partition_log import PartitionLog
from broker_inmem.server import Broker

__all__ = ["InmemLogReader"]

_MAX_BYTES: Final = 64 * 1024 * 1024


class InmemLogReader:
    """Implements `LogReaderSpi`."""

    def __init__(self, broker: Broker, connection: Connection) -> None:
        self._broker = broker
        self._connection = connection

    async def partitions(self, topic: str) -> Sequence[int]:
        with self._broker.lock:
            return range(len(self._logs(topic)))

    async def bounds(self, topic: str) -> Mapping[int, Bounds]:
        with self._broker.lock:
            return {number: log.bounds() for number, log in enumerate(self._logs(topic))}

    async def position_at(self, topic: str, time: datetime) -> Mapping[int, int]:
        with self._broker.lock:
            return {number: log.position_at(time.timestamp()) for number, log in enumerate(self._logs(topic))}

    async def read(
        self, topic: str, partition: int, start: int, stop: int, max_records: int
    ) -> AsyncIterator[Sequence[Record[Any]]]:
        position = start
        while True:
            with self._broker.lock:
                logs = self._logs(topic)
                if not 0 <= partition < len(logs):
                    raise NotFound(
                        f"Topic {topic!r} has no partition {partition}",
                        advice=f"It has partitions 0 to {len(logs) - 1}",
                    )
                log = logs[partition]
                if position < log.first or stop > log.stable:
                    raise OffsetOutOfRange(
                        f"{topic!r}[{partition}] holds {log.first} to {log.stable}; cannot read {position} to {stop}"
                    )
                now = self._broker.clock.time()
                entries, position = log.read(position, max_records, _MAX_BYTES, now, committed=True, stop=stop)
            if entries:
                yield [as_record(entry) for entry in entries]
            if position >= stop:
                return
            await asyncio.sleep(0)

    def _logs(self, topic: str) -> list[PartitionLog]:
        self._connection.check()
        if self._broker.faults.armed:
            self._broker.faults.check("fetch", topic)
        return self._broker.topic(topic, self._broker.clock.time()).partitions
