"""A lease as a tracker sees it: a message that has a START and no END; and a batch of such messages with one START."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

from broker_kafka.queue.markers.wire import Marker, MessageId

__all__ = ["Lease", "LeaseBatch", "LeaseState"]


class LeaseState(IntEnum):
    """OPEN waits for its deadline, SENDING for the END behind its redelivery; CLOSED has ended."""

    OPEN = 0
    SENDING = 1
    CLOSED = 2


_CLOSED: Final = LeaseState.CLOSED
"""Attributes of an enum class cost a slow look-up each; this is read per message."""


class Lease(msgspec.Struct, gc=False):
    """:ivar pin: the marker offset from which the lease can be read again.
    :ivar pinned: the log time of that marker.
    :ivar after_ms: the lease period.
    :ivar deadline: the log time at which the message is due.
    :ivar attempt: how many deliveries count.
    :ivar data: the bytes of the START, for `read_content`; empty once the lease has ended.
    :ivar released: the message has no holder, and no KEEPALIVE moves its deadline.
    :ivar touched: the offset of the last marker that changed the lease.
    :ivar renewing: whether a renewal is being written.
    :ivar queued: the deadline under which it stands in the `DeadlinesQueue`.
    :ivar started: the log time of the first START.
    :ivar due_since: the deadline at which the message was first due; -1 before.
    """

    id: MessageId
    pin: int
    pinned: int
    after_ms: int
    deadline: int
    attempt: int
    data: bytes
    released: bool
    touched: int
    started: int
    state: LeaseState = LeaseState.OPEN
    renewing: bool = False
    queued: int = -1
    reason: str = ""
    due_since: int = -1

    def is_pinned(self, pin: int) -> bool:
        """Whether the lease still needs the log from there."""
        return pin == self.pin and self.state is not _CLOSED


class LeaseBatch(msgspec.Struct, eq=False, gc=False):
    """Leases of messages with one START, as long as only ENDs follow it.

    :ivar marker: the START; None once all have ended.
    :ivar data: its bytes; empty once all have ended.
    :ivar count: how many have not ended.
    :ivar apart: the leases that replaced it when it was split.
    """

    marker: Marker | None
    data: bytes
    count: int
    pin: int
    pinned: int
    deadline: int
    started: int
    state: LeaseState = LeaseState.OPEN
    queued: int = -1
    apart: list[Lease] = []

    def is_pinned(self, pin: int) -> bool:
        """Whether any of them still needs the log from there."""
        apart = self.apart
        while apart and not apart[-1].is_pinned(pin):
            apart.pop()
        return self.count > 0 or bool(apart)

    def leave(self, count: int) -> int:
        """So many have ended, or were split off; returns how many bytes are freed."""
        self.count -= count
        if self.count:
            return 0
        freed = len(self.data)
        self.state, self.marker, self.data = _CLOSED, None, b""
        return freed
