"""`FetchScheduler`: which members of a share consumer are asked for a batch, how many are of use, and which are not. Pure.

The brokers divide a topic's partitions among the members of its group. So what one that was asked does not get may lie
with another, and a member that waits for its last message holds up the partitions that nobody else has; of more members
each has fewer, and from as many on as there are partitions several have the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Generic, TypeVar

__all__ = ["FetchScheduler"]

_ANSWER: Final = 0.05
"""Seconds in which one that is asked may be about to get something."""
_STUCK: Final = 0.2
"""Seconds for which one waits for its last message, and another is asked in vain, until one more is of use."""
_IDLE: Final = 30.0

M = TypeVar("M")


class FetchScheduler(Generic[M]):
    """Times are of one clock, in seconds; members are told with the batch that they wait for, or None.

    :param most: the most members.
    :param partitions: of the topic.
    """

    def __init__(self, most: int, partitions: int) -> None:
        self._most: Final = most
        self._partitions: Final = partitions
        self._asked: dict[M, float] = {}
        self._used: dict[M, float] = {}
        """When each got something, or was added."""

    def added(self, member: M, now: float) -> None:
        self._used[member] = now

    def arrived(self, member: M, now: float) -> None:
        self._asked.pop(member, None)
        self._used[member] = now

    def gone(self, member: M) -> None:
        self._asked.pop(member, None)
        self._used.pop(member, None)

    def next(self, members: Mapping[M, object], now: float) -> M | None:
        """Whom to ask now: the free one that got something the longest ago, unless another may be about to answer."""
        free = self._not_asked(members)
        if not free or any(now - at < _ANSWER for at in self._asked.values()):
            return None
        member = min(free, key=self._used.__getitem__)
        self._asked[member] = now
        return member

    def needs_another(self, members: Mapping[M, object], now: float) -> bool:
        """Whether one more member is of use: none is free, or those that are have been asked in vain."""
        if len(members) >= self._most or self._not_asked(members):
            return False
        if not self._asked:
            return True
        return all(now - at >= _STUCK for at in self._asked.values()) and len(members) < self._useful(members, now)

    def look_after(self, members: Mapping[M, object]) -> float | None:
        """Seconds after which to look again though nothing has come; None if that changes nothing."""
        if self._not_asked(members):
            return _ANSWER
        return None if len(self._asked) == len(members) else _STUCK

    def idle(self, members: Mapping[M, object], now: float) -> M | None:
        """One that was not needed for long, and is not now."""
        if len(members) <= self._useful(members, now):
            return None
        idle = (member for member, batch in members.items() if batch is None and now - self._used[member] > _IDLE)
        return min(idle, key=self._used.__getitem__, default=None)

    def _not_asked(self, members: Mapping[M, object]) -> list[M]:
        return [member for member, batch in members.items() if batch is None and member not in self._asked]

    def _useful(self, members: Mapping[M, object], now: float) -> int:
        """How many members have all partitions read beside those that wait for their last message."""
        stuck = sum(batch is not None and now - self._used[member] >= _STUCK for member, batch in members.items())
        return min(self._most, (stuck + 1) * self._partitions) if stuck else 1
