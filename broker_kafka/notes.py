"""The texts beside a member's positions: what was stored at the assignment, and how much the next may hold. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from confluent_kafka import KafkaError

from broker.errors import BrokerError
from broker.spi import Finished, TopicPartition
from broker_kafka.errors import kafka_error
from broker_kafka.offset_map import LIMIT, decode, encode
from broker_kafka.offsets.protocol import StoredOffset

__all__ = ["Notes"]


class Notes:
    """:ivar limit: the longest text; halved when a broker takes less."""

    def __init__(self) -> None:
        self.limit = LIMIT
        self._stored: dict[TopicPartition, StoredOffset] = {}
        self._fullness: dict[TopicPartition, float] = {}

    def begin(self, partition: TopicPartition, stored: StoredOffset | None) -> None:
        """An assignment begins with what is stored; None if nothing is, or if it is not to count."""
        self._fullness.pop(partition, None)
        self._stored.pop(partition, None)
        if stored is not None:
            self._stored[partition] = stored

    def begun(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The positions that were stored without a text when the assignments began."""
        found = {each: self._stored[each] for each in partitions if each in self._stored}
        return {each: stored.offset for each, stored in found.items() if not stored.metadata}

    def finished(self, partition: TopicPartition) -> Sequence[tuple[int, int]]:
        """The ranges above the position from which the assignment began."""
        stored = self._stored.get(partition)
        return [] if stored is None else decode(stored.offset, stored.metadata)

    def texts(self, positions: Mapping[TopicPartition, Finished]) -> dict[TopicPartition, tuple[int, str]]:
        """What to store of these."""
        texts: dict[TopicPartition, tuple[int, str]] = {}
        for partition, (position, ranges) in positions.items():
            text, self._fullness[partition] = encode(position, ranges, self.limit)
            texts[partition] = (position, text)
        return texts

    def fullness(self, partition: TopicPartition) -> float:
        """How much of the limit the last text would have taken."""
        return self._fullness.get(partition, 0.0)

    def is_too_large(self, error: BrokerError | None) -> bool:
        """Whether the broker refused a text for its length, and a shorter one is worth trying."""
        found = None if error is None or error.native is None else kafka_error(error.native)
        return self.limit > 0 and found is not None and found.code() == KafkaError.OFFSET_METADATA_TOO_LARGE
