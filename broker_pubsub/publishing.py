"""Publishing: a batch becomes as few requests as the service takes, and each message gets its own answer.

Several calls may run at once. Messages without an ordering key go in requests that run side by side; those of a key go
one request after the other, also over calls, in the order of the calls. When a message of a key fails, what already
waits behind it fails too, untried, so that nothing passes it; the first call made after that goes out again.
A refused request is split until the bad message is alone. Cancelling a call leaves its messages' outcome unknown.

MERGED broker_pubsub.publishing: Cuts a batch into requests that the service takes: so many messages and bytes, and one ordering key each. Pure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Final

import grpc

from broker import BackendError, BrokerError, Closed, ConnectionFailed, NotFound, OutboundMessage, Receipt
from broker_pubsub.codec import encode
from broker_pubsub.connection import Connection
from broker_pubsub.errors import classify, is_status
from broker_pubsub.protocol import Methods, PublishRequest

__all__ = ["MAX_MESSAGES", "MAX_REQUEST", "PubSubTarget", "chunks", "runs"]


Outcomes = list[Receipt | BrokerError | None]


class PubSubTarget:
    """One topic's way out."""

    def __init__(self, topic: str, connection: Connection) -> None:
        self._topic = topic
        self._path = connection.names.topic(topic)
        self._connection = connection
        self._ordering = connection.settings.ordering != "off"
        self._slots = asyncio.Semaphore(connection.settings.max_requests)
        self._tails: dict[str, asyncio.Task[bool]] = {}
        """The last run of each key that is on its way."""
        self._closed = False

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError | None]:
        if self._closed:
            raise Closed(f"Topic {self._topic!r} was closed")
        ordering = self._ordering
        whole = PublishRequest(topic=self._path)
        encoded = whole.messages
        for message in messages:
            encode(message, encoded.add(), ordering=ordering)
        outcomes: Outcomes = [None] * len(messages)
        keyed = [index for index, message in enumerate(messages) if message.key is not None] if ordering else []
        if not keyed:
            # Nearly every batch is one request as it is, whose size is told quicker than those of its messages.
            if len(encoded) <= MAX_MESSAGES and whole.ByteSize() <= MAX_REQUEST:
                await self._send(messages, encoded, range(len(encoded)), outcomes, request=whole)
            else:
                pieces = chunks(encoded, range(len(messages)))
                await asyncio.gather(*(self._send(messages, encoded, piece, outcomes) for piece in pieces))
        else:
            await self._publish_keyed(messages, encoded, outcomes)
        if all(isinstance(outcome, NotFound) for outcome in outcomes):
            raise outcomes[0]  # pyright: ignore[reportGeneralTypeIssues]
        return outcomes

    async def _publish_keyed(
        self, messages: Sequence[OutboundMessage], encoded: Sequence[Any], outcomes: Outcomes
    ) -> None:
        loop = asyncio.get_running_loop()
        work: list[asyncio.Task[Any]] = []
        for key, indexes in runs(encoded, range(len(encoded))).items():
            pieces = chunks(encoded, indexes)
            if not key:
                work += [loop.create_task(self._send(messages, encoded, piece, outcomes)) for piece in pieces]
                continue
            before = self._tails.get(key)
            run = loop.create_task(self._send_run(messages, encoded, pieces, outcomes, before))
            self._tails[key] = run
            run.add_done_callback(lambda done, key=key: self._ended(key, done))
            work.append(run)
        # A cancelled call does not end what is on its way, so that the next of a key does not pass it.
        await asyncio.gather(*(asyncio.shield(each) for each in work))

    async def _send_run(
        self,
        messages: Sequence[OutboundMessage],
        encoded: Sequence[Any],
        pieces: Sequence[Sequence[int]],
        outcomes: Outcomes,
        before: asyncio.Task[bool] | None,
    ) -> bool:
        """The messages of one key, one request after the other; whether all are on the server."""
        good = True
        if before is not None:
            await asyncio.wait({before})
            good = not before.cancelled() and before.exception() is None and before.result()
        for piece in pieces:
            if good:
                good = await self._send(messages, encoded, piece, outcomes, in_order=True)
            else:
                self._stop(piece, outcomes)
        return good

    def _stop(self, piece: Sequence[int], outcomes: Outcomes) -> None:
        error = BackendError(
            f"Not attempted: an earlier message of its key failed on topic {self._topic!r}",
            retriable=True,
            advice="Publish the failed one first, then this one",
        )
        for index in piece:
            outcomes[index] = error

    def _ended(self, key: str, done: asyncio.Task[bool]) -> None:
        if self._tails.get(key) is done:
            del self._tails[key]
        if not done.cancelled():
            done.exception()

    async def _send(
        self,
        messages: Sequence[OutboundMessage],
        encoded: Sequence[Any],
        piece: Sequence[int],
        outcomes: Outcomes,
        *,
        in_order: bool = False,
        request: Any = None,
    ) -> bool:
        """One request; a refused one is split until the bad message is alone. Whether all are on the server."""
        if not piece:
            return True
        if request is None:
            request = PublishRequest(topic=self._path, messages=[encoded[index] for index in piece])
        try:
            async with self._slots:
                response = await self._request(request)
        except (BrokerError, grpc.aio.AioRpcError, grpc.aio.UsageError) as failure:
            error = self._told(failure)
            refused = is_status(failure, grpc.StatusCode.INVALID_ARGUMENT)
        else:
            ids = response.message_ids
            for index, message_id in zip(piece, ids, strict=True):
                outcomes[index] = Receipt(messages[index].id or message_id)
            return True
        if refused and len(piece) > 1:
            return await self._split(messages, encoded, piece, outcomes, in_order=in_order)
        for index in piece:
            outcomes[index] = error
        return False

    async def _request(self, request: Any) -> Any:
        """One call; again as long as it was not sent, and the connection may come back by itself."""
        settings, loop = self._connection.settings, asyncio.get_running_loop()
        until = loop.time() + min(settings.publish_timeout, settings.longest_reconnect_wait)
        while True:
            try:
                return await self._connection.start(Methods.PUBLISH, request, settings.publish_timeout)
            except grpc.aio.AioRpcError as failure:
                if not isinstance(self._told(failure), ConnectionFailed) or loop.time() >= until:
                    raise
            await asyncio.sleep(settings.reconnect_wait / 2)

    async def _split(
        self,
        messages: Sequence[OutboundMessage],
        encoded: Sequence[Any],
        piece: Sequence[int],
        outcomes: Outcomes,
        *,
        in_order: bool,
    ) -> bool:
        middle = len(piece) // 2
        good = await self._send(messages, encoded, piece[:middle], outcomes, in_order=in_order)
        if in_order and not good:
            self._stop(piece[middle:], outcomes)
            return False
        return await self._send(messages, encoded, piece[middle:], outcomes, in_order=in_order) and good

    def _told(self, failure: BaseException) -> BrokerError:
        return classify(failure, f"Publishing to topic {self._topic!r}", "topic")

    async def close(self) -> None:
        self._closed = True


MAX_MESSAGES: Final = 1000
MAX_REQUEST: Final = 10_000_000
"""Bytes of a publish request."""
_OVERHEAD: Final = 512
"""Bytes of a request besides its messages: the topic's name."""
_PER_MESSAGE: Final = 16
"""Most bytes that one message's place in the list takes."""


def runs(encoded: Sequence[Any], indexes: Iterable[int]) -> dict[str, list[int]]:
    """Which of these messages have which ordering key; the empty one is none."""
    found: dict[str, list[int]] = {}
    for index in indexes:
        found.setdefault(encoded[index].ordering_key, []).append(index)
    return found


def chunks(encoded: Sequence[Any], indexes: Sequence[int]) -> list[Sequence[int]]:
    """The indexes of each request, in order; a message that fills one goes alone."""
    sizes = [encoded[index].ByteSize() for index in indexes]
    if len(indexes) <= MAX_MESSAGES and sum(sizes) <= MAX_REQUEST - _OVERHEAD - _PER_MESSAGE * len(indexes):
        return [indexes]
    found: list[Sequence[int]] = []
    begin = used = 0
    for position, size in enumerate(sizes):
        size += _PER_MESSAGE
        if position > begin and (used + size > MAX_REQUEST - _OVERHEAD or position - begin >= MAX_MESSAGES):
            found.append(indexes[begin:position])
            begin, used = position, 0
        used += size
    found.append(indexes[begin:])
    return found
