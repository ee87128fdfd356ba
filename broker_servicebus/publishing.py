"""Publishing to one queue or topic: batches split by size, over one sender that one call at a time uses.

*Cancellation.* A cancelled call continues in the background. *Failure.* After a broken connection, messages with an
unknown outcome are sent again under the same id for at most `publish_timeout` seconds; a topic with duplicate detection
drops the copies.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from time import monotonic
from typing import Any, Final

from azure.servicebus import ServiceBusMessage
from azure.servicebus.aio import ServiceBusSender
from azure.servicebus.exceptions import MessageSizeExceededError

from broker import (
    BackendError,
    BrokerError,
    Closed,
    ConfigurationError,
    InvalidMessage,
    MessageTooLarge,
    OutboundMessage,
    Receipt,
)
from broker.driver import Backoff, TaskSet, logger
from broker_servicebus import private_api
from broker_servicebus.codec import encode
from broker_servicebus.connection import Connection
from broker_servicebus.errors import is_broken, is_busy, translate
from broker_servicebus.names import split_path

__all__ = ["ServiceBusPublishTarget"]

_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 2.0
_LONGEST_BUSY_PAUSE: Final = 10.0
_CLOSE_SECONDS: Final = 3.0
_ENVELOPE: Final = 1024
"""Bytes of a scheduled message besides body and properties: three ids and headers."""

_Outcome = Receipt | BrokerError | None


class ServiceBusPublishTarget:
    """Implements `PublishTarget`."""

    def __init__(
        self, topic: str, connection: Connection, *, on_close: Callable[[ServiceBusPublishTarget], object]
    ) -> None:
        entity, subscription, dead = split_path(topic)
        if subscription is not None or dead:
            raise InvalidMessage(f"{topic!r} is a subscription or a dead-letter queue; publish to its topic or queue")
        self._topic = topic
        self._entity = entity
        self._connection = connection
        self._on_close = on_close
        self._lock = asyncio.Lock()
        self._sender: ServiceBusSender | None = None
        self._tasks = TaskSet("broker-servicebus-publish", lambda error: logger.debug("%s: %r", topic, error))
        self._closed = False

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError | None]:
        self._check_open()
        # Shielded: a cancelled send would leave the client's connection in an undefined state.
        return await asyncio.shield(self._tasks.spawn(self._publish(messages)))

    async def cancel_scheduled(self, numbers: Sequence[int]) -> None:
        """Cancel scheduled messages by the offsets of their receipts.

        :raises ConfigurationError: not such an offset.
        :raises BrokerError: a message no longer exists; possibly none was cancelled.
        """
        for number in numbers:
            # The client would retry a number beyond 64 bits.
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**63:
                raise ConfigurationError(
                    f"The number of a scheduled message is {number!r}", advice="Use the offset of its receipt"
                )
        async with self._lock:
            error = await self._retry(lambda sender: sender.cancel_scheduled_messages(list(numbers)))
        if error is not None:
            raise error

    async def _publish(self, messages: Sequence[OutboundMessage]) -> list[_Outcome]:
        outcomes: list[_Outcome] = [None] * len(messages)
        plain: list[tuple[int, ServiceBusMessage]] = []
        scheduled: dict[datetime, list[tuple[int, ServiceBusMessage]]] = {}
        now = datetime.now(UTC)
        for index, message in enumerate(messages):
            try:
                sent, identity = encode(message)
                moment = None if message.deliver_at is None else message.deliver_at.astimezone(UTC)
            except (ValueError, TypeError, OverflowError) as error:
                outcomes[index] = InvalidMessage(f"Service Bus cannot carry the message: {error}", native=error)
                continue
            outcomes[index] = Receipt(identity)
            if moment is not None and moment > now:
                scheduled.setdefault(moment, []).append((index, sent))
            else:
                plain.append((index, sent))
        async with self._lock:
            await self._send_all(plain, outcomes)
            for moment, pairs in scheduled.items():
                await self._schedule(moment, pairs, outcomes)
        return outcomes

    async def _send_all(self, pairs: Sequence[tuple[int, ServiceBusMessage]], outcomes: list[_Outcome]) -> None:
        at = 0
        while at < len(pairs):
            # The limit of a batch comes from an open sender.
            indexes: list[int] = []

            async def send(sender: ServiceBusSender, start: int = at, indexes: list[int] = indexes) -> None:
                batch = await sender.create_message_batch()
                add = partial(private_api.add, batch) if self._connection.fast else batch.add_message
                indexes.clear()
                for index, message in pairs[start:]:
                    try:
                        add(message)
                    except MessageSizeExceededError:
                        break
                    except (ValueError, TypeError, OverflowError, struct.error) as refused:
                        if indexes:
                            break  # It cannot be encoded: the next batch starts with it and fails alone.
                        raise InvalidMessage(
                            f"Service Bus's client cannot encode the message: {refused}", native=refused
                        ) from refused
                    indexes.append(index)
                if indexes:
                    await sender.send_messages(batch, timeout=self._connection.settings.publish_timeout)
                else:
                    # A single message may be larger than a batch.
                    index, message = pairs[start]
                    await sender.send_messages(message, timeout=self._connection.settings.publish_timeout)
                    indexes.append(index)

            error = await self._retry(send)
            if error is not None and not indexes:
                indexes.append(pairs[at][0])
            if _is_message_error(error) and len(indexes) > 1:
                # An invalid message fails its batch: send each alone.
                for pair in pairs[at : at + len(indexes)]:
                    await self._send_all([pair], outcomes)
            elif error is not None:
                for index in indexes:
                    outcomes[index] = error
                if error.retriable:
                    # The others would fail the same way.
                    for index, _ in pairs[at + len(indexes) :]:
                        outcomes[index] = error
                    return
            at += len(indexes)

    async def _schedule(
        self, moment: datetime, pairs: Sequence[tuple[int, ServiceBusMessage]], outcomes: list[_Outcome]
    ) -> None:
        at, room = 0, self._connection.settings.max_message_bytes
        while at < len(pairs):
            # A request is one AMQP message, limited to the size of one.
            used, end = _size_of(pairs[at][1]), at + 1
            while end < len(pairs) and used + (size := _size_of(pairs[end][1])) <= room:
                used, end = used + size, end + 1
            error = await self._schedule_part(moment, pairs[at:end], outcomes)
            at = end
            if error is not None and error.retriable:
                # The others would fail the same way.
                for index, _ in pairs[at:]:
                    outcomes[index] = error
                return

    async def _schedule_part(
        self, moment: datetime, pairs: Sequence[tuple[int, ServiceBusMessage]], outcomes: list[_Outcome]
    ) -> BrokerError | None:
        numbers: list[int] = []

        async def schedule(sender: ServiceBusSender) -> None:
            found = await sender.schedule_messages([message for _, message in pairs], moment)
            numbers[:] = [int(number) for number in found]

        error = await self._retry(schedule)
        if _is_message_error(error) and len(pairs) > 1:
            # An invalid message fails its request: schedule each alone.
            for pair in pairs:
                await self._schedule_part(moment, [pair], outcomes)
            return None
        for place, (index, _) in enumerate(pairs):
            receipt = outcomes[index]
            if error is not None:
                outcomes[index] = error
            elif isinstance(receipt, Receipt):
                outcomes[index] = Receipt(receipt.id, offset=numbers[place])
        return error

    async def _retry(self, call: Callable[[ServiceBusSender], Awaitable[None]]) -> BrokerError | None:
        deadline = monotonic() + self._connection.settings.publish_timeout
        broken, busy = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE), Backoff(_FIRST_PAUSE, _LONGEST_BUSY_PAUSE)
        while True:
            error = await self._attempt(call)
            if error is None or not error.retriable or self._closed or self._connection.closed:
                return error
            pause = (busy if is_busy(error) else broken).next()
            if monotonic() + pause > deadline:
                return error
            await asyncio.sleep(pause)

    async def _attempt(self, call: Callable[[ServiceBusSender], Awaitable[None]]) -> BrokerError | None:
        what = f"Publishing to topic {self._topic!r}"
        try:
            await call(await self._open())
        except Exception as error:
            explained = translate(error if self._sender is None else private_api.explained(self._sender, error), what)
            if is_broken(explained):
                self._connection.on_broken(explained)
            if not is_busy(explained):
                await self._close_sender()
            return explained
        return None

    async def _open(self) -> ServiceBusSender:
        if self._sender is None:
            sender = self._connection.client.get_queue_sender(
                self._entity, socket_timeout=self._connection.settings.socket_timeout
            )
            self._sender = sender
            async with asyncio.timeout(self._connection.settings.connect_timeout):
                await (private_api.open_(sender) if self._connection.fast else sender.__aenter__())
            private_api.remember_connection(sender)
            self._connection.on_open()
        return self._sender

    async def _close_sender(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            await private_api.close(sender, _CLOSE_SECONDS)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._tasks.wait(_CLOSE_SECONDS)
            async with self._lock:
                await self._close_sender()
        finally:
            self._on_close(self)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"The publisher of topic {self._topic!r} is closed")
        self._connection.check_open()


def _is_message_error(error: BrokerError | None) -> bool:
    """Whether one invalid message may have failed its batch."""
    return isinstance(error, BackendError | MessageTooLarge) and not error.retriable


def _size_of(message: ServiceBusMessage) -> int:
    """Upper estimate of a message's bytes in a request."""
    properties: Any = message.application_properties or {}
    body: Any = message.body
    if message.body_type.value == "data":
        size = _ENVELOPE + (len(body) if isinstance(body, bytes) else sum(len(part) for part in body))
    else:
        size = _ENVELOPE + 2 * len(str(message.raw_amqp_message))
    return size + sum(len(str(name).encode()) + len(str(value).encode()) for name, value in properties.items())
