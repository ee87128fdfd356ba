"""Every offset store against the same promises; (a) to (g) are defects that a known store of this kind had."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as NativePartition
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Column, Engine, Integer, MetaData, Table, column, create_engine, select, text
from sqlalchemy import table as sql_table
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from broker.errors import BrokerError, Closed, ConfigurationError, LeaseLost, SettleError, TopicNotFound
from broker.hooks import Hooks
from broker.spi import TopicPartition
from broker_kafka.connection import Connection
from broker_kafka.offsets import (
    FileOffsetStore,
    GroupMember,
    GroupOffsetStore,
    MemberOffsetStore,
    MemoryOffsetStore,
    OffsetStore,
    SqlOffsetStore,
    StoredOffset,
    migrate_offsets,
    sql_rows,
)
from broker_kafka.offsets.protocol import failures
from broker_kafka.settings import KafkaSettings
from tests.kafka import offset_worker
from tests.servers.kafka import KafkaServer, shared_server
from tests.servers.kafka_client import RawAdmin
from tests.servers.postgres import postgres_url

OWN = ["memory", "file", "sqlite", "sqlite-async", "postgres", "postgres-async", "postgres-savepoint"]
"""Stores outside Kafka, which fence by themselves."""
KAFKA = ["kafka-group", "kafka-member"]


@dataclass
class Shelf:
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


@dataclass
class Opened:
    closing: list[Callable[[], Any]] = field(default_factory=list[Callable[[], Any]])


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


async def make_shelf(kind: str, tmp_path: Path, closing: list[Callable[[], Any]]) -> Shelf:
    group = f"group-{uuid.uuid4().hex[:10]}"
    topics = (f"left-{uuid.uuid4().hex[:8]}", f"right-{uuid.uuid4().hex[:8]}")
    owner = GroupMember(group, 5, "member-5")
    if kind == "memory":
        memory = MemoryOffsetStore()
        return Shelf(memory, lambda: memory, owner, topics)
    if kind == "file":
        return Shelf(FileOffsetStore(tmp_path), lambda: FileOffsetStore(tmp_path), owner, topics, place=tmp_path)
    if kind in ("kafka-group", "kafka-member"):
        server = shared_server()
        admin = RawAdmin(server.bootstrap)
        for topic in topics:
            admin.make_topic(topic, 3)
        if kind == "kafka-group":
            connection = await connect(server)
            closing.append(connection.close)
            return Shelf(GroupOffsetStore(connection), lambda: GroupOffsetStore(connection), owner, topics)
        client = await asyncio.to_thread(join, server, group, list(topics), 6)
        closing.append(lambda: asyncio.to_thread(client.close))
        joined = _Joined(client)
        owner = GroupMember.from_metadata(client.consumer_group_metadata())
        return Shelf(MemberOffsetStore(joined), lambda: MemberOffsetStore(joined), owner, topics)
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
    return Shelf(store, lambda: SqlOffsetStore(engine, table=table), owner, topics, engine, table)


@pytest.fixture
async def shelf(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Shelf]:
    closing: list[Callable[[], Any]] = []
    if request.param.endswith("savepoint"):
        # As on a database whose INSERT cannot pass over a row that is there.
        monkeypatch.setattr(sql_rows, "_QUIET_INSERTS", {})
    yield await make_shelf(request.param, tmp_path, closing)
    for close in closing:
        result = close()
        if asyncio.iscoroutine(result):
            await result


every_store = pytest.mark.parametrize("shelf", [*OWN, *KAFKA], indirect=True)
own_store = pytest.mark.parametrize("shelf", OWN, indirect=True)
sql_store = pytest.mark.parametrize("shelf", [kind for kind in OWN if "sq" in kind or "post" in kind], indirect=True)


async def committed(shelf: Shelf, positions: Mapping[TopicPartition, StoredOffset], **how: Any) -> None:
    assert failures(await shelf.store.commit(shelf.owner, positions, **how)) == {}


@every_store
async def test_a_what_is_committed_is_what_is_fetched(shelf: Shelf):
    """The fork read ZooKeeper's offsets and wrote Kafka's."""
    wanted = {shelf.partition(0): StoredOffset(17, "why"), shelf.partition(2): StoredOffset(4)}
    await committed(shelf, wanted)
    again = shelf.again()
    assert await again.fetch(shelf.owner.group, list(wanted)) == wanted
    assert await again.claim(shelf.owner, list(wanted)) == wanted
    assert await again.stored(shelf.owner.group) == wanted


@pytest.mark.parametrize("shelf", KAFKA, indirect=True)
async def test_a_what_is_committed_is_what_a_consumer_of_kafka_reads(shelf: Shelf, kafka: KafkaServer):
    await committed(shelf, {shelf.partition(1): StoredOffset(23, "seen")})
    found = await asyncio.to_thread(RawAdmin(kafka.bootstrap).committed, shelf.owner.group, shelf.topics[0], 1)
    assert (found.offset, found.metadata) == (23, "seen")


@every_store
async def test_b_every_partition_has_its_own_answer(shelf: Shelf, request: pytest.FixtureRequest):
    """The fork's answer had only failures, and what was not among the successes was committed again for ever."""
    good, bad = shelf.partition(0), shelf.partition(1)
    if "kafka" in request.node.name:
        bad = shelf.partition(99)
        expected: type[BrokerError] = TopicNotFound
    else:
        await shelf.store.claim(shelf.member(6), [bad])
        expected = LeaseLost
    results = await shelf.store.commit(shelf.owner, {bad: StoredOffset(8), good: StoredOffset(9)})
    assert set(results) == {good, bad}
    assert results[good] is None
    assert isinstance(results[bad], expected)
    assert str(bad.partition) in str(results[bad])
    found = await shelf.store.fetch(shelf.owner.group, [good, shelf.partition(2)])
    assert found == {good: StoredOffset(9), shelf.partition(2): None}


@every_store
async def test_c_an_offset_is_the_next_one_on_every_path(shelf: Shelf, request: pytest.FixtureRequest):
    """The fork stored the offset by one path and the offset + 1 by the other."""
    group, partition = shelf.owner.group, shelf.partition(0)
    await committed(shelf, {partition: StoredOffset(10)})
    assert (await shelf.store.fetch(group, [partition]))[partition] == StoredOffset(10)
    assert failures(await shelf.store.reset(group, {partition: StoredOffset(7)})) == {}
    assert (await shelf.store.fetch(group, [partition]))[partition] == StoredOffset(7)
    memory = MemoryOffsetStore()
    await migrate_offsets(shelf.store, memory, group)
    assert await memory.stored(group) == {partition: StoredOffset(7)}
    if shelf.engine is not None:
        await shelf.store.claim(shelf.owner, [partition])
        await save(shelf, shelf.owner, {partition: StoredOffset(12)})
        assert (await shelf.store.fetch(group, [partition]))[partition] == StoredOffset(12)


@every_store
async def test_d_never_committed_is_not_zero(shelf: Shelf):
    """The fork took a block that was missing from an answer for "never committed"."""
    zero, never = shelf.partition(0), shelf.partition(1)
    await committed(shelf, {zero: StoredOffset(0)})
    assert await shelf.store.fetch(shelf.owner.group, [zero, never]) == {zero: StoredOffset(0), never: None}
    assert await shelf.store.claim(shelf.owner, [zero, never]) == {zero: StoredOffset(0), never: None}
    assert await shelf.store.stored(shelf.owner.group) == {zero: StoredOffset(0)}


async def _break(shelf: Shelf) -> None:
    """Make the place unusable."""
    if isinstance(shelf.place, Path):
        (path,) = shelf.place.glob("*.json")
        path.write_text('{"version": 1, "group"')
    else:
        await execute(shelf.engine, f'DROP TABLE "{shelf.place}"')


@pytest.mark.parametrize("shelf", OWN[1:], indirect=True)
async def test_d_a_store_that_cannot_be_read_has_not_no_positions(shelf: Shelf):
    group, partitions = shelf.owner.group, [shelf.partition(0), shelf.partition(1)]
    await committed(shelf, {partitions[0]: StoredOffset(3)})
    await _break(shelf)
    for found in (await shelf.store.fetch(group, partitions), await shelf.store.claim(shelf.owner, partitions)):
        assert set(found) == set(partitions)
        assert all(isinstance(entry, SettleError) for entry in found.values())
    with pytest.raises(SettleError):
        await shelf.store.stored(group)
    with pytest.raises(SettleError):
        await migrate_offsets(shelf.store, MemoryOffsetStore(), group)


@every_store
async def test_e_all_topics_and_partitions_of_one_commit_are_kept(shelf: Shelf):
    """The fork's JSON store forgot a topic's other partitions."""
    wanted = {shelf.partition(n, t): StoredOffset(10 * t + n, f"{t}/{n}") for t in (0, 1) for n in range(3)}
    await committed(shelf, wanted)
    assert await shelf.again().stored(shelf.owner.group) == wanted
    await committed(shelf, {shelf.partition(1): StoredOffset(99)})
    assert await shelf.again().stored(shelf.owner.group) == wanted | {shelf.partition(1): StoredOffset(99)}


@pytest.mark.parametrize("shelf", OWN[1:], indirect=True)
async def test_f_a_write_that_fails_is_told(shelf: Shelf):
    """The fork ignored the errors of its database."""
    group, partitions = shelf.owner.group, [shelf.partition(0), shelf.partition(1)]
    await committed(shelf, {partitions[0]: StoredOffset(3)})
    if isinstance(shelf.place, Path):
        (path,) = shelf.place.glob("*.json")
        path.with_suffix(".new").mkdir()
    elif "sqlite" in str(shelf.engine.url):
        await execute(
            shelf.engine,
            f'CREATE TRIGGER "full" BEFORE UPDATE ON "{shelf.place}" BEGIN SELECT RAISE(ABORT, \'disk full\'); END',
        )
    else:
        await execute(shelf.engine, f'ALTER TABLE "{shelf.place}" ADD CHECK (next_offset < 5)')
    for results in (
        await shelf.store.commit(shelf.owner, dict.fromkeys(partitions, StoredOffset(7))),
        await shelf.store.reset(group, dict.fromkeys(partitions, StoredOffset(7))),
    ):
        assert set(results) == set(partitions)
        assert all(isinstance(error, SettleError) and error.native is not None for error in results.values())
    assert await shelf.again().stored(group) == {partitions[0]: StoredOffset(3)}


async def test_d_and_f_kafka_out_of_reach_is_an_error_of_every_partition():
    with KafkaServer() as server:
        connection = await connect(server, request_timeout=1.0)
        await asyncio.to_thread(server.kill)
        store, partitions = GroupOffsetStore(connection), [TopicPartition("left", 0), TopicPartition("left", 1)]
        for results in (
            await store.fetch("group", partitions),
            await store.commit(GroupMember("group", 1), dict.fromkeys(partitions, StoredOffset(1))),
        ):
            assert set(results) == set(partitions)
            assert all(isinstance(error, BrokerError) for error in results.values())
        with pytest.raises(BrokerError):
            await store.stored("group")
        await connection.close()


@own_store
async def test_g_an_older_generation_cannot_overwrite(shelf: Shelf):
    """The fork let a member of an old generation put back a newer offset."""
    group, partition = shelf.owner.group, shelf.partition(0)
    await committed(shelf, {partition: StoredOffset(50)})
    newer = shelf.member(6)
    assert await shelf.store.claim(newer, [partition]) == {partition: StoredOffset(50)}
    # Before the new owner has committed anything.
    for how in ({}, {"rewind": True}):
        (error,) = (await shelf.store.commit(shelf.owner, {partition: StoredOffset(60)}, **how)).values()
        assert isinstance(error, LeaseLost)
        assert "generation 6" in str(error)
    assert await shelf.again().commit(newer, {partition: StoredOffset(55)}) == {partition: None}
    assert isinstance((await shelf.store.commit(shelf.owner, {partition: StoredOffset(60)}))[partition], LeaseLost)
    assert await shelf.store.fetch(group, [partition]) == {partition: StoredOffset(55)}
    # A former member that wakes up late does not get the partition back either.
    assert isinstance((await shelf.store.claim(shelf.owner, [partition]))[partition], LeaseLost)


@own_store
async def test_g_another_member_of_the_same_generation_is_not_the_owner(shelf: Shelf):
    partition = shelf.partition(0)
    await shelf.store.claim(shelf.owner, [partition])
    other = shelf.member(shelf.owner.generation, "other")
    assert isinstance((await shelf.store.commit(other, {partition: StoredOffset(1)}))[partition], LeaseLost)
    await committed(shelf, {partition: StoredOffset(1)})


@own_store
async def test_g_a_group_that_was_founded_anew_counts_from_the_beginning(shelf: Shelf):
    partition, first = shelf.partition(0), shelf.member(1)
    await committed(shelf, {partition: StoredOffset(50)})
    refused = (await shelf.store.claim(first, [partition]))[partition]
    assert isinstance(refused, LeaseLost)
    assert "restarted=True" in str(refused)
    assert await shelf.store.claim(first, [partition], restarted=True) == {partition: StoredOffset(50)}
    assert await shelf.store.commit(first, {partition: StoredOffset(51)}) == {partition: None}
    assert isinstance((await shelf.store.commit(shelf.owner, {partition: StoredOffset(52)}))[partition], LeaseLost)


@pytest.mark.parametrize("shelf", ["kafka-group"], indirect=True)
async def test_g_nobody_commits_past_a_group_that_runs(shelf: Shelf, kafka: KafkaServer):
    partition = shelf.partition(0)
    client = await asyncio.to_thread(join, kafka, shelf.owner.group, list(shelf.topics), 6)
    for write in (
        shelf.store.commit(shelf.owner, {partition: StoredOffset(9)}),
        shelf.store.reset(shelf.owner.group, {partition: StoredOffset(9)}),
    ):
        assert isinstance((await write)[partition], LeaseLost)
    assert await shelf.store.fetch(shelf.owner.group, [partition]) == {partition: None}
    await asyncio.to_thread(client.close)
    await committed(shelf, {partition: StoredOffset(9)})


@pytest.mark.parametrize("shelf", ["kafka-member"], indirect=True)
async def test_g_a_member_that_was_replaced_cannot_commit(shelf: Shelf, kafka: KafkaServer):
    partition = shelf.partition(0)
    await committed(shelf, {partition: StoredOffset(5)})
    await shelf.store._client.call(lambda client: client.unsubscribe())  # type: ignore[attr-defined]
    other = await asyncio.to_thread(join, kafka, shelf.owner.group, list(shelf.topics), 6)
    (error,) = (await shelf.store.commit(shelf.owner, {partition: StoredOffset(6)})).values()
    assert isinstance(error, LeaseLost)
    assert other.committed([NativePartition(*partition)])[0].offset == 5
    await asyncio.to_thread(other.close)


@own_store
async def test_a_member_that_keeps_a_partition_commits_in_later_generations_too(shelf: Shelf):
    partition = shelf.partition(0)
    await shelf.store.claim(shelf.member(5, "same"), [partition])
    for generation in (6, 8):
        results = await shelf.store.commit(shelf.member(generation, "same"), {partition: StoredOffset(generation)})
        assert results == {partition: None}
    # Another member has to claim, whatever its generation is.
    assert isinstance((await shelf.store.commit(shelf.member(9), {partition: StoredOffset(9)}))[partition], LeaseLost)


@own_store
async def test_going_back_is_never_by_accident(shelf: Shelf):
    partition = shelf.partition(0)
    await committed(shelf, {partition: StoredOffset(9, "nine")})
    (error,) = (await shelf.store.commit(shelf.owner, {partition: StoredOffset(8)})).values()
    assert isinstance(error, SettleError)
    assert "9" in str(error)
    assert "rewind=True" in str(error)
    await committed(shelf, {partition: StoredOffset(9, "again")})
    await committed(shelf, {partition: StoredOffset(8)}, rewind=True)
    assert await shelf.store.fetch(shelf.owner.group, [partition]) == {partition: StoredOffset(8)}


@own_store
async def test_a_reset_fences_the_member_that_runs_in_spite_of_it(shelf: Shelf):
    partition = shelf.partition(0)
    await committed(shelf, {partition: StoredOffset(9)})
    assert await shelf.store.reset(shelf.owner.group, {partition: StoredOffset(2, "back")}) == {partition: None}
    assert isinstance((await shelf.store.commit(shelf.owner, {partition: StoredOffset(10)}))[partition], LeaseLost)
    assert await shelf.store.claim(shelf.owner, [partition]) == {partition: StoredOffset(2, "back")}
    await committed(shelf, {partition: StoredOffset(3)})


@every_store
@pytest.mark.parametrize("bad", [StoredOffset(-1), StoredOffset(2**63), StoredOffset(True), StoredOffset(1, None)])  # type: ignore[arg-type]
async def test_a_position_that_cannot_be_kept_is_refused(shelf: Shelf, bad: StoredOffset):
    with pytest.raises(ConfigurationError, match=shelf.topics[0]):
        await shelf.store.commit(shelf.owner, {shelf.partition(0): bad})
    with pytest.raises(ConfigurationError, match=shelf.topics[0]):
        await shelf.store.reset(shelf.owner.group, {shelf.partition(0): bad})


@own_store
async def test_groups_and_odd_names_are_kept_apart(shelf: Shelf):
    partition, text = shelf.partition(0), "ünïcode/../%2F.json"
    other = shelf.owner._replace(group=text)
    await committed(shelf, {partition: StoredOffset(1)})
    assert await shelf.store.commit(other, {partition: StoredOffset(2, "ünï\n'\"")}) == {partition: None}
    assert await shelf.store.stored(text) == {partition: StoredOffset(2, "ünï\n'\"")}
    assert await shelf.store.stored(shelf.owner.group) == {partition: StoredOffset(1)}


@own_store
async def test_a_closed_store_refuses(shelf: Shelf):
    await shelf.store.close()
    await shelf.store.close()
    for call in (
        shelf.store.fetch(shelf.owner.group, []),
        shelf.store.commit(shelf.owner, {}),
        shelf.store.stored(shelf.owner.group),
    ):
        with pytest.raises(Closed):
            await call


@own_store
async def test_commits_at_once_lose_nothing(shelf: Shelf):
    stores = [shelf.again() for _ in range(4)]

    async def climb(store: OffsetStore, partition: TopicPartition) -> None:
        for offset in range(1, 11):
            assert await store.commit(shelf.owner, {partition: StoredOffset(offset)}) == {partition: None}

    partitions = [shelf.partition(n, t) for n in range(2) for t in (0, 1)]
    await asyncio.gather(*map(climb, stores, partitions))
    assert await shelf.store.stored(shelf.owner.group) == dict.fromkeys(sorted(partitions), StoredOffset(10))


@own_store
async def test_of_many_who_claim_at_once_the_newest_wins(shelf: Shelf):
    partition = shelf.partition(0)
    members = [shelf.member(generation) for generation in (4, 9, 6, 8, 7, 5)]
    await asyncio.gather(*(shelf.again().claim(member, [partition]) for member in members))
    results = [
        (member.generation, (await shelf.store.commit(member, {partition: StoredOffset(1)}))[partition])
        for member in members
    ]
    assert [generation for generation, error in results if error is None] == [9]


# -- results and positions in one transaction ------------------------------------------------------------------


async def read(engine: Any, table: str, *columns: str) -> list[Any]:
    """The rows of a table, by the first column."""
    rows = select(*(column(name) for name in columns)).select_from(sql_table(table)).order_by(column(columns[0]))
    return [tuple(row) for row in await execute(engine, rows)]


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
    shelf: Shelf, owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], row: int = 0
) -> None:
    """A result and a position in one transaction."""
    results = Table(f"results-{shelf.place}", MetaData(), Column("place", Integer))
    insert = results.insert().values(place=row) if row else text("SELECT 1")
    store: Any = shelf.store
    if isinstance(shelf.engine, AsyncEngine):
        async with shelf.engine.begin() as tx:
            await tx.execute(insert)
            await store.save_async(tx, owner, positions)
    else:
        with shelf.engine.begin() as tx:
            tx.execute(insert)
            store.save(tx, owner, positions)


@sql_store
async def test_results_and_position_are_one_transaction(shelf: Shelf):
    partition = shelf.partition(0)
    await execute(shelf.engine, f'CREATE TABLE "results-{shelf.place}" (place INTEGER)')
    await shelf.store.claim(shelf.owner, [partition])
    await save(shelf, shelf.owner, {partition: StoredOffset(1)}, row=1)
    # The database fails after the position was written: neither is there.
    with pytest.raises(ZeroDivisionError):
        if isinstance(shelf.engine, AsyncEngine):
            async with shelf.engine.begin() as tx:
                await shelf.store.save_async(tx, shelf.owner, {partition: StoredOffset(2)})  # type: ignore[attr-defined]
                raise ZeroDivisionError
        else:
            with shelf.engine.begin() as tx:
                shelf.store.save(tx, shelf.owner, {partition: StoredOffset(2)})  # type: ignore[attr-defined]
                raise ZeroDivisionError
    assert await shelf.store.fetch(shelf.owner.group, [partition]) == {partition: StoredOffset(1)}
    # A newer member has claimed: the result is rolled back with the position.
    await shelf.store.claim(shelf.member(6), [partition])
    with pytest.raises(LeaseLost):
        await save(shelf, shelf.owner, {partition: StoredOffset(2)}, row=2)
    with pytest.raises(SettleError):
        await save(shelf, shelf.member(6), {partition: StoredOffset(0)}, row=3)
    assert [row for (row,) in await read(shelf.engine, f"results-{shelf.place}", "place")] == [1]


@sql_store
async def test_a_session_of_the_orm_will_do(shelf: Shelf):
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

    partition, store = shelf.partition(0), shelf.store
    assert isinstance(store, SqlOffsetStore)
    if isinstance(shelf.engine, AsyncEngine):
        async with AsyncSession(shelf.engine) as session, session.begin():
            await store.save_async(session, shelf.owner, {partition: StoredOffset(4)})
    else:
        with Session(shelf.engine) as session, session.begin():
            store.save(session, shelf.owner, {partition: StoredOffset(4)})
    assert await store.stored(shelf.owner.group) == {partition: StoredOffset(4)}


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
async def test_the_effects_of_killed_workers_are_exactly_once(
    database: str, kafka: KafkaServer, topic: str, group: str, tmp_path: Path
):
    total = 600
    await asyncio.to_thread(_fill, kafka, topic, total)
    url = f"sqlite:///{tmp_path / 'results.db'}" if database == "sqlite" else await asyncio.to_thread(postgres_url)
    engine = create_engine(url)
    waits = {"timeout": 0.05} if database == "sqlite" else {"options": "-c lock_timeout=50"}
    quick = create_engine(url, connect_args=waits)
    await execute(engine, f'CREATE TABLE "results-{group}" (place INTEGER, body TEXT, generation INTEGER)')
    store = SqlOffsetStore(engine)
    await store.create_table()
    table = store.table

    def start(generation: int) -> subprocess.Popen[bytes]:
        arguments = [kafka.bootstrap, url, group, topic, str(generation), str(total)]
        return subprocess.Popen([sys.executable, "-m", offset_worker.__name__, *arguments])

    async def rows() -> list[Any]:
        return await read(engine, f"results-{group}", "place", "body", "generation")

    async def worked(worker: subprocess.Popen[bytes], generation: int) -> None:
        """Until it has stored something."""
        while not any(row[2] == generation for row in await rows()):
            assert worker.poll() in (None, 0)
            await asyncio.sleep(0.005)

    async def stop(worker: subprocess.Popen[bytes]) -> None:
        """Outside of a transaction, whose lock would keep everybody else out of the database."""
        for _ in range(1000):
            worker.send_signal(signal.SIGSTOP)
            try:
                await execute(quick, table.update().where(table.c.group_name == group).values(note=""))
            except OperationalError:
                worker.send_signal(signal.SIGCONT)
                await asyncio.sleep(0.003)
            else:
                return
        raise AssertionError("it is always in a transaction")

    for generation in (1, 2, 3):
        worker = start(generation)
        await worked(worker, generation)
        worker.kill()
        worker.wait()
    # This one is not killed, but sleeps while another takes over, and wakes up afterwards.
    sleeper = start(4)
    await worked(sleeper, 4)
    await stop(sleeper)
    done = len(await rows())
    last = start(5)
    try:
        assert await asyncio.to_thread(last.wait, 60) == 0
    finally:
        sleeper.send_signal(signal.SIGCONT)
        ended = await asyncio.to_thread(sleeper.wait, 60)
    found = await rows()
    assert [(place, body) for place, body, _ in found] == [(n, str(n)) for n in range(total)]
    if done < total:
        assert ended == offset_worker.FENCED
    engine.dispose()
    quick.dispose()


def _fill(kafka: KafkaServer, topic: str, total: int) -> None:
    from tests.servers.kafka_client import produce

    produce(kafka.bootstrap, topic, [str(number).encode() for number in range(total)], partition=0)


# -- migration ---------------------------------------------------------------------------------------------------


@every_store
async def test_positions_move_between_stores(shelf: Shelf):
    group = shelf.owner.group
    source = MemoryOffsetStore()
    positions = {shelf.partition(n): StoredOffset(n + 1, f"note {n}") for n in range(3)}
    await source.reset(group, positions)
    await committed(shelf, {shelf.partition(1): StoredOffset(2, "note 1"), shelf.partition(2): StoredOffset(9)})
    before = await shelf.store.stored(group)
    plan = await migrate_offsets(source, shelf.store, group, dry_run=True)
    assert [(move.partition.partition, move.action) for move in plan] == [(0, "copy"), (1, "same"), (2, "keep")]
    assert plan[2].target == StoredOffset(9)
    assert await shelf.store.stored(group) == before
    moved = await migrate_offsets(source, shelf.store, group, existing="overwrite")
    assert [move.action for move in moved] == ["copy", "same", "overwrite"]
    assert await shelf.store.stored(group) == positions
    assert {move.action for move in await migrate_offsets(source, shelf.store, group)} == {"same"}


@pytest.mark.parametrize("shelf", ["kafka-group"], indirect=True)
async def test_a_partition_that_cannot_be_moved_is_told(shelf: Shelf):
    group, source = shelf.owner.group, MemoryOffsetStore()
    await source.reset(group, {shelf.partition(0): StoredOffset(1), shelf.partition(99): StoredOffset(1)})
    good, bad = await migrate_offsets(source, shelf.store, group)
    assert (good.action, bad.action) == ("copy", "fail")
    assert isinstance(bad.error, TopicNotFound)
    with pytest.raises(ConfigurationError, match="same store"):
        await migrate_offsets(source, source, group)
    with pytest.raises(ConfigurationError, match="merge"):
        await migrate_offsets(source, shelf.store, group, existing="merge")  # type: ignore[arg-type]


# -- the stores agree ----------------------------------------------------------------------------------------------

_step = st.tuples(
    st.sampled_from(["claim", "restart", "commit", "rewind", "reset"]),
    st.integers(1, 3),
    st.sampled_from(["a", "b"]),
    st.dictionaries(st.integers(0, 2), st.integers(0, 4), min_size=1),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(_step, max_size=12))
def test_memory_file_and_database_take_the_same_steps_alike(steps: list[Any], tmp_path: Path):
    async def run() -> None:
        engine = create_engine(f"sqlite:///{tmp_path / uuid.uuid4().hex}.db")
        sql = SqlOffsetStore(engine)
        directory = tmp_path / uuid.uuid4().hex
        stores: list[OffsetStore] = [MemoryOffsetStore(), FileOffsetStore(directory), sql]
        await sql.create_table()
        for name, generation, member, offsets in steps:
            owner = GroupMember("group", generation, member)
            positions = {TopicPartition("topic", n): StoredOffset(offset) for n, offset in offsets.items()}
            answers = [_plain(await _take(store, name, owner, positions)) for store in stores]
            assert answers[0] == answers[1] == answers[2], (name, owner, offsets)
        assert len({str(await store.stored("group")) for store in stores}) == 1
        engine.dispose()

    asyncio.run(run())


async def _take(store: OffsetStore, name: str, owner: GroupMember, positions: Mapping[TopicPartition, Any]) -> Any:
    match name:
        case "claim" | "restart":
            return await store.claim(owner, list(positions), restarted=name == "restart")
        case "commit" | "rewind":
            return await store.commit(owner, positions, rewind=name == "rewind")
        case _:
            return await store.reset(owner.group, positions)


def _plain(results: Mapping[TopicPartition, Any]) -> dict[TopicPartition, Any]:
    return {key: str(value) if isinstance(value, BrokerError) else value for key, value in results.items()}


def test_the_member_of_a_consumer_is_read_from_its_metadata():
    metadata = b"CGMDv2:\x02\x00\x00\x00orders\x00member-1\x00\x01"
    assert GroupMember.from_metadata(metadata) == GroupMember("orders", 2, "member-1")
    with pytest.raises(ConfigurationError, match="consumer_group_metadata"):
        GroupMember.from_metadata(b"CGMDv9:")


@pytest.mark.parametrize("path", ["/dev/null/offsets", "/proc/offsets"])
def test_a_directory_that_cannot_be_used_is_named(path: str):
    with pytest.raises(ConfigurationError, match=path):
        FileOffsetStore(path)


def test_an_engine_is_needed():
    with pytest.raises(ConfigurationError, match="str"):
        SqlOffsetStore("sqlite://")  # type: ignore[arg-type]
