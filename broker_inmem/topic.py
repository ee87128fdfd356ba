"""One topic of the server: its partitions, its schedule and its subscriptions.

No locking: the caller holds the server's lock, and no call waits. Each message is published completely or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from heapq import heappop, heappush
from itertools import chain, count
from typing import Final
from uuid import uuid4
from zlib import crc32

from broker import BrokerError, InvalidMessage, OutboundMessage, Receipt, Unsupported
from broker.driver import MessageLimits, Start, keyless_message, message_size
from broker_inmem.entries import Entry, TransactionState, as_datetime
from broker_inmem.message_queue import MessageQueue
from broker_inmem.options import BrokerOptions
from broker_inmem.partition_log import PartitionLog
from broker_inmem.waker import Waker

__all__ = ["Topic", "TransactionWork", "partition_of"]

_FOREVER: Final = float("inf")


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key."""
    return crc32(key) % partitions


class TransactionWork:
    """The messages of one transaction in one topic."""

    __slots__ = ("scheduled", "state", "stored")

    def __init__(self, state: TransactionState) -> None:
        self.state: Final = state
        self.stored: list[Entry] = []
        self.scheduled: list[tuple[float, Entry]] = []


class Topic:
    """The state of one topic."""

    def __init__(
        self, name: str, partitions: int, options: BrokerOptions, limits: MessageLimits, *, compacted: bool = False
    ) -> None:
        self.name: Final = name
        self.compacted: Final = compacted
        self.identity: Final = uuid4().hex
        self.partitions: list[PartitionLog] = [PartitionLog() for _ in range(partitions)]
        self.queues: dict[str, MessageQueue] = {}
        self.watchers: set[Waker] = set()
        """Sleeping readers of records."""
        self.deleted = False
        self.retention: float | None = None if compacted else options.retention_seconds
        self.retention_messages: int | None = None if compacted else options.retention_messages
        self._limits = limits
        self._smallest_limit = min(options.max_key, options.max_id, options.max_body)
        """A message up to this size without attributes is within all limits."""
        self._dedup_seconds = options.dedup_seconds
        self._ids: dict[str, tuple[float, Receipt]] = {}
        self._schedule: list[tuple[float, int, Entry]] = []
        self._scheduled = count(1)
        self._seq = 0
        self._turn = 0

    @property
    def seq(self) -> int:
        """The sequence number of the newest message."""
        return self._seq

    @property
    def scheduled(self) -> int:
        """The number of scheduled messages."""
        return len(self._schedule)

    def next_due(self) -> float | None:
        """When the next scheduled message is due."""
        return self._schedule[0][0] if self._schedule else None

    def grow(self, partitions: int) -> None:
        """Set the number of partitions.

        :raises Unsupported: the topic has more partitions.
        """
        if partitions < len(self.partitions):
            raise Unsupported(
                f"Topic {self.name!r} has {len(self.partitions)} partitions, cannot have {partitions}",
                advice="Partitions can only be added; create another topic",
            )
        self.partitions += [PartitionLog() for _ in range(partitions - len(self.partitions))]

    def publish(
        self, messages: Sequence[OutboundMessage], now: float, work: TransactionWork | None = None
    ) -> list[Receipt | BrokerError]:
        """Store messages in order; returns an outcome for each. Those of a transaction become visible at its commit."""
        self.advance(now)
        transaction = None if work is None else work.state
        outcomes: list[Receipt | BrokerError] = []
        stored: list[Entry] = []
        for message in messages:
            try:
                entry = self._entry(message, now, transaction)
            except BrokerError as error:
                outcomes.append(error)
                continue
            given_id = message.id
            if given_id is not None and transaction is None:
                first = self._stored_under(given_id, now)
                if first is not None:
                    outcomes.append(Receipt(given_id, first.partition, first.offset, True))
                    continue
            if message.deliver_at is not None and (due := message.deliver_at.timestamp()) > now:
                receipt = self._publish_later(entry, due, work)
            else:
                self._append(entry, now)
                stored.append(entry)
                receipt = Receipt(entry.id, entry.partition, entry.offset, False, int(now * 1000))
            if (given_id is not None or entry.scheduled) and transaction is None:
                self._ids[entry.id] = (now + self._dedup_seconds, receipt)
            outcomes.append(receipt)
        if stored:
            self._apply_retention(now)
            if work is None:
                self.deliver(stored)
            else:
                work.stored += stored
                self._wake_readers()
        return outcomes

    def end(self, work: TransactionWork, now: float) -> None:
        """Apply the end of a transaction that published here."""
        for number in {entry.partition for entry in work.stored}:
            self.partitions[number].end_transaction(work.state)
        if work.state.committed:
            for due, entry in work.scheduled:
                heappush(self._schedule, (due, next(self._scheduled), entry))
            self.deliver(work.stored)
            self.advance(now)
            self._wake_sleepers()
        elif self.watchers:
            self._wake_readers()

    def deliver(self, entries: Iterable[Entry]) -> None:
        """Add committed entries to every subscription, and wake readers of records."""
        for queue in self.queues.values():
            queue.push(entries)
        if self.watchers:
            self._wake_readers()

    def advance(self, now: float) -> None:
        """Apply what is due: scheduled messages, retention, and expiry of remembered ids."""
        schedule = self._schedule
        if schedule and schedule[0][0] <= now:
            due: list[Entry] = []
            while schedule and schedule[0][0] <= now:
                time, _, entry = heappop(schedule)
                if entry.expires > time:
                    self._append(entry, now)
                    due.append(entry)
            self.deliver(due)
        ids = self._ids
        while ids:
            oldest = next(iter(ids))
            if ids[oldest][0] > now:
                break
            del ids[oldest]
        if self.retention is not None:
            self._apply_retention(now)

    def positions(self, start: Start, now: float) -> dict[int, int]:
        """The start position of a new reader in each partition."""
        self.advance(now)
        if start == "earliest":
            return {number: log.first for number, log in enumerate(self.partitions)}
        if start == "latest":
            return {number: log.next for number, log in enumerate(self.partitions)}
        time = start.timestamp() if isinstance(start, datetime) else now
        return {number: log.position_at(time) for number, log in enumerate(self.partitions)}

    def since(self, positions: dict[int, int], now: float) -> list[Entry]:
        """All committed entries from these positions on, in publishing order."""
        entries = chain.from_iterable(
            (entry for entry in log.visible(now) if entry.offset >= positions.get(number, 0))
            for number, log in enumerate(self.partitions)
        )
        return sorted(entries, key=_seq)

    def delete_queue(self, name: str) -> None:
        """Delete a subscription if it exists."""
        queue = self.queues.pop(name, None)
        if queue is not None:
            queue.end()

    def delete(self) -> None:
        """Delete the topic and its subscriptions."""
        self.deleted = True
        for queue in self.queues.values():
            queue.end()

    def purge(self) -> int:
        """Remove all messages, including scheduled ones; returns their number."""
        removed = sum(log.clear() for log in self.partitions) + len(self._schedule)
        self._schedule.clear()
        self._ids.clear()
        for queue in self.queues.values():
            queue.purge(self._seq)
        return removed

    def compact(self, tombstones_before: float) -> None:
        """Compact every partition; what was delivered to message subscriptions stays there."""
        for log in self.partitions:
            log.compact(tombstones_before)

    def _entry(self, message: OutboundMessage, now: float, transaction: TransactionState | None) -> Entry:
        size = message_size(message)
        if size > self._smallest_limit or message.attributes:
            self._limits.check(message)
        partitions = len(self.partitions)
        key = message.key
        if key is None and self.compacted:
            raise keyless_message(self.name)
        if message.partition is not None:
            number = message.partition
            if number >= partitions:
                raise InvalidMessage(
                    f"Topic {self.name!r} has partitions 0 to {partitions - 1}, not {number}",
                    advice="Choose one of them, or omit the partition",
                )
        elif key is not None:
            number = partition_of(key, partitions)
        else:
            number = self._turn = (self._turn + 1) % partitions
        expires = _FOREVER if message.ttl is None else now + message.ttl
        return Entry(
            self.name,
            number,
            -1,
            -1,
            key,
            message.data,
            message.attributes,
            message.id,
            message.publish_time,
            now,
            size,
            expires,
            transaction,
        )

    def _stored_under(self, id: str, now: float) -> Receipt | None:
        """The receipt of the message with this id, given or made, if it is within the deduplication window."""
        if (known := self._ids.get(id)) is not None:
            return known[1]
        # Made ids are positions, so that they need not be remembered.
        name, _, place = id.partition(":")
        partition, _, offset = place.partition(":")
        if name != self.name or not _is_number(partition) or not _is_number(offset):
            return None
        entry = self.partitions[int(partition)].at(int(offset)) if int(partition) < len(self.partitions) else None
        if entry is None or entry.id != id or entry.transaction is not None:
            return None
        if entry.time + self._dedup_seconds <= now:
            return None
        return Receipt(id, entry.partition, entry.offset)

    def _append(self, entry: Entry, now: float) -> None:
        self._seq += 1
        entry.seq = self._seq
        entry.time = now
        self.partitions[entry.partition].append(entry)

    def _publish_later(self, entry: Entry, due: float, work: TransactionWork | None) -> Receipt:
        number = next(self._scheduled)
        entry.scheduled = number
        if entry.publish_time is None:
            entry.publish_time = as_datetime(entry.time)
        entry.transaction = None
        if work is not None:
            work.scheduled.append((due, entry))
        else:
            heappush(self._schedule, (due, number, entry))
            self._wake_sleepers()
        return Receipt(entry.id)

    def _wake_sleepers(self) -> None:
        """Wake sleepers, because something may be due earlier."""
        for queue in self.queues.values():
            queue.notify()
        self._wake_readers()

    def _apply_retention(self, now: float) -> None:
        if self.retention is None and self.retention_messages is None:
            return
        oldest = None if self.retention is None else now - self.retention
        for log in self.partitions:
            log.keep(oldest, self.retention_messages)

    def _wake_readers(self) -> None:
        for waker in self.watchers:
            waker.wake()
        self.watchers.clear()


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) < 20


def _seq(entry: Entry) -> int:
    return entry.seq
