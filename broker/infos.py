"""What brokers say of topics and subscriptions: answers of the admin, for every backend; and who answers in short."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

__all__ = ["Lag", "SubscriptionInfo", "TellsIdentity", "TopicInfo"]


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
    """

    waiting: int
    unsettled: int | None = None
    partitions: Mapping[int, int] = field(default_factory=dict[int, int])


@runtime_checkable
class TellsIdentity(Protocol):
    """Provisioning that asks the broker less for a topic's identity than for its description; optional."""

    async def topic_identity(self, name: str) -> str | None:
        """What `describe_topic` has as `identity`. :raises TopicNotFound: there is none."""
        ...
