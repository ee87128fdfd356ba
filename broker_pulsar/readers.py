"""Readers of pulsar-client: made, and asked whether anything is left. Blocking, for threads of the connection."""

from __future__ import annotations

from time import monotonic, sleep
from typing import Any, Final

from broker_pulsar.client import Client, Reader, pulsar
from broker_pulsar.names import READERS, TopicPath

__all__ = ["has_more", "open_reader"]

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
