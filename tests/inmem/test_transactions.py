"""Transactions of the in-memory broker: all or nothing, for records, messages and positions."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from broker.driver.contract import Bounds, TopicPartition
from broker.errors import BackendError, Closed, ConnectionFailed, TransactionAborted, TransactionFatal
from broker.outbound import OutboundMessage
from broker_inmem import Broker, ManualClock
from tests.inmem.clients import Client, bodies, read, soon, take

WHERE = TopicPartition("log", 0)


@pytest.fixture(autouse=True)
async def log(client: Client) -> None:
    await client.topic("log", partitions=1)


async def test_a_commit_is_visible_to_all_at_once(client: Client) -> None:
    member, source = await client.join(["log"]), await client.subscribe("log")
    transaction = await client.backend.transaction("loader")
    await transaction.begin()
    await transaction.publish("log", [OutboundMessage(b"a")])
    await transaction.publish("log", [OutboundMessage(b"b")])
    assert await read(member) == []
    assert await take(source) == []
    waiting = asyncio.create_task(read(member, wait=30)), asyncio.create_task(take(source, wait=30))
    await asyncio.sleep(0)
    await transaction.commit()
    assert bodies(await waiting[0]) == [b"a", b"b"]
    assert sorted(bodies(await waiting[1])) == [b"a", b"b"]


async def test_aborted_messages_are_never_visible_and_leave_a_gap(client: Client) -> None:
    member = await client.join(["log"])
    raw = await client.join(["log"], group="raw", isolation="read_uncommitted")
    transaction = await client.backend.transaction("loader")
    await transaction.begin()
    await transaction.publish("log", [OutboundMessage(b"a")])
    assert bodies(await read(raw)) == [b"a"]
    await transaction.abort()
    await client.publish([b"b"], "log")
    [record] = await read(member)
    assert (record.data, record.offset) == (b"b", 2)
    assert bodies(await take(await client.subscribe("log"))) == [b"b"]
    lag = await client.backend.admin().lag("log", "audit")
    assert lag.waiting == 1


async def test_committed_readers_stop_at_an_open_transaction(client: Client) -> None:
    transaction = await client.backend.transaction("loader")
    await client.publish([b"before"], "log")
    await transaction.begin()
    await transaction.publish("log", [OutboundMessage(b"in")])
    await client.publish([b"after"], "log")
    member = await client.join(["log"])
    assert bodies(await read(member)) == [b"before"]
    assert await client.backend.log_reader().bounds("log") == {0: Bounds(0, 1)}
    await transaction.commit()
    records = await read(member)
    assert [(r.data, r.offset) for r in records] == [(b"in", 1), (b"after", 2)]
    # The end of the transaction has an offset of its own: offsets are not dense.
    assert await client.backend.log_reader().bounds("log") == {0: Bounds(0, 4)}
    await client.publish([b"last"], "log")
    assert [(r.data, r.offset) for r in await read(member)] == [(b"last", 4)]


async def test_positions_are_committed_with_the_transaction(client: Client) -> None:
    await client.publish([b"a", b"b"], "log")
    member = await client.join(["log"])
    await read(member)
    transaction = await client.backend.transaction("worker")
    await transaction.begin()
    await transaction.add_offsets(member, {WHERE: 1})
    assert await member.committed([WHERE]) == {WHERE: None}
    await transaction.abort()
    assert await member.committed([WHERE]) == {WHERE: None}
    await transaction.begin()
    await transaction.add_offsets(member, {WHERE: 2})
    await transaction.commit()
    assert await member.committed([WHERE]) == {WHERE: 2}


async def test_a_lost_partition_aborts_the_transaction(broker: Broker, client: Client, clock: ManualClock) -> None:
    async with Client(broker) as other:
        await client.publish([b"a"], "log")
        member = await other.join(["log"])
        await read(member)
        transaction = await other.backend.transaction("worker")
        await transaction.begin()
        await transaction.publish("orders", [OutboundMessage(b"result")])
        await transaction.add_offsets(member, {WHERE: 1})
        broker.faults.isolate(other.backend)
        clock.advance(10)
        heir = await client.join(["log"])
        assert bodies(await read(heir)) == [b"a"]
        broker.faults.heal(other.backend)
        with pytest.raises(TransactionAborted):
            await transaction.commit()
        assert await take(await client.subscribe("orders")) == []
        await transaction.begin()
        await transaction.abort()


async def test_a_newer_producer_fences_the_older(client: Client) -> None:
    old = await client.backend.transaction("loader")
    await old.begin()
    await old.publish("log", [OutboundMessage(b"old")])
    new = await client.backend.transaction("loader")
    for attempt in (old.begin(), old.publish("log", [OutboundMessage(b"x")]), old.commit(), old.abort()):
        with pytest.raises(TransactionFatal):
            await attempt
    await new.begin()
    await new.publish("log", [OutboundMessage(b"new")])
    await new.commit()
    await old.close()
    assert bodies(await read(await client.join(["log"]))) == [b"new"]


async def test_a_transaction_that_takes_too_long_is_aborted(client: Client, clock: ManualClock) -> None:
    transaction = await client.backend.transaction("loader")
    await transaction.begin()
    await transaction.publish("log", [OutboundMessage(b"a")])
    await client.publish([b"b"], "log")
    fetching = asyncio.create_task(read(await client.join(["log"]), wait=30))
    await asyncio.sleep(0)
    clock.advance(60)
    assert bodies(await soon(fetching)) == [b"b"]
    with pytest.raises(TransactionAborted):
        await transaction.publish("log", [OutboundMessage(b"c")])
    with pytest.raises(TransactionAborted):
        await transaction.commit()
    await transaction.begin()
    await transaction.publish("log", [OutboundMessage(b"d")])
    await transaction.commit()


async def test_closing_aborts_the_open_transaction(client: Client) -> None:
    transaction = await client.backend.transaction("loader")
    await transaction.begin()
    await transaction.publish("log", [OutboundMessage(b"a")])
    await transaction.close()
    await transaction.close()
    with pytest.raises(Closed):
        await transaction.begin()
    await client.publish([b"b"], "log")
    assert bodies(await read(await client.join(["log"]))) == [b"b"]


async def test_scheduled_messages_of_a_transaction_wait_for_both(client: Client, clock: ManualClock) -> None:
    later = OutboundMessage(b"later", deliver_at=clock.now() + timedelta(seconds=10))
    transaction = await client.backend.transaction("loader")
    await transaction.begin()
    await transaction.publish("log", [later])
    await transaction.abort()
    await transaction.begin()
    await transaction.publish("log", [later])
    clock.advance(20)
    member = await client.join(["log"])
    assert await read(member) == []
    await transaction.commit()
    assert bodies(await read(member)) == [b"later"]


async def test_a_transaction_is_begun_once_before_its_use(client: Client) -> None:
    transaction = await client.backend.transaction("loader")
    with pytest.raises(BackendError):
        await transaction.publish("log", [OutboundMessage(b"a")])
    await transaction.begin()
    with pytest.raises(BackendError):
        await transaction.begin()


async def test_a_commit_can_fail(client: Client, broker: Broker) -> None:
    transaction = await client.backend.transaction("loader")
    await transaction.begin()
    await transaction.publish("log", [OutboundMessage(b"a")])
    broker.faults.fail("commit")
    with pytest.raises(ConnectionFailed):
        await transaction.commit()
    await transaction.commit()
    assert bodies(await read(await client.join(["log"]))) == [b"a"]
