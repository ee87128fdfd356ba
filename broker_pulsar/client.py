"""The one door to pulsar-client, which has no types: its modules as they are, and names for its objects.

The client makes an object of Python around each message that it hands over, and takes it off again at each ack. The
message beneath, of its extension, answers the same questions: by two private names of the client, `extension_of` and
`shown` save the first and make it for applications. A client without the one for consumers gives wrapped messages.

MERGED broker_pulsar.client: Readers of pulsar-client: made, and asked whether anything is left. Blocking, for threads of the connection.
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


_QUEUE: Final = 1000
_AGAIN: Final = 0.02


def open_reader(client: Client, log: TopicPath, start: Any) -> Reader:
    """A reader of one log that begins with this message id, if it is there; it blocks."""
    return client.create_reader(
        log.url,
        start,
        receiver_queue_size=_QUEUE,
        subscription_role_prefix=READERS,
        start_message_id_inclusive=True,
    )


def has_more(reader: Reader, patience: float) -> bool:
    """Whether anything is behind the place of a reader; it blocks.

    A seek, or a topic that is loaded anew, has the broker drop the reader, which comes back by itself; until then the
    broker does not know it.

    :param patience: seconds for which that is waited for.
    """
    deadline = monotonic() + patience
    while True:
        try:
            return reader.has_message_available()
        except pulsar.BrokerMetadataError:
            if monotonic() >= deadline:
                raise
            sleep(_AGAIN)
