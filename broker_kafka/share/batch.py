"""`Batch`: what one member of a share group has got and not settled. Used on the loop."""

from __future__ import annotations

import asyncio
from typing import Any

from broker import Message
from broker_kafka.share.member import ShareMember

__all__ = ["Batch", "place_of"]


class Batch:
    """The lease of its messages."""

    __slots__ = ("deadline", "member", "open", "timers")

    def __init__(self, member: ShareMember, deadline: float) -> None:
        self.member = member
        self.deadline = deadline
        """The `lease_time` at which the lock may end."""
        self.open: dict[tuple[int, int], Message[Any]] = {}
        self.timers: list[asyncio.TimerHandle] = []

    def stop_timers(self) -> None:
        for timer in self.timers:
            timer.cancel()


def place_of(message: Message[Any]) -> tuple[int, int]:
    """Partition and offset."""
    return message.raw.partition(), message.raw.offset()
