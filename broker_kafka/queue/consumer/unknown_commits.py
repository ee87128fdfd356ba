"""`CommitDoubts`: what was started of partitions that went while it was committed, and whether it was.

Who has the partition next reads from the committed position. Where that is one this process asked for, nobody reads
again what lies before it: its leases end, and it comes again behind what follows it in the log. Of several that got no
answer any may be the one, also a newer one that an older was asked for after, to learn whose the partition is.
*Concurrency.* On the loop. *Failure.* What cannot be looked up stays in doubt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from broker import TopicPartition
from broker_kafka.offsets.protocol import StoredOffset
from broker_kafka.queue.consumer.start_builder import Taken
from broker_kafka.records import KafkaRecordSource

__all__ = ["CommitDoubts"]


class CommitDoubts:
    """Made without I/O."""

    def __init__(self) -> None:
        self._asked: dict[TopicPartition, list[StoredOffset]] = {}
        """What may be committed of each partition, in the order in which it was asked for, with a text that tells who
        did."""
        self._left: dict[TopicPartition, list[Taken]] = {}

    def asked(self, positions: Mapping[TopicPartition, int], text: str) -> None:
        """These are being committed."""
        for place, at in positions.items():
            asked = self._asked.setdefault(place, [])
            position = StoredOffset(at, text)
            if position in asked:
                asked.remove(position)
            asked.append(position)

    def answered(self, positions: Mapping[TopicPartition, int], text: str) -> None:
        """These were committed, or others that were asked for later."""
        for place, at in positions.items():
            asked = self._asked[place]
            position = StoredOffset(at, text)
            if position in asked:
                del asked[: asked.index(position)]

    def gone(self, place: TopicPartition, taken: Sequence[Taken]) -> None:
        """A partition went, with what was taken of it and is not known to be committed."""
        if taken and place in self._asked:
            # It may have come and gone again before anybody could look.
            self._left.setdefault(place, []).extend(taken)

    async def settled(self, member: KafkaRecordSource, places: Collection[TopicPartition]) -> list[Taken]:
        """What was committed here, as it turns out, of those of these partitions that have come back.

        :raises BrokerError: the group's positions cannot be read.
        """
        back = [place for place in self._left if place in places]
        if not back:
            return []
        stored = await member.stored(back)
        found: list[Taken] = []
        for place in back:
            left = self._left.pop(place)
            position = stored[place]
            if position is not None and position in self._asked[place]:
                found += [taken for taken in left if taken.offset < position.offset]
        return found
