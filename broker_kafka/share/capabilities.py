"""What messages of a share group can do. Pure."""

from __future__ import annotations

from typing import Final

from broker.capabilities import ConfirmedAck, LeaseMode, MessageCapabilities
from broker_kafka.settings import KafkaSettings

__all__ = ["DELIVERIES", "LOCK_SECONDS", "counted_lock", "share_capabilities"]

LOCK_SECONDS: Final = 30.0
"""How long a message is a consumer's where neither the group nor the brokers say otherwise."""
DELIVERIES: Final = 10
"""How often a group is made to deliver a message; brokers take no more unless they are told to, and drop it then."""


def counted_lock(settings: KafkaSettings) -> float:
    """The seconds by which delays and retries are measured, before any group is known."""
    return settings.share_lock or LOCK_SECONDS


def share_capabilities(settings: KafkaSettings) -> MessageCapabilities:
    """Of a connection with `queue=share`."""
    return MessageCapabilities(
        lease=LeaseMode.FIXED,
        lease_seconds=counted_lock(settings),
        confirmed_ack=ConfirmedAck.OPTIONAL,
        delivery_attempt=True,
        delivery_limit=DELIVERIES,
        shared_by_message=False,
        start_latest=False,
        subscription_admin=False,
    )
