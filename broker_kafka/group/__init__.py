"""The group consumer of Kafka: partitions mode, patterns of topics, rebalance events, marks, stores of positions."""

from __future__ import annotations

from broker import TopicPattern
from broker_kafka.group.consumer import GroupConsumer, SavePoint
from broker_kafka.group.options import Rebalance
from broker_kafka.group.pending_offsets import OffsetStash
from broker_kafka.group.readers import PartitionStream

__all__ = ["GroupConsumer", "OffsetStash", "PartitionStream", "Rebalance", "SavePoint", "TopicPattern"]
