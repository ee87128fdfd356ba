"""Writes the markers of one queue client, in order for each message.

*Concurrency.* One event loop; calls that run at once go to the brokers in the order in which they were made. *Order.*
The producer is idempotent, so that repeats of a request neither double nor overtake. *Cancellation.* A cancelled call
goes on. *Failure.* Each marker has its own outcome; one that failed may still be on the brokers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

from broker import (
    BackendError,
    BrokerError,
    ConnectionFailed,
    InvalidMessage,
    MessageTooLarge,
    NotAuthorized,
    OperationTimeout,
    OutboundMessage,
    TopicNotFound,
)
from broker.driver import lease_time
from broker_kafka.client.producer import ProducerClient, ProducerThread
from broker_kafka.cluster.connection import Connection
from broker_kafka.queue.markers.marker_topic import LARGEST, MARKER_HEADROOM
from broker_kafka.queue.markers.wire import pack_markers

__all__ = ["PACKED_BYTES", "MarkerProducer", "Placed", "explained", "packed"]

PACKED_BYTES: Final = MARKER_HEADROOM // 2
"""The most bytes of markers in one record of several: every marker topic takes that, whatever its messages may take."""


class Placed(NamedTuple):
    """A marker as bytes, and the partition it belongs to.

    :ivar whole: whether it is a record already, and is not packed with others.
    """

    partition: int
    data: bytes
    whole: bool = False


class MarkerProducer:
    """:param topic: of the markers.
    :param queue: whose markers they are; their key, as in kafka-mq-go.
    :param lasts: seconds; a marker that is not written by then says nothing that still holds.
    :param together: the most markers of one record.
    """

    def __init__(self, connection: Connection, topic: str, queue: str, *, lasts: float, together: int) -> None:
        settings = connection.settings
        self._together: Final = together
        self._topic = topic
        self._key: Final = queue.encode()
        timeout = min(settings.message_timeout_ms, max(1000, int(1000 * lasts)))
        config = connection.client_config("producer") | {
            "enable.idempotence": True,
            "acks": "all",
            "message.timeout.ms": timeout,
            "message.max.bytes": LARGEST,
        }
        self._thread = ProducerThread(
            config, name=f"broker-kafka-markers-{queue}", window=settings.publish_window, timeout=timeout / 1000
        )

    async def open(self) -> None:
        """Connect, so that the first marker need not wait for it.

        :raises BrokerError: the client cannot be made, or the topic is not there.
        """
        await self._thread.start()
        topic = self._topic

        def connect(client: ProducerClient) -> None:
            client.connect(topic)

        await self._thread.call(connect)

    async def write(self, markers: Sequence[Placed], *, by: float = inf) -> list[BrokerError | None]:
        """Write these; for each None if it is on the brokers, else the error.

        :param by: the `lease_time` after which nothing is written: this process stood still, and others went on.
        :raises Closed: it was closed.
        """
        if lease_time() > by:
            return [ConnectionFailed("This process stood still before it wrote a marker")] * len(markers)
        messages, places = self._packed(markers)
        outcomes = await self._thread.publish(self._topic, messages, receipts=False, placed=True)
        told = [
            explained(outcome, self._topic, len(message.data or b"")) if isinstance(outcome, BrokerError) else None
            for outcome, message in zip(outcomes, messages, strict=True)
        ]
        return [told[place] for place in places]

    def records(self, markers: Sequence[Placed]) -> tuple[str, list[OutboundMessage]]:
        """The topic and the records of these, for another producer."""
        return self._topic, self._packed(markers)[0]

    def _packed(self, markers: Sequence[Placed]) -> tuple[list[OutboundMessage], list[int]]:
        records, places = packed(markers, self._together)
        return [OutboundMessage(data, self._key, partition=partition) for partition, data, _ in records], places

    async def close(self, timeout: float) -> None:
        """Write what is on the way, at most for so many seconds; may be called twice."""
        await self._thread.stop(timeout)


def packed(markers: Sequence[Placed], together: int) -> tuple[list[Placed], list[int]]:
    """Records for these markers, in the order of each partition; and for each marker, which record it is in.

    :param together: the most markers of one record.
    """
    records: list[tuple[int, list[bytes]]] = []
    places: list[int] = []
    filling: dict[int, tuple[int, int]] = {}
    """Of each partition the record that takes more, and its bytes."""
    for partition, data, whole in markers:
        if whole:
            places.append(len(records))
            records.append((partition, [data]))
            filling.pop(partition, None)
            continue
        place, size = filling.get(partition, (-1, 0))
        size += len(data)
        if place < 0 or size > PACKED_BYTES or len(records[place][1]) >= together:
            place, size = len(records), len(data)
            records.append((partition, []))
        records[place][1].append(data)
        filling[partition] = place, size
        places.append(place)
    found = [Placed(partition, parts[0] if len(parts) == 1 else pack_markers(parts)) for partition, parts in records]
    return found, places


def explained(error: BrokerError, topic: str, size: int) -> BrokerError:
    """Why markers of so many bytes could not be written, in terms of queues and the topic of their markers."""
    if isinstance(error, MessageTooLarge):
        least = size + MARKER_HEADROOM
        return MessageTooLarge(
            f"A START of {size} bytes, which carries its message, is larger than max.message.bytes of the marker "
            f"topic {topic!r} lets in",
            native=error,
            advice=f"Call bus.admin.ensure_topic({topic!r}, max_message_bytes={least}), or more",
        )
    # What else can be wrong with a marker itself is its partition, which was there when this client was opened.
    if isinstance(error, TopicNotFound | InvalidMessage):
        return BackendError(
            f"The marker topic {topic!r} is gone, and with it what is known of unsettled messages",
            native=error,
            advice="Open the consumer again, which creates it; what was unsettled then comes to nobody",
        )
    if isinstance(error, NotAuthorized):
        return NotAuthorized(
            f"Markers may not be written: {error.message}",
            native=error,
            advice=f"Grant Write, Describe and Read on topic {topic!r}, and IdempotentWrite on the cluster",
        )
    if isinstance(error, OperationTimeout):
        # A START is written again by the next fetch, and who settles is told what became of the message.
        return OperationTimeout(f"Markers are not known to be written: {error.message}", native=error.native, advice="")
    return error
