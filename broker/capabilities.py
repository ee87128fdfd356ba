"""What a backend can do, as data. The core, applications and the conformance kit read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from broker.errors import Unsupported

__all__ = [
    "Capabilities",
    "ConfirmedAck",
    "LeaseMode",
    "Limits",
    "MessageCapabilities",
    "PublishCapabilities",
    "RecordCapabilities",
    "unsupported",
]


class LeaseMode(StrEnum):
    """How the consumer keeps an unsettled message."""

    NONE = "none"
    """No lease: the consumer keeps the message until it is settled or its partition is revoked."""
    CLIENT = "client"
    """The client library renews leases."""
    RENEW = "renew"
    """The core renews leases through `MessageSource.extend`."""
    FIXED = "fixed"
    """Leases last `lease_seconds` and cannot be renewed; then the broker delivers the message again."""


class ConfirmedAck(StrEnum):
    """Whether the broker confirms acks."""

    NEVER = "never"
    OPTIONAL = "optional"
    """With `confirm_acks=True`, at a cost."""
    ALWAYS = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The broker's size limits in bytes; text counts in UTF-8. None is no limit."""

    body: int | None = None
    key: int | None = None
    id: int | None = None
    attribute_key: int | None = None
    attribute_value: int | None = None
    attributes: int | None = None
    """The number of attributes of a message."""
    message: int | None = None
    """Body, key and attributes together; the id does not count."""
    letter_bytes: int = 0
    """Extra bytes that a dead letter may have, so that the largest message still has room for reason and origin."""
    letter_attributes: int = 0
    """Extra attributes that a dead letter may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishCapabilities:
    """Capabilities of publishing."""

    limits: Limits = Limits()
    deduplication: bool = False
    """The broker drops a second message with the same id within its deduplication window."""
    reports_duplicates: bool = False
    """`Receipt.duplicate` is True for a message that the broker dropped as a duplicate."""
    deliver_at: bool = False
    ttl: bool = False
    tombstones: bool = False
    """Consumers can tell `data=None` from `data=b""`."""
    partitions: bool = False
    """`OutboundMessage.partition` selects the partition, otherwise the key does. `bus.topic(name, partitioner=...)`
    works, too."""
    partition_of: bool = False
    """`bus.partition_of` tells where a message with a key goes, also with `partitioner="broker"`."""
    transactions: bool = False
    tables: bool = False
    """`bus.table_writer` writes rows and a checkpoint to a partition of a compacted topic, and fences older writers."""
    atomic_tables: bool = False
    """The rows of such a write and its checkpoint become visible together, or none of them."""
    table_rows: int | None = None
    """The most rows of one such write; None is no limit."""
    ordered_calls: bool = False
    """Concurrent calls publish in the order in which they were made, per key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCapabilities:
    """Capabilities of the Message family."""

    lease: LeaseMode
    lease_seconds: float | None = None
    """Length of a lease without renewal; None without leases, or if the client library renews them."""
    confirmed_ack: ConfirmedAck = ConfirmedAck.NEVER
    native_delay: float = 0.0
    """The longest `nack(delay=)` that the broker itself can keep, in seconds; 0 is none."""
    delivery_attempt: bool = False
    """`Message.delivery_attempt` is a number, not None."""
    delivery_limit: int | None = None
    """The broker drops a message after this many deliveries; the core dead-letters the message before that."""
    release_keeps_attempt: bool = False
    """Releasing an unhandled message does not count as a delivery."""
    key_affinity: bool = False
    """The broker sends all messages of a key to one consumer at a time: order per key holds across processes."""
    shared_by_message: bool = True
    """Consumers of a subscription share single messages; otherwise whole partitions, or batches of a producer."""
    ordered_delivery: bool = False
    """A single consumer without failures receives the messages of a key in the order of publishing."""
    creates_subscriptions: bool = True
    history: bool = True
    """A new subscription with `start="earliest"` receives the messages that the topic already holds."""
    start_latest: bool = True
    start_time: bool = False
    ephemeral: bool = True
    subscription_admin: bool = True
    """`bus.admin` lists the subscriptions of a topic and reports their lag."""
    topic_patterns: bool = False
    """A consumer can read the topics that match a `TopicPattern`, new ones too."""
    retry_topics: bool = False
    """`retry_topics=` works: messages wait for their next attempt on topics."""
    acks_in_transactions: bool = False
    """`tx.ack(message)` acks a message as part of a transaction."""

    @property
    def renewable(self) -> bool:
        """Whether leases can be renewed without a limit."""
        return self.lease is not LeaseMode.FIXED

    @property
    def unlimited_deliveries(self) -> bool:
        """Whether the broker redelivers a message without a limit."""
        return self.delivery_limit is None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordCapabilities:
    """Capabilities of the Record family."""

    groups: bool = True
    rebalance: bool = False
    """Partitions move between members as members join and leave the group."""
    seek: bool = True
    start_time: bool = False
    log_reader: bool = True
    follow: bool = False
    """`bus.log.follow` reads a log without end and without a group."""
    position_at: bool = False
    read_committed: bool = False
    counting_offsets: bool = True
    """The difference of two offsets is (nearly) the number of records between them. If not, use `bus.log.spans`."""
    shared_offsets: bool = False
    """All partitions of a topic share one sequence of offsets: offsets of a single partition have gaps."""
    topic_patterns: bool = False
    """A group can read the topics that match a `TopicPattern`, new ones too."""
    group_admin: bool = False
    """`bus.admin` lists, describes, resets and deletes groups."""
    compacted_topics: bool = False
    """`ensure_topic(compacted=True)` makes a topic that keeps the last value of each key."""
    copartitioned: bool = False
    """`copartitioned=True` works: the partitions of a number of several topics belong to one member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """All capabilities of a backend; a family that it lacks is None."""

    backend: str
    publish: PublishCapabilities
    messages: MessageCapabilities | None = None
    records: RecordCapabilities | None = None
    durable: bool = False
    """Messages survive a restart of the server."""
    shared: bool = True
    """Several processes can use the same topics."""
    settings_needed: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)
    """Capabilities that are missing only because of the settings of this connection, by name such as
    `publish.partitions`, with the settings that they need. Errors quote the text."""


def unsupported(capabilities: Capabilities, what: str, capability: str) -> Unsupported:
    """The error for a feature that the backend does not have, or not with its settings."""
    needed = capabilities.settings_needed.get(capability)
    return Unsupported(
        f"{capabilities.backend} does not support {what}{f'; it takes {needed}' if needed else ''}",
        advice=f"Check bus.capabilities.{capability} first, or use another backend",
    )
