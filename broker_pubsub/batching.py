"""Cuts a batch into requests that the service takes: so many messages and bytes, and one ordering key each. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

__all__ = ["MAX_MESSAGES", "MAX_REQUEST", "chunks", "runs"]

MAX_MESSAGES: Final = 1000
MAX_REQUEST: Final = 10_000_000
"""Bytes of a publish request."""
_OVERHEAD: Final = 512
"""Bytes of a request besides its messages: the topic's name."""
_PER_MESSAGE: Final = 16
"""Most bytes that one message's place in the list takes."""


def runs(encoded: Sequence[Any], indexes: Iterable[int]) -> dict[str, list[int]]:
    """Which of these messages have which ordering key; the empty one is none."""
    found: dict[str, list[int]] = {}
    for index in indexes:
        found.setdefault(encoded[index].ordering_key, []).append(index)
    return found


def chunks(encoded: Sequence[Any], indexes: Sequence[int]) -> list[Sequence[int]]:
    """The indexes of each request, in order; a message that fills one goes alone."""
    sizes = [encoded[index].ByteSize() for index in indexes]
    if len(indexes) <= MAX_MESSAGES and sum(sizes) <= MAX_REQUEST - _OVERHEAD - _PER_MESSAGE * len(indexes):
        return [indexes]
    found: list[Sequence[int]] = []
    begin = used = 0
    for position, size in enumerate(sizes):
        size += _PER_MESSAGE
        if position > begin and (used + size > MAX_REQUEST - _OVERHEAD or position - begin >= MAX_MESSAGES):
            found.append(indexes[begin:position])
            begin, used = position, 0
        used += size
    found.append(indexes[begin:])
    return found
