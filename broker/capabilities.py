"""What a backend can do, as data: asked by the core at open time, by applications, and by the conformance kit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "Capabilities",
    "ConfirmedAck",
    "LeaseMode",
    "Limits",
    "MessageCapabilities",
    "PublishCapabilities",
    "RecordCapabilities",
]


class LeaseMode(StrEnum):
    """Who keeps an unsettled message ours."""

    NONE = "none"
    """There is no lease: it is ours until settled or until its partition is taken away."""
    CLIENT = "client"
    """The client library renews by itself."""
    RENEW = "renew"
    """The core renews through `MessageSource.extend`."""
    FIXED = "fixed"
    """It is ours for `lease_seconds`, which nobody can renew: what takes longer is lost, and comes again."""


class ConfirmedAck(StrEnum):
    """Whether the broker tells if an ack took effect."""

    NEVER = "never"
    OPTIONAL = "optional"
    """It can be asked for, at a price: `confirm_acks=True`."""
    ALWAYS = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The sizes that the broker takes, in bytes of UTF-8 where text is meant; None is no limit."""

    body: int | None = None
    key: int | None = None
    id: int | None = None
    attribute_key: int | None = None
    attribute_value: int | None = None
    attributes: int | None = None
    """How many attributes a message may have."""
    message: int | None = None
    """Body, key and attributes together; there is room for the id besides."""
    letter_bytes: int = 0
    """So many bytes more may a dead letter have, …"""
    letter_attributes: int = 0
    """… and so many attributes, so that the largest message can still tell why and whence it came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishCapabilities:
    """What publishing can do."""

    limits: Limits = Limits()
    deduplication: bool = False
    """A second message of the same id within the broker's window is dropped."""
    tells_duplicates: bool = False
    """`Receipt.duplicate` says of a message that it was dropped as a second one; never so where nothing is dropped."""
    deliver_at: bool = False
    ttl: bool = False
    tombstones: bool = False
    """`data=None` differs from `data=b""` when it comes back."""
    partitions: bool = False
    """`OutboundMessage.partition` is honoured, and keys choose a partition."""
    transactions: bool = False
    ordered_calls: bool = False
    """Calls that run at once are carried out in the order in which they were made, per key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCapabilities:
    """What the Message family can do."""

    lease: LeaseMode
    lease_seconds: float | None = None
    """How long a message is ours without renewal, where the lease is renewed or cannot be."""
    confirmed_ack: ConfirmedAck = ConfirmedAck.NEVER
    native_delay: float = 0.0
    """The longest `nack(delay=)` that the broker keeps by itself, in seconds; 0 is none."""
    delivery_attempt: bool = False
    """`Message.delivery_attempt` is a number, not None."""
    delivery_limit: int | None = None
    """After so many deliveries the broker drops a message, whatever became of them; the core dead-letters it before."""
    release_keeps_attempt: bool = False
    """Giving a message back unhandled does not count as a delivery."""
    key_affinity: bool = False
    """The broker sends all messages of a key to one consumer at a time, so order per key holds across processes."""
    shared_by_message: bool = True
    """Consumers of a subscription share its messages one by one; else larger parts: whole partitions, each with one
    consumer, or what a producer has sent together."""
    ordered_delivery: bool = False
    """A single consumer without failures gets messages of one key in the order they were published."""
    creates_subscriptions: bool = True
    history: bool = True
    """A new subscription can begin before it was made: `start="earliest"` gets what the topic holds."""
    start_latest: bool = True
    start_time: bool = False
    ephemeral: bool = True
    subscription_admin: bool = True
    """`bus.admin` lists the subscriptions of a topic, and tells how far each of them is."""
    retry_topics: bool = False
    """`retry_topics=` is honoured: messages wait for their next try on topics of their own."""
    acks_in_transactions: bool = False
    """`tx.ack(message)` acks messages in the transaction of what was made from them."""

    @property
    def renewable(self) -> bool:
        """Whether a message can stay ours for as long as it takes."""
        return self.lease is not LeaseMode.FIXED

    @property
    def unlimited_deliveries(self) -> bool:
        """Whether the broker delivers a message as often as it takes."""
        return self.delivery_limit is None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordCapabilities:
    """What the Record family can do."""

    groups: bool = True
    rebalance: bool = False
    """Partitions move between the members of a group as these come and go."""
    seek: bool = True
    start_time: bool = False
    log_reader: bool = True
    position_at: bool = False
    read_committed: bool = False
    counting_offsets: bool = True
    """The distance of two offsets of a partition is how many records can be between them, and rarely more. Where it is
    not, `bus.log.spans` tells where records lie."""
    shared_offsets: bool = False
    """Offsets grow over all partitions of a topic, so within one they have gaps, and a position is one in all."""
    group_admin: bool = False
    """`bus.admin` lists, describes, resets and deletes groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """All that can be asked of one backend; a family that it lacks is None."""

    backend: str
    publish: PublishCapabilities
    messages: MessageCapabilities | None = None
    records: RecordCapabilities | None = None
    durable: bool = False
    """What was published survives a restart of the server."""
    shared: bool = True
    """Several processes can use the same topics."""
    settings_needed: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)
    """Of what is missing only because of settings of this connection, by its name such as `publish.partitions`: the
    settings that it takes, and what they are here. An error that refuses it says so."""
