"""One message that was started and has not ended, as the tracker sees it."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from broker_kafka.queue.wire import MessageId

__all__ = ["Lease", "State"]


class State(IntEnum):
    """OPEN waits for its deadline, SENDING was due and waits for the END behind its redelivery, CLOSED is gone."""

    OPEN = 0
    SENDING = 1
    CLOSED = 2


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
