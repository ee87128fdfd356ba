"""The fastest loops on confluent-kafka, without the library, that we found.

Each blocks its thread, as the client does. Publishing waits for all delivery reports and counts failures; reading
checks each record for an error. A failure ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

import broker

__all__ = [
    "produce_batches",
    "produce_one_by_one",
    "produce_with_places",
    "read",
    "read_columns",
    "read_five",
    "read_some",
    "read_with_attributes",
    "transactions",
]

_MOST = 5000
pyarrow: Any = import_module("pyarrow")


class _Reports:
    """Counts delivery reports."""

    def __init__(self) -> None:
        self.delivered = 0
        self.failed = 0

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self.delivered += 1
        else:
            self.failed += 1


def produce_one_by_one(producer: Producer, topic: str, messages: Sequence[broker.OutboundMessage]) -> None:
    """`produce` with a callback that counts, polled in the same thread."""
    reports = _Reports()
    produce, poll = producer.produce, producer.poll
    for start in range(0, len(messages), 500):
        for message in messages[start : start + 500]:
            produce(topic, message.data, message.key, on_delivery=reports)
        poll(0)
    _end(producer, reports, len(messages))


def produce_batches(producer: Producer, topic: str, messages: Sequence[broker.OutboundMessage]) -> None:
    """`produce_batch` with a callback that counts."""
    reports = _Reports()
    for start in range(0, len(messages), _MOST):
        rows = [{"value": message.data, "key": message.key} for message in messages[start : start + _MOST]]
        producer.produce_batch(topic, rows, on_delivery=reports)
        producer.poll(0)
    _end(producer, reports, len(messages))


def produce_with_places(producer: Producer, topic: str, messages: Sequence[broker.OutboundMessage]) -> None:
    """`produce` with a callback that keeps partition and offset, in the order of the reports."""
    places: list[tuple[int | None, int | None]] = []
    reports = _Reports()

    def delivered(error: KafkaError | None, message: Message) -> None:
        reports(error, message)
        places.append((message.partition(), message.offset()))

    for start in range(0, len(messages), 500):
        for message in messages[start : start + 500]:
            producer.produce(topic, message.data, message.key, on_delivery=delivered)
        producer.poll(0)
    _end(producer, reports, len(messages))


def _end(producer: Producer, reports: _Reports, count: int) -> None:
    while reports.delivered + reports.failed < count:
        producer.poll(0.05)
    if reports.failed:
        raise RuntimeError(f"{reports.failed} messages were not delivered")


def read_some(consumer: Consumer) -> int:
    """Wait for the first records. Returns their number."""
    while not (messages := consumer.consume(_MOST, 1.0)):
        pass
    return len(messages)


def read(consumer: Consumer, count: int, most: int = _MOST) -> None:
    """Key, data and offset of each record, `most` records at a time."""
    while count > 0:
        for message in consumer.consume(most, 1.0):
            if message.error() is not None:
                raise RuntimeError(str(message.error()))
            message.key()
            message.value()
            message.offset()
            count -= 1


def read_five(consumer: Consumer, count: int, most: int = _MOST) -> None:
    """The plain columns of each record: topic, partition, offset, key and data."""
    while count > 0:
        for message in consumer.consume(most, 1.0):
            if message.error() is not None:
                raise RuntimeError(str(message.error()))
            message.topic()
            message.partition()
            message.offset()
            message.key()
            message.value()
            count -= 1


def read_with_attributes(consumer: Consumer, count: int, most: int = _MOST) -> None:
    """The same, with headers as a dict of strings, and the timestamp as a datetime."""
    while count > 0:
        for message in consumer.consume(most, 1.0):
            if message.error() is not None:
                raise RuntimeError(str(message.error()))
            message.key()
            message.value()
            message.offset()
            headers = message.headers()
            if headers:
                {name: value.decode() for name, value in headers if isinstance(value, bytes)}
            datetime.fromtimestamp(message.timestamp()[1] / 1000, UTC)
            count -= 1


def read_columns(consumer: Consumer, count: int, headers: bool, most: int = _MOST) -> None:
    """Arrow columns, batch by batch; headers and timestamps only if asked for."""
    while count > 0:
        messages = consumer.consume(most, 1.0)
        if not messages:
            continue
        if any(message.error() for message in messages):
            raise RuntimeError("A record has an error")
        columns: dict[str, Any] = {
            "topic": [message.topic() for message in messages],
            "partition": pyarrow.array([message.partition() for message in messages], pyarrow.int32()),
            "offset": pyarrow.array([message.offset() for message in messages], pyarrow.int64()),
            "key": pyarrow.array([message.key() for message in messages], pyarrow.binary()),
            "data": pyarrow.array([message.value() for message in messages], pyarrow.binary()),
        }
        if headers:
            columns["time"] = pyarrow.array(
                [message.timestamp()[1] for message in messages], pyarrow.timestamp("ms", "UTC")
            )
            columns["headers"] = pyarrow.array(
                [message.headers() or [] for message in messages], pyarrow.map_(pyarrow.string(), pyarrow.binary())
            )
        pyarrow.table(columns)
        count -= len(messages)


def transactions(consumer: Consumer, producer: Producer, sink: str, count: int, size: int) -> None:
    """Copy `count` records to the sink, with the positions, in transactions of `size`.

    Without the flush, the partition and the positions would be added concurrently; the broker would reject one of the
    two, and the client would retry it after 10 or 20 ms.
    """
    held: list[Message] = []
    reports = _Reports()
    while count > 0:
        while len(held) < size:
            held += consumer.consume(size - len(held), 1.0)
        producer.begin_transaction()
        producer.produce_batch(
            sink, [{"value": message.value(), "key": message.key()} for message in held], on_delivery=reports
        )
        producer.flush()
        last = held[-1]
        position = TopicPartition(str(last.topic()), last.partition() or 0, (last.offset() or 0) + 1)
        producer.send_offsets_to_transaction([position], consumer.consumer_group_metadata())
        producer.commit_transaction()
        count -= len(held)
        held = []
    if reports.failed:
        raise RuntimeError(f"{reports.failed} messages were not delivered")
