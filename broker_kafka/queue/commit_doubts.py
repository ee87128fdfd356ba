"""`CommitDoubts`: what was started of partitions that went while it was committed, and whether it was.

Who has the partition next reads from the committed position. Where that is the one this process asked for, nobody reads
again what lies before it: its leases end, and it comes again behind what follows it in the log.
*Concurrency.* On the loop. *Failure.* What cannot be looked up stays in doubt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from broker.spi import TopicPartition
from broker_kafka.offsets.protocol import StoredOffset
from broker_kafka.queue.starting import Taken
from broker_kafka.records import KafkaRecordSource

__all__ = ["CommitDoubts"]


class CommitDoubts:
    """Made without I/O."""

    def __init__(self) -> None:
        self._asked: dict[TopicPartition, StoredOffset] = {}
        """The last that was to be committed of each partition, with a text that tells who did."""
        self._left: dict[TopicPartition, list[Taken]] = {}

    def asked(self, positions: Mapping[TopicPartition, int], text: str) -> None:
        """These are being committed."""
        self._asked |= {place: StoredOffset(at, text) for place, at in positions.items()}

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
            asked = self._asked[place]
            left = self._left.pop(place)
            if stored[place] == asked:
                found += [taken for taken in left if taken.offset < asked.offset]
        return found
