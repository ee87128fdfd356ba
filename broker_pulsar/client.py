"""The only import of pulsar-client, which has no types: its modules, names for its objects, and readers.

The client wraps each received message in a Python object and unwraps it at each ack. The object of its extension has
the same methods, so `extension_of` avoids the wrapper and `wrapped` adds it for applications. Both use private names
of the client; without them messages stay wrapped. `seek` and the functions of readers block.

The client never answers some requests of a consumer that is closed meanwhile, such as a seek that waits for a
reconnect, and its own blocking calls then poll forever. A thread in one of them keeps the process from ending; a daemon
thread aborts it, since the interpreter unwinds it at exit and C++ does not allow that there. So these requests are made
asynchronously, and the wait ends when the caller is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any, Final, TypeAlias

import pulsar as _pulsar  # pyright: ignore[reportMissingTypeStubs]
from pulsar import exceptions as _exceptions  # pyright: ignore[reportMissingTypeStubs]

from broker_pulsar.names import READERS, TopicPath

__all__ = [
    "Client",
    "Consumer",
    "Message",
    "MessageId",
    "Producer",
    "Reader",
    "exceptions",
    "extension_of",
    "has_more",
    "open_reader",
    "pulsar",
    "seek",
    "wrapped",
]


pulsar: Any = _pulsar
exceptions: Any = _exceptions
Client: TypeAlias = Any
Consumer: TypeAlias = Any
Message: TypeAlias = Any
MessageId: TypeAlias = Any
Producer: TypeAlias = Any
Reader: TypeAlias = Any


def extension_of(consumer: Consumer) -> Consumer:
    """The extension's consumer, which receives messages without wrappers."""
    return getattr(consumer, "_consumer", consumer)


def wrapped(message: Message) -> Message:
    """The message with the wrapper that the client gives to applications."""
    if isinstance(message, pulsar.Message):
        return message
    return pulsar.Message._wrap(message)


_QUEUE: Final = 1000
_AGAIN: Final = 0.02
_CHECK: Final = 0.1
"""Seconds between two looks at whether the caller still waits."""


def open_reader(client: Client, log: TopicPath, start: Any, *, compacted: bool = False) -> Reader:
    """A reader of one log that starts at a message id, inclusive. Blocks.

    :param compacted: leave out what compaction has removed.
    """
    return client.create_reader(
        log.url,
        start,
        receiver_queue_size=_QUEUE,
        subscription_role_prefix=READERS,
        start_message_id_inclusive=True,
        is_read_compacted=compacted,
    )


def has_more(reader: Reader, patience: float, is_open: Callable[[], bool]) -> bool:
    """Whether a message follows the reader's position. Blocks.

    After a seek or a reload of the topic the broker does not know the reader until it has reconnected.

    :param patience: seconds to wait for that.
    :param is_open: whether the caller still waits.
    :raises AlreadyClosed: the caller does not.
    """
    deadline = monotonic() + patience
    while True:
        try:
            return _answer(_reader_extension(reader).has_message_available_async, is_open)
        except pulsar.BrokerMetadataError:
            if monotonic() >= deadline:
                raise
            sleep(_AGAIN)


def seek(consumer: Consumer | Reader, target: MessageId | int, is_open: Callable[[], bool]) -> None:
    """Move a consumer or reader to a message id or to a time in milliseconds. Blocks.

    :param is_open: whether the caller still waits.
    :raises AlreadyClosed: the caller does not.
    """
    extension = _reader_extension(consumer) if isinstance(consumer, pulsar.Reader) else extension_of(consumer)
    place = target if isinstance(target, int) else target._msg_id
    _answer(lambda answer: extension.seek_async(place, answer), is_open)


def _reader_extension(reader: Reader) -> Reader:
    return reader._reader


def _answer(request: Callable[[Callable[..., object]], object], is_open: Callable[[], bool]) -> Any:
    """The value of the answer to an asynchronous request; None if it has none.

    :raises PulsarException: the request failed. :raises AlreadyClosed: `is_open` was false first.
    """
    answers: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
    request(lambda *answer: answers.put(answer))
    while is_open():
        with suppress(Empty):
            result, *values = answers.get(timeout=_CHECK)
            if result != pulsar.Result.Ok:
                # A result without a name: see `errors`.
                kind = getattr(exceptions, result.name, exceptions.NotConnected)
                raise kind(f"Pulsar error: {result.name}")
            return values[0] if values else None
    raise exceptions.AlreadyClosed("Closed before the client answered")
