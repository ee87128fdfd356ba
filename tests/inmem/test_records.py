"""The Record family of the in-memory broker: groups, positions, rebalancing, retention, the log reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest

from broker.driver.contract import Bounds, RecordSource, TopicPartition
from broker.errors import Closed, LeaseLost, OffsetOutOfRange, SubscriptionNotFound, TopicNotFound
from broker.hooks import Warned
from broker.names import EPHEMERAL
from broker.outbound import OutboundMessage
from broker_inmem import Broker, ManualClock
from tests.inmem.clients import Client, PartitionListener, bodies, published, read, soon

ALL = [TopicPartition("orders", number) for number in range(4)]


async def eventually(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


async def test_records_of_a_partition_come_in_order(client: Client) -> None:
    receipts = await published(client, [OutboundMessage(str(n).encode(), str(n % 5), {"n": str(n)}) for n in range(50)])
    member = await client.join()
    records = await read(member)
    assert {(r.partition, r.offset) for r in records} == {(r.partition, r.offset) for r in receipts}
    assert {r.id for r in records} == {receipt.id for receipt in receipts}
    for partition in range(4):
        offsets = [r.offset for r in records if r.partition == partition]
        assert offsets == sorted(offsets)
    assert all(r.attributes == {"n": bytes(r.data or b"").decode()} for r in records)
    runs = [r.partition for n, r in enumerate(records) if n == 0 or records[n - 1].partition != r.partition]
    assert len(runs) == len(set(runs))


async def test_a_group_continues_at_its_commits(client: Client) -> None:
    await client.topic("log", partitions=1)
    await client.publish([b"a", b"b", b"c"], "log")
    member = await client.join(["log"])
    first = (await read(member, 1))[0]
    where = TopicPartition("log", 0)
    assert await member.committed([where]) == {where: None}
    assert await member.commit({where: first.offset + 1}) == {where: None}
    assert bodies(await read(member)) == [b"b", b"c"]
    await member.close()
    with pytest.raises(Closed):
        await read(member)
    heir = await client.join(["log"])
    assert await heir.committed([where]) == {where: 1}
    assert bodies(await read(heir)) == [b"b", b"c"]
    other = await client.join(["log"], group="other")
    assert bodies(await read(other)) == [b"a", b"b", b"c"]


async def test_a_group_keeps_its_start_position(client: Client, clock: ManualClock) -> None:
    await client.publish([b"old"])
    clock.advance(60)
    middle = clock.now()
    await client.publish([b"new"])
    latest = await client.join(group="latest", start="latest")
    await latest.close()
    await client.publish([b"next"])
    # Its start was fixed at its creation, although nothing was committed.
    assert bodies(await read(await client.join(group="latest", start="latest"))) == [b"next"]
    assert sorted(bodies(await read(await client.join(group="since", start=middle)))) == [b"new", b"next"]


async def test_a_sleeping_fetch_is_woken_by_a_publish(client: Client) -> None:
    member = await client.join()
    fetching = asyncio.create_task(read(member, wait=30))
    await asyncio.sleep(0)
    await client.publish([b"a"])
    assert bodies(await soon(fetching)) == [b"a"]


async def test_seek_and_pause(client: Client) -> None:
    await client.topic("log", partitions=2)
    await client.publish([OutboundMessage(bytes([65 + n]), partition=n % 2) for n in range(6)], "log")
    even, odd = TopicPartition("log", 0), TopicPartition("log", 1)
    member = await client.join(["log"])
    assert await read(member, 0) == []
    member.pause([odd])
    assert bodies(await read(member)) == [b"A", b"C", b"E"]
    await member.commit({even: 1})
    await member.seek({even: None})
    assert bodies(await read(member)) == [b"C", b"E"]
    await member.seek({even: 2})
    member.resume([odd])
    assert sorted(bodies(await read(member))) == [b"B", b"D", b"E", b"F"]
    with pytest.raises(OffsetOutOfRange):
        await member.seek({even: 4})
    with pytest.raises(LeaseLost, match=r"not assigned to this member of group .*, which has 'log'\[0\]"):
        await member.seek({TopicPartition("log", 7): 0})


async def test_a_commit_beyond_the_end_is_refused(client: Client) -> None:
    member = await client.join()
    await read(member)
    assert isinstance((await member.commit({ALL[0]: 1}))[ALL[0]], OffsetOutOfRange)


async def test_a_missing_topic_is_reported_at_open_and_a_deleted_one_at_the_fetch(client: Client) -> None:
    with pytest.raises(TopicNotFound):
        await client.join(["orders", "nowhere"])
    listener = PartitionListener()
    member = await client.join(listener=listener)
    await read(member)
    fetching = asyncio.create_task(read(member, wait=30))
    await asyncio.sleep(0)
    await client.backend.admin().delete_topic("orders")
    with pytest.raises(TopicNotFound):
        await soon(fetching)
    assert sorted(listener.lost_partitions) == ALL


async def test_a_deleted_group_ends_its_members(client: Client) -> None:
    member = await client.join()
    await read(member)
    await client.backend.admin().delete_subscription("orders", "audit")
    with pytest.raises(SubscriptionNotFound):
        await read(member)


async def test_an_ephemeral_group_ends_with_its_member(client: Client) -> None:
    member = await client.join(group=EPHEMERAL, start="latest")
    await client.publish([b"a"])
    assert bodies(await read(member)) == [b"a"]
    await member.close()
    assert await client.backend.admin().list_subscriptions("orders") == []


async def test_lag_counts_records_behind(client: Client) -> None:
    receipts = await published(client, [str(n) for n in range(20)])
    member = await client.join()
    await read(member)
    admin = client.backend.admin()
    assert (await admin.lag("orders", "audit")).waiting == 20
    last = max((r for r in receipts if r.partition == 1), key=lambda r: r.offset or 0)
    assert last.offset is not None
    await member.commit({ALL[1]: last.offset + 1})
    lag = await admin.lag("orders", "audit")
    assert lag.partitions[1] == 0
    assert lag.waiting == sum(lag.partitions.values()) == sum(r.partition != 1 for r in receipts)


class TestRebalance:
    """Partitions move as members join and leave."""

    async def test_a_new_member_gets_half_and_the_rest_is_not_interrupted(self, client: Client) -> None:
        first, second = PartitionListener(), PartitionListener()
        old = await client.join(listener=first)
        await eventually(lambda: sorted(first.assigned_partitions) == ALL)
        new = await client.join(listener=second)
        await eventually(lambda: len(second.assigned_partitions) == 2)
        assert sorted(first.revoked) == sorted(second.assigned_partitions)
        assert sorted([*old.assignment(), *new.assignment()]) == ALL
        assert first.lost_partitions == []
        assert len(first.assigned_partitions) == 4

    async def test_a_member_may_commit_until_the_release(self, client: Client) -> None:
        await client.publish([OutboundMessage(b"x", partition=n) for n in range(4)])

        class Slow(PartitionListener):
            async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
                await super().revoking(partitions, deadline)
                assert deadline > asyncio.get_running_loop().time()
                assert await read(old) == []
                self.results = await old.commit(dict.fromkeys(partitions, 1))

        listener = Slow()
        old = await client.join(listener=listener)
        assert len(await read(old)) == 4
        new = await client.join()
        await eventually(lambda: len(new.assignment()) == 2)
        assert set(listener.results.values()) == {None}
        assert await read(new) == []
        refused = await old.commit(dict.fromkeys(new.assignment(), 1))
        assert {type(error) for error in refused.values()} == {LeaseLost}
        # Its advice is that of records, not that of messages with a lease.
        assert {"last commit" in (error.advice if error else "") for error in refused.values()} == {True}

    async def test_a_member_that_does_not_release_loses_its_partitions(
        self, client: Client, clock: ManualClock
    ) -> None:
        class Stuck(PartitionListener):
            async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
                await asyncio.Event().wait()

        listener = Stuck()
        old = await client.join(listener=listener)
        await read(old)
        new = await client.join()
        fetching = asyncio.create_task(read(new, wait=30))
        await client.publish([OutboundMessage(b"x", partition=n) for n in range(4)])
        await asyncio.sleep(0)
        assert new.assignment() == []
        clock.advance(30)
        assert len(await soon(fetching)) == 2
        await eventually(lambda: len(listener.lost_partitions) == 2)
        assert len(old.assignment()) == 2

    async def test_a_fetch_includes_partitions_that_it_frees(
        self, broker: Broker, client: Client, clock: ManualClock
    ) -> None:
        await client.publish([OutboundMessage(b"x", partition=n) for n in range(4)])
        async with Client(broker) as victim:
            await read(await victim.join())
            broker.faults.kill(victim.backend)
            heir = await client.join()
            assert await read(heir) == []
            clock.advance(10)
            # No other call advances the group: this fetch ends the session and gets the freed partitions.
            assert len(await read(heir)) == 4

    async def test_a_dead_member_is_replaced_when_its_session_ends(
        self, broker: Broker, client: Client, clock: ManualClock
    ) -> None:
        await client.publish([OutboundMessage(b"x", partition=n) for n in range(4)])
        async with Client(broker) as victim:
            dead = await victim.join()
            assert len(await read(dead)) == 4
            broker.faults.kill(victim.backend)
            heir = await client.join()
            fetching = asyncio.create_task(read(heir, wait=30))
            clock.advance(9.9)
            await asyncio.sleep(0)
            assert not fetching.done()
            clock.advance(0.1)
            # Nothing was committed, so everything is read again.
            assert len(await soon(fetching)) == 4

    async def test_a_zombie_is_fenced_reports_its_losses_and_rejoins(
        self, broker: Broker, client: Client, clock: ManualClock
    ) -> None:
        await client.publish([OutboundMessage(b"x", partition=n) for n in range(4)])
        async with Client(broker) as other:
            listener = PartitionListener()
            zombie = await other.join(listener=listener)
            assert len(await read(zombie)) == 4
            broker.faults.isolate(other.backend)
            clock.advance(10)
            heir = await client.join()
            assert len(await read(heir)) == 4
            assert listener.lost_partitions == []
            broker.faults.heal(other.backend)
            refused = await zombie.commit({ALL[0]: 1})
            assert isinstance(refused[ALL[0]], LeaseLost)
            assert sorted(listener.lost_partitions) == ALL
            await eventually(lambda: len(zombie.assignment()) == 2)

    async def test_added_partitions_are_assigned(self, client: Client) -> None:
        member = await client.join()
        await client.topic("orders", partitions=6)
        await client.publish([OutboundMessage(b"x", partition=5)])
        assert bodies(await read(member)) == [b"x"]
        assert len(member.assignment()) == 6

    async def test_members_of_different_topics_share_a_group(self, client: Client) -> None:
        await client.topic("events", partitions=2)
        both = await client.join(["orders", "events"])
        one = await client.join(["events"])
        await eventually(lambda: len(one.assignment()) == 2)
        assert sorted(both.assignment()) == ALL


class TestLog:
    """Retention and the log reader."""

    async def drain(self, client: Client, start: int, stop: int, size: int = 3) -> list[bytes]:
        reader = client.backend.log_reader()
        return [body async for batch in reader.read("log", 0, start, stop, size) for body in bodies(batch)]

    async def test_retention_by_time_moves_the_first_position(self, client: Client, clock: ManualClock) -> None:
        await client.topic("log", partitions=1, retention=timedelta(seconds=60))
        await client.publish([b"a", b"b"], "log")
        clock.advance(40)
        await client.publish([b"c"], "log")
        clock.advance(30)
        reader = client.backend.log_reader()
        assert await reader.bounds("log") == {0: Bounds(2, 3)}
        with pytest.raises(OffsetOutOfRange):
            await self.drain(client, 0, 3)
        assert await self.drain(client, 2, 3) == [b"c"]

    async def test_a_read_overtaken_by_retention_fails(self, client: Client, clock: ManualClock) -> None:
        await client.topic("log", partitions=1, retention=timedelta(seconds=60))
        await client.publish([b"a", b"b"], "log")
        batches = client.backend.log_reader().read("log", 0, 0, 2, 1)
        assert bodies(await anext(aiter(batches))) == [b"a"]
        clock.advance(61)
        with pytest.raises(OffsetOutOfRange):
            await anext(aiter(batches))

    async def test_a_group_overtaken_by_retention_is_warned(self, client: Client, clock: ManualClock) -> None:
        await client.topic("log", partitions=1, retention=timedelta(seconds=60))
        listener = PartitionListener()
        member: RecordSource = await client.join(["log"], listener=listener)
        await client.publish([b"a"], "log")
        clock.advance(61)
        await client.publish([b"b"], "log")
        assert bodies(await read(member)) == [b"b"]
        await asyncio.sleep(0)
        warnings = [event.text for event in listener.events if isinstance(event, Warned)]
        assert any("removed 1 offsets of 'log'[0]" in text for text in warnings), warnings

    async def test_expired_records_are_not_read(self, client: Client, clock: ManualClock) -> None:
        await client.topic("log", partitions=1)
        await client.publish([OutboundMessage(b"a", ttl=5), b"b"], "log")
        clock.advance(5)
        assert await self.drain(client, 0, 2) == [b"b"]
