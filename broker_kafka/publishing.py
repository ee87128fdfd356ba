"""Publishing to topics of one cluster, over one producer that all of them share.

*Concurrency.* Calls of one topic go to the broker in their order; any number may run at once. *Cancellation.* A
cancelled call goes on: the fate of its messages is unknown to the caller. *Failure.* Each message has its own outcome;
a missing topic is raised if nothing of the call was published.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from broker import BrokerError, Closed, OutboundMessage, Receipt, TopicNotFound
from broker_kafka.client.producer import ProducerThread
from broker_kafka.cluster.connection import Connection

__all__ = ["KafkaPublishTarget", "SharedProducer"]

_CLOSE: Final = 10.0


class SharedProducer:
    """The producer of a backend, which starts with the first message."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._starting: asyncio.Future[ProducerThread] | None = None
        self._line = asyncio.Lock()
        """Who came while it started goes on in the order of the calls, and before who comes later."""
        self._in_line = 0
        self._closed = False

    async def get(self) -> ProducerThread:
        """The running thread, for the caller to use at once: nobody who called later has it earlier.

        :raises Closed: the backend was closed.
        :raises BrokerError: the client could not be made; the next call tries again.
        """
        if self._closed:
            raise Closed("The connection to Kafka is closed", advice="Publish before the bus is closed")
        starting = self._starting
        if starting is None or (starting.done() and (starting.cancelled() or starting.exception() is not None)):
            starting = self._starting = asyncio.ensure_future(self._start())
        if self._in_line or not starting.done():
            self._in_line += 1
            try:
                async with self._line:
                    await asyncio.shield(starting)
            finally:
                self._in_line -= 1
        thread = starting.result()
        if thread.failure is not None and self._starting is starting:
            # A defect ended it; its calls have their errors, and the next ones get a new thread.
            self._starting = None
        return thread

    async def close(self) -> None:
        """Deliver what is on the way for at most ten seconds, fail the rest. May be called twice."""
        self._closed = True
        starting, self._starting = self._starting, None
        if starting is not None:
            await asyncio.wait((starting,))
            if not starting.cancelled() and starting.exception() is None:
                await starting.result().stop(_CLOSE)

    async def _start(self) -> ProducerThread:
        settings = self._connection.settings
        thread = ProducerThread(
            self._connection.client_config("producer"),
            window=settings.publish_window,
            timeout=settings.message_timeout_ms / 1000,
            eager="linger_ms" not in settings.model_fields_set,
            partitioner=settings.partition_function,
            changed=self._connection.changed,
        )
        await thread.start()
        return thread


class KafkaPublishTarget:
    """Implements `PublishTarget`."""

    def __init__(self, topic: str, producer: SharedProducer) -> None:
        self._topic = topic
        self._producer = producer
        self._closed = False

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError | None]:
        if self._closed:
            raise Closed(f"Topic {self._topic!r} was closed")
        thread = await self._producer.get()
        outcomes = await thread.publish(self._topic, messages, receipts=receipts)
        first = outcomes[0] if outcomes else None
        if isinstance(first, TopicNotFound) and all(isinstance(outcome, TopicNotFound) for outcome in outcomes):
            raise first
        return outcomes

    async def close(self) -> None:
        self._closed = True
