"""A raw confluent-kafka client, for tests that inspect a broker without the SDK. Blocking."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from uuid import uuid4

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,  # pyright: ignore[reportPrivateImportUsage]
    ConfigEntry,  # pyright: ignore[reportPrivateImportUsage]
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
)
from confluent_kafka.cimpl import NewPartitions, NewTopic

__all__ = ["SECONDS", "RawAdmin", "produce", "read_all", "round_trip", "use_all", "wait_for"]

SECONDS = 60.0
"""How long a step may take on a machine that is busy."""

_DONE_BEFORE = (
    KafkaError.TOPIC_ALREADY_EXISTS,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.INVALID_PARTITIONS,
)
"""What a request is answered that was made a second time, and done the first."""
_NO_COORDINATOR_YET = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
)

_Found = TypeVar("_Found")


class RawAdmin:
    """A broker's topics, by the raw client."""

    def __init__(self, config: Mapping[str, Any] | str) -> None:
        self.config: dict[str, Any] = {"bootstrap.servers": config} if isinstance(config, str) else dict(config)
        self.client = AdminClient({"log_level": 0, **self.config})

    def make_topic(
        self, name: str | None = None, partitions: int = 1, *, copies: int = -1, config: Mapping[str, str] | None = None
    ) -> str:
        """Create a topic and wait for its leaders; without a name, it gets a unique one.

        `config` are topic settings by Kafka's names.
        """
        name = name or f"test-{uuid4().hex[:12]}"
        topic = NewTopic(name, partitions, copies, config=dict(config or {}))
        _ask(lambda: self.client.create_topics([topic], operation_timeout=SECONDS))
        self.wait_for_leaders(name, partitions)
        return name

    def wait_for_leaders(self, topic: str, partitions: int) -> None:
        """Wait until brokers serve all partitions of the topic."""

        def led() -> bool:
            found = self.client.list_topics(topic, timeout=SECONDS).topics[topic]
            return len(found.partitions) == partitions and all(each.leader >= 0 for each in found.partitions.values())

        wait_for(led)

    def add_partitions(self, topic: str, total: int) -> None:
        _ask(lambda: self.client.create_partitions([NewPartitions(topic, total)], operation_timeout=SECONDS))
        self.wait_for_leaders(topic, total)

    def delete_topic(self, *topics: str) -> None:
        """Delete the topics and wait until the broker lists none: the answer is its controller's, which knows first."""
        _ask(lambda: self.client.delete_topics(list(topics), operation_timeout=SECONDS))
        wait_for(lambda: not self.client.list_topics(timeout=SECONDS).topics.keys() & {*topics})

    def delete_records(self, topic: str, before: int, partition: int = 0) -> None:
        """Remove the records before the offset, as retention does; -1 removes all."""
        _ask(lambda: self.client.delete_records([TopicPartition(topic, partition, before)], operation_timeout=SECONDS))

    def configure_group(self, group: str, config: Mapping[str, str]) -> None:
        """Set configuration of a group, by Kafka's names."""
        operation = AlterConfigOpType.SET
        entries = [ConfigEntry(name, value, incremental_operation=operation) for name, value in config.items()]
        resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=entries)
        _ask(lambda: self.client.incremental_alter_configs([resource]))

    def leader(self, topic: str, partition: int = 0) -> int:
        """The node that leads the partition; -1 if none does."""
        return self.client.list_topics(topic, timeout=SECONDS).topics[topic].partitions[partition].leader

    def bounds(self, topic: str, partition: int = 0) -> tuple[int, int]:
        """The first offset and the next one, including open transactions."""
        with self._bounds_reader("read_uncommitted", topic, partition) as bounds:
            return bounds()

    def wait_for_markers(self, topic: str, partition: int = 0) -> None:
        """Wait until ended transactions are visible: brokers write markers after the answer to a commit.

        :raises AssertionError: a transaction stays open.
        """
        end = self.bounds(topic, partition)[1]
        with self._bounds_reader("read_committed", topic, partition) as bounds:
            wait_for(lambda: bounds()[1] >= end)

    @contextmanager
    def _bounds_reader(self, isolation: str, topic: str, partition: int) -> Generator[Callable[[], tuple[int, int]]]:
        """The bounds for readers with this isolation level; librdkafka's default is read_committed."""
        consumer = Consumer({**self.config, "group.id": "none", "log_level": 0, "isolation.level": isolation})

        def bounds() -> tuple[int, int]:
            found = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=SECONDS)
            assert found is not None, f"no bounds of {topic} [{partition}] within {SECONDS} s"
            return found

        try:
            yield bounds
        finally:
            consumer.close()

    def committed(
        self, group: str, topic: str, partition: int = 0, *, isolation: str = "read_committed"
    ) -> TopicPartition:
        """The group's offset, -1001 if it has none, and its metadata.

        With `read_committed` the answer waits while a transaction that commits another is open.
        """
        consumer = Consumer({**self.config, "group.id": group, "log_level": 0, "isolation.level": isolation})

        def offset() -> TopicPartition | None:
            try:
                return consumer.committed([TopicPartition(topic, partition)], timeout=SECONDS)[0]
            except KafkaException as error:
                # A broker that has just started, or moved the group, answers this before it is the coordinator.
                if error.args[0].code() not in _NO_COORDINATOR_YET:
                    raise
                return None

        try:
            return wait_for(offset)
        finally:
            consumer.close()


def produce(config: Mapping[str, Any] | str, topic: str, values: Iterable[bytes | None], **how: Any) -> list[Message]:
    """Write the records; `how` is passed to each raw `produce`.

    :raises KafkaException: one was not written.
    """
    settings = {"bootstrap.servers": config} if isinstance(config, str) else dict(config)
    producer = Producer(
        {"log_level": 0, "linger.ms": 0, "enable.idempotence": True, "delivery.timeout.ms": SECONDS * 1000, **settings}
    )
    producer.list_topics(topic, timeout=SECONDS)  # otherwise an idempotent producer starts half a second later
    written: list[Message] = []
    failed: list[KafkaError] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        written.append(message) if error is None else failed.append(error)

    for value in values:
        producer.produce(topic, value, on_delivery=delivered, **how)
    left = producer.flush(2 * SECONDS)
    if failed:
        raise KafkaException(failed[0])
    assert not left, f"{left} messages have no delivery report"
    return written


def read_all(
    config: Mapping[str, Any] | str, topic: str, partition: int = 0, *, isolation: str = "read_committed"
) -> list[Message]:
    """The records of the partition up to its current end; aborted ones only if requested."""
    settings = {"bootstrap.servers": config} if isinstance(config, str) else dict(config)
    consumer = Consumer(
        {
            "log_level": 0,
            "fetch.wait.max.ms": 10,
            **settings,
            "group.id": f"reader-{uuid4().hex}",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": isolation,
        }
    )
    found: list[Message] = []
    try:
        consumer.list_topics(topic, timeout=SECONDS)  # otherwise librdkafka queries the start half a second later
        consumer.assign([TopicPartition(topic, partition, -2)])  # from the beginning
        deadline = time.monotonic() + 2 * SECONDS
        while time.monotonic() < deadline:
            for message in consumer.consume(10_000, 0.05):
                error = message.error()
                if error is None:
                    found.append(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    return found
                else:
                    raise KafkaException(error)
        raise TimeoutError(f"{topic} [{partition}] was not read to its end; {len(found)} records were")
    finally:
        consumer.close()


def round_trip(config: Mapping[str, Any], topic: str) -> None:
    """Write a record into partition 0 and read it back.

    :raises KafkaException: it cannot.
    """
    value = uuid4().bytes
    produce(config, topic, [value], partition=0)
    assert value in [message.value() for message in read_all(config, topic)]


def use_all(bootstrap: str) -> None:
    """Use a new broker once, so that later requests are quick."""
    admin = RawAdmin(bootstrap)
    topic = admin.make_topic(partitions=2)
    round_trip(admin.config, topic)
    config = {"log_level": 0, **admin.config}
    writer = Producer({**config, "transactional.id": "writer"})
    writer.init_transactions()
    for protocol in ("classic", "consumer"):
        reader = Consumer({**config, "group.id": protocol, "group.protocol": protocol, "auto.offset.reset": "earliest"})
        reader.subscribe([topic])
        found = wait_for(lambda: reader.consume(1, 0.1))  # noqa: B023
        writer.begin_transaction()
        writer.produce(topic, b"of a transaction")
        offsets = [TopicPartition(topic, 0, found[0].offset() or 0)]
        writer.send_offsets_to_transaction(offsets, reader.consumer_group_metadata())
        writer.commit_transaction()
        reader.commit(message=found[0], asynchronous=False)
        reader.close()
    admin.delete_records(topic, 1)
    admin.delete_topic(topic)


def wait_for(look: Callable[[], _Found | None], seconds: float = SECONDS) -> _Found:
    """Poll `look` until its result is true; return it."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"{look} did not become true within {seconds} s"
        time.sleep(0.02)
    return found


def _ask(request: Callable[[], Mapping[Any, Any]]) -> None:
    """Make a request and wait, at most a minute: a broker forwards it, and gives a controller that went away
    half a minute before it asks the next one."""
    repeated = False
    while True:
        try:
            for future in request().values():
                future.result(4 * SECONDS)
        except KafkaException as error:
            code = error.args[0].code()
            if repeated and code in _DONE_BEFORE:
                return
            # The client drops the bootstrap broker, with its pending requests, once it knows the broker's id.
            if code != KafkaError._DESTROY_BROKER:
                raise
            repeated = True
        else:
            return
