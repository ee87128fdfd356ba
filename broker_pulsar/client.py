"""The only import of pulsar-client, which has no types: its modules, names for its objects, and readers.

The client wraps each received message in a Python object and unwraps it at each ack. The object of its extension has
the same methods, so `extension_of` avoids the wrapper and `wrapped` adds it for applications. Both use private names
of the client; without them messages stay wrapped. Reader functions block.
"""

from __future__ import annotations

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


def has_more(reader: Reader, patience: float) -> bool:
    """Whether a message follows the reader's position. Blocks.

    After a seek or a reload of the topic the broker does not know the reader until it has reconnected.

    :param patience: seconds to wait for that.
    """
    deadline = monotonic() + patience
    while True:
        try:
            return reader.has_message_available()
        except pulsar.BrokerMetadataError:
            if monotonic() >= deadline:
                raise
            sleep(_AGAIN)
