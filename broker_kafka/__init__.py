"""Apache Kafka for `broker`: `kafka://host:9092,host:9092`."""

from __future__ import annotations

from broker_kafka.settings import KafkaSettings

__all__ = ["KafkaSettings"]
