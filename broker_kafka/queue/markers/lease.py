"""One message that was started and has not ended, as the tracker sees it, and many that were started together."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

from broker_kafka.queue.markers.wire import Marker, MessageId

__all__ = ["Lease", "LeaseBatch", "State"]


class State(IntEnum):
    """OPEN waits for its deadline, SENDING was due and waits for the END behind its redelivery, CLOSED is gone."""

    OPEN = 0
    SENDING = 1
    CLOSED = 2


_CLOSED: Final = State.CLOSED
"""Attributes of an enum class cost a slow look-up each; this is read per message."""


class Lease(msgspec.Struct, gc=False):
    """:ivar pin: the marker offset from which the lease can be read anew.
    :ivar pinned: the log time of that marker.
    :ivar after_ms: the lease period.
    :ivar deadline: the log time at which the message is due.
    :ivar attempt: how many deliveries of it count.
    :ivar data: the START, of which `read_content` tells the rest; empty once it has ended.
    :ivar released: nobody holds it, and no KEEPALIVE moves its deadline.
    :ivar touched: the offset of the last marker that changed it.
    :ivar renewing: a renewal of it is under way.
    :ivar queued: the deadline under which it stands in the queue of deadlines.
    :ivar started: the log time of its first START.
    :ivar due_since: the deadline at which it was due first, whatever it waited for since; -1 if it was not due yet.
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
    state: State = State.OPEN
    renewing: bool = False
    queued: int = -1
    reason: str = ""
    due_since: int = -1

    def is_pinned(self, pin: int) -> bool:
        """Whether the log is still needed from there for it."""
        return pin == self.pin and self.state is not _CLOSED


class LeaseBatch(msgspec.Struct, eq=False, gc=False):
    """Leases of messages with one START, as long as nothing was said of any of them but ENDs.

    :ivar marker: the START; None once none is left.
    :ivar data: its bytes; empty once none is left.
    :ivar count: how many have not ended.
    :ivar apart: those that were open when it was taken apart.
    """

    marker: Marker | None
    data: bytes
    count: int
    pin: int
    pinned: int
    deadline: int
    started: int
    state: State = State.OPEN
    queued: int = -1
    apart: list[Lease] = []

    def is_pinned(self, pin: int) -> bool:
        """Whether the log is still needed from there for any of them."""
        apart = self.apart
        while apart and not apart[-1].is_pinned(pin):
            apart.pop()
        return self.count > 0 or bool(apart)

    def leave(self, count: int) -> int:
        """So many have ended, or are leases of their own; how many bytes are not needed any more."""
        self.count -= count
        if self.count:
            return 0
        freed = len(self.data)
        self.state, self.marker, self.data = _CLOSED, None, b""
        return freed
