"""Every offset store, created for one test each, and what a test needs to use it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer
from sqlalchemy import Column, Engine, Integer, MetaData, Table, create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from broker.driver.contract import TopicPartition
from broker.hooks import Hooks
from broker_kafka.cluster.connection import Connection
from broker_kafka.offsets import (
    GroupMember,
    GroupOffsetStore,
    MemberOffsetStore,
    MemoryOffsetStore,
    OffsetStore,
    SqlOffsetStore,
    StoredOffset,
)
from broker_kafka.offsets.protocol import failures
from broker_kafka.settings import KafkaSettings
from tests.servers.kafka import KafkaServer, shared_server
from tests.servers.kafka_client import RawAdmin
from tests.servers.postgres import postgres_url

__all__ = [
    "KAFKA",
    "OWN",
    "StoreCase",
    "committed",
    "connect",
    "every_store",
    "execute",
    "join",
    "make_case",
    "own_store",
    "save",
    "sql_store",
]

OWN = ["memory", "sqlite", "sqlite-async", "postgres", "postgres-async", "postgres-savepoint"]
"""Stores outside Kafka, which fence by themselves."""
KAFKA = ["kafka-group", "kafka-member"]

every_store = pytest.mark.parametrize("case", [*OWN, *KAFKA], indirect=True)
own_store = pytest.mark.parametrize("case", OWN, indirect=True)
sql_store = pytest.mark.parametrize("case", [kind for kind in OWN if "sq" in kind or "post" in kind], indirect=True)


@dataclass
class StoreCase:
    """A store, and what a test needs to know of it.

    :ivar again: another store object on the same place.
    :ivar owner: who may commit.
    :ivar topics: two topics with three partitions each.
    """

    store: OffsetStore
    again: Callable[[], OffsetStore]
    owner: GroupMember
    topics: tuple[str, str]
    engine: Any = None
    place: Any = None

    def partition(self, number: int, topic: int = 0) -> TopicPartition:
        return TopicPartition(self.topics[topic], number)

    def member(self, generation: int, member: str = "") -> GroupMember:
        return GroupMember(self.owner.group, generation, member or f"member-{generation}")


class _Joined:
    """A consumer that is in its group, called in a thread as its owner would."""

    def __init__(self, client: Consumer) -> None:
        self.client = client

    async def call(self, function: Callable[[Consumer], Any]) -> Any:
        return await asyncio.to_thread(function, self.client)


def join(server: KafkaServer, group: str, topics: list[str], partitions: int) -> Consumer:
    client = Consumer(
        {
            "bootstrap.servers": server.bootstrap,
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            # So that a frozen one is replaced soon.
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 300,
            "log_level": 3,
        }
    )
    client.subscribe(topics)
    while len(client.assignment()) < partitions:
        client.poll(0.05)
    return client


async def connect(server: KafkaServer, **values: Any) -> Connection:
    connection = Connection(KafkaSettings(servers=(server.bootstrap,), **values), Hooks())
    await connection.open()
    return connection


async def make_case(kind: str, tmp_path: Path, closing: list[Callable[[], Any]]) -> StoreCase:
    group = f"group-{uuid.uuid4().hex[:10]}"
    topics = (f"left-{uuid.uuid4().hex[:8]}", f"right-{uuid.uuid4().hex[:8]}")
    owner = GroupMember(group, 5, "member-5")
    if kind == "memory":
        memory = MemoryOffsetStore()
        return StoreCase(memory, lambda: memory, owner, topics)
    if kind in ("kafka-group", "kafka-member"):
        server = shared_server()
        admin = RawAdmin(server.bootstrap)
        for topic in topics:
            admin.make_topic(topic, 3)
        if kind == "kafka-group":
            connection = await connect(server)
            closing.append(connection.close)
            return StoreCase(GroupOffsetStore(connection), lambda: GroupOffsetStore(connection), owner, topics)
        client = await asyncio.to_thread(join, server, group, list(topics), 6)
        closing.append(lambda: asyncio.to_thread(client.close))
        joined = _Joined(client)
        owner = GroupMember.from_metadata(client.consumer_group_metadata())
        return StoreCase(MemberOffsetStore(joined), lambda: MemberOffsetStore(joined), owner, topics)
    if kind.startswith("sqlite"):
        path = tmp_path / "offsets.db"
        url = f"sqlite+aiosqlite:///{path}" if kind.endswith("async") else f"sqlite:///{path}"
    else:
        url = await asyncio.to_thread(postgres_url)
    engine: Engine | AsyncEngine = create_async_engine(url) if kind.endswith("async") else create_engine(url)
    closing.append(engine.dispose)
    table = f"offsets_{uuid.uuid4().hex[:10]}"
    store = SqlOffsetStore(engine, table=table)
    await store.create_table()
    await store.create_table()
    return StoreCase(store, lambda: SqlOffsetStore(engine, table=table), owner, topics, engine, table)


async def committed(case: StoreCase, positions: Mapping[TopicPartition, StoredOffset], **how: Any) -> None:
    assert failures(await case.store.commit(case.owner, positions, **how)) == {}


async def execute(engine: Any, statement: Any) -> list[Any]:
    def run(tx: Any) -> list[Any]:
        result = tx.execute(text(statement) if isinstance(statement, str) else statement)
        return list(result) if result.returns_rows else []

    if isinstance(engine, AsyncEngine):
        async with engine.begin() as tx:
            return await tx.run_sync(run)
    with engine.begin() as tx:
        return run(tx)


async def save(
    case: StoreCase, owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], row: int = 0
) -> None:
    """A result and a position in one transaction."""
    results = Table(f"results-{case.place}", MetaData(), Column("place", Integer))
    insert = results.insert().values(place=row) if row else text("SELECT 1")
    store: Any = case.store
    if isinstance(case.engine, AsyncEngine):
        async with case.engine.begin() as tx:
            await tx.execute(insert)
            await store.save_async(tx, owner, positions)
    else:
        with case.engine.begin() as tx:
            tx.execute(insert)
            store.save(tx, owner, positions)
