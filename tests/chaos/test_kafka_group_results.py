"""Members that store results and positions in one database are frozen and killed. The accounts are printed."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, create_engine, text

from broker_kafka.offsets import SqlOffsetStore
from tests.chaos.kafka_group_running import Process, quick
from tests.kafka.group_members import eventually, fill, new_group
from tests.servers.kafka import shared_server
from tests.servers.kafka_client import RawAdmin
from tests.servers.postgres import postgres_url

pytestmark = pytest.mark.deep


def database(kind: str, directory: Path) -> str:
    return postgres_url() if kind == "postgres" else f"sqlite:///{directory}/results.db?timeout=30"


async def query(engine: Engine, statement: str) -> list[Any]:
    def run() -> list[Any]:
        with engine.begin() as tx:
            result = tx.execute(text(statement))
            return [tuple(row) for row in result] if result.returns_rows else []

    return await asyncio.to_thread(run)


@pytest.mark.parametrize(
    ("kind", "protocol"),
    [pytest.param("sqlite", "consumer", marks=pytest.mark.deep), ("postgres", "cooperative-sticky")],
)
async def test_results_and_positions_in_one_database_are_exactly_once_under_kills(
    kind: str, protocol: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, group, options = shared_server(), new_group(), quick(protocol)
    topic = RawAdmin(server.bootstrap).make_topic(partitions=3)
    url, table = await asyncio.to_thread(database, kind, tmp_path), f"results_{uuid4().hex[:8]}"
    engine = create_engine(url)
    # No primary key: a record that took effect twice has two rows.
    await query(engine, f"CREATE TABLE {table} (place INTEGER, position BIGINT, body VARCHAR(40))")
    await SqlOffsetStore(engine).create_table()
    arguments = (server.url, topic, group, json.dumps(options), url, table)
    processes = [Process(*arguments) for _ in range(2)]
    kills = stops = 0
    ended: list[Process] = []

    async def rows() -> int:
        return (await query(engine, f"SELECT COUNT(*) FROM {table}"))[0][0]  # noqa: S608

    def saved() -> list[int]:
        return [len(process.all("saved")) for process in processes]

    try:
        for wave in range(3):
            had = saved()
            await fill(server, topic, 3, 500, wave * 500)
            # One of the two works on this wave: the other may find nothing left.
            at_work = await eventually(
                lambda: [index for index, now in enumerate(saved()) if now > had[index]],  # noqa: B023
                60,
            )
            victim = random.choice(at_work)
            if wave == 1:
                # Longer than its session: its partitions move before it continues.
                processes[victim].send(signal.SIGSTOP)
                await asyncio.sleep(4 if protocol != "consumer" else 8)
                processes[victim].send(signal.SIGCONT)
                stops += 1
            else:
                processes[victim].kill()
                ended.append(processes[victim])
                processes[victim] = Process(*arguments)
                kills += 1
        until = asyncio.get_running_loop().time() + 150
        while await rows() < 4500 and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
    found = await query(engine, f"SELECT place, position, body FROM {table}")  # noqa: S608
    stored = await SqlOffsetStore(engine).stored(group)
    engine.dispose()
    twice = len(found) - len(set(found))
    with capsys.disabled():
        sys.stdout.write(
            f"\n{kind}, {protocol}: {kills} kills, {stops} stop; {len(found)} rows, "
            f"{4500 - len(set(found))} missing, {twice} twice; "
            f"{sum(len(each.all('lost')) for each in (*processes, *ended))} times lost\n"
        )
    assert sorted(found) == [(place, at, f"{place}/{at}") for place in range(3) for at in range(1500)]
    assert {place.partition: at.offset for place, at in stored.items() if at and not isinstance(at, Exception)} == {
        0: 1500,
        1: 1500,
        2: 1500,
    }
