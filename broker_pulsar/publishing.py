"""Publishing with receipts: the client batches, a callback per message tells its fate, one hop tells the loop.

*Concurrency.* Any number of calls; each sends its messages in the order in which the calls were made, as soon as there
is room in the window. *Cancellation.* What was sent stays sent; its outcome is nobody's. *Failure.* Told per message; a
missing topic is TopicNotFound for all. While no broker can be reached the client keeps what it was given and sends it
in the same order when one is back, until `publish_timeout` ends it.
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
from broker.driver import logger
from broker_pulsar.client import Producer, pulsar
from broker_pulsar.codec import partition_key, properties_of
from broker_pulsar.connection import Connection
from broker_pulsar.errors import result_error, translate
from broker_pulsar.message_ids import pack
from broker_pulsar.names import TopicPath

__all__ = ["PulsarTarget"]

_COMPRESSION: Final = {
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
_GONE: Final = frozenset({"AlreadyClosed", "ProducerNotInitialized", "TopicNotFound", "ProducerFenced", "NotConnected"})
"""Results after which a producer is made anew."""
_OKAY: Final[int] = pulsar.Result.Ok.value
"""Two results are compared in three times the time of two numbers."""
_LARGEST_SEQUENCE: Final = 2**63 - 1
_WAIT_FOR_EVER: Final = 2_000_000


class _Sending:
    """The messages of one call that are on the way."""

    __slots__ = ("_left", "_loop", "done", "producers", "results")

    def __init__(self, count: int, loop: asyncio.AbstractEventLoop) -> None:
        self.results: list[Any] = [None] * count
        self.producers: list[Producer] = []
        """Those that they went to."""
        self._left = count
        self._loop = loop
        self.done: asyncio.Future[None] = loop.create_future()

    def tell(self, index: int, result: Any, message_id: Any) -> None:
        """Called by a thread of the client, one at a time: an exception here would end the process."""
        self.results[index] = (result, message_id)
        self._left -= 1
        if not self._left:
            # A loop that has ended has nobody who waits.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class PulsarTarget:
    """Publishes to one topic; a producer is opened when it is first needed."""

    def __init__(self, topic: str, connection: Connection) -> None:
        self._topic = topic
        self._connection = connection
        self._settings = connection.settings
        self._path = connection.topic(topic)
        self._producers: dict[int | None, Producer] = {}
        self._partitions = 0
        self._sequenced = -1
        """The highest sequence number that was given out."""
        self._opening = asyncio.Lock()
        """Held from the look-up of the producer until all of a call is sent, so that calls are sent in their order."""
        self._free = self._settings.publish_window
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._closed = False
        self._forget = connection.on_topic_deleted(self._deleted)

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError | None]:
        if self._closed:
            raise Closed(f"Topic {self._topic!r} was closed")
        outcomes: list[Receipt | BrokerError | None] = [None] * len(messages)
        window = self._settings.publish_window
        sendings: list[tuple[int, int, _Sending]] = []
        async with self._opening:
            for first in range(0, len(messages), window):
                part = messages[first : first + window]
                await self._take(len(part))
                try:
                    sending = await self._send(part, outcomes, first)
                except BaseException:
                    self._give_back(len(part))
                    raise
                sending.done.add_done_callback(partial(self._over, len(part)))
                sendings.append((first, len(part), sending))
        for first, count, sending in sendings:
            # Shielded, because the window opens again only when the broker has answered.
            await asyncio.shield(sending.done)
            self._read(messages, first, count, sending, outcomes)
        await self._explain(outcomes, [producer for _, _, sending in sendings for producer in sending.producers])
        return outcomes

    async def close(self) -> None:
        self._closed = True
        self._forget()
        await self._drop_all()

    # -- sending -------------------------------------------------------------------------------------------

    async def _send(
        self, messages: Sequence[OutboundMessage], outcomes: list[Receipt | BrokerError | None], first: int
    ) -> _Sending:
        """Hand these to the client.

        :raises BrokerError: no producer can be opened.
        """
        sending = _Sending(len(messages), asyncio.get_running_loop())
        tell, named = sending.tell, self._settings.producer_name is not None
        main = await self._producer(None)
        sending.producers.append(main)
        for index, message in enumerate(messages):
            try:
                producer = main
                if message.partition is not None:
                    producer = await self._producer(message.partition)
                    if producer not in sending.producers:
                        sending.producers.append(producer)
                if message.plain and message.data is not None and not named:
                    producer.send_async(
                        message.data,
                        partial(tell, index),
                        properties_of(message),
                        partition_key(message.key),
                    )
                    continue
                producer.send_async(
                    message.data,
                    partial(tell, index),
                    properties=properties_of(message),
                    partition_key=partition_key(message.key),
                    sequence_id=self._sequence(message, producer),
                    deliver_at=_delivery(message),
                )
            except BrokerError as error:
                outcomes[first + index] = error
                tell(index, None, None)
            except Exception as error:
                outcomes[first + index] = translate(error, f"Publishing to topic {self._topic!r}")
                tell(index, None, None)
        return sending

    def _sequence(self, message: OutboundMessage, producer: Producer) -> int | None:
        """One above the id that is a number, since the client takes 0 for none; else the one that follows."""
        if self._settings.producer_name is None:
            return None
        if message.id is None or not message.id.isdecimal():
            # The client counts by itself from its start on, whatever numbers it was given.
            number = max(self._sequenced, producer.last_sequence_id()) + 1
        else:
            number = int(message.id) + 1
        number = max(1, number)
        if number > _LARGEST_SEQUENCE:
            raise InvalidMessage(
                f"Id {message.id!r} is not below {_LARGEST_SEQUENCE}, the largest sequence number",
                advice="With producer_name, ids that are whole numbers are sequence numbers; give it another form",
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
                    advice=f"It has {max(self._partitions, 1)}; the first is 0",
                )
            path = path.partition(partition) if self._partitions else path
        settings = self._settings
        options: dict[str, Any] = {
            "producer_name": settings.producer_name,
            "send_timeout_millis": round(settings.publish_timeout * 1000),
            "compression_type": _COMPRESSION[settings.compression],
            # The window is ours: the client's own bound would fail what is above it.
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
            raise Closed(f"Topic {self._topic!r} was closed")
        self._producers[partition] = producer
        return producer

    async def _create(self, path: TopicPath, options: Mapping[str, Any]) -> Producer:
        """Open a producer. One that waits for exclusive access does so until it has it, or its caller is cancelled.

        :raises BrokerError: the broker refuses it, or does not answer. :raises Closed: the topic was closed meanwhile.
        """
        client, what = self._connection.client, f"Publishing to topic {self._topic!r}"
        while True:
            try:
                return await self._connection.make(lambda: client.create_producer(path.url, **options), _close)
            except Exception as error:
                told = translate(error, what)
                if not isinstance(told, OperationTimeout) or self._settings.access_mode != "wait_for_exclusive":
                    raise told from error
            # The client gives up a place in the broker's queue as it does a broker that says nothing.
            if self._closed:
                raise Closed(f"Topic {self._topic!r} was closed")
            await self._connection.partitions(self._topic, once=True)
            await self._connection.check_health()
            logger.info("Topic %r: another producer has access to it; waiting on", self._topic)

    # -- the window ----------------------------------------------------------------------------------------

    async def _take(self, count: int) -> None:
        while self._free < count:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter
        self._free -= count

    def _over(self, count: int, _: asyncio.Future[None]) -> None:
        self._give_back(count)

    def _give_back(self, count: int) -> None:
        self._free += count
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)

    # -- outcomes ------------------------------------------------------------------------------------------

    def _read(
        self,
        messages: Sequence[OutboundMessage],
        first: int,
        count: int,
        sending: _Sending,
        outcomes: list[Receipt | BrokerError | None],
    ) -> None:
        for index in range(count):
            result, message_id = sending.results[index]
            if result is None:
                continue  # It was not sent, and its outcome is there.
            at = first + index
            if result.value != _OKAY:
                outcomes[at] = result_error(result, f"Publishing to topic {self._topic!r}")
                if result.name in _GONE:
                    self._forget_producers(sending.producers)
                continue
            outcomes[at] = self._receipt(messages[at], message_id)

    def _receipt(self, message: OutboundMessage, message_id: Any) -> Receipt:
        # Each question to the client's id costs more than all else here.
        partition = message.partition if message.partition is not None else max(message_id.partition(), 0)
        ledger = message_id.ledger_id()
        if ledger < 0:
            # The broker had a message of this producer and sequence, and dropped this one.
            return Receipt(message.id or "", partition, None, duplicate=True)
        offset = pack(ledger, message_id.entry_id(), message_id.batch_index() + 1)
        return Receipt(message.id or f"{partition}-{offset}", partition, offset)

    async def _explain(self, outcomes: list[Receipt | BrokerError | None], used: Sequence[Producer]) -> None:
        """Where a whole call failed, find out whether the topic is there at all."""
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
            # Whether they were stored nobody knows, but why there was no answer.
            for outcome in outcomes:
                if isinstance(outcome, OperationTimeout):
                    outcome.advice = f"The broker refuses our credentials: {error}"
        except BrokerError:
            return

    # -- the end -------------------------------------------------------------------------------------------

    def _deleted(self, topic: str) -> None:
        if topic == self._topic:
            self._forget_producers(tuple(self._producers.values()))

    def _forget_producers(self, used: Sequence[Producer]) -> None:
        """Make these anew when they are needed next; what has taken their place since is left alone."""
        for partition, producer in tuple(self._producers.items()):
            if producer in used:
                del self._producers[partition]
                self._connection.later(partial(_close, producer))

    async def _drop_all(self) -> None:
        producers, self._producers = self._producers, {}
        await asyncio.gather(*(self._drop(producer) for producer in producers.values()))

    async def _drop(self, producer: Producer) -> None:
        try:
            await self._connection.call(partial(_close, producer))
        except Closed:
            return


def _delivery(message: OutboundMessage) -> int | None:
    if message.deliver_at is None:
        return None
    moment = message.deliver_at.timestamp()
    return round(moment * 1000) if moment > time() else None


def _close(producer: Producer) -> None:
    try:
        producer.close()
    except Exception as error:
        logger.debug("A Pulsar producer did not close well: %s", error)
