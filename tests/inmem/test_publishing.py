"""Publishing to the in-memory broker: partitions, deduplication, limits, admin."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from broker.errors import (
    Closed,
    InvalidMessage,
    InvalidSetting,
    MessageTooLarge,
    SubscriptionNotFound,
    TopicNotFound,
    UnknownSetting,
    Unsupported,
)
from broker.messages import Outcome
from broker.outbound import OutboundMessage
from broker_inmem import Broker, BrokerOptions, ManualClock
from tests.inmem.clients import Client, bodies, published, read, settle, take


async def test_messages_without_a_key_use_all_partitions(client: Client) -> None:
    receipts = await published(client, [b"x"] * 8)
    assert {receipt.partition for receipt in receipts} == {0, 1, 2, 3}


async def test_a_partition_may_be_chosen_if_it_exists(client: Client) -> None:
    [receipt] = await published(client, [OutboundMessage(b"x", partition=3)])
    assert receipt.partition == 3
    [error] = await client.publish([OutboundMessage(b"x", partition=4)])
    assert isinstance(error, InvalidMessage)


async def test_an_id_is_stored_once_within_the_window(client: Client, clock: ManualClock) -> None:
    first, again, other = await published(
        client, [OutboundMessage(b"1", id="a"), OutboundMessage(b"2", id="a"), OutboundMessage(b"3", id="b")]
    )
    assert not first.duplicate
    assert (again.duplicate, again.partition, again.offset) == (True, first.partition, first.offset)
    assert not other.duplicate
    clock.advance(120)
    [later] = await published(client, [OutboundMessage(b"4", id="a")])
    assert not later.duplicate
    assert sorted(bodies(await take(await client.subscribe()))) == [b"1", b"3", b"4"]


async def test_an_id_that_the_server_made_is_stored_once_within_the_window(client: Client, clock: ManualClock) -> None:
    due = datetime.fromtimestamp(clock.time() + 10, UTC)
    for message in (OutboundMessage(b"1"), OutboundMessage(b"1", deliver_at=due)):
        [first] = await published(client, [message])
        [again] = await published(client, [OutboundMessage(b"2", id=first.id)])
        assert (again.id, again.duplicate, again.offset) == (first.id, True, first.offset)
        clock.advance(120)
        [later] = await published(client, [OutboundMessage(b"3", id=first.id)])
        assert not later.duplicate


@pytest.mark.parametrize("id", ["orders:0:0", "0-0", ":0:0", "orders:0:", "orders:9:9", "orders:²:0", "orders:0:-1"])
async def test_an_id_that_only_looks_made_is_no_duplicate(client: Client, id: str) -> None:
    await published(client, [OutboundMessage(b"1", id="a", partition=0)])
    [other] = await published(client, [OutboundMessage(b"2", id=id)])
    assert not other.duplicate


async def test_each_message_of_a_batch_has_its_own_outcome(client: Client) -> None:
    limits = client.backend.capabilities.publish.limits
    assert limits.body is not None
    assert limits.attributes is not None
    assert limits.key is not None
    fits, body, key, attributes = await client.publish(
        [
            OutboundMessage(b"x" * limits.body),
            OutboundMessage(b"x" * (limits.body + 1)),
            OutboundMessage(b"", b"k" * (limits.key + 1)),
            OutboundMessage(b"", None, {f"n{n}": "" for n in range(limits.attributes + 1)}),
        ]
    )
    assert not isinstance(fits, Exception)
    assert isinstance(body, MessageTooLarge)
    assert isinstance(key, MessageTooLarge)
    assert isinstance(attributes, InvalidMessage)
    assert len(await take(await client.subscribe())) == 1


async def test_publishing_after_close_is_refused(client: Client) -> None:
    target = client.backend.publish_target("orders")
    await target.close()
    with pytest.raises(Closed):
        await target.publish([OutboundMessage(b"x")])


async def test_endless_publishing_lets_other_tasks_run(client: Client) -> None:
    target = client.backend.publish_target("orders")
    ran = asyncio.Event()
    asyncio.get_running_loop().call_soon(ran.set)
    for _ in range(1000):
        await target.publish([OutboundMessage(b"x")])
    assert ran.is_set()


class TestAdmin:
    """Provisioning."""

    async def test_topics_are_created_described_listed_and_deleted(self, client: Client) -> None:
        admin = client.backend.admin()
        await client.topic("events", partitions=2)
        info = await admin.ensure_topic("events", partitions=None, retention=None, options={})
        assert (info.name, info.partitions, info.messages) == ("events", 2, 0)
        await client.publish([b"abc"], "events")
        info = await admin.describe_topic("events")
        assert (info.messages, info.bytes) == (1, 3)
        assert await admin.list_topics() == ["events", "orders"]
        await admin.delete_topic("events")
        await admin.delete_topic("events")
        with pytest.raises(TopicNotFound):
            await admin.describe_topic("events")

    async def test_partitions_can_be_added_and_not_removed(self, client: Client) -> None:
        admin = client.backend.admin()
        info = await admin.ensure_topic("orders", partitions=6, retention=None, options={})
        assert info.partitions == 6
        with pytest.raises(Unsupported):
            await admin.ensure_topic("orders", partitions=5, retention=None, options={})

    async def test_unknown_options_are_refused_by_name(self, client: Client) -> None:
        admin = client.backend.admin()
        with pytest.raises(UnknownSetting, match="replicas"):
            await admin.ensure_topic("orders", partitions=None, retention=None, options={"replicas": 3})
        with pytest.raises(UnknownSetting, match="filter"):
            await admin.ensure_subscription("orders", "billing", start="earliest", options={"filter": "x"})

    @pytest.mark.parametrize("partitions", [0, -1])
    async def test_invalid_partitions_are_refused(self, client: Client, partitions: int) -> None:
        with pytest.raises(InvalidSetting):
            await client.topic("events", partitions=partitions)

    async def test_lag_counts_waiting_and_unsettled_messages(self, client: Client, clock: ManualClock) -> None:
        admin = client.backend.admin()
        source = await client.subscribe()
        await client.publish([b"a", b"b", b"c", b"d"])
        one, two = await take(source, 2)
        lag = await admin.lag("orders", "billing")
        assert (lag.waiting, lag.unsettled) == (2, 2)
        await settle(source, [one])
        await settle(source, [two], Outcome.NACK, 60)
        lag = await admin.lag("orders", "billing")
        assert (lag.waiting, lag.unsettled) == (3, 0)
        assert (await admin.describe_subscription("orders", "billing")).native["waiting"] == 3
        with pytest.raises(SubscriptionNotFound):
            await admin.lag("orders", "absent")

    async def test_purge_removes_everything_and_leases_can_still_be_settled(
        self, client: Client, clock: ManualClock
    ) -> None:
        source = await client.subscribe()
        await client.publish([b"a", b"b", OutboundMessage(b"later", deliver_at=clock.now() + timedelta(hours=1))])
        [held] = await take(source, 1)
        assert await client.backend.admin().purge("orders") == 3
        assert await take(source) == []
        assert await settle(source, [held], Outcome.NACK) == [None]
        clock.advance(7200)
        assert await take(source) == []
        assert await read(await client.join()) == []
        await client.publish([b"new"])
        assert bodies(await take(source)) == [b"new"]

    async def test_a_name_belongs_to_the_family_that_opened_it(self, client: Client) -> None:
        admin = client.backend.admin()
        await client.publish([b"old"])
        await admin.ensure_subscription("orders", "audit", start="latest", options={})
        await client.publish([b"new"])
        member = await client.join(group="audit")
        assert bodies(await read(member)) == [b"new"]
        with pytest.raises(ValueError, match="consumed as records"):
            await client.subscribe(subscription="audit")
        await client.subscribe(subscription="billing")
        with pytest.raises(ValueError, match="consumed as messages"):
            await client.join(group="billing")
        assert await admin.list_subscriptions("orders") == ["audit", "billing"]


async def test_retention_by_count_leaves_the_newest_records() -> None:
    async with Client(Broker(BrokerOptions(retention_messages=3))) as client:
        await client.topic(partitions=1)
        await client.publish([str(n).encode() for n in range(10)])
        assert bodies(await read(await client.join())) == [b"7", b"8", b"9"]
