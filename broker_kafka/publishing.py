"""Publishing to topics of one cluster, with one producer for all of them.

*Concurrency.* Any number of calls at once; those of one topic reach the broker in order. *Cancellation.* A cancelled
call goes on: the outcome of its messages is unknown. *Failure.* Each message has its own outcome; TopicNotFound is
raised if it is the outcome of every message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from broker import BrokerError, Closed, OutboundMessage, Receipt, TopicNotFound
from broker_kafka.client.producer import ProducerThread
from broker_kafka.cluster.connection import Connection

__all__ = ["KafkaPublishTarget", "SharedProducer"]

_CLOSE_SECONDS: Final = 10.0


class SharedProducer:
    """The producer of a backend, which starts with the first message.

    :param on_old: as of `ProducerThread`.
    :ivar running: the thread, for a caller to use at once; None while `get` has to be called.
    """

    def __init__(self, connection: Connection, on_old: Callable[[str, Sequence[int]], object] | None = None) -> None:
        self._connection = connection
        self._on_old = on_old
        self.running: ProducerThread | None = None
        self._starting: asyncio.Future[ProducerThread] | None = None
        self._line = asyncio.Lock()
        """Calls that came while the thread started pass in order, and before later calls."""
        self._in_line = 0
        self._closed = False

    async def get(self) -> ProducerThread:
        """Start the thread if necessary and return it, for the caller to use at once, in the order of the calls.

        :raises Closed: the backend was closed.
        :raises BrokerError: the client could not be opened; the next call tries again.
        """
        if self._closed:
            raise Closed("The connection to Kafka is closed", advice="Publish before the bus is closed")
        starting = self._starting
        if starting is None or (starting.done() and (starting.cancelled() or starting.exception() is not None)):
            starting = self._starting = asyncio.ensure_future(self._start())
        self._in_line += 1
        try:
            async with self._line:
                thread = await asyncio.shield(starting)
        finally:
            self._in_line -= 1
        if not self._in_line and starting is self._starting:
            self.running = thread
        return thread

    async def close(self) -> None:
        """Deliver pending messages for at most ten seconds, and fail the rest. May be called twice."""
        self._closed = True
        starting, self._starting, self.running = self._starting, None, None
        if starting is not None:
            await asyncio.wait((starting,))
            if not starting.cancelled() and starting.exception() is None:
                await starting.result().stop(_CLOSE_SECONDS)

    async def _start(self) -> ProducerThread:
        settings = self._connection.settings
        thread = ProducerThread(
            self._connection.client_config("producer"),
            window=settings.publish_window,
            timeout=settings.message_timeout_ms / 1000,
            eager="linger_ms" not in settings.model_fields_set,
            partitioner=settings.partition_function,
            changed=self._connection.changed,
            on_old=self._on_old,
            on_crash=self._replace,
        )
        await thread.start()
        return thread

    def _replace(self) -> None:
        """Have the next call start a new thread; every call of the old one has its error."""
        self._starting = self.running = None


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
        thread = self._producer.running or await self._producer.get()
        outcomes = await thread.publish(self._topic, messages, receipts=receipts)
        first = outcomes[0] if outcomes else None
        if isinstance(first, TopicNotFound) and all(isinstance(outcome, TopicNotFound) for outcome in outcomes):
            raise first
        return outcomes

    async def close(self) -> None:
        self._closed = True
