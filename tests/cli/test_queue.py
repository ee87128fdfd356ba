"""`broker queue` on a real Kafka broker: peek and purge."""

from __future__ import annotations

import asyncio

import pytest

from broker.driver.queue_tracking import PurgedQueue
from broker.errors import BackendError
from broker.hooks import Hooks
from broker_kafka.backend import KafkaBackend
from broker_kafka.queue.markers.wire import Content, Kind, Marker, MessageId
from broker_kafka.settings import KafkaSettings
from tests.cli.conftest import InnerCli
from tests.kafka.queue_markers import Queue, connected, prepared_queue, tracking
from tests.servers.kafka import shared_server
from tests.servers.kafka_client import produce


@pytest.fixture
def queue() -> Queue:
    """Five messages: one leased, one in backoff, one acked, and two not delivered."""
    queue = prepared_queue(shared_server())
    held, waiting, done, _ = queue.send(4)
    produce(queue.server.bootstrap, queue.topic, [b"m4"], key=b"k", headers=[("color", b"red")])
    headers = (("color", b"blue"), ("anybroker-id", b"given"))
    queue.write(
        (Marker(kind=Kind.START, id=held, after_ms=600_000, attempt=1), Content(key=b"k", value=b"m0")),
        (Marker(kind=Kind.START, id=waiting, after_ms=600_000, attempt=2), Content(value=b"m1", headers=headers)),
        (Marker(kind=Kind.KEEPALIVE, id=waiting, after_ms=600_000, attempt=2, released=True), None),
    )
    queue.take([done])
    queue.end([done])
    return queue


def test_peek_shows_open_and_undelivered_messages(queue: Queue) -> None:
    cli = InnerCli(shared_server().url)
    shown = cli("queue", "peek", queue.subscription, "--json").lines
    reported = [[each[name] for name in ("offset", "state", "attempt", "key", "data")] for each in shown]
    assert reported == [
        [0, "held", 1, "k", "m0"],
        [1, "waiting", 2, None, "m1"],
        [3, "ready", 0, None, "m3"],
        [4, "ready", 0, "k", "m4"],
    ]
    assert (shown[1]["id"], shown[1]["attributes"]) == ("given", {"color": "blue"})
    assert (shown[3]["id"], shown[3]["attributes"]) == (f"{queue.topic}:0:4", {"color": "red"})
    assert shown[0]["due_in"] > 0
    assert shown[2]["due_in"] is None
    # Also more than Kafka's client returns at once.
    for limit, places in (3, [0, 1, 3]), (2_000_000, [0, 1, 3, 4]):
        lines = cli("queue", "peek", queue.subscription, "-n", str(limit), "--json").lines
        assert [each["offset"] for each in lines] == places
    assert "color=red" in cli("queue", "peek", queue.subscription).text
    cli("queue", "peek", "nobodys", code=3)


@pytest.mark.deep
def test_purge_drops_open_and_undelivered_messages(queue: Queue) -> None:
    cli = InnerCli(shared_server().url)
    counts = {"subscription": queue.subscription, "open": 2, "ready": 2}
    assert cli("queue", "purge", queue.subscription, "--dry-run", "--json").json == {**counts, "dry_run": True}
    assert "--yes" in cli("queue", "purge", queue.subscription, code=2).err
    assert cli("queue", "purge", queue.subscription, "--yes", "--json").json == {**counts, "dry_run": False}
    assert "is empty" in cli("queue", "peek", queue.subscription).err
    # Other subscriptions keep their messages.
    assert len(queue.read()) == 5
    cli("queue", "purge", "nobodys", "--yes", code=3)


@pytest.mark.deep
def test_a_queue_that_is_tracked_is_not_purged(queue: Queue) -> None:
    async def purge() -> None:
        settings = KafkaSettings(servers=(queue.server.bootstrap,))
        backend = KafkaBackend(settings, Hooks())
        await backend.open()
        try:
            async with connected(queue.server) as connection, tracking(connection, queue):
                with pytest.raises(BackendError, match=r"has 1 member .* is not purged\. Stop its consumers and"):
                    await backend.purge_queue(queue.subscription)
            assert await backend.purge_queue(queue.subscription) == PurgedQueue(open=2, ready=2)
            assert await backend.purge_queue(queue.subscription) == PurgedQueue(open=0, ready=0)
            # From a foreign writer, which names the queue but no topic.
            foreign = Marker(kind=Kind.START, id=MessageId("", 0, 9, queue.subscription), after_ms=600_000)
            await asyncio.to_thread(queue.write, (foreign, Content(value=b"m9")))
            assert await backend.purge_queue(queue.subscription) == PurgedQueue(open=1, ready=0)
            assert await backend.purge_queue(queue.subscription) == PurgedQueue(open=0, ready=0)
        finally:
            await backend.close()

    asyncio.run(purge())
