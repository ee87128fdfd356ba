"""Results and positions in one database transaction: both are stored or neither, whatever is killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import column, create_engine, select
from sqlalchemy import table as sql_table
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine

from broker.errors import LeaseLost, SettleError
from broker_kafka.offsets import SqlOffsetStore, StoredOffset
from tests.kafka import offset_worker
from tests.kafka.offset_store_cases import StoreCase, execute, save, sql_store
from tests.servers.kafka import KafkaServer
from tests.servers.postgres import postgres_url


async def read(engine: Any, table: str, *columns: str) -> list[Any]:
    """The rows of a table, by the first column."""
    rows = select(*(column(name) for name in columns)).select_from(sql_table(table)).order_by(column(columns[0]))
    return [tuple(row) for row in await execute(engine, rows)]


@sql_store
async def test_results_and_position_are_one_transaction(case: StoreCase):
    partition = case.partition(0)
    await execute(case.engine, f'CREATE TABLE "results-{case.place}" (place INTEGER)')
    await case.store.claim(case.owner, [partition])
    await save(case, case.owner, {partition: StoredOffset(1)}, row=1)
    # The database fails after the position was written: neither is there.
    with pytest.raises(ZeroDivisionError):
        if isinstance(case.engine, AsyncEngine):
            async with case.engine.begin() as tx:
                await case.store.save_async(tx, case.owner, {partition: StoredOffset(2)})  # type: ignore[attr-defined]
                raise ZeroDivisionError
        else:
            with case.engine.begin() as tx:
                case.store.save(tx, case.owner, {partition: StoredOffset(2)})  # type: ignore[attr-defined]
                raise ZeroDivisionError
    assert await case.store.fetch(case.owner.group, [partition]) == {partition: StoredOffset(1)}
    # A newer member has claimed: the result is rolled back with the position.
    await case.store.claim(case.member(6), [partition])
    with pytest.raises(LeaseLost):
        await save(case, case.owner, {partition: StoredOffset(2)}, row=2)
    with pytest.raises(SettleError):
        await save(case, case.member(6), {partition: StoredOffset(0)}, row=3)
    assert [row for (row,) in await read(case.engine, f"results-{case.place}", "place")] == [1]


@sql_store
async def test_an_orm_session_works_as_transaction(case: StoreCase):
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

    partition, store = case.partition(0), case.store
    assert isinstance(store, SqlOffsetStore)
    if isinstance(case.engine, AsyncEngine):
        async with AsyncSession(case.engine) as session, session.begin():
            await store.save_async(session, case.owner, {partition: StoredOffset(4)})
    else:
        with Session(case.engine) as session, session.begin():
            store.save(session, case.owner, {partition: StoredOffset(4)})
    assert await store.stored(case.owner.group) == {partition: StoredOffset(4)}


@pytest.mark.deep
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
async def test_killed_workers_have_exactly_once_effects(
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
        """Outside of a transaction, whose lock would block all other users of the database."""
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

    for generation in (1, 2):
        worker = start(generation)
        await worked(worker, generation)
        worker.kill()
        worker.wait()
    # This one is not killed, but sleeps while another takes over, and wakes up afterwards.
    sleeper = start(3)
    await worked(sleeper, 3)
    await stop(sleeper)
    done = len(await rows())
    last = start(4)
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
