"""What brokers say of topics, subscriptions and logs, for every backend; and who answers in short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

__all__ = ["Lag", "Span", "SubscriptionInfo", "TellsIdentity", "TellsSpans", "TopicInfo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicInfo:
    """What the broker says of a topic.

    :ivar identity: another one after the topic was deleted and made again, whose offsets mean other records; None
        where the broker does not tell.
    """

    name: str
    partitions: int | None = None
    messages: int | None = None
    bytes: int | None = None
    identity: str | None = None
    native: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionInfo:
    """What the broker says of a subscription or group."""

    topic: str
    name: str
    native: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How far behind a subscription is.

    :ivar waiting: messages, or records, not delivered yet.
    :ivar unsettled: delivered and not settled; None where the broker does not tell.
    :ivar partitions: records behind per partition, for a record group.
    :ivar current: whether it is as of now; else the broker tells what was some minutes ago.
    """

    waiting: int
    unsettled: int | None = None
    partitions: Mapping[int, int] = field(default_factory=dict[int, int])
    current: bool = True


@runtime_checkable
class TellsIdentity(Protocol):
    """Provisioning that asks the broker less for a topic's identity than for its description; optional."""

    async def topic_identity(self, name: str) -> str | None:
        """What `describe_topic` has as `identity`. :raises TopicNotFound: there is none."""
        ...


class Span(NamedTuple):
    """Positions from `start` to `stop`, half-open, in which records lie as batches: at each whole multiple of `step`
    begins one, of at most `step` records."""

    start: int
    stop: int
    step: int


@runtime_checkable
class TellsSpans(Protocol):
    """A log reader whose offsets do not count records; optional."""

    async def spans(self, topic: str, partition: int, start: int, stop: int) -> Sequence[Span]:
        """Where between two positions records lie now, rising; what retention removed is left out."""
        ...
