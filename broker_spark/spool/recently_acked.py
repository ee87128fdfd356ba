"""What was written of late, for messages that come again although they were acked.

A broker that was killed may have forgotten acks that it had confirmed, and even that it ever delivered the message.
One thread at a time.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

__all__ = ["REMEMBERED", "Recent"]

REMEMBERED: Final = 1_000_000
"""Rows; their identities take about 40 bytes each."""


class Recent:
    """The identities of the last million rows, at least of the last segment."""

    def __init__(self) -> None:
        self._chunks: deque[Any] = deque()
        self._rows = 0

    def add(self, identities: Any) -> None:
        """Remember a segment's, an array of pyarrow."""
        self._chunks.append(identities)
        self._rows += len(identities)
        while self._rows > REMEMBERED and len(self._chunks) > 1:
            self._rows -= len(self._chunks.popleft())

    def known(self, identities: Any) -> set[str]:
        """Which of these are remembered. Some milliseconds for each segment: for those that may have come before."""
        from pyarrow import compute

        arrow: Any = compute
        found: set[str] = set()
        for chunk in self._chunks:
            there = arrow.is_in(identities, value_set=chunk)
            if arrow.any(there).as_py():
                found.update(arrow.filter(identities, there).to_pylist())
        return found
