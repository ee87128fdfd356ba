"""When offsets are committed: after so many markers, or so long after the first that is not committed. Pure."""

from __future__ import annotations

from typing import Final

__all__ = ["CommitSchedule"]


class CommitSchedule:
    """:param markers: how many markers at most are read again after a crash, beside those that are open.
    :param after_ms: how long a marker waits for that at most.
    """

    def __init__(self, *, markers: int = 10_000, after_ms: int = 1_000) -> None:
        self._markers: Final = markers
        self._after: Final = after_ms
        self._waiting = 0
        self._since = 0

    def read(self, count: int, at: int) -> None:
        """So many markers were read at this local time."""
        if count and not self._waiting:
            self._since = at
        self._waiting += count

    def is_due(self, at: int) -> bool:
        """Whether to commit now. A revocation and a close commit at once, without asking."""
        return self._waiting >= self._markers or (self._waiting > 0 and at - self._since >= self._after)

    def committed(self) -> None:
        """All was offered for a commit; what failed is offered again with the next."""
        self._waiting = 0
