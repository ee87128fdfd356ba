"""Queues of other brokers than JetStream as a source, without a session of Spark."""

from __future__ import annotations

import threading
import uuid
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest

import broker
from broker import Lag
from broker.admin import AdminFacade
from broker.blocking import connect
from broker.errors import ConnectionFailed, Unsupported
from broker_spark.spool.receiver import FOREVER, DrainGoal, find_drain_goal
from tests.servers import kafka, pubsub
from tests.servers.servicebus import double
from tests.spark.spool_query import SECONDS, Query
from tests.spark.support import numbered, publish

ROWS = 60


@pytest.mark.parametrize("backend", ["pubsub", "servicebus"])
def test_a_queue_of_another_broker_is_drained(backend: str, tmp_path: Path) -> None:
    url = pubsub.shared_server().url if backend == "pubsub" else double.shared_double().url
    topic = f"spark-{uuid.uuid4().hex[:12]}"
    with connect(url) as bus:
        bus.admin.ensure_topic(topic)
        bus.admin.ensure_subscription(topic, "spark")
        publish(bus, topic, numbered(ROWS))
        query = Query(url, topic, tmp_path / "spool", maxRows=40)
        try:
            query.begin()
            assert sorted(query.until(ROWS)) == sorted(numbered(ROWS))
        finally:
            query.reader.stop()
        # A new run continues from the checkpoint, and a batch that runs again has the same rows.
        publish(bus, topic, numbered(5, ROWS))
        try:
            before = query.begin().at
            came = query.until(5)
            assert sorted(came) == sorted(numbered(5, ROWS))
            assert sorted(query.rows(before, query.at)) == sorted(came)
            tables = query.tables(before, query.at)
            # A server's id as a number is no offset; a sequence number is one.
            offsets = [offset for table in tables for offset in table["offset"]]
            first = offsets[0]
            assert offsets == ([None] * 5 if backend == "pubsub" else list(range(first, first + 5)))
            assert {partition for table in tables for partition in table["partition"]} == {None}
            assert all(time for table in tables for time in table["broker_time"])
        finally:
            query.reader.stop()


@pytest.mark.deep
def test_a_queue_without_a_lag_is_drained(tmp_path: Path) -> None:
    url = f"{pubsub.shared_server().url}&topic_retention=0&lease_seconds=5"
    topic = f"spark-{uuid.uuid4().hex[:12]}"
    with connect(url) as bus:
        bus.admin.ensure_topic(topic)
        bus.admin.ensure_subscription(topic, "spark")
        publish(bus, topic, numbered(ROWS))
        with pytest.raises(Unsupported, match="topic without retention"):
            bus.admin.lag(topic, "spark")
        query = Query(url, topic, tmp_path / "spool", maxRows=40)
        try:
            batches = list(query.begin(drain=True).batches())
        finally:
            query.reader.stop()
        assert sorted(row for batch in batches for row in batch) == sorted(numbered(ROWS))


@pytest.mark.deep
def test_a_queue_is_drained_by_its_messages_and_not_by_a_late_lag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service's lag is some minutes old; the drain ends although a publisher never stops."""

    async def lag_of(admin: AdminFacade, topic: str, subscription: str) -> Lag:
        return Lag(waiting=0, current=False)

    monkeypatch.setattr(AdminFacade, "lag", lag_of)
    url = f"{pubsub.shared_server().url}&lease_seconds=5"
    topic = f"spark-{uuid.uuid4().hex[:12]}"
    stop = threading.Event()
    with connect(url) as bus:
        bus.admin.ensure_topic(topic)
        bus.admin.ensure_subscription(topic, "spark")
        publish(bus, topic, numbered(ROWS))

        def publish_on() -> None:
            while not stop.wait(0.05):
                bus.topic(topic).publish(b"later")

        publisher = threading.Thread(target=publish_on)
        publisher.start()
        query = Query(url, topic, tmp_path / "spool", maxRows=40)
        try:
            came = [row for batch in query.begin(drain=True).batches() for row in batch]
        finally:
            stop.set()
            publisher.join()
            query.reader.stop()
        assert sorted(row for row in came if row != b"later") == sorted(numbered(ROWS))


@pytest.mark.deep
def test_a_queue_is_drained_even_if_new_messages_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of a killed consumer come when its lease ends, while others are published."""

    async def lag_of(admin: AdminFacade, topic: str, subscription: str) -> Lag:
        raise ConnectionFailed("Cloud Monitoring is away")

    monkeypatch.setattr(AdminFacade, "lag", lag_of)
    url = f"{pubsub.shared_server().url}&lease_seconds=5"
    topic = f"spark-{uuid.uuid4().hex[:12]}"
    with connect(url) as bus, connect(url) as other:
        bus.admin.ensure_topic(topic)
        bus.admin.ensure_subscription(topic, "spark")
        publish(bus, topic, numbered(ROWS))
        query = Query(url, topic, tmp_path / "spool", maxRows=40)
        with ExitStack() as held:
            consumer = held.enter_context(other.messages(topic, subscription="spark", max_outstanding=ROWS))
            assert all(consumer.next_message(timeout=SECONDS) for _ in range(ROWS))
            try:
                query.begin(drain=True)
                publish(bus, topic, [b"later"])
                came = query.batch() or []
                # Which releases all of them.
                held.close()
                came += [row for batch in query.batches() for row in batch]
            finally:
                query.reader.stop()
        assert sorted(row for row in came if row != b"later") == sorted(numbered(ROWS))


def lag(waiting: int, unsettled: int | None = None, *, current: bool = True) -> Lag:
    return Lag(waiting=waiting, unsettled=unsettled, current=current)


@pytest.mark.parametrize(
    ("lags", "expected"),
    [
        ([lag(3, 0), lag(4, 0)], (7, 1.0)),
        ([lag(3, 2)], (5, 31.0)),
        # Leased messages count as waiting there, and come when their leases end.
        ([lag(3)], (3, 31.0)),
        ([lag(3, 0), lag(0, current=False)], (FOREVER, 31.0)),
        ([], (FOREVER, 31.0)),
    ],
)
async def test_the_goal_of_a_drain(
    lags: list[Lag], expected: tuple[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lag_of(admin: AdminFacade, topic: str, subscription: str) -> Lag:
        if not lags:
            raise Unsupported("The broker has no lag")
        return lags[int(topic)]

    monkeypatch.setattr(AdminFacade, "lag", lag_of)
    began = datetime.now(UTC)
    async with broker.connect("inmem://") as bus:
        goal = await find_drain_goal(bus, [str(each) for each in range(max(1, len(lags)))], "spark", 30.0)
    assert (goal.messages, goal.patience) == expected
    assert (goal.began is not None and began <= goal.began) is (expected[0] == FOREVER)


async def test_messages_published_after_the_start_of_a_drain_were_not_waiting() -> None:
    async with broker.connect("inmem://") as bus:
        await bus.admin.ensure_topic("orders")
        await bus.admin.ensure_subscription("orders", "spark")
        async with bus.messages("orders", subscription="spark") as consumer:
            await bus.topic("orders").publish(b"before")
            before = await consumer.next_batch(1)
            await bus.topic("orders").publish(b"after")
            after = await consumer.next_batch(1)
    began = before[0].broker_time
    assert began is not None
    assert DrainGoal(FOREVER, 1.0, began).was_waiting([before])
    assert DrainGoal(FOREVER, 1.0, began).was_waiting([after, before])
    assert not DrainGoal(FOREVER, 1.0, began).was_waiting([after])
    assert DrainGoal(FOREVER, 1.0, None).was_waiting([after])


def test_messages_of_a_kafka_queue_have_their_places(tmp_path: Path) -> None:
    url = kafka.shared_server().url
    topic = f"spark-{uuid.uuid4().hex[:12]}"
    with connect(url) as bus:
        bus.admin.ensure_topic(topic, partitions=2)
        bus.admin.ensure_subscription(topic, "spark")
        publish(bus, topic, numbered(ROWS))
        places = [
            (partition, record.offset, record.data)
            for partition in bus.log.partitions(topic)
            for batch in bus.log.read(topic, partition)
            for record in batch
        ]
    query = Query(url, topic, tmp_path / "spool")
    try:
        before = query.begin().at
        query.until(ROWS)
        tables = query.tables(before, query.at)
    finally:
        query.reader.stop()
    found = [row for each in tables for row in zip(each["partition"], each["offset"], each["value"], strict=True)]
    assert sorted(found) == sorted(places)
