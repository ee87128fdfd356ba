"""What the Message family can do with each engine of queues. Pure."""

from __future__ import annotations

from broker.capabilities import Capabilities, ConfirmedAck, LeaseMode, MessageCapabilities
from broker.reading.as_messages import message_capabilities
from broker_kafka.scheduling import LONGEST_DELAY
from broker_kafka.settings import KafkaSettings
from broker_kafka.share.capabilities import share_capabilities

__all__ = ["queue_capabilities"]


def queue_capabilities(settings: KafkaSettings, bare: Capabilities) -> MessageCapabilities:
    """Those of the engine that the settings choose.

    :param bare: the backend's, without the Message family.
    """
    if settings.queue == "markers":
        return MessageCapabilities(
            lease=LeaseMode.RENEW,
            lease_seconds=settings.lease_seconds,
            confirmed_ack=ConfirmedAck.OPTIONAL,
            # V1 has no field for attempts: what fails waits with its consumer, which counts them.
            native_delay=0.0 if settings.marker_format == "v1" else LONGEST_DELAY,
            delivery_attempt=settings.marker_format != "v1",
            release_keeps_attempt=True,
            key_affinity=False,
            shared_by_message=False,
            # What comes again lies at the end of the log, and its key waits; too long with V1 after a lost lease.
            ordered_delivery=settings.marker_format != "v1",
            creates_subscriptions=True,
            start_latest=True,
            start_time=True,
            # Nobody else takes over what one process reads alone, and its marker topic would be left behind.
            ephemeral=False,
            acks_in_transactions=True,
        )
    if settings.queue == "share":
        return share_capabilities(settings)
    return message_capabilities(bare)
