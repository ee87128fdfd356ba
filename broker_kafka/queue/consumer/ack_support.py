"""Whose messages can be acked in a transaction, and why those of others cannot. Pure."""

from __future__ import annotations

from broker import Unsupported
from broker.driver import MessageSource, RecordsAsMessages
from broker_kafka.cluster.connection import Connection
from broker_kafka.queue.consumer.queue_client import QueueClient
from broker_kafka.queue.consumer.transacted_ends import TransactedEnds
from broker_kafka.share.messages import ShareMessageSource

__all__ = ["ends_of"]


def ends_of(source: MessageSource, connection: Connection) -> TransactedEnds:
    """What writes the acks of a consumer's messages into transactions of this connection.

    :raises Unsupported: they cannot be acked there.
    """
    if isinstance(source, QueueClient):
        if source.transacted.connection is connection:
            return source.transacted
        raise Unsupported(
            "The message is of another bus than the transaction",
            advice="Open the transactional publisher and the consumer on one bus",
        )
    if isinstance(source, RecordsAsMessages):
        raise Unsupported(
            "Messages of queue=offsets are acked by the positions of their group, in no transaction",
            advice="Use queue=markers, or read with bus.records(...) and give that to publisher.transaction(...)",
        )
    if isinstance(source, ShareMessageSource):
        raise Unsupported(
            "Kafka takes acks of share groups in no transaction", advice="Use queue=markers for messages of this topic"
        )
    raise Unsupported(
        "The message is of another broker than the transaction",
        advice="Open the transactional publisher and the consumer on one bus",
    )
