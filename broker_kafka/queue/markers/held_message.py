"""A message that this process holds: which one, where its markers lie, and until when it is ours."""

from __future__ import annotations

import msgspec

from broker_kafka.queue.markers.wire import MessageId

__all__ = ["Hold"]


class Hold(msgspec.Struct, eq=False, gc=False):
    """:ivar id: the message.
    :ivar partition: of the marker topic, chosen once: all markers of a message lie in one, whatever the topic grows to.
    :ivar attempt: how many deliveries count, this one included; more than its START tells once it was `kept`.
    :ivar until: the `lease_time` at which the lease is over as far as is known here: its last START or KEEPALIVE that
        is on the brokers was begun a lease before. A tracker counts from when it was written, which is later.
    :ivar due: the `lease_time` before which it is not to be delivered again; 0 while nobody waits for that.
    :ivar kept: whether it was delivered from memory, or waits for that: its KEEPALIVEs tell how often.
    :ivar ended: whether an END or a release was written, so that nothing more is to be said of it.
    :ivar end_sent: whether an END was ever given to the producer, and so may be on the brokers.
    """

    id: MessageId
    partition: int
    attempt: int
    until: float = 0.0
    due: float = 0.0
    kept: bool = False
    ended: bool = False
    end_sent: bool = False
