"""Trackers that may describe a topic and not write to it: only messages of that topic wait."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from broker.errors import NotAuthorized
from broker.hooks import Hooks, Warned
from broker_kafka.cluster.connection import Connection
from broker_kafka.fenced_writer import FencedWriter, OutcomeUnknown, OutgoingRecord
from broker_kafka.queue.markers.wire import Content, Kind, Marker, MessageId
from broker_kafka.queue.tracker.redelivery_checks import TopicChecks
from tests.kafka.group_members import eventually
from tests.kafka.queue_markers import Queue, connected, tracking
from tests.servers.kafka_client import produce
from tests.servers.kafka_security import USERS, SecureBroker

INTERNAL = "__consumer_offsets"
pytestmark = pytest.mark.xdist_group("kafka-queue-rights")


@pytest.fixture(scope="module")
def secure() -> Iterator[SecureBroker]:
    with SecureBroker() as broker:
        yield broker


def listening() -> tuple[Hooks, list[str]]:
    hooks, warned = Hooks(), list[str]()
    hooks.listen(lambda event: warned.append(event.text) if isinstance(event, Warned) else None)
    return hooks, warned


def released(id: MessageId, *, max_attempts: int = 0, dead_letter: str = "") -> tuple[Marker, Content]:
    start = Marker(kind=Kind.START, id=id, after_ms=100, attempt=1, released=True)
    return start, Content(value=b"held", max_attempts=max_attempts, dead_letter=dead_letter)


@pytest.mark.deep
@pytest.mark.parametrize("what", ["dead letters", "messages"])
async def test_a_topic_without_write_access_blocks_no_other(secure: SecureBroker, what: str) -> None:
    hooks, warned = listening()
    queue = await asyncio.to_thread(Queue, secure.server)
    other = await asyncio.to_thread(queue.admin.make_topic)
    await asyncio.to_thread(secure.forbid_writing, other, "ann")
    login = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN"}
    login |= {"sasl_username": "ann", "sasl_password": USERS["ann"]}
    async with connected(secure.server, servers=(secure.server.address("SASL_PLAIN"),), **login) as connection:
        await queue.prepare(connection)
        ids = await asyncio.to_thread(queue.send, 3)
        async with tracking(connection, queue, hooks=hooks, refused_after=0.2) as tracker:
            held = ids[0] if what == "dead letters" else MessageId(other, 0, 700, queue.subscription)
            dead = released(held, max_attempts=1, dead_letter=other)
            await asyncio.to_thread(queue.write, dead if what == "dead letters" else released(held))
            # It is tried again and again.
            await eventually(lambda: tracker.counts.refused >= 2)
            await asyncio.to_thread(queue.take, ids[1:])
            found = await asyncio.to_thread(queue.wait_for_again, 2, 3)
            assert [each.value() for each in found] == [b"m1", b"m2"]
            assert tracker.counts.unknown_outcomes == 0
            assert tracker.state().open == 1
    assert [f"{held.topic}:0:{held.offset} is refused" in text and other in text for text in warned] == [True]


@pytest.mark.deep
async def test_a_marker_of_an_internal_topic_blocks_no_other(connection: Connection, queue: Queue) -> None:
    await stands_apart(connection, queue, has_unknown_outcome=False)


@pytest.mark.deep
async def test_an_unforeseen_refusal_blocks_no_other(
    connection: Connection, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(self: TopicChecks, topics: object) -> dict[str, Exception]:
        return {}

    monkeypatch.setattr(TopicChecks, "unwritable", nothing)
    await stands_apart(connection, queue, has_unknown_outcome=True)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["d" * 40_000, "no name"], ids=["too long", "letters"])
async def test_a_dead_letter_topic_with_an_invalid_name_blocks_no_other(
    connection: Connection, queue: Queue, name: str
) -> None:
    hooks, warned = listening()
    ids = await asyncio.to_thread(queue.send, 2)
    async with tracking(connection, queue, hooks=hooks) as tracker:
        held = released(ids[0], max_attempts=1, dead_letter=name)
        await asyncio.to_thread(queue.write, held, released(ids[1]))
        await asyncio.to_thread(queue.wait_for_again, 1, 2)
        await eventually(lambda: tracker.counts.redelivered == 1 and tracker.state().open == 1)
        assert tracker.counts.lateness.sum < 5
        assert tracker.counts.unknown_outcomes == 0
    assert [f"{name[:60]!r} is no valid topic name on Kafka" in text for text in warned] == [True]


async def stands_apart(connection: Connection, queue: Queue, *, has_unknown_outcome: bool) -> None:
    hooks, warned = listening()
    ids = await asyncio.to_thread(queue.send, 9)
    # Now the topic of the offsets is there.
    await asyncio.to_thread(queue.commit, ids)
    held = MessageId(INTERNAL, 0, 700, queue.subscription)
    async with tracking(connection, queue, hooks=hooks) as tracker:
        # Due together, so that it is not known at first which of them is refused.
        await asyncio.to_thread(queue.write, released(held), *(released(each) for each in ids))
        await asyncio.to_thread(queue.wait_for_again, 9, 9)
        await eventually(lambda: tracker.state().open == 1)
        assert bool(tracker.counts.unknown_outcomes) == has_unknown_outcome
    assert [f"{INTERNAL}:0:700 is refused" in text and repr(INTERNAL) in text for text in warned] == [True]


async def test_a_transaction_refused_for_a_topic_raises_its_error(connection: Connection, queue: Queue) -> None:
    ids = await asyncio.to_thread(queue.send, 1)
    await asyncio.to_thread(queue.commit, ids)
    writer = FencedWriter(connection, f"{queue.topic}-writer")
    await writer.start()
    try:
        entries = [
            OutgoingRecord(queue.topic, None, b"a"),
            OutgoingRecord(INTERNAL, None, b"b"),
            OutgoingRecord(queue.topic, None, b"c"),
        ]
        with pytest.raises(OutcomeUnknown) as caught:
            await writer.write(entries)
        # The client does not say which of them; those that it had not dropped by then are missing.
        assert 1 in caught.value.refused
        for error in caught.value.refused.values():
            assert isinstance(error, NotAuthorized)
            assert not error.retriable
            assert INTERNAL in str(error)
    finally:
        assert await writer.stop(3.0)
    assert writer.failure is None
    assert len(await asyncio.to_thread(queue.read)) == 1


@pytest.mark.deep
async def test_the_refusal_of_one_record_is_not_reported_for_others(connection: Connection, queue: Queue) -> None:
    writer = FencedWriter(connection, f"{queue.topic}-writer")
    await writer.start()
    try:
        with pytest.raises(OutcomeUnknown) as caught:
            await writer.write([OutgoingRecord(queue.topic, None, b"a"), OutgoingRecord("no-such-topic", None, b"b")])
        lasting = [place for place, error in caught.value.refused.items() if not error.retriable]
        assert lasting == [1]
    finally:
        await writer.stop(3.0)
    assert await asyncio.to_thread(produce, queue.server.bootstrap, queue.topic, [b"c"])
