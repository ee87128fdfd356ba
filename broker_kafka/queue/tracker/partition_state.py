"""`PartitionState`: what a tracker knows of one marker partition: open leases, clock, gate, and what to commit. Pure.

The caller reports what was read, with the local monotonic time, and asks what is due and what may be committed. Each
assignment makes a new state, and so does a write whose outcome is unknown. All times are milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from broker_kafka.queue.markers.lease import Lease
from broker_kafka.queue.markers.wire import Kind, Marker, read_markers
from broker_kafka.queue.tracker.markers_queue import MarkersQueue

__all__ = ["LogClock", "PartitionOptions", "PartitionState"]

_START: Final = Kind.START
"""Attributes of an enum class cost a slow look-up each; this is read per message."""


class PartitionState:
    """:param start: the offset from which it is read: the committed one, or the log's first.
    :param end: the high watermark at the assignment, looked up after every earlier owner was fenced. Nothing is
        redelivered or committed before all records below it are read: the END of a redelivery always lies behind the
        deadline that caused it.
    :param at: the local monotonic time in milliseconds.
    :ivar position: the next offset to read.
    :ivar read_at: every marker that was written before this local time has been read.
    :ivar unknown: how many markers were not recognised.
    """

    def __init__(self, start: int, end: int, at: int, options: PartitionOptions | None = None) -> None:
        self._options: Final = options or PartitionOptions()
        self.markers: Final = MarkersQueue(start)
        self.clock: Final = LogClock(at, max_jump_ms=self._options.max_jump_ms, stall_ms=self._options.stall_ms)
        self.position = start
        self._gate: int | None = end
        """Nothing is due before all records below this offset are read; None until the end of the log is known."""
        self._open = start >= end
        self._timed = False
        self._unread: tuple[int, int] | None = None
        """An end of the log that was not reached yet, and when it was looked up."""
        self.read_at = -1
        self._committed = start
        self._at = at
        self.unknown = 0

    # -- what is read --------------------------------------------------------------------------------------

    def read(self, offset: int, timestamp: int, data: bytes | None, at: int) -> int:
        """A record of the marker topic, in the order of the log; a record that was read before is skipped.

        Returns how many markers it has; the START of several messages counts as one of each.
        """
        if offset < self.position:
            return 0
        self._advance_time(at)
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
        """The position passed records that are not visible, such as those of aborted transactions."""
        if position > self.position:
            self._moved(position)

    def log_end_known(self, end: int, at: int) -> None:
        """The high watermark that was looked up at this local time; the clock advances by it."""
        self._advance_time(at)
        if self._gate is None:
            self._gate = end
        if self._unread is None:
            # One at a time: under load the log may always be a little ahead of the reader.
            self._unread = end, at
        self._moved(self.position)
        if self.position >= end:
            self.clock.caught_up(at)
            self.read_at = max(self.read_at, at)

    @property
    def needs_end(self) -> bool:
        """Whether `log_end_known` must be called to open the gate."""
        return self._gate is None

    def _advance_time(self, at: int) -> None:
        if at - self._at > self._options.stall_ms:
            # Markers may have been written meanwhile: a later END must be read before anything is due.
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

    # -- what to write and commit --------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether all markers that precede the assignment, or the last stall, are read."""
        return self._open

    def wants_time(self, at: int) -> bool:
        """Whether to write a `TIME_MARKER` for the timestamp that the broker gives it.

        It is needed when a lease is due by the estimated broker time, or no time is known since the gate opened.
        """
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
        """See `MarkersQueue.failed`; the lease is due again after so long."""
        self.markers.failed(lease, (self.clock.now or 0) + delay_ms)

    def to_renew(self, limit: int) -> list[Lease]:
        """Take the leases whose START should be renewed; see `MarkersQueue.to_renew`."""
        now = self.clock.now
        if not self._open or now is None:
            return []
        options = self._options
        return self.markers.to_renew(self.position - options.renew_distance, now - options.renew_age_ms, limit)

    def renewal(self, lease: Lease) -> Marker:
        """A START with the state of a lease. A reader that begins here redelivers no sooner than one that read all."""
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
        """The offset to commit: of the lowest open START, else the position; None if it is committed already."""
        if not self._open:
            return None
        pin = self.markers.pin
        offset = self.position if pin is None else pin
        return offset if offset > self._committed else None

    def committed(self, offset: int) -> None:
        """This offset is stored."""
        self._committed = max(self._committed, offset)

    @property
    def committed_position(self) -> int:
        """The stored offset; before the first commit the one from which reading began."""
        return self._committed


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionOptions:
    """:ivar max_jump_ms: see `LogClock`; less than what is left of a lease of 30 s when it is renewed.
    :ivar stall_ms: see `LogClock`.
    :ivar renew_distance: a START so many offsets back is renewed, since a new owner reads from it; a record
        holds up to 200 markers.
    :ivar renew_age_ms: a START of that age is renewed; much less than the marker topic's retention.
    """

    max_jump_ms: int = 10_000
    stall_ms: int = 10_000
    renew_distance: int = 20_000
    renew_age_ms: int = 3_600_000


class LogClock:
    """The time of a partition's log, which advances between markers while the log is being read.

    The wall clock of this machine plays no part. Log times should be the broker's
    (`message.timestamp.type=LogAppendTime`); with others the clock still never runs backwards, and a marker from the
    future cannot take it further ahead than `max_jump_ms` in all.

    :param at: the local monotonic time.
    :param max_jump_ms: how far log times may run ahead of this machine's monotonic clock once the clock is anchored.
    :param stall_ms: a longer silence does not count as time: while this process is cut off from the brokers, others may
        write.
    """

    def __init__(self, at: int, *, max_jump_ms: int = 10_000, stall_ms: int = 10_000) -> None:
        self._max_jump: Final = max_jump_ms
        self._stall: Final = stall_ms
        self._now: int | None = None
        self._lead = 0
        """How far the log's time is ahead of the local one, at least: a marker is read after it is written."""
        self._alive = at
        """The local time at which a marker was last read, or the log was last caught up with."""
        self._anchor: tuple[int, int] | None = None

    @property
    def now(self) -> int | None:
        """The log time up to which all markers are known; None before the first."""
        return self._now

    def read(self, timestamp: int, at: int) -> int:
        """A marker of this log time was read; the time that counts for it, which never falls.

        :param at: the local monotonic time.
        """
        anchor = self._anchor
        if anchor is not None and timestamp > (limit := anchor[0] + at - anchor[1] + self._max_jump):
            timestamp = limit
        now = self._now
        if now is None:
            self._lead = timestamp - at
            now = timestamp
        else:
            self._lead = max(self._lead, timestamp - at)
            now = max(now, timestamp)
        self._now = now
        self._alive = max(self._alive, at)
        return now

    def caught_up(self, at: int) -> None:
        """The log is read to its end at this local time."""
        silent = at - self._alive
        if silent > self._stall:
            self._lead -= silent
        self._alive = max(self._alive, at)
        if self._now is not None:
            self._now = max(self._now, self._lead + at)
            if self._anchor is None:
                self._anchor = (self._now, at)

    def estimate(self, at: int) -> int:
        """The log's time at this local time, at least: when it reaches a deadline, ask the brokers for the time."""
        return self._lead + at

    def lag(self, at: int) -> int:
        """How far `now` is behind the log's time at this local time."""
        return 0 if self._now is None else max(0, self.estimate(at) - self._now)

    def lift_anchor(self) -> None:
        """Accept any log time until the log is caught up with again: much of it may be unread."""
        self._anchor = None
