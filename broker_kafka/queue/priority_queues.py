"""The two priority queues of a marker partition: leases by the offset of their START, and by their deadline. Those of
one START are one entry.

Pure. Leases that have ended or moved are not looked for: they are dropped when they come to the head, and all at once
when they are the greater part, so that each call is amortised O(1) for offsets and O(log n) for deadlines.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Final

from broker_kafka.queue.lease import Lease, LeaseBatch, State

__all__ = ["DeadlinesQueue", "OffsetsQueue"]

# Attributes of an enum class cost a slow look-up each; these are read per message.
_OPEN: Final = State.OPEN

_FEW: Final = 1024
"""So few entries are not worth sweeping."""


class OffsetsQueue:
    """Leases by their pin. Pins come in rising order, since a log is read so; a deque is a priority queue then."""

    __slots__ = ("_leases", "_pins", "_sweep_at")

    def __init__(self) -> None:
        # Two, for a tuple of each lease would take more than both.
        self._pins: deque[int] = deque()
        self._leases: deque[Lease | LeaseBatch] = deque()
        self._sweep_at = _FEW

    def add(self, lease: Lease | LeaseBatch) -> None:
        """Its pin is new, and the highest."""
        self._pins.append(lease.pin)
        self._leases.append(lease)
        if len(self._leases) > self._sweep_at:
            kept = [(pin, each) for pin, each in zip(self._pins, self._leases, strict=True) if each.is_pinned(pin)]
            self._pins = deque([pin for pin, _ in kept])
            self._leases = deque([each for _, each in kept])
            self._sweep_at = max(_FEW, 2 * len(kept))

    def head(self) -> Lease | LeaseBatch | None:
        """The lease with the lowest pin."""
        pins, leases = self._pins, self._leases
        while leases:
            if leases[0].is_pinned(pins[0]):
                return leases[0]
            leases.popleft()
            pins.popleft()
        return None

    def __iter__(self) -> Iterator[Lease | LeaseBatch]:
        """By rising pin."""
        self.head()  # what is over at the front would be passed over by each look
        return (lease for pin, lease in zip(self._pins, self._leases, strict=True) if lease.is_pinned(pin))


class DeadlinesQueue:
    """Open leases by their deadline. One that moved later keeps its place until it comes to the head there."""

    __slots__ = ("_entries", "_serial", "_sweep_at")

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Lease | LeaseBatch]] = []
        self._serial = 0
        self._sweep_at = _FEW

    def add(self, lease: Lease | LeaseBatch) -> None:
        """It is new here, or its deadline moved."""
        if 0 <= lease.queued <= lease.deadline:
            return
        self._push(lease)
        if len(self._entries) > self._sweep_at:
            self._entries = [
                entry for entry in self._entries if entry[0] == entry[2].queued and entry[2].state is _OPEN
            ]
            heapq.heapify(self._entries)
            self._sweep_at = max(_FEW, 2 * len(self._entries))

    def head(self) -> Lease | LeaseBatch | None:
        """The lease with the earliest deadline."""
        entries = self._entries
        while entries:
            entry = entries[0]
            lease = entry[2]
            if entry[0] != lease.queued or lease.state is not _OPEN:
                heapq.heappop(entries)
            elif lease.deadline > entry[0]:
                heapq.heappop(entries)
                self._push(lease)
            else:
                return lease
        return None

    def pop(self, lease: Lease | LeaseBatch) -> None:
        """Take the head out."""
        heapq.heappop(self._entries)
        lease.queued = -1

    def _push(self, lease: Lease | LeaseBatch) -> None:
        lease.queued = lease.deadline
        self._serial += 1
        heapq.heappush(self._entries, (lease.deadline, self._serial, lease))
