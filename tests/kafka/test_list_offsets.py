"""The bounds of partitions come from their leaders, never from a request that was not answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from confluent_kafka import KafkaError

from broker.driver.contract import Bounds, TopicPartition
from broker.errors import ConnectionFailed
from broker.hooks import Hooks
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import bounds_of, positions_at
from broker_kafka.errors import translate
from broker_kafka.settings import KafkaSettings
from tests.servers.kafka import PLAIN, KafkaServer
from tests.servers.kafka_client import RawAdmin, produce
from tests.servers.proxy import Proxy

pytestmark = pytest.mark.xdist_group("kafka-positions")


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[KafkaServer, Proxy]]:
    """A broker whose clients are all behind a proxy."""
    server = KafkaServer()
    with Proxy(server.ports[PLAIN.name]) as proxy:
        server.advertised[PLAIN.name] = proxy.port
        with server:
            yield server, proxy


async def held(proxy: Proxy) -> None:
    """Until a question is on its way."""
    async with asyncio.timeout(60):
        while not proxy.held:
            await asyncio.sleep(0.001)


@pytest.mark.deep
async def test_a_lost_leader_is_retried(server: tuple[KafkaServer, Proxy]) -> None:
    kafka, proxy = server
    topic = RawAdmin(kafka.bootstrap).make_topic()
    produce(kafka.bootstrap, topic, [b"a", b"b"])
    place = TopicPartition(topic, 0)
    connection = Connection(KafkaSettings(servers=(kafka.bootstrap,)), Hooks())
    await connection.open()
    try:
        for request, answer in (
            (lambda: bounds_of(connection, [place]), {place: Bounds(0, 2)}),
            (lambda: positions_at(connection, [place], datetime(2020, 1, 1, tzinfo=UTC)), {place: 0}),
        ):
            assert await request() == answer
            proxy.hold()
            pending = asyncio.create_task(request())
            await held(proxy)
            proxy.cut()
            proxy.hold(False)
            assert await pending == answer
    finally:
        proxy.hold(False)
        await connection.close()


async def test_a_leader_with_stale_metadata_is_retried(
    kafka: KafkaServer, topic: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = TopicPartition(topic, 0)
    unknown = translate(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART), f"Positions of {topic!r}")
    request = connection.outcomes
    strange = 3

    async def outcomes(start: Callable[[Any], Any], what: str) -> dict[Any, Any]:
        nonlocal strange
        found = await request(start, what)
        if what.startswith("Positions") and strange:
            strange -= 1
            return dict.fromkeys(found, unknown)
        return found

    monkeypatch.setattr(connection, "outcomes", outcomes)
    assert await bounds_of(connection, [place]) == {place: Bounds(0, 0)}
    assert not strange


@pytest.mark.deep
async def test_an_unresponsive_leader_is_an_error(server: tuple[KafkaServer, Proxy]) -> None:
    kafka, proxy = server
    topic = RawAdmin(kafka.bootstrap).make_topic()
    connection = Connection(KafkaSettings(servers=(kafka.bootstrap,), request_timeout=5.0), Hooks())
    await connection.open()
    try:
        assert await bounds_of(connection, [TopicPartition(topic, 0)])
        proxy.refuse()
        with pytest.raises(ConnectionFailed, match=topic):
            await bounds_of(connection, [TopicPartition(topic, 0)])
    finally:
        proxy.refuse(False)
        await connection.close()
