"""`TransactedEnds`: writes ENDs of messages held here into the transaction of somebody else.

*Why that is enough.* A tracker reads what is committed, in the order of the log, and its clock stands while something
of the log is hidden. An END that was on the brokers before its lease was over is therefore read before the lease can
be due, whenever its transaction commits. *Keep-alive.* A lease is not renewed from before its END is written; a
KEEPALIVE that was on its way then comes behind the END, and is heeded only if the END does not count. *Concurrency.*
On the loop; calls may run at once. *Failure.* Told per message; nothing is repeated here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from broker import BrokerError, Message, OutboundMessage
from broker_kafka.cluster.connection import Connection
from broker_kafka.queue.consumer.lease_manager import Hold, LeaseBook
from broker_kafka.queue.markers.marker_producer import MarkerProducer, explained

__all__ = ["Produce", "TransactedEnds"]

Produce = Callable[[str, Sequence[OutboundMessage]], Awaitable[Sequence[object]]]
"""Produces into the open transaction, each message in the partition that it names; an error for each that failed."""


class TransactedEnds:
    """:ivar connection: whose transactions may have them."""

    def __init__(self, connection: Connection, book: LeaseBook, producer: MarkerProducer) -> None:
        self.connection: Final = connection
        self._book = book
        self._producer = producer

    async def write(self, messages: Sequence[Message[Any]], produce: Produce) -> Sequence[BrokerError | None]:
        """As `AcksMessages.add_acks`."""
        holds: list[Hold] = [message.lease for message in messages]
        lost = self._book.lost(holds)
        if any(lost):
            return lost
        for hold in holds:
            hold.ended = True
        topic, records = self._producer.records([placed for placed, _ in self._book.ends(holds)])
        outcomes = await produce(topic, records)
        for outcome, record in zip(outcomes, records, strict=True):
            if isinstance(outcome, BrokerError):
                return [explained(outcome, topic, len(record.data or b""))] * len(holds)
        return self._book.lost(holds, ended=True)

    def undone(self, messages: Sequence[Message[Any]]) -> None:
        """As `AcksMessages.acks_undone`."""
        for message in messages:
            message.lease.ended = False
