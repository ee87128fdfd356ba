"""`MarkerProducer`: writes the markers of one queue client, in order for each message.

*Concurrency.* One event loop; overlapping calls are sent in the order of the calls. *Order.* The producer is
idempotent: retries neither duplicate nor reorder markers. *Cancellation.* The write of a cancelled call continues.
*Failure.* Each marker has its own outcome; one that failed may still be on the brokers.
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
from broker_kafka.config.properties import LARGEST
from broker_kafka.queue.markers.marker_topic import MARKER_HEADROOM
from broker_kafka.queue.markers.wire import pack_markers

__all__ = ["PACKED_BYTES", "MarkerProducer", "PlacedMarker", "explain_marker_error", "pack_records"]

PACKED_BYTES: Final = MARKER_HEADROOM // 2
"""The most bytes of markers in one record of several; every marker topic takes so many."""


class PlacedMarker(NamedTuple):
    """The bytes of a marker, and its partition of the marker topic.

    :ivar whole: whether the bytes are a record of several markers, which is not packed with others.
    """

    partition: int
    data: bytes
    whole: bool = False


class MarkerProducer:
    """:param topic: of the markers.
    :param queue: the key of the markers, as in kafka-mq-go.
    :param timeout: seconds after which a marker that was not written is out of date.
    :param max_markers: of one record.
    """

    def __init__(self, connection: Connection, topic: str, queue: str, *, timeout: float, max_markers: int) -> None:
        settings = connection.settings
        self._max_markers: Final = max_markers
        self._topic = topic
        self._key: Final = queue.encode()
        timeout_ms = min(settings.message_timeout_ms, max(1000, int(1000 * timeout)))
        config = connection.client_config("producer") | {
            "enable.idempotence": True,
            "acks": "all",
            "message.timeout.ms": timeout_ms,
            "message.max.bytes": LARGEST,
        }
        self._thread = ProducerThread(
            config, name=f"broker-kafka-markers-{queue}", window=settings.publish_window, timeout=timeout_ms / 1000
        )

    async def open(self) -> None:
        """Connect, so that the first marker does not wait for that.

        :raises BrokerError: the client cannot be created, or the topic does not exist.
        """
        await self._thread.start()
        topic = self._topic

        def connect(client: ProducerClient) -> None:
            client.connect(topic)

        await self._thread.call(connect)

    async def write(self, markers: Sequence[PlacedMarker], *, by: float = inf) -> list[BrokerError | None]:
        """Write these; for each None once it is on the brokers, else the error.

        :param by: the `lease_time` after which nothing is written, since this process was suspended.
        :raises Closed: the producer was closed.
        """
        if lease_time() > by:
            return [ConnectionFailed("The process was suspended before it wrote a marker")] * len(markers)
        records, places = pack_records(markers, self._max_markers)
        messages = [OutboundMessage(data, self._key, partition=partition) for partition, data, _ in records]
        outcomes = await self._thread.publish(self._topic, messages, receipts=False, placed=True)
        errors = [
            explain_marker_error(outcome, self._topic, len(message.data or b""))
            if isinstance(outcome, BrokerError)
            else None
            for outcome, message in zip(outcomes, messages, strict=True)
        ]
        return [errors[place] for place in places]

    def records(self, markers: Sequence[PlacedMarker]) -> tuple[str, list[OutboundMessage]]:
        """The topic and the records of these markers, for a transactional producer."""
        records, _ = pack_records(markers, self._max_markers)
        return self._topic, [OutboundMessage(data, self._key, partition=partition) for partition, data, _ in records]

    async def close(self, timeout: float) -> None:
        """Flush for so many seconds at most; may be called twice."""
        await self._thread.stop(timeout)


def pack_records(markers: Sequence[PlacedMarker], max_markers: int) -> tuple[list[PlacedMarker], list[int]]:
    """Records for these markers, in the order of each partition; and for each marker the index of its record.

    :param max_markers: of one record.
    """
    records: list[tuple[int, list[bytes]]] = []
    places: list[int] = []
    filling: dict[int, tuple[int, int]] = {}
    """By partition: the index of the record that has room, and its bytes."""
    for partition, data, whole in markers:
        if whole:
            places.append(len(records))
            records.append((partition, [data]))
            filling.pop(partition, None)
            continue
        place, size = filling.get(partition, (-1, 0))
        size += len(data)
        if place < 0 or size > PACKED_BYTES or len(records[place][1]) >= max_markers:
            place, size = len(records), len(data)
            records.append((partition, []))
        records[place][1].append(data)
        filling[partition] = place, size
        places.append(place)
    found = [
        PlacedMarker(partition, parts[0] if len(parts) == 1 else pack_markers(parts)) for partition, parts in records
    ]
    return found, places


def explain_marker_error(error: BrokerError, topic: str, size: int) -> BrokerError:
    """The error of a record of markers, with what to do about the marker topic.

    :param size: the bytes of the record.
    """
    if isinstance(error, MessageTooLarge):
        least = size + MARKER_HEADROOM
        return MessageTooLarge(
            f"A START of {size} bytes, which carries its message, is larger than max.message.bytes of marker topic "
            f"{topic!r}",
            native=error,
            advice=f"Call bus.admin.ensure_topic({topic!r}, max_message_bytes={least}), or set more",
        )
    # Of a marker itself only the partition can be wrong, and it existed when this client was opened.
    if isinstance(error, TopicNotFound | InvalidMessage):
        return BackendError(
            f"Marker topic {topic!r} was deleted, and with it the record of unsettled messages",
            native=error,
            advice="Open the consumer again, which creates the topic; messages that were unsettled are lost",
        )
    if isinstance(error, NotAuthorized):
        return NotAuthorized(
            f"Markers may not be written: {error.message}",
            native=error,
            advice=f"Grant Write, Describe and Read on topic {topic!r}, and IdempotentWrite on the cluster",
        )
    if isinstance(error, OperationTimeout):
        # The next fetch writes a START again; a settlement reports the state of its message.
        return OperationTimeout(
            f"No confirmation that markers were written: {error.message}", native=error.native, advice=""
        )
    return error
