"""Publishing: a batch becomes as few requests as the service allows, and each message gets its own outcome.

*Concurrency.* Calls may run at once. Requests without an ordering key run in parallel; those of one key run in
sequence, also across calls. *Failure.* If a message of a key fails, the messages that wait behind it fail without an
attempt, so none overtakes it; the next call is sent again. A refused request is split until the invalid message is
alone. *Cancellation.* A cancelled call leaves the outcome of its messages unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Final

import grpc

from broker import BackendError, BrokerError, Closed, ConnectionFailed, NotFound, OutboundMessage, Receipt
from broker.driver import Backoff
from broker_pubsub.codec import encode
from broker_pubsub.connection import Connection
from broker_pubsub.errors import is_status, translate
from broker_pubsub.protocol import Methods, PublishRequest

__all__ = ["MAX_MESSAGES", "MAX_REQUEST", "PubSubPublishTarget", "group_by_key", "split_by_size"]

Outcomes = list[Receipt | BrokerError | None]


class PubSubPublishTarget:
    """Implements `PublishTarget`."""

    def __init__(self, topic: str, connection: Connection) -> None:
        self._topic = topic
        self._path = connection.names.topic(topic)
        self._connection = connection
        self._ordering = connection.settings.ordering != "off"
        self._slots = asyncio.Semaphore(connection.settings.max_requests)
        self._tails: dict[str, asyncio.Task[bool]] = {}
        """The last task in flight of each key."""
        self._closed = False

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError | None]:
        if self._closed:
            raise Closed(f"The publisher of topic {self._topic!r} is closed")
        ordering = self._ordering
        full_request = PublishRequest(topic=self._path)
        encoded = full_request.messages
        for message in messages:
            encode(message, encoded.add(), ordering=ordering)
        outcomes: Outcomes = [None] * len(messages)
        keyed = [index for index, message in enumerate(messages) if message.key is not None] if ordering else []
        if not keyed:
            # Nearly every batch fits into one request, whose size is computed faster than those of its messages.
            if len(encoded) <= MAX_MESSAGES and full_request.ByteSize() <= MAX_REQUEST:
                await self._send(messages, encoded, range(len(encoded)), outcomes, request=full_request)
            else:
                pieces = split_by_size(encoded, range(len(messages)))
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
        for key, indexes in group_by_key(encoded, range(len(encoded))).items():
            pieces = split_by_size(encoded, indexes)
            if not key:
                work += [loop.create_task(self._send(messages, encoded, piece, outcomes)) for piece in pieces]
                continue
            before = self._tails.get(key)
            run = loop.create_task(self._send_run(messages, encoded, pieces, outcomes, before))
            self._tails[key] = run
            run.add_done_callback(lambda done, key=key: self._ended(key, done))
            work.append(run)
        # Shielded, so the next message of a key does not overtake one in flight.
        await asyncio.gather(*(asyncio.shield(each) for each in work))

    async def _send_run(
        self,
        messages: Sequence[OutboundMessage],
        encoded: Sequence[Any],
        pieces: Sequence[Sequence[int]],
        outcomes: Outcomes,
        before: asyncio.Task[bool] | None,
    ) -> bool:
        """Send the messages of one key in sequence; returns whether all were stored."""
        succeeded = True
        if before is not None:
            await asyncio.wait({before})
            succeeded = not before.cancelled() and before.exception() is None and before.result()
        for piece in pieces:
            if succeeded:
                succeeded = await self._send(messages, encoded, piece, outcomes, in_order=True)
            else:
                self._skip(piece, outcomes)
        return succeeded

    def _skip(self, piece: Sequence[int], outcomes: Outcomes) -> None:
        error = BackendError(
            f"Not sent: an earlier message of its key failed on topic {self._topic!r}",
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
        """Send one request; a refused one is split until the invalid message is alone. Returns whether all were
        stored."""
        if not piece:
            return True
        if request is None:
            request = PublishRequest(topic=self._path, messages=[encoded[index] for index in piece])
        try:
            async with self._slots:
                response = await self._request(request)
        except (BrokerError, grpc.aio.AioRpcError, grpc.aio.UsageError) as failure:
            error = self._translate(failure)
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
        """Send a request; retried if it certainly was not sent, while the connection may return."""
        settings, loop = self._connection.settings, asyncio.get_running_loop()
        until = loop.time() + min(settings.publish_timeout, settings.longest_reconnect_wait)
        backoff = Backoff(settings.reconnect_wait / 2, settings.reconnect_wait)
        while True:
            try:
                return await self._connection.start(Methods.PUBLISH, request, settings.publish_timeout)
            except grpc.aio.AioRpcError as failure:
                if not isinstance(self._translate(failure), ConnectionFailed) or loop.time() >= until:
                    raise
            await asyncio.sleep(backoff.next())

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
        succeeded = await self._send(messages, encoded, piece[:middle], outcomes, in_order=in_order)
        if in_order and not succeeded:
            self._skip(piece[middle:], outcomes)
            return False
        return await self._send(messages, encoded, piece[middle:], outcomes, in_order=in_order) and succeeded

    def _translate(self, failure: BaseException) -> BrokerError:
        return translate(failure, f"Publishing to topic {self._topic!r}", "topic")

    async def close(self) -> None:
        self._closed = True


MAX_MESSAGES: Final = 1000
MAX_REQUEST: Final = 10_000_000
"""Bytes of a publish request."""
_OVERHEAD: Final = 512
"""Bytes of a request besides its messages: the topic name."""
_PER_MESSAGE: Final = 16
"""Maximum framing bytes per message."""


def group_by_key(encoded: Sequence[Any], indexes: Iterable[int]) -> dict[str, list[int]]:
    """The messages by ordering key; the empty key means none."""
    found: dict[str, list[int]] = {}
    for index in indexes:
        found.setdefault(encoded[index].ordering_key, []).append(index)
    return found


def split_by_size(encoded: Sequence[Any], indexes: Sequence[int]) -> list[Sequence[int]]:
    """The indexes of each request, in order; a message that fills a request is sent alone."""
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
