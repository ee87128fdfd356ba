"""`MarkersQueue`: what the markers of one partition say: which messages are open and which are due, and what to commit.

Pure and synchronous. The caller passes each marker once, in the order of the log, with the time of the partition's
clock. Reading the log again from a committed `pin` gives the same leases. Messages of one START are kept together until
a marker other than an END names one of them, or one is to be written.

`OffsetsQueue` and `DeadlinesQueue` are its priority queues: leases by the offset of their START, and by deadline.
Leases that ended or moved are dropped when they reach the head, and all at once when they are the greater part: a call
is amortised O(1) for offsets and O(log n) for deadlines.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from broker_kafka.queue.markers.lease import Lease, LeaseBatch, LeaseState
from broker_kafka.queue.markers.start_writer import read_each
from broker_kafka.queue.markers.wire import Kind, Marker, MessageId

__all__ = ["DeadlinesQueue", "MarkersQueue", "OffsetsQueue"]

# Attributes of an enum class cost a slow look-up each; these are read per message.
_START: Final = Kind.START
_END: Final = Kind.END
_OPEN: Final = LeaseState.OPEN
_CLOSED: Final = LeaseState.CLOSED

_SWEEP_ABOVE: Final = 1024
"""Fewer entries are not worth sweeping."""
_BATCH_BYTES_EACH: Final = 768
"""Bytes that an open message of a batch may keep in memory, about the size of a lease of its own."""


class MarkersQueue:
    """:param first: the offset from which the log is read.
    :ivar bytes: of the STARTs of open messages.
    """

    def __init__(self, first: int = 0) -> None:
        self._first: Final = first
        self._open: dict[tuple[str, int, str], dict[int, Lease | LeaseBatch]] = {}
        """By topic, partition and queue, and there by offset."""
        self._overtaken: dict[MessageId, int] = {}
        """Messages that ended before their renewal was read, and the pins that they keep until an END follows it.

        Without that END a reader that begins between the two would take the renewal for a START.
        """
        self._to_end: dict[MessageId, None] = {}
        """Messages of `_overtaken` whose renewal was read."""
        self._offsets: Final = OffsetsQueue()
        self._deadlines: Final = DeadlinesQueue()
        self.bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def __iter__(self) -> Iterator[Lease]:
        """The open leases, to be shown; not to be changed."""
        for batch in {each for each in self.entries() if isinstance(each, LeaseBatch)}:
            self._split(batch)
        return (each for each in self.entries() if isinstance(each, Lease))

    def entries(self) -> Iterator[Lease | LeaseBatch]:
        """For each open message its lease, or the batch that holds it; not to be changed."""
        for present in self._open.values():
            yield from present.values()

    def find(self, id: MessageId) -> Lease | None:
        """The open lease of a message."""
        topic, partition, offset, queue = id
        found = self._open.get((topic, partition, queue), {}).get(offset)
        if isinstance(found, LeaseBatch):
            self._split(found)
            return self.find(id)
        return found

    @property
    def pin(self) -> int | None:
        """The lowest offset that is still needed, if any."""
        lease = self._offsets.head()
        pins = list(self._overtaken.values())
        if lease is not None:
            pins.append(lease.pin)
        return min(pins, default=None)

    # -- reading markers -----------------------------------------------------------------------------------

    def read(self, offset: int, time: int, marker: Marker, data: bytes) -> None:
        """Apply a marker, in the order of the log.

        :param time: of the partition's clock, which never runs backwards.
        :param data: the bytes of the marker; those of a START are kept until its message ends.
        """
        kind = marker.kind
        if kind is _START:
            if marker.more:
                self._start_together(offset, time, marker, data)
                return
            lease = self.find(marker.id)
            if marker.renews is not None:
                self._renewed(offset, time, marker, data, lease)
            elif lease is None:
                self._start(offset, time, marker, data)
            else:
                self._start_again(lease, offset, time, marker, data)
        elif kind is _END:
            self._end(marker)
        else:
            for message in marker.ids():
                self._keep_alive(message, offset, time, marker)

    def _start_together(self, offset: int, time: int, marker: Marker, data: bytes) -> None:
        topic, partition, first, queue = marker.id
        deadline = time + marker.after_ms
        batch = LeaseBatch(marker, data, 1 + len(marker.more), offset, time, deadline, time)
        started = dict.fromkeys((first, *marker.more), batch)
        present = self._open.setdefault((topic, partition, queue), {})
        if len(started) < batch.count or not started.keys().isdisjoint(present.keys()):
            for start, part in read_each(marker, data, started):
                self.read(offset, time, start, part)
            return
        present.update(started)
        self.bytes += len(data)
        self._offsets.add(batch)
        self._deadlines.add(batch)

    def _split(self, batch: LeaseBatch) -> None:
        """Replace a batch by one lease for each of its open messages."""
        marker = batch.marker
        assert marker is not None
        topic, partition, _, queue = marker.id
        present = self._open[topic, partition, queue]
        left = {offset for offset in (marker.id.offset, *marker.more) if present.get(offset) is batch}
        batch.apart = [
            Lease(
                start.id,
                batch.pin,
                batch.pinned,
                start.after_ms,
                batch.deadline,
                1 if start.attempt is None else start.attempt,
                part,
                start.released,
                batch.pin,
                batch.started,
            )
            for start, part in read_each(marker, batch.data, left)
        ]
        for lease in batch.apart:
            present[lease.id.offset] = lease
            self.bytes += len(lease.data)
            self._deadlines.add(lease)
        self.bytes -= batch.leave(batch.count)

    def _start(self, offset: int, time: int, marker: Marker, data: bytes) -> None:
        lease = Lease(
            marker.id,
            offset,
            time,
            marker.after_ms,
            time + marker.after_ms,
            1 if marker.attempt is None else marker.attempt,
            data,
            marker.released,
            offset,
            time,
            reason=marker.reason,
        )
        topic, partition, first, queue = marker.id
        self._open.setdefault((topic, partition, queue), {})[first] = lease
        self.bytes += len(data)
        self._offsets.add(lease)
        self._deadlines.add(lease)

    def _start_again(self, lease: Lease, offset: int, time: int, marker: Marker, data: bytes) -> None:
        """The first reader did not commit, and another one started the message: the later START replaces the first."""
        if not lease.renewing:
            self._move_pin(lease, offset, time, data)
        lease.touched = offset
        lease.after_ms = marker.after_ms
        lease.attempt = 1 if marker.attempt is None else marker.attempt
        lease.released = marker.released
        if lease.state == LeaseState.SENDING:
            return  # the message is being redelivered, and the END behind that ends this lease too
        self._move_deadline(lease, time + marker.after_ms)

    def _renewed(self, offset: int, time: int, marker: Marker, data: bytes, lease: Lease | None) -> None:
        assert marker.renews is not None
        if marker.id in self._overtaken:
            self._to_end[marker.id] = None
        if lease is not None:
            lease.renewing = False
            # Markers since `as_of` are not part of the renewal; with any the old START stays pinned.
            if lease.touched < marker.as_of:
                self._move_pin(lease, offset, time, data)
                self._adopt(lease, time, marker)
        elif marker.renews < self._first and marker.id not in self._overtaken:
            self._start(offset, time, marker, data)
        else:
            self._overtaken.setdefault(marker.id, marker.renews)
            self._to_end[marker.id] = None

    def _adopt(self, lease: Lease, time: int, marker: Marker) -> None:
        """Adopt the state of a renewal; a lease that was read from an earlier renewal may lack some."""
        attempt = lease.attempt if marker.attempt is None else marker.attempt
        if lease.state == LeaseState.OPEN and (lease.released, lease.attempt) != (marker.released, attempt):
            lease.released, lease.attempt = marker.released, attempt
            self._move_deadline(lease, time + marker.after_ms)

    def _end(self, marker: Marker) -> None:
        topic, partition, first, queue = marker.id
        offsets = (first, *marker.more)
        if self._to_end:
            for offset in offsets:
                self._end_renewal(MessageId(topic, partition, offset, queue))
        present = self._open.get((topic, partition, queue))
        if present is None:
            return
        pop = present.pop
        ended = [pop(offset, None) for offset in offsets]
        batch = ended[0]
        if isinstance(batch, LeaseBatch) and ended.count(batch) == len(ended):
            self._left(batch, len(ended))
        else:
            batches: dict[LeaseBatch, int] = {}
            for each in ended:
                if isinstance(each, Lease):
                    self._end_one(each)
                elif each is not None:
                    batches[each] = batches.get(each, 0) + 1
            for batch, count in batches.items():
                self._left(batch, count)
        if not present:
            del self._open[topic, partition, queue]

    def _left(self, batch: LeaseBatch, count: int) -> None:
        self.bytes -= batch.leave(count)
        if len(batch.data) > batch.count * _BATCH_BYTES_EACH:
            # A few open messages must not keep the bytes of the whole batch.
            self._split(batch)

    def _end_one(self, lease: Lease) -> None:
        self.bytes -= len(lease.data)
        lease.data = b""
        lease.state = _CLOSED
        if lease.renewing:
            self._overtaken[lease.id] = lease.pin

    def _end_renewal(self, id: MessageId) -> None:
        if id in self._to_end:
            del self._to_end[id], self._overtaken[id]

    def _keep_alive(self, id: MessageId, offset: int, time: int, marker: Marker) -> None:
        lease = self.find(id)
        if lease is None or lease.state == LeaseState.SENDING or (lease.released and not marker.released):
            return
        lease.touched = offset
        if marker.attempt is not None and not lease.released:
            # The holder may have tried more often than the START says; a release may take the last try back.
            lease.attempt = max(marker.attempt, lease.attempt - marker.released)
        lease.released = marker.released
        if marker.reason:
            lease.reason = marker.reason
        self._move_deadline(lease, time + marker.after_ms)

    def _move_deadline(self, lease: Lease, deadline: int) -> None:
        lease.deadline, lease.due_since = deadline, -1
        self._deadlines.add(lease)

    def _move_pin(self, lease: Lease, offset: int, time: int, data: bytes) -> None:
        self.bytes += len(data) - len(lease.data)
        lease.pin, lease.pinned, lease.data = offset, time, data
        self._offsets.add(lease)

    # -- what to write -------------------------------------------------------------------------------------

    def due(self, now: int, limit: int) -> list[Lease]:
        """Take due leases, the longest due first. Each counts as being sent until its END is read, or `failed`."""
        found: list[Lease] = []
        while len(found) < limit:
            lease = self._deadlines.head()
            if lease is None or lease.deadline > now:
                break
            if isinstance(lease, LeaseBatch):
                self._split(lease)
                continue
            self._deadlines.pop(lease)
            lease.state = LeaseState.SENDING
            if lease.due_since < 0:
                lease.due_since = lease.deadline
            found.append(lease)
        return found

    def next_deadline(self) -> int | None:
        """The log time of the earliest deadline."""
        lease = self._deadlines.head()
        return None if lease is None else lease.deadline

    def failed(self, lease: Lease, due: int) -> None:
        """A due message was not sent, and nothing of it is on the brokers: it is due again at this log time."""
        if lease.state == LeaseState.SENDING:
            lease.state = LeaseState.OPEN
            lease.deadline = due
            self._deadlines.add(lease)

    def to_renew(self, pin_below: int, pinned_before: int, limit: int) -> list[Lease]:
        """Take open leases whose START lies far back, so that the log before it is not needed any more.

        Each is being renewed until its renewal is read, or `renewal_failed`.
        """
        found: list[Lease] = []
        for entry in self._offsets:
            if len(found) == limit or (entry.pin >= pin_below and entry.pinned >= pinned_before):
                break
            for lease in self._leases(entry):
                if (
                    len(found) < limit
                    and lease.state == LeaseState.OPEN
                    and not lease.renewing
                    and lease.pin == entry.pin
                ):
                    lease.renewing = True
                    found.append(lease)
        return found

    def _leases(self, entry: Lease | LeaseBatch) -> Sequence[Lease]:
        if isinstance(entry, Lease):
            return (entry,)
        if entry.count:
            self._split(entry)
        return entry.apart

    def renewal_failed(self, lease: Lease) -> None:
        """The renewal is not on the brokers and never will be."""
        lease.renewing = False
        if lease.state == LeaseState.CLOSED:
            self._overtaken.pop(lease.id, None)

    def to_end(self) -> list[MessageId]:
        """Messages whose renewal follows their END: each needs another END, and is pinned until that is read."""
        return [message for message in self._to_end if self.find(message) is None]


class OffsetsQueue:
    """Leases by their pin. A log is read in order, so pins rise, and a deque is a priority queue."""

    __slots__ = ("_leases", "_pins", "_sweep_at")

    def __init__(self) -> None:
        # Two deques take less memory than one of tuples.
        self._pins: deque[int] = deque()
        self._leases: deque[Lease | LeaseBatch] = deque()
        self._sweep_at = _SWEEP_ABOVE

    def add(self, lease: Lease | LeaseBatch) -> None:
        """Add a lease whose pin is new, and the highest."""
        self._pins.append(lease.pin)
        self._leases.append(lease)
        if len(self._leases) > self._sweep_at:
            kept = [(pin, each) for pin, each in zip(self._pins, self._leases, strict=True) if each.is_pinned(pin)]
            self._pins = deque([pin for pin, _ in kept])
            self._leases = deque([each for _, each in kept])
            self._sweep_at = max(_SWEEP_ABOVE, 2 * len(kept))

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
        self.head()  # drops ended leases at the front, which each iteration would skip
        return (lease for pin, lease in zip(self._pins, self._leases, strict=True) if lease.is_pinned(pin))


class DeadlinesQueue:
    """Open leases by deadline. A lease whose deadline moved later keeps its place until it reaches the head."""

    __slots__ = ("_entries", "_serial", "_sweep_at")

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Lease | LeaseBatch]] = []
        self._serial = 0
        self._sweep_at = _SWEEP_ABOVE

    def add(self, lease: Lease | LeaseBatch) -> None:
        """Add a lease that is new, or whose deadline moved."""
        if 0 <= lease.queued <= lease.deadline:
            return
        self._push(lease)
        if len(self._entries) > self._sweep_at:
            self._entries = [
                entry for entry in self._entries if entry[0] == entry[2].queued and entry[2].state is _OPEN
            ]
            heapq.heapify(self._entries)
            self._sweep_at = max(_SWEEP_ABOVE, 2 * len(self._entries))

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
        """Remove the head."""
        heapq.heappop(self._entries)
        lease.queued = -1

    def _push(self, lease: Lease | LeaseBatch) -> None:
        lease.queued = lease.deadline
        self._serial += 1
        heapq.heappush(self._entries, (lease.deadline, self._serial, lease))
