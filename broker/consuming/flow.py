"""Flow control: how many messages and bytes of one source may be unsettled at once. Used on one event loop."""

from __future__ import annotations

__all__ = ["Flow"]


class Flow:
    """Counts what was fetched and is not settled, buffered messages included.

    The number of messages is never exceeded; the bytes may be by one message, whose size is not known before
    it is fetched.
    """

    __slots__ = ("bytes", "count", "max_bytes", "max_messages")

    def __init__(self, max_messages: int, max_bytes: int) -> None:
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
