"""What was taken and cannot be started, because its START is too large for the marker topic; pure.

It waits, with what came behind it in its partition, and its first message is tried again ever more seldom. Nothing of
it is committed, so that whoever gets the partition next reads it again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from broker.spi import TopicPartition
from broker_kafka.queue.starting import Taken

__all__ = ["SetAside"]

_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0


class _Waiting:
    __slots__ = ("again_at", "pause", "taken")

    def __init__(self) -> None:
        self.taken: list[Taken] = []
        self.pause = _FIRST_PAUSE
        self.again_at = 0.0


class SetAside:
    """By partition, in the order of its log."""

    def __init__(self) -> None:
        self._waiting: dict[TopicPartition, _Waiting] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, place: object) -> bool:
        return place in self._waiting

    def add(self, place: TopicPartition, taken: list[Taken], now: float) -> bool:
        """These wait, before what waits of the partition already; whether nothing did.

        :param now: a time in seconds, as for `due`.
        """
        new = place not in self._waiting
        waiting = self._waiting.setdefault(place, _Waiting())
        waiting.taken = taken + waiting.taken
        waiting.again_at = now + waiting.pause
        waiting.pause = min(_LONGEST_PAUSE, 2 * waiting.pause)
        return new

    def due(self, now: float) -> list[Taken]:
        """Take the first message of each partition that is to be tried again; it is either added again, or `free`."""
        due = [waiting for waiting in self._waiting.values() if waiting.taken and waiting.again_at <= now]
        return [waiting.taken.pop(0) for waiting in due]

    def free(self, place: TopicPartition) -> list[Taken]:
        """The rest of a partition whose first message was started, which waits no more."""
        waiting = self._waiting.pop(place, None)
        return [] if waiting is None else waiting.taken

    def forget(self, places: Collection[TopicPartition]) -> list[TopicPartition]:
        """These partitions are not ours any more; those of them of which something waited."""
        return [place for place in places if self._waiting.pop(place, None) is not None]
