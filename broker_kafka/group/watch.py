"""Keeps a member subscribed to the topics there are: new ones that match a pattern, and not those that were deleted.

*Concurrency.* One task on the loop, asleep between two looks. *Failure.* A look that fails is repeated, soon if that
may help and else at the next turn, and nothing changes meanwhile. An explicit topic that is gone ends the consumer,
with TopicNotFound; one that a pattern found is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from broker import BrokerError, TopicNotFound, TopicPartition
from broker.driver import logger
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import partitions_of
from broker_kafka.cluster.requests import read_metadata
from broker_kafka.group.topics import Subscription

__all__ = ["TopicWatch"]

_AGAIN: Final = 1.0


class TopicWatch:
    """:param interval: seconds between two looks, which only patterns need; None is never by time.
    :param subscribe: is told the topics when they change.
    :param failed: is told that an explicit topic is gone.
    """

    def __init__(
        self,
        connection: Connection,
        subscription: Subscription,
        *,
        interval: float | None,
        subscribe: Callable[[Sequence[str]], Awaitable[object]],
        failed: Callable[[BrokerError], None],
    ) -> None:
        self._connection = connection
        self._subscription = subscription
        self._interval = interval
        self._subscribe = subscribe
        self._failed = failed
        self._look_now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.topics: list[str] = []
        """What is subscribed to."""

    async def open(self) -> list[TopicPartition]:
        """Find the topics, which are subscribed to by `start`; their partitions.

        :raises TopicNotFound: an explicit topic does not exist.
        :raises BrokerError: the brokers do not tell.
        """
        self.topics = await self._find()
        found: list[TopicPartition] = []
        for topic in self.topics:
            try:
                found += await partitions_of(self._connection, topic)
            except TopicNotFound:
                # Deleted since the list was made; the next look leaves it out.
                if topic in self._subscription.names:
                    raise
        return found

    async def start(self) -> None:
        """Subscribe, and watch."""
        await self._subscribe(self.topics)
        self._task = asyncio.create_task(self._run(), name="broker-kafka-topics")

    def look(self) -> None:
        """Look at once: a topic seems to be gone."""
        self._look_now.set()

    async def stop(self) -> None:
        """End the watching."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._interval if self._subscription.patterns else None):
                    await self._look_now.wait()
            except TimeoutError:
                pass
            self._look_now.clear()
            try:
                await self._check()
            except TopicNotFound as error:
                self._failed(error)
            except BrokerError as error:
                logger.warning("The topics of %s could not be looked at: %s", self._subscription, error)
                if error.retriable:
                    await asyncio.sleep(_AGAIN)
                    self._look_now.set()

    async def _check(self) -> None:
        found = await self._find()
        for topic in self._subscription.names:
            await partitions_of(self._connection, topic)
        if found != self.topics:
            await self._subscribe(found)
            # Not before: what failed is tried again at the next look.
            self.topics = found

    async def _find(self) -> list[str]:
        if not self._subscription.patterns:
            return self._subscription.matching(())
        timeout = self._connection.settings.request_timeout
        answer = await read_metadata(self._connection, "Listing topics", timeout)
        return self._subscription.matching([name for name, found in answer.topics.items() if found.error is None])
