"""Reads and writes positions of a group as an operator does, without the SDK. Blocking."""

from __future__ import annotations

from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

from tests.servers.kafka_client import RawAdmin, wait_for

__all__ = ["store", "stored"]


def stored(admin: RawAdmin, group: str, topic: str) -> TopicPartition:
    """What the broker has of the group's position on partition 0."""
    # Not by the admin client: librdkafka ends the process when a coordinator that has moved answers that request.
    return admin.committed(group, topic)


def store(admin: RawAdmin, group: str, topic: str, offset: int, metadata: str | None = None) -> None:
    """Set the position of a group without members on partition 0."""

    def attempt() -> bool:
        place = TopicPartition(topic, 0, offset) if metadata is None else TopicPartition(topic, 0, offset, metadata)
        request = ConsumerGroupTopicPartitions(group, [place])
        (future,) = admin.client.alter_consumer_group_offsets([request]).values()
        # A coordinator that has just been started loads for a moment.
        return future.result(10).topic_partitions[0].error is None

    wait_for(attempt)
