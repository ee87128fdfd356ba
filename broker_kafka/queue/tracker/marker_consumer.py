"""`MarkerConsumer`: the thread that polls a member of the trackers' group, and reports where a partition ends.

The end that the client reports lies behind records that it does not return, those that end transactions. Without it a
tracker would never know that it has read everything.
"""

from __future__ import annotations

from typing import Protocol

from confluent_kafka import KafkaError
from confluent_kafka import Message as NativeRecord

from broker import TopicPartition
from broker_kafka.client.consumer import ConsumerHost, ConsumerThread
from broker_kafka.cluster.connection import Connection

__all__ = ["MarkerConsumer", "MarkerHost"]

_BATCH = 2_000
_REVOKE_SECONDS = 10.0


class MarkerHost(ConsumerHost, Protocol):
    """The owner of the thread; called on the loop."""

    def reached(self, partition: TopicPartition, position: int) -> None:
        """All records below this position were handed over, or are not visible."""
        ...


class MarkerConsumer(ConsumerThread):
    """:param group: of the trackers."""

    def __init__(self, connection: Connection, group: str, host: MarkerHost) -> None:
        config = connection.client_config("consumer") | {
            "group.id": group,
            # A START of an aborted transaction leases nothing.
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
        }
        seconds = min(_REVOKE_SECONDS, connection.settings.max_poll_interval_ms / 2000)
        super().__init__(
            config,
            host,
            name=f"broker-kafka-{group}",
            warn=connection.warn,
            max_batch=_BATCH,
            revoke_seconds=seconds,
            # Its commands are rare and not urgent, and checking for them between short polls costs more.
            busy_seconds=0.0,
        )
        self._marker_host = host

    def _hand_over(self, messages: list[NativeRecord], sole: tuple[str, int] | None) -> None:
        super()._hand_over(messages, sole)
        for message in messages:
            error = message.error()
            if error is None or error.code() != KafkaError._PARTITION_EOF:
                continue
            topic, partition, position = message.topic(), message.partition(), message.offset()
            if topic is not None and partition is not None and position is not None:
                self._post(self._marker_host.reached, TopicPartition(topic, partition), position)
