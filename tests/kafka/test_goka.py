"""Tables and groups shared with goka itself, a program in Go: what it writes is read here, and the other way round.

What docs/migration-goka.md says of goka is pinned here, so a test fails when a newer goka differs from that page.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest

from broker import CHECKPOINT_KEY, Bus, Bytes, OutboundMessage, connect
from broker.testing.waiting import eventually
from broker_streams.codecs import Int64
from broker_streams.context import Context
from broker_streams.emitter import Emitter
from broker_streams.graph import Group, Input, Join, Lookup, Output, Persist
from broker_streams.processor import Processor
from broker_streams.stores.memory import Memory
from broker_streams.view import View
from tests.servers.goka import Goka, running_goka
from tests.servers.kafka import KafkaServer
from tests.streams.support import read_all

pytestmark = pytest.mark.deep

PARTITIONS = 5
PATIENCE = 120.0
USERS = [f"user-{n}" for n in range(150)] + ["ünïcode", "日本", "a b", "x" * 300]
SOME = USERS[-30:]
"""goka sends a message of its own after a tenth of a second."""
CHECKPOINT = CHECKPOINT_KEY.decode()


@pytest.fixture
async def bus(kafka: KafkaServer) -> AsyncIterator[Bus]:
    async with connect(f"{kafka.url}?session_timeout_ms=6000&heartbeat_interval_ms=300") as bus:
        yield bus


@pytest.fixture
async def name(bus: Bus) -> str:
    """The name of a group, which has its input."""
    name = f"goka-{uuid.uuid4().hex[:8]}"
    await bus.admin.ensure_topic(f"{name}-clicks", partitions=PARTITIONS)
    return name


@pytest.fixture
async def table(kafka: KafkaServer, bus: Bus, name: str) -> str:
    """Its table, as goka creates it."""
    table = f"{name}-table"
    async with running_goka(kafka.bootstrap, "create", table, str(PARTITIONS)):
        pass
    # A processor of goka fails where a new partition has no leader yet.
    await bus.log.bounds(table)
    return table


def counting(name: str) -> Group:
    """What the processor of the program does."""
    counts = Persist(Int64())

    def count(ctx: Context, _: bytes) -> None:
        ctx[counts] = (ctx[counts] or 0) + 1

    return Group(name, Input(f"{name}-clicks", Bytes(), count), counts, partitioner="fnv1a")


def clicks(start: int) -> list[str]:
    """Users, each as often as its number says."""
    return [user for n, user in enumerate(USERS, start) for _ in range(n % 4)]


async def emit(bus: Bus, topic: str, users: list[str]) -> None:
    async with Emitter(bus, topic, Bytes(), partitioner="fnv1a") as emitter:
        for user in users:
            await emitter.enqueue(user, b"/home")


async def reaches(view: View[int], rows: Mapping[str, int]) -> None:
    await eventually(lambda: dict(view.items()) == rows, PATIENCE, "the rows")
    assert {key: view.get(key) for key in rows} == rows


async def errors_of(goka: Goka, wanted: Mapping[str, int]) -> dict[str, str]:
    """Wait until a view of goka has these rows; return the errors of others, by key, that its codec refuses."""
    async with asyncio.timeout(PATIENCE):
        while True:
            found: dict[str, dict[str, Any]] = (await goka.ask(do="rows"))["rows"]
            rows = {key: row["value"] for key, row in found.items() if not row["error"]}
            if rows == wanted:
                # It looks for a key in the partition that its hash names.
                assert {key: row["got"] for key, row in found.items() if not row["error"]} == rows
                return {key: row["error"] for key, row in found.items() if row["error"]}
            await asyncio.sleep(0.1)


async def delete_checkpoints(bus: Bus, table: str) -> None:
    for partition in range(PARTITIONS):
        await bus.topic(table).publish(OutboundMessage(None, CHECKPOINT_KEY, partition=partition))


async def test_a_table_of_goka_is_read(kafka: KafkaServer, bus: Bus, name: str, table: str) -> None:
    topic = f"{name}-clicks"
    async with running_goka(kafka.bootstrap, "process", name, topic) as goka:
        await goka.ask()
        await emit(bus, topic, clicks(0))
        async with running_goka(kafka.bootstrap, "emit", topic) as emitter:
            for user in SOME:
                assert await emitter.ask(key=user, value="/home")
        rows = dict(Counter(clicks(0) + SOME))
        async with View(bus, table, Int64()) as view:
            await reaches(view, rows)
    places: dict[str, set[int]] = defaultdict(set)
    for record in await read_all(bus, topic):
        assert record.key is not None
        places[record.key.decode()].add(record.partition)
    assert len(set.union(*places.values())) == PARTITIONS
    assert [key for key, found in places.items() if len(found) > 1] == []


async def test_a_group_joins_a_table_of_goka(kafka: KafkaServer, bus: Bus, name: str, table: str) -> None:
    async with running_goka(kafka.bootstrap, "process", name, f"{name}-clicks") as goka:
        await goka.ask()
        await emit(bus, f"{name}-clicks", clicks(0))
        rows = dict(Counter(clicks(0)))
        async with View(bus, table, Int64()) as view:
            await reaches(view, rows)
    for end in ("asked", "found"):
        await bus.admin.ensure_topic(f"{name}-{end}", partitions=PARTITIONS)
    joined, looked_up = Join(table, Int64()), Lookup(table, Int64())
    output = Output(f"{name}-found", Int64())

    def ask(ctx: Context, _: bytes) -> None:
        found = ctx[joined]
        assert found == ctx.lookup(looked_up, ctx.key)
        ctx.emit(output, key=ctx.key, value=-1 if found is None else found)

    edges = (Input(f"{name}-asked", Bytes(), ask), joined, looked_up, output)
    group = Group(f"{name}-joining", *edges, partitioner="fnv1a")
    async with Processor(bus, group, store=Memory(), checkpoint_interval=0.1) as processor:
        await processor.ready()
        await emit(bus, f"{name}-asked", USERS)
        async with asyncio.timeout(PATIENCE):
            while len(found := await read_all(bus, output.topic)) < len(USERS):
                await asyncio.sleep(0.1)
    answers = {record.key: record.data for record in found}
    assert answers == {user.encode(): b"%d" % rows.get(user, -1) for user in USERS}


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
async def test_goka_reads_a_table(
    kafka: KafkaServer, bus: Bus, name: str, guarantee: Literal["exactly_once", "at_least_once"]
) -> None:
    values = Persist(Int64())

    def keep(ctx: Context, value: int) -> None:
        if value:
            ctx[values] = value
        else:
            del ctx[values]

    group = Group(name, Input(f"{name}-clicks", Int64(), keep), values, partitioner="fnv1a")
    rows = {user: (n - 70) * 10**n if n < 17 else n for n, user in enumerate(USERS, 1)}
    rows |= {"smallest": -(1 << 63), "largest": (1 << 63) - 1}
    async with Processor(bus, group, store=Memory(), checkpoint_interval=0.1, guarantee=guarantee) as processor:
        await processor.ready()
        async with Emitter(bus, f"{name}-clicks", Int64(), partitioner="fnv1a") as emitter:
            for user, value in rows.items():
                await emitter.enqueue(user, 5)
                await emitter.enqueue(user, value)
                await emitter.enqueue(f"{user}-gone", 5)
                await emitter.enqueue(f"{user}-gone", 0)

        async def is_done() -> bool:
            return not (await bus.admin.lag(f"{name}-clicks", name)).waiting

        await eventually(is_done, PATIENCE, "the last checkpoint")
    async with View(bus, group.table, Int64()) as view:
        await reaches(view, rows)
    async with running_goka(kafka.bootstrap, "view", group.table) as goka:
        errors = await errors_of(goka, rows)
        assert list(errors) == [CHECKPOINT]
        assert errors[CHECKPOINT].startswith("Error parsing data from string")
        if guarantee == "exactly_once":
            # The end of a transaction is a record that goka is not given, and it waits for the one before the end.
            partitions = (await goka.ask(do="rows"))["partitions"].values()
            assert [(at["running"], at["end"] - at["offset"]) for at in partitions] == [(False, 2)] * PARTITIONS
            await delete_checkpoints(bus, group.table)
        assert await goka.ask(do="wait")
        if guarantee == "exactly_once":
            assert await errors_of(goka, rows) == {}
    async with running_goka(kafka.bootstrap, f"-skip={CHECKPOINT}", "view", group.table) as goka:
        assert await goka.ask(do="wait")
        assert await errors_of(goka, rows) == {}


async def test_goka_reads_rows_of_aborted_transactions_unless_told_otherwise(
    kafka: KafkaServer, bus: Bus, name: str
) -> None:
    table = f"{name}-table"
    await bus.admin.ensure_topic(table, partitions=PARTITIONS, compacted=True)
    async with bus.transactional_publisher(name) as publisher:
        with suppress(ZeroDivisionError):
            async with publisher.transaction() as transaction:
                await transaction.publish(table, b"1", key="aborted", partition=0)
                raise ZeroDivisionError
    # goka waits for a plain record at the end.
    ends = [OutboundMessage(b"2", f"end-{n}", partition=n) for n in range(PARTITIONS)]
    await bus.topic(table).publish_batch(ends)
    for option, seen in (("-committed=false", {"aborted"}), ("-committed", set[str]())):
        async with running_goka(kafka.bootstrap, option, "view", table) as goka:
            assert await goka.ask(do="wait")
            found: Mapping[str, object] = (await goka.ask(do="rows"))["rows"]
            assert set(found) - {f"end-{n}" for n in range(PARTITIONS)} == seen


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
async def test_a_group_is_taken_over_from_goka_and_given_back(
    kafka: KafkaServer,
    bus: Bus,
    name: str,
    table: str,
    guarantee: Literal["exactly_once", "at_least_once"],
    tmp_path: Path,
) -> None:
    topic, group, rows = f"{name}-clicks", counting(name), Counter[str]()
    assert group.table == table
    for turn in range(4):
        users = clicks(turn)
        rows.update(users)
        await emit(bus, topic, users)
        if turn % 2 == 0:
            async with running_goka(kafka.bootstrap, "process", name, topic) as goka:
                await goka.ask()
                async with View(bus, table, Int64()) as view:
                    await reaches(view, rows)
        else:
            async with (
                Processor(bus, group, state_dir=tmp_path, checkpoint_interval=0.1, guarantee=guarantee) as processor,
                View(bus, table, Int64()) as view,
            ):
                # Nobody else has an open transaction.
                raw: Any = vars(processor)["_checkpoints"]
                raw.commits.patience = 0.1
                await processor.ready()
                await reaches(view, rows)
            await delete_checkpoints(bus, table)
