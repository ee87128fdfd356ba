"""The one door to pulsar-client, which has no types: its modules as they are, and names for its objects.

The client makes an object of Python around each message that it hands over, and takes it off again at each ack. The
message beneath, of its extension, answers the same questions: by two private names of the client, `extension_of` and
`shown` save the first and make it for applications. A client without the one for consumers gives wrapped messages.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import pulsar as _pulsar  # pyright: ignore[reportMissingTypeStubs]
from pulsar import exceptions as _exceptions  # pyright: ignore[reportMissingTypeStubs]

__all__ = [
    "Client",
    "Consumer",
    "Message",
    "MessageId",
    "Producer",
    "Reader",
    "exceptions",
    "extension_of",
    "pulsar",
    "shown",
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
    """What receives and acks for the consumer: its messages have no wrapper."""
    return getattr(consumer, "_consumer", consumer)


def shown(message: Message) -> Message:
    """The message as the client shows it to applications."""
    if isinstance(message, pulsar.Message):
        return message
    return pulsar.Message._wrap(message)
