"""Publishing with receipts: the client batches and calls back per message; the loop is woken once per call.

*Concurrency.* Any number of calls; their messages are sent in call order, as soon as the window has room.
*Cancellation.* Sent messages stay sent. *Failure.* Returned per message; a missing topic raises TopicNotFound. While no
broker is reachable the client queues messages and sends them in order later, until `publish_timeout`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import time
from typing import Any, Final

from broker import (
    AuthenticationFailed,
    BrokerError,
    Closed,
    InvalidMessage,
    OperationTimeout,
    OutboundMessage,
    Receipt,
    TopicNotFound,
    Unsupported,
)
from broker.driver import keyless_message, logger
from broker_pulsar.client import Producer, pulsar
from broker_pulsar.codec import partition_key, properties_of
from broker_pulsar.connection import Connection
from broker_pulsar.errors import result_error, translate
from broker_pulsar.message_ids import pack
from broker_pulsar.names import TopicPath

__all__ = ["COMPRESSION", "PendingCall", "PulsarPublishTarget", "close_producer"]

COMPRESSION: Final = {
    "none": pulsar.CompressionType.NONE,
    "lz4": pulsar.CompressionType.LZ4,
    "zlib": pulsar.CompressionType.ZLib,
    "zstd": pulsar.CompressionType.ZSTD,
    "snappy": pulsar.CompressionType.SNAPPY,
}
_ACCESS: Final = {
    "shared": pulsar.ProducerAccessMode.Shared,
    "exclusive": pulsar.ProducerAccessMode.Exclusive,
    "wait_for_exclusive": pulsar.ProducerAccessMode.WaitForExclusive,
    "exclusive_with_fencing": pulsar.ProducerAccessMode.ExclusiveWithFencing,
}
_RECREATE: Final = frozenset(
    {"AlreadyClosed", "ProducerNotInitialized", "TopicNotFound", "ProducerFenced", "NotConnected"}
)
"""Results after which a producer is recreated."""
_OKAY: Final[int] = pulsar.Result.Ok.value
"""An int, because comparing enum results takes three times as long."""
_LARGEST_SEQUENCE: Final = 2**63 - 1
_WAIT_FOR_EVER: Final = 2_000_000


class PendingCall:
    """The messages of one call in flight."""

    __slots__ = ("_left", "_loop", "done", "producers", "results")

    def __init__(self, count: int, loop: asyncio.AbstractEventLoop) -> None:
        self.results: list[Any] = [None] * count
        self.producers: list[Producer] = []
        """The producers in use."""
        self._left = count
        self._loop = loop
        self.done: asyncio.Future[None] = loop.create_future()

    def set_result(self, index: int, result: Any, message_id: Any) -> None:
        """Called by a thread of the client, one at a time; an exception here would end the process."""
        self.results[index] = (result, message_id)
        self._left -= 1
        if not self._left:
            # The loop has ended: no caller waits.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class PulsarPublishTarget:
    """Implements `PublishTarget`; opens producers on first use."""

    def __init__(self, topic: str, connection: Connection) -> None:
        self._topic = topic
        self._connection = connection
        self._settings = connection.settings
        self._path = connection.topic(topic)
        self._producers: dict[int | None, Producer] = {}
        self._partitions = 0
        self._sequenced = -1
        """The highest sequence number used."""
        self._opening = asyncio.Lock()
        """Held from the lookup of the producer until all messages are sent, so calls keep their order."""
        self._free = self._settings.publish_window
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._closed = False
        self._forget = connection.on_topic_deleted(self._on_topic_deleted)

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError | None]:
        if self._closed:
            raise Closed(f"The publisher of topic {self._topic!r} is closed")
        outcomes: list[Receipt | BrokerError | None] = [None] * len(messages)
        window = self._settings.publish_window
        calls: list[tuple[int, int, PendingCall]] = []
        async with self._opening:
            for first in range(0, len(messages), window):
                part = messages[first : first + window]
                count = len(part)
                await self._reserve(count)
                try:
                    pending = await self._send_part(part, outcomes, first)
                except BaseException:
                    self._release(count)
                    raise
                pending.done.add_done_callback(lambda _, count=count: self._release(count))
                calls.append((first, count, pending))
        for first, count, pending in calls:
            # Shielded, because the answers release the window.
            await asyncio.shield(pending.done)
            self._read_results(messages, first, count, pending, outcomes)
        await self._explain(outcomes, [producer for _, _, pending in calls for producer in pending.producers])
        return outcomes

    async def close(self) -> None:
        self._closed = True
        self._forget()
        producers, self._producers = self._producers, {}
        await asyncio.gather(*(self._drop(producer) for producer in producers.values()))

    # Sending.

    async def _send_part(
        self, messages: Sequence[OutboundMessage], outcomes: list[Receipt | BrokerError | None], first: int
    ) -> PendingCall:
        """Pass messages to the client.

        :raises BrokerError: no producer can be opened.
        """
        pending = PendingCall(len(messages), asyncio.get_running_loop())
        set_result, named = pending.set_result, self._settings.producer_name is not None
        main = await self._producer(None)
        pending.producers.append(main)
        compacted = self._topic in self._connection.compacted
        for index, message in enumerate(messages):
            try:
                producer = main
                if message.key is None and compacted:
                    raise keyless_message(self._topic)
                if message.partition is not None:
                    producer = await self._producer(message.partition)
                    if producer not in pending.producers:
                        pending.producers.append(producer)
                if message.plain and message.data is not None and not named:
                    producer.send_async(
                        message.data,
                        partial(set_result, index),
                        properties_of(message),
                        partition_key(message.key),
                    )
                    continue
                producer.send_async(
                    message.data,
                    partial(set_result, index),
                    properties=properties_of(message),
                    partition_key=partition_key(message.key),
                    sequence_id=self._sequence(message, producer),
                    deliver_at=_delivery(message),
                )
            except BrokerError as error:
                outcomes[first + index] = error
                set_result(index, None, None)
            except Exception as error:
                outcomes[first + index] = translate(error, f"Publishing to topic {self._topic!r}")
                set_result(index, None, None)
        return pending

    def _sequence(self, message: OutboundMessage, producer: Producer) -> int | None:
        """A numeric id plus one, because the client treats 0 as unset; else the next number."""
        if self._settings.producer_name is None:
            return None
        if message.id is None or not message.id.isdecimal():
            # The client's own counter ignores the numbers it was given.
            number = max(self._sequenced, producer.last_sequence_id()) + 1
        else:
            number = int(message.id) + 1
        number = max(1, number)
        if number > _LARGEST_SEQUENCE:
            raise InvalidMessage(
                f"Id {message.id!r} is not below {_LARGEST_SEQUENCE}, the largest sequence number",
                advice="With producer_name a numeric id is a sequence number; use a smaller or a non-numeric id",
            )
        self._sequenced = max(self._sequenced, number)
        return number

    async def _producer(self, partition: int | None) -> Producer:
        found = self._producers.get(partition)
        if found is not None:
            return found
        self._partitions = await self._connection.partitions(self._topic)
        path = self._path
        if partition is not None:
            if partition >= max(self._partitions, 1):
                raise InvalidMessage(
                    f"Topic {self._topic!r} has no partition {partition}",
                    advice=f"It has {max(self._partitions, 1)} partitions, numbered from 0",
                )
            path = path.partition(partition) if self._partitions else path
        settings = self._settings
        options: dict[str, Any] = {
            "producer_name": settings.producer_name,
            "send_timeout_millis": round(settings.publish_timeout * 1000),
            "compression_type": COMPRESSION[settings.compression],
            # Beyond its own bound the client fails messages, so our window is the smaller one.
            "max_pending_messages": settings.publish_window + 1,
            "max_pending_messages_across_partitions": _WAIT_FOR_EVER,
            "batching_enabled": settings.batching != "off",
            "batching_max_messages": settings.batching_max_messages,
            "batching_max_allowed_size_in_bytes": settings.batching_max_bytes,
            "batching_max_publish_delay_ms": max(1, round(settings.linger * 1000)),
            "batching_type": pulsar.BatchingType.KeyBased
            if settings.batching == "key"
            else pulsar.BatchingType.Default,
            "chunking_enabled": settings.chunking,
            "access_mode": _ACCESS[settings.access_mode],
        }
        producer = await self._create(path, options)
        if self._closed:
            await self._drop(producer)
            raise Closed(f"The publisher of topic {self._topic!r} is closed")
        self._producers[partition] = producer
        return producer

    async def _create(self, path: TopicPath, options: Mapping[str, Any]) -> Producer:
        """Open a producer; with wait_for_exclusive, wait until the access is granted.

        :raises BrokerError: the broker refuses, or does not answer. :raises Closed: the publisher was closed meanwhile.
        """
        client, what = self._connection.client, f"Publishing to topic {self._topic!r}"
        while True:
            try:
                return await self._connection.create(
                    lambda: client.create_producer(path.url, **options), close_producer
                )
            except Exception as error:
                translated = translate(error, what)
                if not isinstance(translated, OperationTimeout) or self._settings.access_mode != "wait_for_exclusive":
                    raise translated from error
            # The client times out while it queues for access, as if the broker were down.
            if self._closed:
                raise Closed(f"The publisher of topic {self._topic!r} is closed")
            await self._connection.partitions(self._topic, once=True)
            await self._connection.check_health()
            logger.info("Topic %r: waiting for exclusive access, which another producer has", self._topic)

    # The window.

    async def _reserve(self, count: int) -> None:
        while self._free < count:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter
        self._free -= count

    def _release(self, count: int) -> None:
        self._free += count
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)

    # Outcomes.

    def _read_results(
        self,
        messages: Sequence[OutboundMessage],
        first: int,
        count: int,
        pending: PendingCall,
        outcomes: list[Receipt | BrokerError | None],
    ) -> None:
        for index in range(count):
            result, message_id = pending.results[index]
            if result is None:
                continue  # Not sent; its error is set.
            at = first + index
            if result.value != _OKAY:
                outcomes[at] = result_error(result, f"Publishing to topic {self._topic!r}")
                if result.name in _RECREATE:
                    self._forget_producers(pending.producers)
                continue
            outcomes[at] = self._receipt(messages[at], message_id)

    def _receipt(self, message: OutboundMessage, message_id: Any) -> Receipt:
        # Each access to the client's id is expensive.
        partition = message.partition if message.partition is not None else max(message_id.partition(), 0)
        ledger = message_id.ledger_id()
        if ledger < 0:
            # The broker dropped it as a duplicate of this producer and sequence.
            return Receipt(message.id or "", partition, None, duplicate=True)
        offset = pack(ledger, message_id.entry_id(), message_id.batch_index() + 1)
        return Receipt(message.id or f"{partition}-{offset}", partition, offset)

    async def _explain(self, outcomes: list[Receipt | BrokerError | None], used: Sequence[Producer]) -> None:
        """If all messages failed, check whether the topic exists."""
        if not outcomes or not all(isinstance(outcome, BrokerError) for outcome in outcomes):
            return
        if any(isinstance(outcome, (InvalidMessage, Unsupported, TopicNotFound)) for outcome in outcomes):
            return
        try:
            await self._connection.partitions(self._topic, once=True)
        except TopicNotFound:
            self._forget_producers(used)
            raise
        except AuthenticationFailed as error:
            # The outcome is unknown, but the cause of the missing answers is known.
            for outcome in outcomes:
                if isinstance(outcome, OperationTimeout):
                    outcome.advice = f"The broker refuses the credentials: {error}"
        except BrokerError:
            return

    # Closing.

    def _on_topic_deleted(self, topic: str) -> None:
        if topic == self._topic:
            self._forget_producers(tuple(self._producers.values()))

    def _forget_producers(self, used: Sequence[Producer]) -> None:
        """Recreate these producers on their next use."""
        for partition, producer in tuple(self._producers.items()):
            if producer in used:
                del self._producers[partition]
                self._connection.run_later(partial(close_producer, producer))

    async def _drop(self, producer: Producer) -> None:
        try:
            await self._connection.call(partial(close_producer, producer))
        except Closed:
            return


def _delivery(message: OutboundMessage) -> int | None:
    if message.deliver_at is None:
        return None
    moment = message.deliver_at.timestamp()
    return round(moment * 1000) if moment > time() else None


def close_producer(producer: Producer) -> None:
    try:
        producer.close()
    except Exception as error:
        logger.debug("Closing a Pulsar producer: %s", error)
