"""Partitions that a member of a group had before: redeliveries, and messages that are still queued in the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

import broker
from broker.bus import Bus
from broker.driver.contract import TopicPartition
from broker.errors import ConfigurationError, NotAuthorized
from broker.reading.record_consumer import RecordConsumer
from broker.testing.waiting import eventually, numbered
from broker_pulsar.assigned_partition import AssignedPartition
from broker_pulsar.client import exceptions, pulsar, seek
from tests.servers.pulsar import PulsarServer

pytestmark = pytest.mark.xdist_group("pulsar")

SLOW = "&rebalance_interval=2"
"""The member notices an assignment late, when the broker has sent messages already."""


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second member's name makes the broker give it the partition while the member is connected."""
    names = iter("ba")
    monkeypatch.setattr("broker_pulsar.records.token_hex", lambda _size: next(names))


async def sent_to_first(server: PulsarServer, topic: str) -> int:
    """The number of messages sent to the first member; -1 while the other one is active."""
    path = f"/admin/v2/persistent/public/default/{topic}-partition-0/stats"
    status, body = await asyncio.to_thread(server.request, "GET", path)
    assert status == 200, body
    found = json.loads(body)["subscriptions"]["billing"]
    if found.get("activeConsumerName") != "anybroker-b":
        return -1
    return sum(each["msgOutCounter"] for each in found["consumers"] if each["consumerName"] == "anybroker-b")


async def more_sent(server: PulsarServer, topic: str, than: int) -> int:
    """Wait until the number exceeds `than`, and return it."""

    async def more() -> list[int]:
        return [count] if (count := await sent_to_first(server, topic)) > than else []

    return (await eventually(more, 15, "a delivery to the first member"))[0]


async def data_of(log: RecordConsumer[bytes], count: int) -> list[bytes | None]:
    records = [await log.next_record(timeout=60) for _ in range(count)]
    return [None if record is None else record.data for record in records]


@pytest.mark.deep
async def test_a_member_that_lost_a_partition_before_it_took_it_over_never_has_it(
    bus: Bus, pulsar_server: PulsarServer, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker passes the partition on while its new owner waits for the last commits of the former one."""
    names = iter("cba")
    monkeypatch.setattr("broker_pulsar.records.token_hex", lambda _size: next(names))

    async def is_active(name: str) -> bool:
        path = f"/admin/v2/persistent/public/default/{topic}-partition-0/stats"
        _, body = await asyncio.to_thread(pulsar_server.request, "GET", path)
        return json.loads(body)["subscriptions"]["billing"]["activeConsumerName"] == f"anybroker-{name}"

    async with (
        broker.connect(f"{pulsar_server.url}&rebalance_interval=5") as slow,
        bus.records(topic, group="billing"),
    ):
        second = slow.records(topic, group="billing")
        # Ends when the member has waited.
        opening = asyncio.ensure_future(second.__aenter__())
        await eventually(partial(is_active, "b"), 15, "the second member to be active")
        async with bus.records(topic, group="billing") as third:
            await eventually(partial(is_active, "a"), 15, "the third member to be active")
            await opening
            assert second.assignment() == []
            await eventually(third.assignment, 15, "its assignment")
        await second.close()


async def test_a_copartitioned_member_that_may_not_mark_its_partitions_is_refused(
    bus: Bus, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands for a broker that refuses the properties: others could not see who owns the partition."""

    async def refuse(*_: object) -> str:
        raise NotAuthorized("no right")

    monkeypatch.setattr("broker_pulsar.subscriptions.mark_owner", refuse)
    assigned: list[TopicPartition] = []

    async def on_assigned(partitions: Sequence[TopicPartition]) -> None:
        assigned.extend(partitions)

    with pytest.raises(NotAuthorized, match="no right"):
        async with bus.records(topic, group="billing", copartitioned=True, on_assigned=on_assigned):
            pass
    assert assigned == []


async def test_topics_without_partitions_are_not_copartitioned(
    bus: Bus, pulsar_server: PulsarServer, topic: str
) -> None:
    plain = f"{topic}-plain"
    path = f"/admin/v2/persistent/public/default/{plain}"
    assert (await asyncio.to_thread(pulsar_server.request, "PUT", path))[0] == 204
    with pytest.raises(ConfigurationError, match=f"topic '{plain}' is not partitioned"):
        async with bus.records([topic, plain], group="billing", copartitioned=True):
            pass
    await bus.admin.delete_topic(plain)


@pytest.mark.deep
@pytest.mark.usefixtures("names")
@pytest.mark.parametrize("batch", [1, 5])
async def test_messages_sent_before_the_member_noticed_are_redelivered(
    bus: Bus, pulsar_server: PulsarServer, topic: str, batch: int
) -> None:
    """The partition is assigned to the member again, and messages arrive before it notices."""
    bodies = numbered(1 + 3 * batch)
    async with (
        broker.connect(f"{pulsar_server.url}{SLOW}") as slow,
        slow.records(topic, group="billing") as log,
    ):
        await bus.topic(topic).publish(bodies[0])
        first = await log.next_record(timeout=60)
        assert first is not None
        await first.commit()
        async with bus.records(topic, group="billing"):
            await eventually(lambda: not log.assignment(), 15, "the other member to be active")
        before = await more_sent(pulsar_server, topic, -1)
        for start in range(1, len(bodies), batch):
            await bus.topic(topic).publish_batch(bodies[start : start + batch])
            before = await more_sent(pulsar_server, topic, before)
        assert await data_of(log, 3 * batch) == bodies[1:]


@pytest.mark.usefixtures("names")
async def test_the_rest_of_a_batch_is_redelivered(bus: Bus, pulsar_server: PulsarServer, topic: str) -> None:
    """Part of the batch is committed, so the delivery starts within an entry."""
    bodies = numbered(5)
    async with (
        broker.connect(f"{pulsar_server.url}&rebalance_interval=0.5") as first,
        first.records(topic, group="billing") as log,
    ):
        await bus.topic(topic).publish_batch(bodies)
        assert await data_of(log, 3) == bodies[:3]
        await log.commit()
        async with bus.records(topic, group="billing"):
            await eventually(lambda: not log.assignment(), 15, "the other member to be active")
        assert await data_of(log, 2) == bodies[3:]


@pytest.mark.usefixtures("names")
async def test_a_dropped_redelivery_request_is_repeated(
    bus: Bus, pulsar_server: PulsarServer, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a change of consumers the broker may drop a redelivery request; here the client never sees its messages."""
    requests = 0
    redeliver, arrived = pulsar.Consumer.redeliver_unacknowledged_messages, AssignedPartition.arrived

    def request(consumer: Any) -> None:
        nonlocal requests
        requests += 1
        redeliver(consumer)

    def arrive(part: AssignedPartition, messages: Sequence[Any]) -> bool:
        return arrived(part, messages) if requests != 1 else False

    bodies = numbered(5)
    async with (
        broker.connect(f"{pulsar_server.url}&rebalance_interval=0.2") as first,
        first.records(topic, group="billing") as log,
    ):
        await bus.topic(topic).publish_batch(bodies)
        assert await data_of(log, 5) == bodies
        async with bus.records(topic, group="billing") as other:
            await eventually(lambda: other.assignment() and not log.assignment(), 15, "the other member to be active")
            requests = 0
            monkeypatch.setattr(pulsar.Consumer, "redeliver_unacknowledged_messages", request)
            monkeypatch.setattr(AssignedPartition, "arrived", arrive)
        assert await data_of(log, 5) == bodies
        assert requests > 1


@pytest.mark.usefixtures("names")
async def test_records_below_another_members_seek_are_redelivered(
    bus: Bus, pulsar_server: PulsarServer, topic: str
) -> None:
    """The client drops acked messages, and does not notice the seek of the other member."""
    bodies = numbered(5)
    async with broker.connect(pulsar_server.url) as first, first.records(topic, group="billing") as log:
        await bus.topic(topic).publish(bodies[0])
        receipts = await bus.topic(topic).publish_batch(bodies[1:])
        assert await data_of(log, 5) == bodies
        await log.commit()
        async with bus.records(topic, group="billing") as other:
            await eventually(lambda: other.assignment() and not log.assignment(), 15, "the other member to be active")
            await other.seek({TopicPartition(topic, 0): receipts[0].offset})
        assert await data_of(log, 4) == bodies[1:]


async def test_the_position_of_a_group_that_has_read_everything_is_in_the_log(bus: Bus, topic: str) -> None:
    """The broker's cursor is at the start of an entry that does not exist yet."""
    place, bodies = TopicPartition(topic, 0), numbered(4)
    await bus.topic(topic).publish_batch(bodies[:3])
    async with bus.records(topic, group="billing") as log:
        assert await data_of(log, 3) == bodies[:3]
        await log.commit()
    async with bus.records(topic, group="billing") as log:
        await eventually(log.assignment, 60, "the assignment")
        position = (await log.committed([place]))[place]
        assert position is not None
        await log.seek({place: None})
        await log.seek({place: position})
        assert [batch async for batch in bus.log.read(topic, 0, position)] == []
        async with bus.log.follow(topic, {0: position}) as followed:
            await bus.topic(topic).publish(bodies[3])
            # An empty batch tells that it has caught up.
            batch = await followed.next_batch(timeout=60) or await followed.next_batch(timeout=60)
            assert [record.data for record in batch] == [bodies[3]]
        assert await data_of(log, 1) == bodies[3:]


async def test_a_seek_waits_while_the_broker_moves_the_cursor_for_another_client(
    bus: Bus, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [exceptions.UnknownError, exceptions.NotConnected]

    def refused_first(consumer: Any, target: Any, is_open: Callable[[], bool]) -> None:
        if refusals:
            raise refusals.pop()("Error when resetting subscription")
        seek(consumer, target, is_open)

    bodies = numbered(4)
    receipts = await bus.topic(topic).publish_batch(bodies)
    monkeypatch.setattr("broker_pulsar.records.seek", refused_first)
    async with bus.records(topic, group="billing") as log:
        assert await data_of(log, 4) == bodies
        await log.seek({TopicPartition(topic, 0): receipts[2].offset})
        assert refusals == []
        assert await data_of(log, 2) == bodies[2:]
