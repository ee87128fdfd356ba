"""`Emitter`: publishes typed values to a topic with a group's partitioner.

*Concurrency.* Tasks of one event loop may share it; messages of a key are published in the order of the calls.
*Cancellation.* A cancelled call may have published. *Failure.* `emit` raises the error of its message; `flush` and
`close` raise those of futures whose outcome was not retrieved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from broker import Bus, Closed, Codec, InvalidMessage, OutboundMessage, Partitioner, Receipt, Topic
from broker_streams import keys

__all__ = ["Emitter"]

T = TypeVar("T")


class Emitter(Generic[T]):
    """Publishes to one topic; `async with` flushes it at the end.

    :param partitioner: as of the group that reads the topic, `group.partitioner`.
    :param attributes: of every message; those of a call come on top.
    """

    def __init__(
        self,
        bus: Bus,
        topic: str,
        codec: Codec[T],
        *,
        partitioner: Partitioner = "broker",
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        self.topic: Final = topic
        self._bus = bus
        self._codec = codec
        self._partitioner: Partitioner = partitioner
        self._attributes = dict(attributes or {})
        self._closed = False

    async def emit(
        self, key: str, value: T | None, *, attributes: Mapping[str, str] | None = None, id: str | None = None
    ) -> Receipt:
        """Publish a value; return when the broker has stored it.

        :param value: None is a tombstone: it deletes the key from a table.
        :raises InvalidMessage: the codec cannot encode the value, or the key is none of a table's.
        :raises Closed: the emitter is closed.
        :raises BrokerError: the message was not published.
        """
        return await self._target().publish(self._message(key, value, attributes, id))

    async def enqueue(
        self, key: str, value: T | None, *, attributes: Mapping[str, str] | None = None, id: str | None = None
    ) -> asyncio.Future[Receipt]:
        """Queue a value for publishing; return a future of its receipt. Waits while the queue is full.

        :raises InvalidMessage, Closed: as for `emit`.
        """
        return await self._target().enqueue(self._message(key, value, attributes, id))

    async def flush(self) -> None:
        """Wait until all queued values are on the broker.

        :raises PublishError: some messages failed, and the outcomes of their futures were not retrieved.
        """
        await self._target().flush()

    async def close(self) -> None:
        """Flush, and publish no more. May be called twice."""
        if not self._closed:
            self._closed = True
            await self._bus.topic(self.topic, partitioner=self._partitioner).flush()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _target(self) -> Topic[Any]:
        if self._closed:
            raise Closed(f"The emitter of {self.topic!r} is closed")
        return self._bus.topic(self.topic, partitioner=self._partitioner)

    def _message(
        self, key: str, value: T | None, attributes: Mapping[str, str] | None, id: str | None
    ) -> OutboundMessage:
        if type(key) is not str:
            raise InvalidMessage(f"key is {key!r}", advice="It takes a str")
        data = None if value is None else self._codec.encode(value)
        return OutboundMessage(data, keys.encode(key), {**self._attributes, **(attributes or {})}, id)
