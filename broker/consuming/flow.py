"""Flow control: how many messages and bytes of one source may be unsettled at once. Used on one event loop."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from broker.hooks import FlowBlocked
from broker.messages import Message, SettleState

__all__ = ["Flow", "blocked"]

logger = logging.getLogger("broker")

_SHOWN = 5


class Flow:
    """Counts what was fetched and is not settled, buffered messages included; implements `HeldMessages`.

    The number of messages is never exceeded; the bytes may be by one message, whose size is not known before
    it is fetched.
    """

    __slots__ = ("bytes", "count", "max_bytes", "max_messages", "topic")

    def __init__(self, topic: str, max_messages: int, max_bytes: int) -> None:
        self.topic = topic
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.count = 0
        self.bytes = 0

    @property
    def room(self) -> int:
        """How many more messages may be fetched now."""
        return self.max_messages - self.count if self.bytes < self.max_bytes else 0

    @property
    def byte_room(self) -> int:
        return self.max_bytes - self.bytes

    def taken(self, count: int, size: int) -> None:
        """So many were fetched."""
        self.count += count
        self.bytes += size

    def freed(self, count: int, size: int) -> None:
        """So many are settled, or lost."""
        self.count -= count
        self.bytes -= size


def blocked(topic: str, held: Iterable[Message[Any]], flow: Flow, seconds: float) -> FlowBlocked | None:
    """Nothing was fetched for so long: who is to blame, if messages were handed over and nobody works on them."""
    # Buffered messages have not been given to anybody, so nobody forgot them.
    forgotten = (m for m in held if m.lease_ends is not None and m.state is SettleState.OPEN and not m.in_use)
    oldest = [message for message, _ in zip(forgotten, range(_SHOWN), strict=False)]
    if not oldest:
        return None
    logger.warning(
        "Nothing is fetched from %r for %.0f s: %d messages are unsettled; the oldest are %s",
        topic,
        seconds,
        flow.count,
        ", ".join(repr(message.id) for message in oldest),
    )
    return FlowBlocked(outstanding=flow.count, oldest=oldest, seconds=seconds)
