"""Which consumer's messages can be acked in a Kafka transaction: those of queue=markers, on the same bus. Pure."""

from __future__ import annotations

from broker import Unsupported
from broker.driver import MessageSource, RecordsAsMessages
from broker_kafka.cluster.connection import Connection
from broker_kafka.queue.consumer.lease_manager import LeaseManager
from broker_kafka.queue.consumer.queue_client import QueueClient
from broker_kafka.share.messages import ShareMessageSource

__all__ = ["transactional_leases"]


def transactional_leases(source: MessageSource, connection: Connection) -> LeaseManager:
    """The leases whose ENDs may be written into transactions of this connection.

    :raises Unsupported: messages of this source cannot be acked there.
    """
    if isinstance(source, QueueClient):
        if source.connection is connection:
            return source.leases
        raise Unsupported(
            "The message is of another bus than the transaction",
            advice="Open the transactional publisher and the consumer on one bus",
        )
    if isinstance(source, RecordsAsMessages):
        raise Unsupported(
            "Messages of queue=offsets are acked by the positions of their group, outside of transactions",
            advice="Use queue=markers, or read with bus.records(...) and give that to publisher.transaction(...)",
        )
    if isinstance(source, ShareMessageSource):
        raise Unsupported(
            "Kafka does not take acks of share groups in a transaction",
            advice="Use queue=markers for messages of this topic",
        )
    raise Unsupported(
        "The message is of another broker than the transaction",
        advice="Open the transactional publisher and the consumer on one bus",
    )
