"""Kafka as a queue on confluent-kafka without the library: the bare loop of the protocol, and a plain consumer.

The bare loop does what `queue=markers` promises and no more: STARTs of all fetched records, one commit, ENDs, on one
thread. The topic has one partition. Its markers have the size of real ones and are not encoded; no tracker runs. A
failure ends the run.
"""

from __future__ import annotations

from confluent_kafka import Consumer, KafkaError, Message, Producer

__all__ = ["consume_and_commit", "protocol_loop", "take"]

_START = b"s" * 60
_END = b"e" * 40


def take(consumer: Consumer, most: int) -> list[Message]:
    """The next records, at least one."""
    while True:
        found = consumer.consume(most, 1.0)
        for message in found:
            if (error := message.error()) is not None:
                raise RuntimeError(f"Consuming failed: {error}")
        if found:
            return found


def consume_and_commit(consumer: Consumer, count: int, *, most: int = 500) -> None:
    """A plain consumer that commits each batch."""
    while count > 0:
        messages = take(consumer, most)
        for message in messages:
            message.value()
        count -= len(messages)
        consumer.commit(message=messages[-1], asynchronous=False)


def protocol_loop(consumer: Consumer, producer: Producer, markers: str, count: int, *, most: int) -> None:
    """Fetch, write all STARTs and wait for them, commit once, hand over, write all ENDs."""
    lost: list[KafkaError] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            lost.append(error)

    while count > 0:
        messages = take(consumer, most)
        for message in messages:
            producer.produce(markers, _START + (message.value() or b""), message.key(), on_delivery=delivered)
        if producer.flush(30) or lost:
            raise RuntimeError(f"Markers were not written: {lost[:1]}")
        consumer.commit(message=messages[-1], asynchronous=False)
        for message in messages:
            producer.produce(markers, _END, message.key(), on_delivery=delivered)
        producer.poll(0)
        count -= len(messages)
    if producer.flush(30) or lost:
        raise RuntimeError(f"Markers were not written: {lost[:1]}")
