"""The messages of one call to publish on their way, and the stream's answers to them. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from broker import BrokerError, OutboundMessage
from broker_jetstream.fastpath import Outgoing
from broker_jetstream.layout import Layout
from broker_jetstream.replies import Replies

__all__ = ["Batch", "decode_ack"]


class PublishAck(msgspec.Struct, gc=False):
    """The stream's answer to a message."""

    seq: int = 0
    duplicate: bool = False
    error: dict[str, Any] | None = None


decode_ack: Final = msgspec.json.Decoder(PublishAck).decode


class Batch:
    """The messages of one call, as they are written.

    :ivar indexes: which of the call's messages are in it; those that cannot be sent are not.
    :ivar partitions: partition of each; -1 - partition for one that waits for its time.
    :ivar written: how many of `items` were written.
    :ivar again: some were written more than once.
    :ivar left: its caller waits no more.
    :ivar errors: by position, why a message is not sent any more.
    """

    __slots__ = (
        "again",
        "errors",
        "ids",
        "indexes",
        "items",
        "layout",
        "left",
        "messages",
        "partitions",
        "replies",
        "sent_at",
        "written",
    )

    def __init__(self, messages: Sequence[OutboundMessage], ids: list[bytes], layout: Layout, replies: Replies) -> None:
        self.messages = messages
        self.ids = ids
        self.layout = layout
        self.replies = replies
        self.items: list[Outgoing] = []
        self.indexes: list[int] = []
        self.partitions: list[int] = []
        self.written = 0
        self.sent_at = 0.0
        self.again = False
        self.left = False
        self.errors: dict[int, BrokerError] = {}

    @property
    def unanswered(self) -> int:
        return 0 if self.left else self.written - (len(self.items) - self.replies.missing)

    @property
    def open(self) -> list[int]:
        """The positions that were written and have no answer, or that of nobody."""
        if self.left:
            return []
        return [position for position, answer in enumerate(self.replies.answers[: self.written]) if answer is None]

    def give_up(self, position: int, error: BrokerError) -> None:
        """Send this one no more."""
        self.errors[position] = error
        self.replies.give_up(position)

    def is_stored(self, position: int) -> bool:
        """Whether the answer says that this copy of the message is in the stream."""
        answer = self.replies.answers[position]
        if answer is None or not answer[1]:
            return False
        ack = decode_ack(answer[1])
        return ack.error is None and (self.again or not ack.duplicate)
