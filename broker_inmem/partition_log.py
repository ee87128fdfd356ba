"""The log of one partition: entries by offset. Offsets only grow and have gaps.

No locking: the caller holds the server's lock. No call waits or fails half-way.
"""

from __future__ import annotations

from bisect import bisect_left

from broker import Bounds
from broker_inmem.entries import Entry, TransactionState

__all__ = ["PartitionLog"]

_COMPACT_AT = 1024


class PartitionLog:
    """Entries from `first` to `next`; the end of a transaction has its own offset."""

    __slots__ = ("_head", "entries", "first", "next", "open", "transactional")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._head = 0
        self.first = 0
        """The lowest readable offset."""
        self.next = 0
        """The offset of the next entry."""
        self.open: dict[TransactionState, int] = {}
        """Open transactions, with the offset of the first entry of each."""
        self.transactional = False
        """Whether it ever contained an entry of a transaction."""

    def __len__(self) -> int:
        return len(self.entries) - self._head

    @property
    def stable(self) -> int:
        """All entries below this offset are committed or aborted."""
        return min(self.open.values()) if self.open else self.next

    def bounds(self) -> Bounds:
        return Bounds(self.first, self.stable)

    def append(self, entry: Entry) -> None:
        """Append an entry at the next offset."""
        entry.offset = self.next
        self.next += 1
        self.entries.append(entry)
        if entry.transaction is not None:
            self.transactional = True
            self.open.setdefault(entry.transaction, entry.offset)

    def end_transaction(self, transaction: TransactionState) -> None:
        """Write the marker that ends a transaction."""
        if self.open.pop(transaction, None) is not None:
            self.next += 1

    def read(
        self, position: int, max_records: int, max_bytes: int, now: float, *, committed: bool, stop: int | None = None
    ) -> tuple[list[Entry], int]:
        """Visible entries from `position` on, and the position after them.

        The position skips invisible entries, up to `stop` or the end. Bytes are exceeded by one entry at most.
        """
        limit = self.stable if committed else self.next
        if stop is not None and stop < limit:
            limit = stop
        entries = self.entries
        index = self._index(position)
        end = len(entries)
        check = committed and self.transactional
        found: list[Entry] = []
        count = size = 0
        while index < end:
            entry = entries[index]
            if entry.offset >= limit:
                break
            if count >= max_records or size >= max_bytes:
                return found, position
            position = entry.offset + 1
            index += 1
            if entry.expires > now and not (check and entry.transaction is not None and entry.transaction.aborted):
                found.append(entry)
                count += 1
                size += entry.size
        return found, max(position, limit)

    def at(self, offset: int) -> Entry | None:
        """The entry with this offset; None if there is none any more."""
        index = self._index(offset)
        entry = self.entries[index] if index < len(self.entries) else None
        return entry if entry is not None and entry.offset == offset else None

    def count(self, position: int, now: float) -> int:
        """The number of unexpired entries at or above a position, including those of open transactions."""
        entries = self.entries[self._index(position) :]
        return sum(
            1
            for entry in entries
            if entry.expires > now and not (entry.transaction is not None and entry.transaction.aborted)
        )

    def visible(self, now: float) -> list[Entry]:
        """All committed entries that have not expired."""
        return [
            entry
            for entry in self.entries[self._head :]
            if entry.expires > now and (entry.transaction is None or entry.transaction.committed)
        ]

    def position_at(self, time: float) -> int:
        """The first position whose entry was appended at `time` or later; the end if there is none."""
        index = bisect_left(self.entries, time, lo=self._head, key=_time)
        return self.entries[index].offset if index < len(self.entries) else self.stable

    def keep(self, oldest: float | None, most: int | None) -> None:
        """Remove entries appended before `oldest`, and the oldest ones beyond `most`."""
        index = self._head
        if oldest is not None and index < len(self.entries) and self.entries[index].time < oldest:
            index = bisect_left(self.entries, oldest, lo=index, key=_time)
        if most is not None:
            index = max(index, len(self.entries) - most)
        if index > self._head:
            self._remove_below(index)

    def compact(self, tombstones_before: float) -> None:
        """Keep the last committed entry of each key, and everything from the first open transaction on.

        :param tombstones_before: remove tombstones that were appended before this time.
        """
        stable = self.stable
        closed = [entry for entry in self.entries[self._head :] if entry.offset < stable]
        last = {entry.key: entry.offset for entry in closed if entry.transaction is None or entry.transaction.committed}
        kept = [
            entry
            for entry in closed
            if last.get(entry.key) == entry.offset and (entry.data is not None or entry.time >= tombstones_before)
        ]
        self.entries = kept + self.entries[self._head + len(closed) :]
        self._head = 0

    def clear(self) -> int:
        """Remove every entry; returns their number."""
        removed = len(self)
        self._remove_below(len(self.entries))
        self.first = self.next
        return removed

    def bytes(self) -> int:
        return sum(entry.size for entry in self.entries[self._head :])

    def _remove_below(self, index: int) -> None:
        if index > self._head:
            self.first = max(self.first, self.entries[index - 1].offset + 1)
            self._head = index
        # Compact only when half of the list is unused: amortized O(1) per entry.
        if (self._head >= _COMPACT_AT and 2 * self._head >= len(self.entries)) or self._head == len(self.entries):
            del self.entries[: self._head]
            self._head = 0

    def _index(self, position: int) -> int:
        entries, head = self.entries, self._head
        if head == len(entries):
            return head
        guess = head + position - entries[head].offset
        if guess <= head:
            return head
        if guess < len(entries) and entries[guess].offset == position:
            return guess
        return bisect_left(entries, position, lo=head, key=_offset)


def _time(entry: Entry) -> float:
    return entry.time


def _offset(entry: Entry) -> int:
    return entry.offset
