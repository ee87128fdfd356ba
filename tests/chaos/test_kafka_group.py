"""Members of a group join, leave, are frozen and killed; every record is accounted for. The accounts are printed."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from broker.bus import Bus, connect
from broker.records import Record
from broker_kafka.group import GroupConsumer, Rebalance
from tests.chaos.kafka_group_running import Process, quick
from tests.kafka.group_members import eventually, fill, new_group, options_of
from tests.servers.kafka import KafkaServer, shared_server
from tests.servers.kafka_client import RawAdmin

pytestmark = pytest.mark.deep

TOPICS, PARTITIONS, WAVES, WAVE = 2, 4, 5, 150
RECORDS = TOPICS * PARTITIONS * WAVES * WAVE


@dataclass
class Account:
    """The work of all members of a group.

    :ivar handled: the number of times that each record was handled.
    """

    handled: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    members: int = 0
    rebalances: Counter[str] = field(default_factory=Counter)

    def note(self, record: Record[Any]) -> None:
        """Called right before the record is marked; a cancellation in between leaves it uncommitted."""
        self.handled[record.topic, record.partition, record.offset] += 1

    def count(self, event: Rebalance) -> None:
        self.rebalances["assigned"] += bool(event.assigned)
        self.rebalances["revoked"] += bool(event.revoked)
        self.rebalances["lost"] += bool(event.lost)

    def __str__(self) -> str:
        again = sum(count - 1 for count in self.handled.values())
        return (
            f"{len(self.handled)} records, {again} of them again, by {self.members} members; "
            f"{self.rebalances['assigned']} times assigned, {self.rebalances['revoked']} revoked, "
            f"{self.rebalances['lost']} lost"
        )


async def one_by_one(group: GroupConsumer, account: Account, quota: int) -> None:
    async for record in group:
        if random.random() < 0.02:
            await asyncio.sleep(random.random() / 50)
        account.note(record)
        group.mark(record)
        quota -= 1
        if quota <= 0:
            return


async def by_batch(group: GroupConsumer, account: Account, quota: int) -> None:
    async for batch in group.batches(random.choice((7, 50, 300))):
        for _ in batch:
            if random.random() < 0.02:
                await asyncio.sleep(random.random() / 50)
        for record in batch:
            account.note(record)
        group.mark_all(batch)
        quota -= len(batch)
        if quota <= 0:
            return


async def by_partition(group: GroupConsumer, account: Account, quota: int) -> None:
    left = [quota]
    enough = asyncio.Event()

    async def work(stream: AsyncIterator[Record[Any]]) -> None:
        async for record in stream:
            if random.random() < 0.02:
                await asyncio.sleep(random.random() / 50)
            account.note(record)
            group.mark(record)
            left[0] -= 1
            if left[0] <= 0:
                enough.set()

    async def all_streams(tasks: asyncio.TaskGroup) -> None:
        async for stream in group.partitions():
            tasks.create_task(work(aiter(stream)))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(all_streams(tasks))
        await enough.wait()
        await group.close()


async def finishing(group: GroupConsumer, account: Account, quota: int) -> None:
    """Finish records of a partition concurrently and out of order."""

    async def work(record: Record[Any]) -> None:
        if random.random() < 0.1:
            await asyncio.sleep(random.random() / 50)
        account.note(record)
        group.finish(record)

    async with asyncio.TaskGroup() as tasks:
        async for record in group:
            tasks.create_task(work(record))
            quota -= 1
            if quota <= 0:
                break
        await group.close()


WAYS = {"one by one": one_by_one, "by batch": by_batch, "by partition": by_partition, "finishing": finishing}


async def member(
    bus: Bus, topics: list[str], group: str, account: Account, quota: int, way: str, **options: Any
) -> None:
    account.members += 1
    events = {
        "on_assigned": account.count,
        "on_revoking": account.count,
        "on_lost": account.count,
    }
    async with GroupConsumer(bus, topics, group=group, commit_interval=0.2, **events, **options) as consumer:
        try:
            await WAYS[way](consumer, account, quota)
        finally:
            await consumer.close()


@pytest.mark.parametrize("protocol", ["cooperative-sticky", pytest.param("range", marks=pytest.mark.deep), "consumer"])
async def test_members_join_and_leave_and_every_record_is_handled_once(
    protocol: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = shared_server()
    raw = RawAdmin(server.bootstrap)
    topics = [raw.make_topic(partitions=PARTITIONS) for _ in range(TOPICS)]
    group, account = new_group(), Account()
    options = options_of(protocol)

    async def produce() -> None:
        for wave in range(WAVES):
            for topic in topics:
                await fill(server, topic, PARTITIONS, WAVE, wave * WAVE)

    async def join_and_leave(bus: Bus) -> None:
        while len(account.handled) < RECORDS:
            quota, way = random.choice((40, 120, 300, 600, 800)), random.choice(list(WAYS))
            work = asyncio.create_task(member(bus, topics, group, account, quota, way, **options))
            await asyncio.wait((work, done), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
            await asyncio.wait((work,))
            if not work.cancelled():
                work.result()

    done = asyncio.ensure_future(eventually(lambda: len(account.handled) >= RECORDS, 240))
    async with connect(server.url) as bus, asyncio.TaskGroup() as tasks:
        tasks.create_task(produce())
        for _ in range(4):
            tasks.create_task(join_and_leave(bus))
            await asyncio.sleep(random.random())
    await done
    with capsys.disabled():
        sys.stdout.write(f"\n{protocol}: {account}\n")
    assert len(account.handled) == RECORDS
    assert set(account.handled.values()) == {1}
    assert account.rebalances["lost"] == 0
    for topic in topics:
        for partition in range(PARTITIONS):
            assert raw.committed(group, topic, partition).offset == WAVES * WAVE


# -- members that are stopped and killed -----------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [pytest.param("cooperative-sticky", marks=pytest.mark.deep), "consumer"])
async def test_a_member_that_is_stopped_longer_than_its_session_is_fenced(protocol: str) -> None:
    server, group, options = shared_server(), new_group(), quick(protocol)
    raw = RawAdmin(server.bootstrap)
    topic = raw.make_topic(partitions=2)
    await fill(server, topic, 2, 400)
    process = Process(server.url, topic, group, json.dumps(options), "", "")
    seen: list[tuple[int, int]] = []
    try:
        await eventually(lambda: len(process.all("record")) > 20)
        process.send(signal.SIGSTOP)
        async with connect(server.url) as bus, GroupConsumer(bus, topic, group=group, **options) as survivor:

            async def read() -> None:
                async for record in survivor:
                    seen.append((record.partition, record.offset))
                    survivor.mark(record)

            reader = asyncio.create_task(read())
            await eventually(lambda: len(survivor.assignment()) == 2)
            await eventually(lambda: {(0, 399), (1, 399)} <= set(seen))
            await eventually(lambda: [raw.committed(group, topic, number).offset for number in (0, 1)] == [400, 400])
            process.send(signal.SIGCONT)
            await eventually(lambda: process.all("lost"))
            await eventually(lambda: len(process.all("assigned")) > 1)
            # Its unfinished records have not overwritten the survivor's positions.
            assert [raw.committed(group, topic, number).offset for number in (0, 1)] == [400, 400]
            assert not process.all("revoked")
            assert sorted(process.all("lost")[0]["partitions"]) == [0, 1]
            reader.cancel()
            await asyncio.wait((reader,))
    finally:
        process.kill()
    before = {(each["partition"], each["offset"]) for each in process.all("record")}
    assert before | set(seen) == {(partition, offset) for partition in (0, 1) for offset in range(400)}


# -- a broker that dies ----------------------------------------------------------------------------------------


def committed_of(raw: RawAdmin, group: str, topic: str, partition: int) -> int:
    return raw.committed(group, topic, partition).offset


@pytest.fixture(scope="module")
def mortal() -> Iterator[KafkaServer]:
    with KafkaServer() as server:
        yield server


@pytest.mark.xdist_group("kafka-chaos-group")
@pytest.mark.parametrize("protocol", [pytest.param("cooperative-sticky", marks=pytest.mark.deep), "consumer"])
async def test_a_group_continues_after_its_broker_was_killed(
    mortal: KafkaServer, protocol: str, capsys: pytest.CaptureFixture[str]
) -> None:
    account, server = Account(members=1), mortal
    raw = RawAdmin(server.bootstrap)
    topic, group = raw.make_topic(partitions=4), new_group()
    places = [partial(committed_of, raw, group, topic, number) for number in range(4)]
    # A session that outlives the outage.
    session = {} if protocol == "consumer" else {"session_timeout_ms": 30_000}
    options: dict[str, Any] = {**options_of(protocol), **session, "commit_interval": 0.05, "max_buffered": 500}
    await fill(server, topic, 4, 500)
    events = {
        "on_assigned": account.count,
        "on_revoking": account.count,
        "on_lost": account.count,
    }
    async with (
        connect(server.url) as bus,
        GroupConsumer(bus, topic, group=group, **events, **options) as consumer,
    ):

        async def read() -> None:
            async for record in consumer:
                account.note(record)
                consumer.mark(record)
                await asyncio.sleep(0.001)

        reader = asyncio.create_task(read())
        await eventually(lambda: len(account.handled) > 500, 60)
        server.kill()
        await asyncio.sleep(1)
        await asyncio.to_thread(server.start)
        await eventually(lambda: len(account.handled) == 2000, 90)
        # Handled records are committed once the coordinator knows the member again; records lost before are read again.
        committed: list[int] = []
        until = asyncio.get_running_loop().time() + 90
        while committed != [500] * 4 and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.2)
            committed = [await asyncio.to_thread(place) for place in places]
        assert committed == [500] * 4, f"{account}; a commit now: {await consumer.commit()}"
        await consumer.close()
        await reader
    with capsys.disabled():
        sys.stdout.write(f"\n{protocol}, broker killed: {account}\n")
    assert len(account.handled) == 2000
    assert account.rebalances["lost"] or set(account.handled.values()) == {1}
