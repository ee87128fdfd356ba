"""The two priority queues of a marker partition: leases by the offset of their START, and by their deadline.

Pure. Leases that have ended or moved are not looked for: they are dropped when they come to the head, and all at once
when they are the greater part, so that each call is amortised O(1) for offsets and O(log n) for deadlines.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from broker_kafka.queue.lease import Lease, State

__all__ = ["DeadlinesQueue", "OffsetsQueue"]

# Attributes of an enum class cost a slow look-up each; these are read per message.
_OPEN: Final = State.OPEN
_CLOSED: Final = State.CLOSED

_FEW: Final = 1024
"""So few entries are not worth sweeping."""

_Entry = tuple[int, int, Lease]
"""The deadline under which it stands, a number that tells equal ones apart, and the lease."""


class OffsetsQueue:
    """Leases by their pin. Pins come in rising order, since a log is read so; a deque is a priority queue then."""

    __slots__ = ("_entries", "_sweep_at")

    def __init__(self) -> None:
        self._entries: deque[tuple[int, Lease]] = deque()
        self._sweep_at = _FEW

    def add(self, lease: Lease) -> None:
        """Its pin is new, and the highest."""
        self._entries.append((lease.pin, lease))
        if len(self._entries) > self._sweep_at:
            self._entries = deque(
                [entry for entry in self._entries if entry[0] == entry[1].pin and entry[1].state is not _CLOSED]
            )
            self._sweep_at = max(_FEW, 2 * len(self._entries))

    def head(self) -> Lease | None:
        """The lease with the lowest pin."""
        entries = self._entries
        while entries:
            pin, lease = entries[0]
            if pin == lease.pin and lease.state is not _CLOSED:
                return lease
            entries.popleft()
        return None

    def __iter__(self) -> Iterator[Lease]:
        """By rising pin."""
        return (lease for pin, lease in self._entries if pin == lease.pin and lease.state is not _CLOSED)


class DeadlinesQueue:
    """Open leases by their deadline. One that moved later keeps its place until it comes to the head there.

    Most leases are as long as the one before, so that deadlines rise: these lie in a deque, and the others in a heap.
    """

    __slots__ = ("_heap", "_rising", "_serial", "_sweep_at")

    def __init__(self) -> None:
        self._rising: deque[_Entry] = deque()
        self._heap: list[_Entry] = []
        self._serial = 0
        self._sweep_at = _FEW

    def add(self, lease: Lease) -> None:
        """It is new here, or its deadline moved."""
        if 0 <= lease.queued <= lease.deadline:
            return
        self._push(lease)
        if len(self._rising) + len(self._heap) > self._sweep_at:
            self._rising = deque(_that_count(self._rising))
            self._heap = _that_count(self._heap)
            heapq.heapify(self._heap)
            self._sweep_at = max(_FEW, 2 * (len(self._rising) + len(self._heap)))

    def head(self) -> Lease | None:
        """The lease with the earliest deadline."""
        rising, heap = self._rising, self._heap
        while rising or heap:
            rises = not heap or (bool(rising) and rising[0] < heap[0])
            deadline, _, lease = rising[0] if rises else heap[0]
            counts = lease.queued == deadline and lease.state is _OPEN
            if counts and lease.deadline <= deadline:
                return lease
            self._drop(rises)
            if counts:
                self._push(lease)
        return None

    def pop(self, lease: Lease) -> None:
        """Take the head out."""
        rising = self._rising
        self._drop(bool(rising) and rising[0][2] is lease and rising[0][0] == lease.queued)
        lease.queued = -1

    def _drop(self, rises: bool) -> None:
        if rises:
            self._rising.popleft()
        else:
            heapq.heappop(self._heap)

    def _push(self, lease: Lease) -> None:
        deadline = lease.queued = lease.deadline
        self._serial += 1
        entry = deadline, self._serial, lease
        if not self._rising or self._rising[-1][0] <= deadline:
            self._rising.append(entry)
        else:
            heapq.heappush(self._heap, entry)


def _that_count(entries: Iterable[_Entry]) -> list[_Entry]:
    return [entry for entry in entries if entry[0] == entry[2].queued and entry[2].state is _OPEN]
