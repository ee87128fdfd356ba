"""Reads results and dead letters while they are written. Cancelling it loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import Final

import broker
from examples.flights_queue.accounts import Accounts, Letter
from examples.flights_queue.topics import DEAD, DONE, DONE_JSON, FLIGHTS

__all__ = ["Auditor", "count_jobs"]

_IDLE_SECONDS: Final = 0.2


class Auditor:
    """:param accounts: receives every result and dead letter."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._read: dict[str, int] = {}
        """The position of each topic; a topic has one partition."""
        self._ends: Mapping[str, int] | None = None
        self._changed = asyncio.Condition()

    async def run(self, bus: broker.Bus) -> None:
        """Read until `finish` is called, and then to the ends of the topics at that moment."""
        async with bus.records([DONE, DEAD], group=broker.ephemeral()) as log:
            while self._ends is None or any(self._read.get(topic, 0) < end for topic, end in self._ends.items()):
                batch = await log.next_batch(2000, timeout=_IDLE_SECONDS)
                for record in batch:
                    self.take(record)
                if batch:
                    async with self._changed:
                        self._changed.notify_all()

    async def finish(self, bus: broker.Bus) -> None:
        """End `run` once everything is read. Call it when all workers have stopped."""
        self._ends = {topic: (await bus.log.bounds(topic))[0].next for topic in (DONE, DEAD)}

    async def settled(self, count: int) -> None:
        """Wait until this many jobs have a result or a dead letter."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._accounts.settled >= count)

    def take(self, record: broker.Record[bytes]) -> None:
        """Count a record once."""
        if record.offset < self._read.get(record.topic, 0):
            # After a lost session the reader receives records since its last commit again.
            return
        self._read[record.topic] = record.offset + 1
        if record.topic == DONE:
            self._accounts.take_done(DONE_JSON.decode(record.data))
            return
        fields = {name.removeprefix("dead-letter-"): text for name, text in record.attributes.items()}
        self._accounts.take_letter(
            Letter(fields["id"], fields["reason"], int(fields["attempts"]), datetime.fromisoformat(fields["time"]))
        )


async def count_jobs(bus: broker.Bus) -> int:
    """Number of messages in the topic of jobs, including republished ones."""
    count = 0
    for partition in await bus.log.partitions(FLIGHTS):
        async for batch in bus.log.read(FLIGHTS, partition):
            count += len(batch)
    return count
