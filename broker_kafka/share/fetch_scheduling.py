"""`FetchScheduler`: which member of a share consumer fetches next, and how many members are of use. Pure.

The brokers divide a topic's partitions among the members of its group. A message that one member does not get may lie
with another; a member that waits for its last message holds up the partitions that only it has. More members have fewer
partitions each, and once there are more members than partitions several share one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Generic, TypeVar

__all__ = ["FetchScheduler"]

_ANSWER: Final = 0.05
"""Seconds within which a fetching member is likely to get messages."""
_STUCK: Final = 0.2
"""Seconds of waiting for a last message, and of fetching in vain, after which another member is of use."""
_IDLE: Final = 30.0

M = TypeVar("M")


class FetchScheduler(Generic[M]):
    """Times are seconds of one clock. `members` maps each member to its unsettled batch, or to None.

    :param max_members: the setting `share_members`.
    :param partitions: of the topic.
    """

    def __init__(self, max_members: int, partitions: int) -> None:
        self._max_members: Final = max_members
        self._partitions: Final = partitions
        self._fetching: dict[M, float] = {}
        self._used: dict[M, float] = {}
        """When each member last got messages, or was added."""

    def add(self, member: M, now: float) -> None:
        self._used[member] = now

    def received(self, member: M, now: float) -> None:
        self._fetching.pop(member, None)
        self._used[member] = now

    def remove(self, member: M) -> None:
        self._fetching.pop(member, None)
        self._used.pop(member, None)

    def next_member(self, members: Mapping[M, object], now: float) -> M | None:
        """The member that fetches now: the free one that got messages the longest ago.

        None if no member is free, or a fetch that has just begun may still get messages.
        """
        free = self._free(members)
        if not free or any(now - at < _ANSWER for at in self._fetching.values()):
            return None
        member = min(free, key=self._used.__getitem__)
        self._fetching[member] = now
        return member

    def needs_another(self, members: Mapping[M, object], now: float) -> bool:
        """Whether one more member is of use: no member is free or gets messages."""
        if len(members) >= self._max_members or self._free(members):
            return False
        if not self._fetching:
            return True
        return all(now - at >= _STUCK for at in self._fetching.values()) and len(members) < self._useful(members, now)

    def recheck_after(self, members: Mapping[M, object]) -> float | None:
        """Seconds after which to check again without a message; None if that changes nothing."""
        if self._free(members):
            return _ANSWER
        return None if len(self._fetching) == len(members) else _STUCK

    def idle_member(self, members: Mapping[M, object], now: float) -> M | None:
        """A member that was not needed for long, and is not now."""
        if len(members) <= self._useful(members, now):
            return None
        idle = (member for member, batch in members.items() if batch is None and now - self._used[member] > _IDLE)
        return min(idle, key=self._used.__getitem__, default=None)

    def _free(self, members: Mapping[M, object]) -> list[M]:
        return [member for member, batch in members.items() if batch is None and member not in self._fetching]

    def _useful(self, members: Mapping[M, object], now: float) -> int:
        """How many members read all partitions, not counting those that wait for their last message."""
        stuck = sum(batch is not None and now - self._used[member] >= _STUCK for member, batch in members.items())
        return min(self._max_members, (stuck + 1) * self._partitions) if stuck else 1
