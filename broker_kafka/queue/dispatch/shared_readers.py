"""`SharedReaders`: the readers of one backend with `queue_group`, one for each topic, for as long as it has consumers.

*Concurrency.* One event loop; a reader is opened once however many ask for it. *Cancellation.* Who is cancelled while a
reader opens leaves it to the others. *Failure.* A reader that cannot be opened is forgotten, and its error raised; one
that has failed serves those who have it, and who comes next gets another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from broker import InvalidName, Message, Unsupported
from broker.driver import Ephemeral, MessageSubscription, SourceListener, logger
from broker_kafka.cluster.connection import Connection
from broker_kafka.queue.consumer.queue_lane import QueueLane
from broker_kafka.queue.consumer.subscribing import open_queue
from broker_kafka.queue.dispatch.dispatch_starting import DispatchStarting
from broker_kafka.queue.dispatch.dispatch_table import DispatchTable, Policy
from broker_kafka.queue.dispatch.dispatching_reader import DispatchingReader
from broker_kafka.queue.markers.queue_filter import ALL_QUEUES
from broker_kafka.queue.markers.queue_names import check_names
from broker_kafka.queue.tracker.trackers import Trackers
from broker_kafka.settings import KafkaSettings

__all__ = ["SharedReaders"]

_LANE_BYTES: Final = 16 * 1024 * 1024
_TOTAL_BYTES: Final = 64 * 1024 * 1024


class _Shared:
    def __init__(self, reader: DispatchingReader, opening: asyncio.Task[None]) -> None:
        self.reader = reader
        self.opening = opening
        self.users = 0


class SharedReaders:
    """Made without I/O.

    :param found: gives a group that is new its positions.
    """

    def __init__(
        self,
        connection: Connection,
        trackers: Trackers,
        found: Callable[[Connection, MessageSubscription], Awaitable[None]],
    ) -> None:
        self._connection = connection
        self._trackers = trackers
        self._found = found
        self._shared: dict[str, _Shared] = {}
        """By topic."""
        self._closing: dict[str, asyncio.Task[None]] = {}

    async def use(self, subscription: MessageSubscription, listener: SourceListener) -> QueueLane:
        """An open lane of the queue that the subscription names, in the group of the settings.

        :raises InvalidName: the group has no such queue.
        :raises BrokerError: the reader cannot be opened.
        """
        settings, topic = self._connection.settings, subscription.topic
        queue = _checked(subscription, settings)
        wanted = replace(subscription, subscription=settings.queue_group or "")
        await check_names(self._connection, wanted)
        await self._found(self._connection, wanted)
        while (before := self._closing.get(topic)) is not None:
            # Two members of one process would share the partitions for a moment, and hand them over again.
            await asyncio.wait({before})
        shared = self._shared.get(topic)
        if shared is None or shared.reader.failure is not None:
            shared = self._shared[topic] = self._open(wanted)
        shared.users += 1
        try:
            await asyncio.shield(shared.opening)
        except BaseException:
            await self._leave(topic, shared)
            raise
        lane = QueueLane(queue, listener, shared.reader, partial(self._left, topic, shared))
        shared.reader.attach(lane, Policy(subscription.max_deliveries, subscription.dead_letter))
        self._connection.attach(lane)
        return lane

    def _open(self, wanted: MessageSubscription) -> _Shared:
        settings, loop = self._connection.settings, asyncio.get_running_loop()
        table = DispatchTable[Message[Any]](
            most=settings.queue_waiting, most_bytes=_LANE_BYTES, total_bytes=_TOTAL_BYTES, now=loop.time()
        )
        ids = settings.queue_ids
        reader = DispatchingReader(
            table,
            declared=None if ALL_QUEUES in ids else frozenset([name.encode() for name in ids]),
            group=settings.queue_group or "",
            lease_seconds=settings.lease_seconds,
        )
        starting = partial(DispatchStarting, table, loop.time, reader.forsaken)
        return _Shared(reader, loop.create_task(self._begin(reader, wanted, starting), name="broker-kafka-open-queues"))

    async def _begin(
        self, reader: DispatchingReader, wanted: MessageSubscription, starting: Callable[..., DispatchStarting]
    ) -> None:
        client = await open_queue(self._connection, self._trackers, wanted, reader, starting=starting)
        reader.begin(client)

    async def _left(self, topic: str, shared: _Shared, lane: QueueLane) -> None:
        try:
            await shared.reader.detach(lane)
        finally:
            try:
                await self._leave(topic, shared)
            finally:
                self._connection.detach(lane)

    async def _leave(self, topic: str, shared: _Shared) -> None:
        """One lane less; with the last one the reader ends."""
        shared.users -= 1
        if shared.users:
            return
        if self._shared.get(topic) is shared:
            del self._shared[topic]
        closing = asyncio.get_running_loop().create_task(_close(shared), name="broker-kafka-close-queues")
        self._closing[topic] = closing
        closing.add_done_callback(partial(self._over, topic))
        await asyncio.wait({closing})

    def _over(self, topic: str, closing: asyncio.Task[None]) -> None:
        if self._closing.get(topic) is closing:
            del self._closing[topic]
        if not closing.cancelled() and (error := closing.exception()) is not None:
            logger.warning("The reader of the queues in %r did not end cleanly: %s", topic, error)


async def _close(shared: _Shared) -> None:
    if not shared.opening.done():
        shared.opening.cancel()
        await asyncio.wait({shared.opening})
    if not shared.opening.cancelled():
        shared.opening.exception()  # who asked for it was told
    await shared.reader.close()


def _checked(subscription: MessageSubscription, settings: KafkaSettings) -> bytes:
    """The key of the subscription's records.

    :raises InvalidName: the group has no such queue.
    """
    name, ids = subscription.subscription, settings.queue_ids
    if isinstance(name, Ephemeral):
        raise Unsupported(
            "A queue with markers has no ephemeral subscriptions", advice="Name the subscription, or use queue=offsets"
        )
    if name == settings.queue_group:
        raise InvalidName(
            f"subscription is {name!r}, which is the queue_group that reads for all queues",
            advice="Name one of the queues: " + ", ".join(ids),
        )
    if ALL_QUEUES not in ids and name not in ids:
        raise InvalidName(
            f"subscription is {name!r}, and queue_ids is {','.join(ids)!r}",
            advice="Add it to queue_ids, in all processes of the group",
        )
    return name.encode()
