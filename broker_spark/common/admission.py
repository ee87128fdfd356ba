"""How far one micro-batch goes. Pure.

Rows are counted by offsets, of which there are at least as many, so a batch never has more rows than it may. Where the
partitions of a topic share their offsets, all of them are cut at one offset, which counts each row once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

__all__ = ["PartitionOffsets", "admit", "backlog", "covers"]

PartitionOffsets = Mapping[str, Mapping[int, int]]
"""An offset by topic and partition."""

K = TypeVar("K", bound=Hashable)


def backlog(start: PartitionOffsets, end: PartitionOffsets, *, shared: bool) -> dict[str, int]:
    """The most rows that each topic can have between these."""
    return {topic: _span(start[topic], ends, shared) for topic, ends in end.items()}


def covers(start: PartitionOffsets, end: PartitionOffsets) -> bool:
    """Whether there is a start for each end, in the same topics."""
    return start.keys() == end.keys() and all(ends.keys() <= start[topic].keys() for topic, ends in end.items())


def admit(
    start: PartitionOffsets, end: PartitionOffsets, most: int | None, *, shared: bool
) -> dict[str, dict[int, int]]:
    """How far to read from `start` towards `end`: at most `most` rows; None reads all.

    Each topic and partition gets a share in proportion to its backlog. The smallest backlogs get the remainder, so that
    they do not wait for a large one.
    """
    waiting = backlog(start, end, shared=shared)
    if most is None or sum(waiting.values()) <= most:
        return {topic: dict(ends) for topic, ends in end.items()}
    shares = _share(waiting, most)
    found: dict[str, dict[int, int]] = {}
    for topic, ends in end.items():
        starts = start[topic]
        if shared:
            cut = min((starts[each] for each in ends if starts[each] < ends[each]), default=0) + shares[topic]
            found[topic] = {each: max(starts[each], min(cut, place)) for each, place in ends.items()}
        else:
            parts = _share({each: place - starts[each] for each, place in ends.items()}, shares[topic])
            found[topic] = {each: starts[each] + parts[each] for each in ends}
    return found


def _span(starts: Mapping[int, int], ends: Mapping[int, int], shared: bool) -> int:
    behind = [(starts[each], place) for each, place in ends.items() if starts[each] < place]
    if not behind:
        return 0
    if shared:
        return max(place for _, place in behind) - min(place for place, _ in behind)
    return sum(place - first for first, place in behind)


def _share(waiting: Mapping[K, int], most: int) -> dict[K, int]:
    """Integer shares of `most`, in proportion to the backlogs, and at most the backlog."""
    total = sum(waiting.values())
    if total <= most:
        return dict(waiting)
    found = {name: most * number // total for name, number in waiting.items()}
    left = most - sum(found.values())
    for name in sorted(waiting, key=lambda name: waiting[name]):
        if left > 0 and found[name] < waiting[name]:
            found[name] += 1
            left -= 1
    return found
