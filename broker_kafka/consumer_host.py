"""What a polling thread works for, and what its client's objects are to us. Pure."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from confluent_kafka import Consumer, KafkaError
from confluent_kafka import Message as NativeRecord
from confluent_kafka import TopicPartition as NativePartition

from broker.errors import BrokerError
from broker.hooks import logger
from broker.spi import TopicPartition
from broker_kafka.errors import translate
from broker_kafka.runs import NativeRun

__all__ = ["ConsumerHost", "OnPartitions", "guarded", "native_partitions", "told_by"]

OnPartitions = Callable[[Consumer, list[NativePartition]], None]
"""A callback of the client in a rebalance."""

_OF_POSITIONS: Final = frozenset({KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET})


class ConsumerHost(Protocol):
    """Whom the thread works for; everything is called on the loop, in the order in which it happened."""

    def arrived(self, runs: Sequence[NativeRun]) -> None:
        """A batch; to be answered by `ConsumerThread.taken` once it is no longer held here."""
        ...

    async def assigning(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Where to begin with each of these; it is awaited before they are taken over.

        What it raises goes to `failed`, and if it is retriable the group is joined again.
        """
        ...

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """These are ours, and their records may follow."""
        ...

    async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
        """These are given up when it returns, or at the loop time `deadline`; commits of them still work."""
        ...

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        """These are gone already."""
        ...

    def out_of_range(self, partition: TopicPartition, position: int) -> None:
        """The log does not hold this position; nothing more comes of the partition until it is moved."""
        ...

    def failed(self, error: BrokerError) -> None:
        """The client reports an error; if it is retriable, it goes on by itself."""
        ...


def told_by(
    messages: Iterable[NativeRecord],
    group: str,
    host: ConsumerHost,
    ended: Callable[[TopicPartition, int], object] | None,
    moved: Container[tuple[str, int]],
) -> Iterator[tuple[Callable[..., object], *tuple[Any, ...]]]:
    """What is to be called for messages that are none, and with what.

    :param group: whose member reads; it is named where an error is about no topic.
    :param ended: is told where a partition ends.
    :param moved: what was taken away or moved since: an end of these may be none of what is read now.
    """
    for message in messages:
        error = message.error()
        if error is None or error.code() == KafkaError._MAX_POLL_EXCEEDED:
            continue
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        if topic is not None and partition is not None and error.code() in _OF_POSITIONS:
            out_of_range = error.code() == KafkaError._AUTO_OFFSET_RESET
            call = host.out_of_range if out_of_range else ended
            if call is not None and (out_of_range or (topic, partition) not in moved):
                yield call, TopicPartition(topic, partition), -1 if offset is None else offset
            continue
        about_topic = topic and error.code() != KafkaError.GROUP_AUTHORIZATION_FAILED
        yield host.failed, translate(error, f"Reading {topic!r}" if about_topic else f"Reading as group {group!r}")


def native_partitions(partitions: Iterable[tuple[str, int]]) -> list[NativePartition]:
    """As the client library takes them."""
    return [NativePartition(*partition) for partition in partitions]


def guarded(callback: OnPartitions, failed: Callable[[BrokerError], object], name: str) -> OnPartitions:
    """The callback, but it never raises: an exception that reached the client would end the poll, or the process.

    :param failed: told of the exception. :param name: whose callback it is, for the log.
    """

    def call(client: Consumer, partitions: list[NativePartition]) -> None:
        try:
            callback(client, partitions)
        except BaseException as error:
            logger.exception("%s failed in a rebalance", name)
            failed(translate(error, "A rebalance"))

    return call
