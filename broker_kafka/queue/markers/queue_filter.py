"""Which records and leases are a queue's, in topics that it shares with others. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from broker import Unsupported
from broker.driver import REDRIVE_SUBSCRIPTION
from broker_kafka.codec.headers import Headers
from broker_kafka.queue.markers.commit_texts import mark_of_keys
from broker_kafka.queue.markers.lease import Lease
from broker_kafka.queue.markers.redelivery import QUEUE
from broker_kafka.queue.markers.wire import read_content
from broker_kafka.settings import KafkaSettings

__all__ = ["ALL_QUEUES", "OwnRecords", "refuse_one_of_many"]

ALL_QUEUES: Final = "*"
"""Given as `queue_ids`: each key names a queue."""


class _AnyName:
    """All keys that a queue can have: text, and not empty."""

    def __contains__(self, key: object, /) -> bool:
        if not isinstance(key, bytes) or not key:
            return False
        try:
            key.decode()
        except UnicodeDecodeError:
            return False
        return True


class OwnRecords(NamedTuple):
    """:ivar queue: the subscription, or the group that reads for many queues.
    :ivar keys: of its records in topics that it shares with other queues; None if all of a topic are its own.
    """

    queue: str
    keys: frozenset[bytes] | _AnyName | None

    @classmethod
    def of(cls, queue: str, settings: KafkaSettings) -> OwnRecords:
        """Those of a subscription. With `queue_group` that is one of its queues, or all of them by the group's name;
        else another group, which has no part in it."""
        group, ids = settings.queue_group, settings.queue_ids
        if group is None:
            return cls(queue, None if settings.queue_id is None else frozenset({settings.queue_id.encode()}))
        if queue == group:
            return cls(group, _AnyName() if ALL_QUEUES in ids else frozenset([name.encode() for name in ids]))
        if queue in ids or (ALL_QUEUES in ids and queue != REDRIVE_SUBSCRIPTION):
            return cls(group, frozenset({queue.encode()}))
        return cls(queue, None)

    @property
    def mark(self) -> str:
        """What stands for the keys; empty for all of a topic."""
        if self.keys is None:
            return ""
        return mark_of_keys(self.keys) if isinstance(self.keys, frozenset) else ALL_QUEUES

    def has(self, key: bytes | None, headers: Headers) -> bool:
        """Whether a record is for this queue: others' redeliveries are not."""
        if self.keys is not None and key not in self.keys:
            return False
        for name, value in headers:
            if name == QUEUE:
                return value == self.queue.encode()
        return True

    def has_lease(self, lease: Lease) -> bool:
        """Whether it is the queue's; V1's markers name none, and tell the key of the queue."""
        if lease.id.queue and lease.id.queue != self.queue:
            return False
        return self.keys is None or read_content(lease.data).key in self.keys


def refuse_one_of_many(name: str, settings: KafkaSettings, what: str) -> None:
    """:raises Unsupported: others share the positions of this subscription, so that this cannot be done to it alone."""
    group = OwnRecords.of(name, settings).queue
    if group != name:
        raise Unsupported(
            f"Queue {name!r} is not {what}: queue_group {group!r} reads for others too, by one position",
            advice=f"Name {group!r} to have it done to all of its queues",
        )
