"""One marker partition that a tracker was given: its open leases, its clock, its gate and its commit rule.

Pure: it is told what was read, and at which local monotonic time, and is asked what is due and what may be committed.
It is made anew with each assignment, and after any doubt about what of one's own writing is on the brokers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from broker_kafka.queue.markers.lease import Lease
from broker_kafka.queue.markers.wire import Kind, Marker, read_markers
from broker_kafka.queue.tracker.clock import LogClock
from broker_kafka.queue.tracker.markers_queue import MarkersQueue

__all__ = ["AssignedPartition", "PartitionOptions"]

_START: Final = Kind.START
"""Attributes of an enum class cost a slow look-up each; this is read per message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionOptions:
    """:ivar max_jump_ms: see `LogClock`; less than what is left of a lease of 30 s when it is renewed.
    :ivar stall_ms: see `LogClock`.
    :ivar renew_distance: a START so many offsets back is renewed, since a new owner reads from it; a record
        holds up to 200 markers.
    :ivar renew_age_ms: a START of so long ago is renewed; much less than the marker topic's retention.
    """

    max_jump_ms: int = 10_000
    stall_ms: int = 10_000
    renew_distance: int = 20_000
    renew_age_ms: int = 3_600_000


class AssignedPartition:
    """:param start: the offset from which it is read: the committed one, or the log's first.
    :param end: the log's end at the assignment, its high watermark, asked for after every earlier owner was fenced.
        Nothing is redelivered and nothing committed before all below it was read: the END of a redelivery always lies
        behind the deadline that caused it.
    :param at: the local monotonic time in milliseconds.
    :ivar position: the next offset to read.
    :ivar read_at: all that was written before this local time has been read; it may be more.
    :ivar unknown: how many markers, or records without any, were not known here.
    """

    def __init__(self, start: int, end: int, at: int, options: PartitionOptions | None = None) -> None:
        self._options: Final = options or PartitionOptions()
        self.markers: Final = MarkersQueue(start)
        self.clock: Final = LogClock(at, max_jump_ms=self._options.max_jump_ms, stall_ms=self._options.stall_ms)
        self.position = start
        self._gate: int | None = end
        """Closed until all below this offset was read; None until somebody tells where the log ends."""
        self._open = start >= end
        self._timed = False
        self._unread: tuple[int, int] | None = None
        """An end of the log that was not reached yet, and when it was asked for."""
        self.read_at = -1
        self._committed = start
        self._at = at
        self.unknown = 0

    # -- what is read --------------------------------------------------------------------------------------

    def read(self, offset: int, timestamp: int, data: bytes | None, at: int) -> int:
        """A record of the marker topic, in the order of the log; how many markers it has, where the START of several
        messages counts as one of each. One that was read before is passed over."""
        if offset < self.position:
            return 0
        self._heard(at)
        found = read_markers(data)
        count = len(found)
        time: int | None = None
        for marker, part in found:
            if marker is None:
                self.unknown += 1
                continue
            if time is None:
                time = self.clock.read(timestamp, at)
                self._timed = self._open
            self.markers.read(offset, time, marker, part)
            if marker.kind is _START:
                count += len(marker.more)
        self._moved(offset + 1)
        return count

    def moved(self, position: int) -> None:
        """The position passed records that are not shown: those of transactions."""
        if position > self.position:
            self._moved(position)

    def log_ends(self, end: int, at: int) -> None:
        """The log ended here, at its high watermark, when it was asked for at this local time. To be told now and then,
        above all where nothing comes and where `needs_end`: the clock goes on from it."""
        self._heard(at)
        if self._gate is None:
            self._gate = end
        if self._unread is None:
            # One after the other: under load the log may always be a little ahead of what was read.
            self._unread = end, at
        self._moved(self.position)
        if self.position >= end:
            self.clock.caught_up(at)
            self.read_at = max(self.read_at, at)

    @property
    def needs_end(self) -> bool:
        """Whether the gate is closed and nobody told since where the log ends."""
        return self._gate is None

    def _heard(self, at: int) -> None:
        if at - self._at > self._options.stall_ms:
            # Much may have been written meanwhile, and an END that lies further on must be read before anything is due.
            self._gate = None
            self._open = self._timed = False
            self.clock.lift_anchor()
        self._at = max(self._at, at)

    def _moved(self, position: int) -> None:
        self.position = position
        if self._unread is not None and position >= self._unread[0]:
            self.read_at = max(self.read_at, self._unread[1])
            self._unread = None
        if not self._open and self._gate is not None and position >= self._gate:
            self._open = True

    # -- what is to be done --------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether all that was written before the assignment, or the last stall, has been read."""
        return self._open

    def wants_time(self, at: int) -> bool:
        """Whether a `TIME_MARKER` should be written, for the time that the broker gives it: because something is due by
        what is known of the broker's clock, or because nothing is known of it since the gate opened."""
        if not self._open:
            return False
        deadline = self.markers.next_deadline()
        now = self.clock.now
        if deadline is None or now is None or deadline <= now:
            return False
        return not self._timed or self.clock.estimate(at) >= deadline

    def due(self, limit: int) -> list[Lease]:
        """Take the leases that are due, at most so many; see `MarkersQueue.due`."""
        now = self.clock.now
        return self.markers.due(now, limit) if self._open and now is not None else []

    def failed(self, lease: Lease, delay_ms: int) -> None:
        """See `MarkersQueue.failed`; it is due again after so long."""
        self.markers.failed(lease, (self.clock.now or 0) + delay_ms)

    def to_renew(self, limit: int) -> list[Lease]:
        """Take the leases whose START is to be repeated; see `MarkersQueue.to_renew` and `renewal`."""
        now = self.clock.now
        if not self._open or now is None:
            return []
        options = self._options
        return self.markers.to_renew(self.position - options.renew_distance, now - options.renew_age_ms, limit)

    def renewal(self, lease: Lease) -> Marker:
        """The START that repeats a lease as it is now. Who reads from it on redelivers no sooner than who read all."""
        remaining = lease.deadline - (self.clock.now or 0)
        return Marker(
            kind=Kind.START,
            id=lease.id,
            after_ms=max(0, remaining if lease.released else max(remaining, lease.after_ms)),
            attempt=lease.attempt,
            released=lease.released,
            renews=lease.pin,
            as_of=self.position,
            reason=lease.reason,
        )

    def to_commit(self) -> int | None:
        """The offset to commit: of the lowest START that is open, else the position; None if there is nothing new."""
        if not self._open:
            return None
        pin = self.markers.pin
        offset = self.position if pin is None else pin
        return offset if offset > self._committed else None

    def committed(self, offset: int) -> None:
        """It is stored."""
        self._committed = max(self._committed, offset)

    @property
    def committed_position(self) -> int:
        """The offset that is stored, or from which it was read first."""
        return self._committed
