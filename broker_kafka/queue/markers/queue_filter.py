"""Which records and leases are a queue's, in topics that it shares with others. Pure."""

from __future__ import annotations

from typing import NamedTuple

from broker_kafka.codec.headers import Headers
from broker_kafka.queue.markers import commit_text
from broker_kafka.queue.markers.lease import Lease
from broker_kafka.queue.markers.marker_topic import marker_topic_name
from broker_kafka.queue.markers.redelivery import QUEUE
from broker_kafka.queue.markers.wire import read_content
from broker_kafka.settings import KafkaSettings

__all__ = ["QueueFilter"]


class QueueFilter(NamedTuple):
    """:ivar queue: the subscription.
    :ivar key: the setting `queue_id`, which is the key of the queue's records; None if every record of a topic counts.
    :ivar marker_topic: where its leases are.
    """

    queue: str
    key: bytes | None
    marker_topic: str = ""

    @classmethod
    def of(cls, queue: str, settings: KafkaSettings) -> QueueFilter:
        """The filter of a subscription."""
        key = None if settings.queue_id is None else settings.queue_id.encode()
        return cls(queue, key, marker_topic_name(queue, settings.marker_topic))

    @property
    def key_mark(self) -> str:
        """The mark of the key in commit texts; empty without a key."""
        return "" if self.key is None else commit_text.key_mark(self.key)

    @property
    def topic_mark(self) -> str:
        """The mark of the marker topic in commit texts."""
        return commit_text.topic_mark(self.marker_topic)

    def matches(self, key: bytes | None, headers: Headers) -> bool:
        """Whether a record is for this queue: redeliveries of other queues are not."""
        if self.key is not None and key != self.key:
            return False
        for name, value in headers:
            if name == QUEUE:
                return value == self.queue.encode()
        return True

    def matches_lease(self, lease: Lease) -> bool:
        """Whether a lease is the queue's; V1 markers name no queue, and carry its key."""
        if lease.id.queue and lease.id.queue != self.queue:
            return False
        return self.key is None or read_content(lease.data).key == self.key
