"""`UnknownCommits`: records of partitions that were lost while their commit was in flight, and whether it succeeded.

The next owner of a partition reads from the committed position. If that is one this process sent, no consumer reads the
records before it: their leases end, and they are redelivered behind what follows them in the log. Of several commits
without an answer any may have succeeded, a newer one too: an older position is sent after it to confirm ownership.

*Concurrency.* On the loop. *Failure.* What cannot be looked up stays unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from broker import TopicPartition
from broker_kafka.offsets.protocol import StoredOffset
from broker_kafka.queue.consumer.start_builder import FetchedRecord
from broker_kafka.records import KafkaRecordSource

__all__ = ["UnknownCommits"]


class UnknownCommits:
    """The commits of one queue client that may have succeeded. Creating one does no I/O."""

    def __init__(self) -> None:
        self._sent: dict[TopicPartition, list[StoredOffset]] = {}
        """What may be committed of each partition, in the order of sending, with the commit text of this process."""
        self._removed: dict[TopicPartition, list[FetchedRecord]] = {}

    def sent(self, positions: Mapping[TopicPartition, int], text: str) -> None:
        """These are being committed."""
        for place, at in positions.items():
            sent = self._sent.setdefault(place, [])
            position = StoredOffset(at, text)
            if position in sent:
                sent.remove(position)
            sent.append(position)

    def succeeded(self, positions: Mapping[TopicPartition, int], text: str) -> None:
        """These were committed, or others that were sent later."""
        for place, at in positions.items():
            sent = self._sent[place]
            position = StoredOffset(at, text)
            if position in sent:
                del sent[: sent.index(position)]

    def removed(self, place: TopicPartition, records: Sequence[FetchedRecord]) -> None:
        """A partition was lost or revoked, with records that are not known to be committed."""
        if records and place in self._sent:
            # The partition may be assigned and lost again before anything is looked up.
            self._removed.setdefault(place, []).extend(records)

    async def resolve(self, member: KafkaRecordSource, places: Collection[TopicPartition]) -> list[FetchedRecord]:
        """Records of removed partitions among `places` whose commit succeeded after all.

        :raises BrokerError: the group's positions cannot be read.
        """
        back = [place for place in self._removed if place in places]
        if not back:
            return []
        stored = await member.stored(back)
        found: list[FetchedRecord] = []
        for place in back:
            removed = self._removed.pop(place)
            position = stored[place]
            if position is not None and position in self._sent[place]:
                found += [record for record in removed if record.offset < position.offset]
        return found
