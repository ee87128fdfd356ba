"""Which records and leases are a queue's, in topics that it shares with others. Pure."""

from __future__ import annotations

from typing import NamedTuple

from broker_kafka.queue.lease import Lease
from broker_kafka.queue.redelivery import QUEUE
from broker_kafka.queue.wire import Headers, read_content
from broker_kafka.settings import KafkaSettings

__all__ = ["OwnRecords"]


class OwnRecords(NamedTuple):
    """:ivar queue: the subscription.
    :ivar key: of its records in topics that it shares with other queues; None if all of a topic are its own.
    """

    queue: str
    key: bytes | None

    @classmethod
    def of(cls, queue: str, settings: KafkaSettings) -> OwnRecords:
        return cls(queue, None if settings.queue_id is None else settings.queue_id.encode())

    def has(self, key: bytes | None, headers: Headers) -> bool:
        """Whether a record is for this queue: others' redeliveries are not."""
        if self.key is not None and key != self.key:
            return False
        for name, value in headers:
            if name == QUEUE:
                return value == self.queue.encode()
        return True

    def has_lease(self, lease: Lease) -> bool:
        """Whether it is the queue's; V1's markers name none, and tell the key of the queue."""
        if lease.id.queue:
            return lease.id.queue == self.queue
        return self.key is None or read_content(lease.data).key == self.key
