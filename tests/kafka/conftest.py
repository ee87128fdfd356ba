"""The broker that the tests of a run share, and topics of a test's own."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from broker.hooks import Hooks
from broker_kafka.admin.facade import KafkaAdmin
from broker_kafka.cluster.connection import Connection
from broker_kafka.log_reader import KafkaLogReader
from broker_kafka.offsets import sql
from broker_kafka.settings import KafkaSettings
from tests.kafka.offset_store_cases import StoreCase, make_case
from tests.kafka.queue_markers import Queue, connected
from tests.servers.kafka import KafkaServer, shared_server
from tests.servers.kafka_client import RawAdmin

MakeTopic = Callable[..., str]


@cache
def _shared_admin() -> RawAdmin:
    return RawAdmin(shared_server().bootstrap)


@pytest.fixture
def kafka() -> KafkaServer:
    """The shared broker: not to be stopped; tests that stop one start their own."""
    return shared_server()


@pytest.fixture
def admin(kafka: KafkaServer) -> RawAdmin:
    return _shared_admin()


@pytest.fixture
def make_topic(admin: RawAdmin) -> MakeTopic:
    """`make_topic(partitions=3, config={"retention.ms": "1000"})` gives the name of a new topic."""
    return admin.make_topic


@pytest.fixture
def topic(admin: RawAdmin) -> str:
    """A new topic with one partition."""
    return admin.make_topic()


@pytest.fixture
def group() -> str:
    """The name of a new group."""
    return f"group-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def name() -> str:
    """The name of a topic that is not there yet."""
    return f"made-{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def spi(kafka: KafkaServer) -> AsyncIterator[KafkaAdmin]:
    """Provisioning, over a connection of its own."""
    connection = Connection(KafkaSettings(servers=(kafka.bootstrap,)), Hooks())
    await connection.open()
    yield KafkaAdmin(connection)
    await connection.close()


@pytest.fixture
async def connection(kafka: KafkaServer) -> AsyncIterator[Connection]:
    """One whose groups find out quickly that a member is gone."""
    async with connected(kafka) as connection:
        yield connection


@pytest.fixture
async def queue(kafka: KafkaServer, connection: Connection) -> Queue:
    """The topics of a queue with markers, of one partition each."""
    queue = await asyncio.to_thread(Queue, kafka)
    await queue.prepare(connection)
    return queue


@pytest.fixture
async def case(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[StoreCase]:
    """The store that the parameter names."""
    closing: list[Callable[[], Any]] = []
    if request.param.endswith("savepoint"):
        # As on a database whose INSERT cannot pass over a row that is there.
        monkeypatch.setattr(sql, "_QUIET_INSERTS", {})
    yield await make_case(request.param, tmp_path, closing)
    for close in closing:
        result = close()
        if asyncio.iscoroutine(result):
            await result


@pytest.fixture
async def reader(kafka: KafkaServer) -> AsyncIterator[KafkaLogReader]:
    connection = Connection(KafkaSettings(servers=(kafka.bootstrap,)), Hooks())
    await connection.open()
    reader = KafkaLogReader(connection)
    yield reader
    await reader.close()
    await connection.close()
