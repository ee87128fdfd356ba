"""A queue's topics as tests of trackers fill them: messages, positions and hand-written markers, past the SDK."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from broker.hooks import Hooks
from broker_kafka.cluster.connection import Connection
from broker_kafka.queue.markers.marker_topic import ensure_marker_topic, marker_topic_name, tracker_group
from broker_kafka.queue.markers.wire import Content, Kind, Marker, MessageId, write_marker
from broker_kafka.queue.tracker.tracker import Tracker
from broker_kafka.queue.tracker.tracker_state import TrackerOptions
from broker_kafka.settings import KafkaSettings
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin, produce, read_all, wait_for

__all__ = ["Queue", "connected", "prepared_queue", "tracking"]


class Queue:
    """One message topic, and the markers of one subscription. Blocking.

    :param partitions: of both topics; message `n` lies in partition `n % partitions`, and its markers in the same.
    """

    def __init__(self, server: KafkaServer, partitions: int = 1, *, config: dict[str, str] | None = None) -> None:
        self.server = server
        self.admin = RawAdmin(server.bootstrap)
        self.partitions = partitions
        self.subscription = f"queue-{uuid.uuid4().hex[:12]}"
        self.topic = self.admin.make_topic(partitions=partitions, config=config or {})
        self.dead = f"{self.subscription}.dead"
        self.markers = marker_topic_name(self.subscription)

    async def prepare(self, connection: Connection) -> None:
        """Make the marker topic."""
        await ensure_marker_topic(connection, self.subscription, topics=[self.topic])

    def send(self, count: int) -> list[MessageId]:
        """New messages `m0`, `m1` and so on; their ids."""
        ids: list[MessageId] = []
        for partition in range(self.partitions):
            numbers = range(partition, count, self.partitions)
            sent = produce(
                self.server.bootstrap, self.topic, [b"m%d" % number for number in numbers], partition=partition
            )
            ids += [MessageId(self.topic, partition, each.offset() or 0, self.subscription) for each in sent]
        return ids

    def take(self, ids: Sequence[MessageId], *, period: int = 300, commits: bool = True) -> None:
        """Write their STARTs as a worker does, and commit its position."""
        held = {each: b"m%d" % (each.offset * self.partitions + each.partition) for each in ids}
        self.write(
            *(
                (
                    Marker(kind=Kind.START, id=each, after_ms=period, attempt=1),
                    Content(key=b"key", value=value),
                )
                for each, value in held.items()
            )
        )
        if commits:
            self.commit(ids)

    def commit(self, ids: Sequence[MessageId]) -> None:
        """The workers' position is behind these."""
        ends: dict[int, int] = {}
        for each in ids:
            ends[each.partition] = max(each.offset + 1, ends.get(each.partition, 0))
        self._move(self.subscription, self.topic, ends)

    def rewind(self) -> None:
        """Take the trackers' positions back to the begin; none of them runs."""
        self._move(tracker_group(self.subscription), self.markers, dict.fromkeys(range(self.partitions), 0))

    def _move(self, group: str, topic: str, positions: dict[int, int]) -> None:
        offsets = [TopicPartition(topic, partition, position) for partition, position in positions.items()]
        # The admin client may wait for ever for the coordinator of a broker that is new.
        consumer = Consumer({"bootstrap.servers": self.server.bootstrap, "group.id": group, "log_level": 0})
        try:
            consumer.commit(offsets=offsets, asynchronous=False)
        finally:
            consumer.close()

    def end(self, ids: Sequence[MessageId]) -> None:
        self.write(*((Marker(kind=Kind.END, id=each), None) for each in ids))

    def keep(self, ids: Sequence[MessageId], period: int) -> None:
        self.write(*((Marker(kind=Kind.KEEPALIVE, id=each, after_ms=period), None) for each in ids))

    def write(self, *markers: tuple[Marker, Content | None]) -> None:
        """Each in the partition of its message."""
        by_partition: dict[int, list[bytes | None]] = {}
        for marker, content in markers:
            by_partition.setdefault(marker.id.partition, []).append(write_marker(marker, content))
        for partition, values in by_partition.items():
            produce(self.server.bootstrap, self.markers, values, partition=partition)

    def read(self, topic: str | None = None) -> list[Message]:
        """What readers of committed data see of the message topic, or of another."""
        topic = topic or self.topic
        partitions = self.partitions if topic in (self.topic, self.markers) else 1
        found: list[Message] = []
        for partition in range(partitions):
            self.admin.wait_for_markers(topic, partition)
            found += read_all(self.server.bootstrap, topic, partition)
        return found

    def again(self, sent: int) -> list[Message]:
        """The redeliveries among the messages, of which so many were sent first."""
        read = self.read()
        found = [each for each in read if each.headers()]
        assert len(read) == sent + len(found)
        return found

    def committed(self, partition: int = 0) -> int:
        """The trackers' position."""
        return self.admin.committed(tracker_group(self.subscription), self.markers, partition).offset

    def wait_for_again(self, count: int, sent: int) -> list[Message]:
        """The redeliveries, once there are so many."""
        ends = sent + count

        def there() -> bool:
            try:
                return sum(self.admin.bounds(self.topic, number)[1] for number in range(self.partitions)) >= ends
            except KafkaException as error:
                # A broker that has just started may not lead its partitions yet.
                if error.args[0].code() != KafkaError.NOT_LEADER_FOR_PARTITION:
                    raise
                return False

        wait_for(there)
        return wait_for(lambda: found if len(found := self.again(sent)) >= count else [])


def prepared_queue(server: KafkaServer) -> Queue:
    """One with a marker topic; blocking, where no loop runs."""

    async def prepare() -> Queue:
        queue = await asyncio.to_thread(Queue, server)
        async with connected(server) as connection:
            await queue.prepare(connection)
        return queue

    return asyncio.run(prepare())


@asynccontextmanager
async def connected(server: KafkaServer, **values: Any) -> AsyncGenerator[Connection]:
    """A connection whose groups find out quickly that a member is gone."""
    quick: dict[str, Any] = {"session_timeout_ms": 6000, "heartbeat_interval_ms": 300}
    given: dict[str, Any] = {"servers": (server.bootstrap,), **quick, **values}
    connection = Connection(KafkaSettings(**given), Hooks())
    await connection.open()
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def tracking(
    connection: Connection, queue: Queue, *, hooks: Hooks | None = None, **options: Any
) -> AsyncGenerator[Tracker]:
    """A tracker that has all partitions."""
    values: dict[str, Any] = {"commit_after": 0.1, **options}
    given = TrackerOptions(topics=[queue.topic], **values)
    tracker = Tracker(connection, queue.subscription, hooks or Hooks(), options=given)
    await tracker.open()
    try:
        async with asyncio.timeout(60):
            while len(tracker.state().partitions) < queue.partitions:
                await asyncio.sleep(0.02)
        yield tracker
    finally:
        await tracker.close()
