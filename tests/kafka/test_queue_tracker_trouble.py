"""Trackers on the real broker in trouble: a deleted topic, STARTs that are too large, a failed seek, a close."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from broker.errors import BackendError, BrokerError, TopicNotFound
from broker.hooks import Hooks, Warned
from broker_kafka.admin.topics import KafkaTopics
from broker_kafka.client.consumer import ClientAssignment
from broker_kafka.cluster.connection import Connection
from broker_kafka.fenced_writer import FencedWriter, NotWritten, OutcomeUnknown, OutgoingRecord, Positions
from broker_kafka.queue.admin.standalone_tracker import KafkaQueueTracker
from broker_kafka.queue.markers.wire import Content, Kind, Marker, MessageId
from broker_kafka.queue.tracker.partition_state import PartitionOptions
from broker_kafka.queue.tracker.redelivery_checks import GroupPositions
from broker_kafka.queue.tracker.tracked_partition import TrackedPartition, now_ms
from broker_kafka.queue.tracker.tracker import Tracker
from broker_kafka.queue.tracker.tracker_state import TrackerOptions
from tests.kafka.group_members import eventually
from tests.kafka.queue_markers import Queue, connected, tracking
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import produce, wait_for


async def test_a_held_message_is_dead_lettered_when_its_topic_is_deleted(connection: Connection, queue: Queue) -> None:
    await asyncio.to_thread(queue.admin.make_topic, queue.dead)
    ids = await asyncio.to_thread(queue.send, 1)
    async with tracking(connection, queue) as tracker:
        # The group's position is deleted with the topic.
        await asyncio.to_thread(queue.admin.delete_topic, queue.topic)
        start = Marker(kind=Kind.START, id=ids[0], after_ms=200, attempt=1)
        await asyncio.to_thread(queue.write, (start, Content(value=b"m0", dead_letter=queue.dead)))
        await eventually(lambda: tracker.counts.dead_lettered == 1 and tracker.state().open == 0)
    (letter,) = await asyncio.to_thread(wait_for, lambda: queue.read(queue.dead))
    assert letter.value() == b"m0"
    assert "could not be redelivered" in str(dict(letter.headers() or ())["dead-letter-reason"])


async def test_a_deleted_marker_topic_fails_the_tracker_with_advice(connection: Connection, queue: Queue) -> None:
    async with tracking(connection, queue) as tracker:
        await asyncio.to_thread(queue.admin.delete_topic, queue.markers)
        # As the client says it, which takes half a minute to be sure.
        tracker.failed(TopicNotFound("Unknown topic"))
        async with asyncio.timeout(60):
            with pytest.raises(BackendError, match="was deleted, and with it the record") as raised:
                await tracker.wait()
    assert "Open the consumer again, which creates the topic" in str(raised.value)


@pytest.mark.deep
async def test_a_deleted_topic_is_reported_once_for_all_partitions(kafka: KafkaServer) -> None:
    hooks, warned = Hooks(), list[str]()
    hooks.listen(lambda event: warned.append(event.text) if isinstance(event, Warned) else None)
    async with connected(kafka) as connection:
        queue = await asyncio.to_thread(Queue, kafka, 3)
        await queue.prepare(connection)
        gone = [MessageId("no-such-topic", partition, 0, queue.subscription) for partition in range(3)]
        async with tracking(connection, queue, hooks=hooks) as tracker:
            starts = [Marker(kind=Kind.START, id=each, after_ms=200, attempt=1) for each in gone]
            await asyncio.to_thread(queue.write, *((start, Content(value=b"m")) for start in starts))
            await eventually(lambda: tracker.counts.refused == 3)
            # Warnings are reported at the end of a turn.
            await eventually(lambda: bool(warned))
            await asyncio.to_thread(queue.take, await asyncio.to_thread(queue.send, 3))
            await asyncio.to_thread(queue.wait_for_again, 3, 3)
    assert ["topic does not exist" in text for text in warned] == [True]


@pytest.mark.deep
@pytest.mark.parametrize("taken_at", [1, 2])
async def test_a_message_started_during_the_position_check_is_not_redelivered(
    connection: Connection, queue: Queue, taken_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, mine, other = await asyncio.to_thread(queue.send, 3)
    lookups: list[int] = []
    since: dict[MessageId, int] = {}

    async def behind(self: GroupPositions, messages: Iterable[MessageId]) -> dict[MessageId, int]:
        lookups.append(1)
        if len(lookups) < taken_at:
            return {}
        if len(lookups) == taken_at:
            # Without the loop, so that the START is on the brokers and not read here.
            queue.take([mine], period=600_000)
        return {message: since.setdefault(message, now_ms()) for message in messages}

    async with tracking(connection, queue) as tracker:
        # So that the topic is known, and nothing else is waited for.
        await asyncio.to_thread(queue.take, [first])
        await asyncio.to_thread(queue.wait_for_again, 1, 3)
        monkeypatch.setattr(GroupPositions, "passed", behind)
        await asyncio.to_thread(queue.take, [mine], commits=False, period=200)
        await eventually(lambda: len(lookups) >= taken_at)
        await asyncio.to_thread(queue.take, [other], period=200)
        found = await asyncio.to_thread(queue.wait_for_again, 2, 3)
        assert [each.value() for each in found] == [b"m0", b"m2"]
        assert tracker.state().open == 1


@pytest.mark.deep
async def test_a_renewal_that_is_too_large_blocks_no_message(connection: Connection, queue: Queue) -> None:
    hooks, warned = Hooks(), list[str]()
    hooks.listen(lambda event: warned.append(event.text) if isinstance(event, Warned) else None)
    large, *rest, due = await asyncio.to_thread(queue.send, 22)
    async with tracking(connection, queue, hooks=hooks, partition=PartitionOptions(renew_distance=10)) as tracker:
        start = Marker(kind=Kind.START, id=large, after_ms=600_000, attempt=1)
        await asyncio.to_thread(queue.write, (start, Content(value=b"x" * 5000)))
        await KafkaTopics(connection).ensure_topic(
            queue.markers, partitions=None, retention=None, options={"max.message.bytes": 3000}
        )
        await asyncio.to_thread(wait_for, lambda: is_refused(queue, b"x" * 5000))
        await asyncio.to_thread(queue.take, rest, period=600_000)
        await asyncio.to_thread(queue.take, [due], period=200)
        (again,) = await asyncio.to_thread(queue.wait_for_again, 1, 22)
        assert again.value() == b"m21"
        await eventually(lambda: any(f"{large.topic}:0:0 is refused" in text for text in warned))
        await eventually(lambda: tracker.counts.renewed >= 1)
        assert tracker.counts.dead_lettered == 0


@pytest.mark.deep
async def test_lateness_of_a_retry_counts_from_the_first_deadline(
    connection: Connection, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, refusals = FencedWriter.write, [1, 2, 3]

    async def refusing(
        self: FencedWriter, entries: Sequence[OutgoingRecord], positions: Positions | None = None
    ) -> None:
        if refusals and any(entry.topic == queue.topic for entry in entries):
            refusals.pop()
            raise NotWritten("The transaction was aborted", refused={}, native=None)
        await write(self, entries, positions)

    monkeypatch.setattr(FencedWriter, "write", refusing)
    ids = await asyncio.to_thread(queue.send, 1)
    async with tracking(connection, queue, retry_after=0.5) as tracker:
        await asyncio.to_thread(queue.take, ids)
        await asyncio.to_thread(queue.wait_for_again, 1, 1)
        await eventually(lambda: tracker.counts.redelivered == 1)
        lateness, delay = tracker.counts.lateness, tracker.counts.delay
        assert not refusals
        assert lateness.sum >= 1.5
        # Its lease was one of 0.3 s.
        assert delay.sum - lateness.sum < 0.301


@pytest.mark.deep
async def test_a_failed_reclaim_is_retried(
    connection: Connection, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, move = FencedWriter.write, ClientAssignment.move
    answers_to_lose, refusals = [1], [1]

    async def losing_the_answer(
        self: FencedWriter, entries: Sequence[OutgoingRecord], positions: Positions | None = None
    ) -> None:
        if answers_to_lose and any(entry.topic == queue.topic for entry in entries):
            answers_to_lose.clear()
            raise OutcomeUnknown("The answer was lost")
        await write(self, entries, positions)

    def refusing(self: ClientAssignment, *args: Any) -> Any:
        if refusals:
            refusals.clear()
            return [], KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return move(self, *args)

    monkeypatch.setattr(FencedWriter, "write", losing_the_answer)
    monkeypatch.setattr(ClientAssignment, "move", refusing)
    ids = await asyncio.to_thread(queue.send, 1)
    async with tracking(connection, queue) as tracker:
        await asyncio.to_thread(queue.take, ids)
        (again,) = await asyncio.to_thread(queue.wait_for_again, 1, 1)
        assert again.value() == b"m0"
        await eventually(lambda: tracker.state().open == 0)
    assert not answers_to_lose
    assert not refusals


@pytest.mark.deep
async def test_a_failed_seek_blocks_no_other_partition(kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    write, move = FencedWriter.write, ClientAssignment.move
    answers_to_lose, stuck = [1], asyncio.Event()
    hooks, warned = Hooks(), list[str]()
    hooks.listen(lambda event: warned.append(event.text) if isinstance(event, Warned) else None)

    async def losing_the_answer(
        self: FencedWriter, entries: Sequence[OutgoingRecord], positions: Positions | None = None
    ) -> None:
        if answers_to_lose and any(entry.value == b"m0" for entry in entries):
            answers_to_lose.clear()
            stuck.set()
            raise OutcomeUnknown("The answer was lost")
        await write(self, entries, positions)

    def refusing(self: ClientAssignment, *args: Any) -> Any:
        return ([], KafkaException(KafkaError(KafkaError._STATE))) if stuck.is_set() else move(self, *args)

    monkeypatch.setattr(FencedWriter, "write", losing_the_answer)
    monkeypatch.setattr(ClientAssignment, "move", refusing)
    async with connected(kafka) as connection:
        queue = await asyncio.to_thread(Queue, kafka, 2)
        await queue.prepare(connection)
        first, second = await asyncio.to_thread(queue.send, 2)
        async with tracking(connection, queue, hooks=hooks) as tracker:
            await asyncio.to_thread(queue.take, [first])
            await eventually(lambda: any(f"{queue.markers!r}[0]" in text for text in warned))
            await asyncio.to_thread(queue.take, [second])
            (again,) = await asyncio.to_thread(queue.wait_for_again, 1, 2)
            assert again.value() == b"m1"
            assert tracker.failure is None
            stuck.clear()
            await asyncio.to_thread(queue.wait_for_again, 2, 2)
            await eventually(lambda: tracker.state().open == 0)
    assert len(warned) == 1


@pytest.mark.deep
@pytest.mark.parametrize("failure", [OutcomeUnknown("The answer was lost"), BackendError("No reason known")], ids=str)
async def test_repeated_unknown_outcomes_cause_a_warning_and_a_pause(
    connection: Connection, queue: Queue, failure: BrokerError, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, reclaim, failing, reclaims = FencedWriter.write, Tracker.reclaim, asyncio.Event(), list[float]()
    hooks, warned = Hooks(), list[str]()
    hooks.listen(lambda event: warned.append(event.text) if isinstance(event, Warned) else None)

    async def failing_write(
        self: FencedWriter, entries: Sequence[OutgoingRecord], positions: Positions | None = None
    ) -> None:
        if failing.is_set() and any(entry.topic == queue.topic for entry in entries):
            raise failure
        await write(self, entries, positions)

    async def counted(self: Tracker, tracked: TrackedPartition) -> None:
        reclaims.append(monotonic())
        await reclaim(self, tracked)

    monkeypatch.setattr(FencedWriter, "write", failing_write)
    monkeypatch.setattr(Tracker, "reclaim", counted)
    ids = await asyncio.to_thread(queue.send, 1)
    options = TrackerOptions(topics=[queue.topic])
    tracker = KafkaQueueTracker(connection, queue.subscription, hooks, options, on_close=lambda _: None)
    await tracker.open()
    try:
        assert tracker.trouble() == ""
        failing.set()
        await asyncio.to_thread(queue.take, ids)
        # `/health` reports it.
        await eventually(lambda: str(failure) in tracker.trouble(), 30)
        await eventually(lambda: len(reclaims) >= 6, 30)
        assert reclaims[5] - reclaims[4] > 3.0
        failing.clear()
        await asyncio.to_thread(queue.wait_for_again, 1, 1)
        await eventually(lambda: tracker.metrics()["open_leases"] == 0)
    finally:
        await tracker.close()
    assert [f"Nothing is redelivered from {queue.markers!r}[0]" in text for text in warned] == [True]


async def test_a_cancelled_close_continues(connection: Connection, queue: Queue) -> None:
    async with tracking(connection, queue) as tracker:
        closing = asyncio.ensure_future(tracker.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing})
        await tracker.close()
        # Else its member would keep the partitions, and do nothing for them.
        assert tracker.state().partitions == []


def is_refused(queue: Queue, body: bytes) -> bool:
    try:
        produce(queue.server.bootstrap, queue.markers, [body])
    except KafkaException:
        return True
    return False
