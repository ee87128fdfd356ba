"""`OutgoingQueue`: the batch that the next message joins, and the bounds of the whole pipeline.

Synchronous, on one event loop. A plain message costs one call of `put_plain` until its batch leaves: the queue counts
messages and bytes per batch, and knows how many more the open batch takes. A batch is two lists; its messages get an
`Entry` each only when their outcomes differ or one must wait for its key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from broker.driver.limits import MessageLimits, PipelineSettings, message_size
from broker.errors import BrokerError
from broker.outbound import OutboundMessage
from broker.receipts import Receipt

__all__ = ["Caller", "Entry", "OutgoingBatch", "OutgoingQueue", "is_unseen", "outcome_of"]


class OutgoingQueue:
    """Collects messages in an open batch until it is closed.

    :param limits: of the backend, for messages that were not checked.
    :param closed: called with each batch when it is closed.
    """

    __slots__ = (
        "_bytes",
        "_closed",
        "_harmless",
        "_harmless_text",
        "_loop",
        "_messages",
        "_open",
        "_room",
        "_settings",
        "_space",
    )

    def __init__(
        self, settings: PipelineSettings, limits: MessageLimits, closed: Callable[[OutgoingBatch], object]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._harmless = limits.harmless
        self._harmless_text = limits.harmless_text
        self._closed = closed
        self._open = OutgoingBatch([], [])
        self._messages = self._bytes = 0
        """Messages and bytes in the pipeline, without the open batch."""
        self._room = self._space = 0
        """Messages and bytes that the open batch takes through `put_plain`."""

    @property
    def messages(self) -> int:
        """The number of messages in the pipeline."""
        return self._messages + len(self._open.messages)

    @property
    def batch_has_messages(self) -> bool:
        """Whether the open batch has a message."""
        return bool(self._open.messages)

    @property
    def batch_is_full(self) -> bool:
        """Whether the open batch is as large as one call to the backend may be."""
        settings = self._settings
        return len(self._open.messages) >= settings.max_batch or self._open.size >= settings.max_batch_bytes

    def has_room(self, size: int) -> bool:
        """Whether the pipeline takes a message of so many bytes."""
        messages, settings = self.messages, self._settings
        if messages >= settings.max_messages:
            return False
        return not messages or self._bytes + self._open.size + size <= settings.max_bytes

    def put_plain(self, message: OutboundMessage) -> asyncio.Future[Receipt] | None:
        """Queue a plain message in the open batch. None: check the message, then call `add`."""
        data, key, batch = message.data, message.key, self._open
        if data is None:
            return None
        size = len(data)
        if key is not None:
            length = len(key)
            if length > self._harmless_text:
                return None
            size += length
        messages, total = batch.messages, batch.size + size
        if size > self._harmless or not 0 < len(messages) < self._room or total > self._space:
            return None
        batch.size = total
        future: asyncio.Future[Receipt] = asyncio.Future(loop=self._loop)
        messages.append(message)
        batch.futures.append(future)
        return future

    def add(self, message: OutboundMessage, size: int, future: asyncio.Future[Receipt]) -> None:
        """Queue a message for which there is room."""
        batch = self._open
        batch.messages.append(message)
        batch.futures.append(future)
        batch.size += size

    def close_batch(self) -> None:
        """Close the open batch, if it has a message, and begin another."""
        batch = self._open
        if batch.messages:
            self._messages += len(batch.messages)
            self._bytes += batch.size
            self._open = OutgoingBatch([], [])
            self._closed(batch)

    def remove(self, count: int, size: int) -> None:
        """These numbers of messages and bytes have left the pipeline; call `open_fast_path` afterwards."""
        self._messages -= count
        self._bytes -= size

    def open_fast_path(self) -> None:
        """Compute how much the open batch takes through `put_plain`."""
        settings = self._settings
        self._room = min(settings.max_batch, settings.max_messages - self._messages)
        self._space = min(settings.max_batch_bytes, settings.max_bytes - self._bytes)

    def close_fast_path(self) -> None:
        """Have `put_plain` return None until the next `open_fast_path`."""
        self._room = 0


class Entry(msgspec.Struct, eq=False, gc=False):
    """A queued message with an outcome of its own."""

    message: OutboundMessage
    size: int
    future: asyncio.Future[Receipt]
    done: bool = False
    error: BrokerError | None = None
    """The error of the last attempt."""


class Caller(msgspec.Struct, eq=False):
    """A caller that waits for room in the pipeline."""

    message: OutboundMessage
    size: int
    future: asyncio.Future[Receipt]
    admitted: asyncio.Future[None]


class OutgoingBatch:
    """Messages that are sent together.

    :ivar size: bytes of all messages.
    :ivar entries: None as long as all messages have the same outcome.
    """

    __slots__ = ("_done", "entries", "futures", "messages", "size")

    def __init__(self, messages: list[OutboundMessage], futures: list[asyncio.Future[Receipt]], size: int = 0) -> None:
        self.messages = messages
        self.futures = futures
        self.size = size
        self.entries: list[Entry] | None = None
        self._done = False

    @classmethod
    def of(cls, entries: list[Entry]) -> OutgoingBatch:
        """A batch of messages that have entries already."""
        batch = cls([entry.message for entry in entries], [entry.future for entry in entries])
        batch.entries = entries
        return batch

    def apart(self) -> list[Entry]:
        """An entry for each message."""
        if self.entries is None:
            self.entries = [
                Entry(message, message_size(message), future, self._done)
                for message, future in zip(self.messages, self.futures, strict=True)
            ]
        return self.entries

    def end(self) -> None:
        """All messages of a batch without entries have their outcomes."""
        self._done = True

    @property
    def done(self) -> bool:
        """Whether all messages have their outcomes."""
        return self._done if self.entries is None else all(entry.done for entry in self.entries)


def is_unseen(future: asyncio.Future[Receipt]) -> bool:
    """Whether the future's exception was never retrieved; asyncio keeps this flag for its own warning."""
    return future.cancelled() or bool(getattr(future, "_log_traceback", True))


def outcome_of(future: asyncio.Future[Receipt]) -> Receipt | BaseException:
    """The receipt or the error of a done future, which stays unseen (`is_unseen`)."""
    if future.cancelled():
        return asyncio.CancelledError()
    error: BaseException | None = getattr(future, "_exception", None)
    return future.result() if error is None else error
