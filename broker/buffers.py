"""What a source holds in memory until it is fetched. Pure."""

from __future__ import annotations

from collections import deque
from typing import Any

from broker.messages import Message

__all__ = ["take_from"]


def take_from(buffer: deque[Message[Any]], max_messages: int, max_bytes: int) -> list[Message[Any]]:
    """Take the first messages of the buffer: at most so many and, but for one message, at most so many bytes."""
    if len(buffer) <= max_messages and sum([message.size for message in buffer]) <= max_bytes:
        everything = list(buffer)
        buffer.clear()
        return everything
    taken: list[Message[Any]] = []
    size = 0
    while buffer and len(taken) < max_messages:
        size += buffer[0].size
        if taken and size > max_bytes:
            break
        taken.append(buffer.popleft())
    return taken
