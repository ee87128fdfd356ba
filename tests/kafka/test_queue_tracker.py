"""Trackers on the real broker, fed with hand-written markers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from confluent_kafka import Message, Producer

from broker.hooks import Hooks, Warned
from broker_kafka.cluster.connection import Connection
from broker_kafka.queue.markers.wire import TIME_MARKER, Content, Kind, Marker, MessageId, pack_markers, write_marker
from broker_kafka.queue.tracker.partition_state import PartitionOptions
from broker_kafka.queue.tracker.tracker import Tracker
from broker_kafka.queue.tracker.tracker_state import TrackerOptions
from tests.kafka.group_members import both_protocols, eventually
from tests.kafka.queue_markers import Queue, connected, tracking
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import produce, wait_for


async def test_a_message_whose_lease_ends_is_redelivered_once(connection: Connection, queue: Queue) -> None:
    ids = await asyncio.to_thread(queue.send, 3)
    async with tracking(connection, queue) as tracker:
        await asyncio.to_thread(queue.take, ids[1:2], period=600_000)
        await asyncio.to_thread(queue.end, ids[1:2])
        await asyncio.to_thread(queue.take, [ids[0], ids[2]])
        found = await asyncio.to_thread(queue.wait_for_again, 2, 3)
        assert [(each.key(), each.value()) for each in found] == [(b"key", b"m0"), (b"key", b"m2")]
        headers = dict(found[0].headers() or ())
        assert headers["anybroker-attempts"] == b"1"
        assert headers["anybroker-origin"] == f"{queue.topic}:0:0:0".encode()
        assert headers["anybroker-queue"] == queue.subscription.encode()
        assert headers["anybroker-id"] == f"{queue.topic}:0:0".encode()
        await eventually(lambda: tracker.state().open == 0)
        assert (tracker.counts.redelivered, tracker.counts.dead_lettered, tracker.counts.unknown) == (2, 0, 0)
        lateness, delay = tracker.counts.lateness, tracker.counts.delay
        assert (sum(lateness.counts), sum(delay.counts)) == (2, 2)
        # Each was due 0.3 s after its START; later, where its tracker did not know its readers' position yet.
        assert delay.sum - lateness.sum > 0.599
    # Three STARTs, an END, two more of the tracker; nothing is read again.
    assert await asyncio.to_thread(queue.committed) >= 6


@pytest.mark.deep
async def test_keepalives_postpone_a_redelivery_and_a_release_advances_it(connection: Connection, queue: Queue) -> None:
    ids = await asyncio.to_thread(queue.send, 3)
    kept, released, _ = ids
    async with tracking(connection, queue):
        await asyncio.to_thread(queue.take, ids, period=600_000)
        start = Marker(kind=Kind.START, id=kept, after_ms=300, attempt=1)
        keep = Marker(kind=Kind.KEEPALIVE, id=kept, after_ms=600_000)
        await asyncio.to_thread(queue.write, (start, Content()), (keep, None))
        release = Marker(kind=Kind.KEEPALIVE, id=released, after_ms=100, attempt=1, released=True, reason="busy")
        await asyncio.to_thread(queue.write, (release, None))
        found = await asyncio.to_thread(queue.wait_for_again, 1, 3)
        await asyncio.sleep(0.5)
        assert [each.value() for each in found] == [b"m1"]
        assert len(await asyncio.to_thread(queue.again, 3)) == 1


@pytest.mark.deep
async def test_a_message_that_no_position_has_passed_is_left_to_the_log(connection: Connection, queue: Queue) -> None:
    ids = await asyncio.to_thread(queue.send, 2)
    async with tracking(connection, queue) as tracker:
        await asyncio.to_thread(queue.take, ids, commits=False, period=200)
        await eventually(lambda: tracker.counts.waiting_for_readers >= 2)
        assert await asyncio.to_thread(queue.again, 2) == []
        await asyncio.to_thread(queue.commit, ids[:1])
        found = await asyncio.to_thread(queue.wait_for_again, 1, 2)
        assert [each.value() for each in found] == [b"m0"]
        assert tracker.state().open == 1


async def test_a_message_delivered_too_often_is_dead_lettered(connection: Connection, queue: Queue) -> None:
    await asyncio.to_thread(queue.admin.make_topic, queue.dead)
    ids = await asyncio.to_thread(queue.send, 2)
    async with tracking(connection, queue) as tracker:
        headers = (("color", b"red"), ("anybroker-id", b"given"), ("raw", b"\xff"))
        first, second = (
            Content(value=value, headers=headers, max_attempts=3, dead_letter=queue.dead) for value in (b"m0", b"m1")
        )
        await asyncio.to_thread(
            queue.write,
            (Marker(kind=Kind.START, id=ids[0], after_ms=200, attempt=3), first),
            (Marker(kind=Kind.START, id=ids[1], after_ms=200, attempt=2), second),
        )
        await asyncio.to_thread(queue.commit, ids)
        (again,) = await asyncio.to_thread(queue.wait_for_again, 1, 2)
        assert again.value() == b"m1"
        (letter,) = await eventually_read(queue, queue.dead, 1)
        assert letter.value() == b"m0"
        headers = dict(letter.headers() or ())
        assert headers["color"] == b"red"
        assert headers["raw"] == b"\xff"
        assert headers["dead-letter-reason"] == b"delivered 3 times without being settled"
        assert headers["dead-letter-attempts"] == b"3"
        assert headers["dead-letter-topic"] == queue.topic.encode()
        assert headers["dead-letter-subscription"] == queue.subscription.encode()
        assert headers["dead-letter-id"] == b"given"
        assert "anybroker-attempts" not in headers
        await eventually(lambda: tracker.state().open == 0)
        assert (tracker.counts.redelivered, tracker.counts.dead_lettered) == (1, 1)


@pytest.mark.deep
async def test_a_refused_message_blocks_no_other(kafka: KafkaServer, connection: Connection) -> None:
    queue = await asyncio.to_thread(Queue, kafka, config={"max.message.bytes": "2000"})
    await queue.prepare(connection)
    await asyncio.to_thread(queue.admin.make_topic, queue.dead)
    ids = await asyncio.to_thread(queue.send, 6)
    hooks, warned = Hooks(), list[str]()
    hooks.listen(lambda event: warned.append(event.text) if isinstance(event, Warned) else None)
    async with tracking(connection, queue, hooks=hooks) as tracker:
        await asyncio.to_thread(queue.take, ids[:3])
        large = Content(value=b"x" * 3000)
        lettered = Content(value=b"y" * 3000, dead_letter=queue.dead)
        unnamed = Content(value=b"z", dead_letter="no\0name", max_attempts=1)
        await asyncio.to_thread(
            queue.write,
            (Marker(kind=Kind.START, id=ids[3], after_ms=200, attempt=1), large),
            (Marker(kind=Kind.START, id=ids[4], after_ms=200, attempt=1), lettered),
            (Marker(kind=Kind.START, id=ids[5], after_ms=200, attempt=1), unnamed),
        )
        await asyncio.to_thread(queue.commit, ids)
        found = await asyncio.to_thread(queue.wait_for_again, 3, 6)
        assert sorted(each.value() or b"" for each in found) == [b"m0", b"m1", b"m2"]
        (letter,) = await eventually_read(queue, queue.dead, 1)
        assert letter.value() == b"y" * 3000
        assert "could not be redelivered" in str(dict(letter.headers() or ())["dead-letter-reason"])
        await eventually(lambda: tracker.state().open == 2)
        (warning,) = [text for text in warned if f"{ids[3].topic}:0:3 is refused" in text]
        assert f"larger than max.message.bytes of {ids[3].topic!r}" in warning
        assert "raise that by " in warning
        assert any("topic does not exist: 'no\\x00name'" in text for text in warned)
        (tracked,) = tracker._tracked.values()
        assert {*tracked._redeliverer._refused} >= {ids[3]}
        # Its worker acks it all the same: nothing is kept of it.
        await asyncio.to_thread(queue.end, ids[3:4])
        await eventually(lambda: ids[3] not in tracked._redeliverer._refused)
        assert tracker.state().open == 1
        assert len(await asyncio.to_thread(queue.again, 6)) == 3


@pytest.mark.parametrize(
    "id",
    [MessageId("{topic}", 0, 700, "q" * 40_000), MessageId("{topic}", 0, 700, " q"), MessageId("t" * 40_000, 0, 700)],
    ids=["too long a queue", "white space", "too long a topic"],
)
async def test_a_marker_with_invalid_names_blocks_nothing(connection: Connection, queue: Queue, id: MessageId) -> None:
    ids = await asyncio.to_thread(queue.send, 1)
    named = id._replace(topic=id.topic.format(topic=queue.topic))
    async with tracking(connection, queue) as tracker:
        start = Marker(kind=Kind.START, id=named, after_ms=100, attempt=1)
        await asyncio.to_thread(queue.write, (start, Content()))
        await eventually(lambda: tracker.counts.unknown == 1)
        await asyncio.to_thread(queue.take, ids)
        await asyncio.to_thread(queue.wait_for_again, 1, 1)
        await eventually(lambda: tracker.state().open == 0)
        assert tracker.counts.unknown_outcomes == 0
        assert tracker.counts.lateness.sum < 10


async def test_markers_of_kafka_mq_go_name_no_topic(connection: Connection, queue: Queue) -> None:
    ids = await asyncio.to_thread(queue.send, 1)
    data = write_marker(Marker(kind=Kind.START, id=ids[0], after_ms=200), Content(key=b"q", value=b"m0"), v1=True)
    async with tracking(connection, queue, topic=queue.topic) as tracker:
        await asyncio.to_thread(produce, queue.server.bootstrap, queue.markers, [data])
        (again,) = await asyncio.to_thread(queue.wait_for_again, 1, 1)
        assert (again.key(), again.value()) == (b"q", b"m0")
        await eventually(lambda: tracker.state().open == 0)


async def test_markers_that_name_a_queue_and_no_topic_end_too(connection: Connection, queue: Queue) -> None:
    ids = await asyncio.to_thread(queue.send, 1)
    start = Marker(kind=Kind.START, id=ids[0]._replace(topic=""), after_ms=200, attempt=1)
    async with tracking(connection, queue, topic=queue.topic) as tracker:
        await asyncio.to_thread(queue.write, (start, Content(value=b"m0")))
        await asyncio.to_thread(queue.wait_for_again, 1, 1)
        await eventually(lambda: tracker.state().open == 0)


@pytest.mark.deep
async def test_an_old_start_is_renewed_and_unpins_the_log(connection: Connection, queue: Queue) -> None:
    first, *rest = await asyncio.to_thread(queue.send, 21)
    async with tracking(connection, queue, partition=PartitionOptions(renew_distance=10)) as tracker:
        await asyncio.to_thread(queue.take, [first], period=600_000)
        await asyncio.to_thread(queue.take, rest, period=600_000)
        await asyncio.to_thread(queue.end, rest)
        await eventually(lambda: tracker.counts.renewed >= 1)
        await until_committed(queue, 40)
        assert tracker.state().open == 1
    async with tracking(connection, queue) as tracker:
        await eventually(lambda: not tracker.state().catching_up)
        assert tracker.state().open == 1
        await asyncio.to_thread(queue.keep, [first], 100)
        (again,) = await asyncio.to_thread(queue.wait_for_again, 1, 21)
        assert again.value() == b"m0"


@pytest.mark.deep
async def test_a_new_tracker_redelivers_none_of_a_hundred_thousand_ended_messages(
    kafka: KafkaServer, connection: Connection
) -> None:
    count, together = 50_000, 200
    queue = await asyncio.to_thread(Queue, kafka, 2)
    await queue.prepare(connection)
    for partition in range(2):
        # Of messages that retention has removed since; in as few records as workers write.
        starts: list[bytes | None] = []
        ends: list[bytes | None] = []
        for begin in range(0, count, together):
            first, *more = range(begin, begin + together)
            ids = [MessageId(queue.topic, partition, offset, queue.subscription) for offset in (first, *more)]
            starts.append(pack_markers([write_marker(Marker(kind=Kind.START, id=each, after_ms=1)) for each in ids]))
            ends.append(write_marker(Marker(kind=Kind.END, id=ids[0], more=tuple(more))))
        await asyncio.to_thread(produce, kafka.bootstrap, queue.markers, [*starts, *ends], partition=partition)
        await asyncio.to_thread(queue.commit, [MessageId(queue.topic, partition, count - 1)])
    async with tracking(connection, queue) as tracker:
        await eventually(lambda: tracker.counts.markers >= 2 * count and not tracker.state().catching_up)
        await asyncio.sleep(0.3)
        assert tracker.counts.redelivered == 0
        assert tracker.state().open == 0
    assert await asyncio.to_thread(queue.read) == []


@pytest.mark.deep
async def test_redeliveries_are_not_repeated_by_the_next_tracker(connection: Connection, queue: Queue) -> None:
    ids = await asyncio.to_thread(queue.send, 300)
    async with tracking(connection, queue, batch=50) as tracker:
        await asyncio.to_thread(queue.take, ids, period=200)
        await asyncio.to_thread(queue.wait_for_again, 300, 300)
    # As if it had died before it could commit.
    await asyncio.to_thread(queue.rewind)
    async with tracking(connection, queue) as tracker:
        await eventually(lambda: tracker.counts.markers >= 600 and not tracker.state().catching_up)
        assert tracker.state().open == 0
        await asyncio.sleep(0.3)
        assert tracker.counts.redelivered == 0
    assert len(await asyncio.to_thread(queue.again, 300)) == 300


@pytest.mark.deep
@both_protocols
async def test_partitions_are_reassigned_while_leases_are_open(kafka: KafkaServer, protocol: str) -> None:
    queue = await asyncio.to_thread(Queue, kafka, 2)
    values: dict[str, Any] = {"group_protocol": "consumer"} if protocol == "consumer" else {}
    async with connected(kafka, **values) as connection, connected(kafka, **values) as other:
        await queue.prepare(connection)
        ids = await asyncio.to_thread(queue.send, 40)
        async with tracking(connection, queue) as first:
            await asyncio.to_thread(queue.take, ids, period=600_000)
            second = Tracker(other, queue.subscription, Hooks(), options=TrackerOptions(commit_after=0.1))
            await second.open()
            await eventually(lambda: len(second.state().partitions) == len(first.state().partitions) == 1)
            await eventually(lambda: second.state().open == 20)
            await second.close()
            await eventually(lambda: len(first.state().partitions) == 2)
            await asyncio.to_thread(queue.keep, ids, 100)
            found = await asyncio.to_thread(queue.wait_for_again, 40, 40)
            assert sorted(each.value() or b"" for each in found) == sorted(b"m%d" % n for n in range(40))
            await asyncio.sleep(0.3)
            assert len(await asyncio.to_thread(queue.again, 40)) == 40
            assert first.counts.redelivered + second.counts.redelivered == 40


async def test_trackers_of_consumers_with_different_assignors_share_the_work(kafka: KafkaServer) -> None:
    queue = await asyncio.to_thread(Queue, kafka, 2)
    strategy = {"partition_assignment_strategy": ("range", "roundrobin")}
    async with connected(kafka, **strategy) as migrating, connected(kafka) as alone:
        await queue.prepare(alone)
        async with tracking(migrating, queue) as first:
            second = Tracker(alone, queue.subscription, Hooks())
            await second.open()
            try:
                await eventually(lambda: len(second.state().partitions) == len(first.state().partitions) == 1)
                assert first.failure is second.failure is None
            finally:
                await second.close()


@pytest.mark.deep
async def test_partitions_that_are_added_are_tracked_too(kafka: KafkaServer) -> None:
    queue = await asyncio.to_thread(Queue, kafka)
    async with connected(kafka, topic_metadata_refresh_interval_ms=200) as connection:
        await queue.prepare(connection)
        held, other = await asyncio.to_thread(queue.send, 2)
        async with tracking(connection, queue) as tracker:
            await asyncio.to_thread(queue.take, [held], period=600_000)
            await asyncio.to_thread(queue.admin.add_partitions, queue.markers, 2)
            await eventually(lambda: len(tracker.state().partitions) == 2)
            # By a worker that knows of the new partition, of a message of the old one.
            start = write_marker(Marker(kind=Kind.START, id=other, after_ms=200, attempt=1), Content(value=b"m1"))
            await asyncio.to_thread(produce, kafka.bootstrap, queue.markers, [start], partition=1)
            await asyncio.to_thread(queue.commit, [other])
            (again,) = await asyncio.to_thread(queue.wait_for_again, 1, 2)
            assert again.value() == b"m1"
            await eventually(lambda: tracker.state().open == 1)


async def test_a_committed_position_outside_the_log_causes_a_warning(connection: Connection, queue: Queue) -> None:
    ids = await asyncio.to_thread(queue.send, 20)
    await asyncio.to_thread(queue.take, ids)
    await asyncio.to_thread(queue.rewind)
    await asyncio.to_thread(queue.admin.delete_records, queue.markers, 18)
    hooks, warned = Hooks(), list[str]()
    hooks.listen(lambda event: warned.append(event.text) if isinstance(event, Warned) else None)
    async with tracking(connection, queue, hooks=hooks):
        found = await asyncio.to_thread(queue.wait_for_again, 2, 20)
        assert [each.value() for each in found] == [b"m18", b"m19"]
    assert any("does not hold the committed position 0" in text for text in warned)


@pytest.mark.deep
async def test_an_end_hidden_by_an_open_transaction_counts(connection: Connection, queue: Queue) -> None:
    ids = await asyncio.to_thread(queue.send, 1)
    config = {"bootstrap.servers": queue.server.bootstrap, "transactional.id": queue.subscription, "log_level": 0}
    worker = Producer(config)
    await asyncio.to_thread(worker.init_transactions, 15)
    async with tracking(connection, queue) as tracker:
        await asyncio.to_thread(queue.take, ids, period=3000)
        worker.begin_transaction()
        worker.produce(queue.markers, write_marker(TIME_MARKER), partition=0)
        assert await asyncio.to_thread(worker.flush, 15) == 0
        await asyncio.to_thread(queue.end, ids)
        await eventually(lambda: tracker.state().lag >= 2)
        await asyncio.sleep(3.5)
        assert tracker.state().open == 1
        await asyncio.to_thread(worker.commit_transaction, 15)
        await eventually(lambda: tracker.state().open == 0)
        await asyncio.sleep(0.2)
        assert tracker.counts.redelivered == 0
    assert await asyncio.to_thread(queue.again, 1) == []


async def eventually_read(queue: Queue, topic: str, count: int) -> list[Message]:
    """What the topic holds, once that is so much."""
    return await asyncio.to_thread(wait_for, lambda: found if len(found := queue.read(topic)) >= count else [])


async def until_committed(queue: Queue, position: int) -> None:
    await asyncio.to_thread(wait_for, lambda: queue.committed() >= position)
