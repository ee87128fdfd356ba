"""Publishing to one topic of an in-memory server.

Messages are stored before the call first suspends, so a cancelled call has published them. The call yields to the loop
now and then, as a network client would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from broker import BrokerError, Closed, OutboundMessage, Receipt
from broker_inmem.connection import Connection
from broker_inmem.faults import Faults
from broker_inmem.server import Broker
from broker_inmem.topic import Topic, TransactionWork

__all__ = ["InmemPublishTarget", "store"]

_YIELD_AFTER: Final = 256


class InmemPublishTarget:
    """Implements `PublishTarget`."""

    def __init__(self, broker: Broker, connection: Connection, topic: str) -> None:
        self._broker = broker
        self._connection = connection
        self._topic = topic
        self._closed = False
        self._published = 0

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError]:
        if self._closed:
            raise Closed(f"The publisher of topic {self._topic!r} was closed")
        broker = self._broker
        with broker.lock:
            self._connection.check()
            now = broker.clock.time()
            topic = broker.topic(self._topic, now)
            if broker.faults.armed:
                outcomes = store(broker.faults, topic, messages, now, None)
            else:
                outcomes = topic.publish(messages, now)
        self._published += 1 + len(messages)
        if self._published >= _YIELD_AFTER:
            self._published = 0
            await asyncio.sleep(0)
        return outcomes

    async def close(self) -> None:
        self._closed = True


def store(
    faults: Faults, topic: Topic, messages: Sequence[OutboundMessage], now: float, work: TransactionWork | None
) -> list[Receipt | BrokerError]:
    """Publish, subject to injected faults; the caller holds the lock."""
    faults.check("publish", topic.name)
    failures = faults.draw("publish", topic.name, len(messages))
    wanted = [
        message for message, failure in zip(messages, failures, strict=True) if failure is None or failure.applied
    ]
    stored = iter(topic.publish(wanted, now, work))
    outcomes: list[Receipt | BrokerError] = []
    for failure in failures:
        outcome = next(stored) if failure is None or failure.applied else None
        error = failure.error if failure is not None else None
        if error is not None:
            outcomes.append(error)
        elif outcome is not None:
            outcomes.append(outcome)
    return outcomes
