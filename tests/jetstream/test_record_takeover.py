"""Joining a group whose former members died, or left at once."""

from __future__ import annotations

import time

import pytest

import broker
from broker.driver.contract import RecordSource, RecordSubscription, TopicPartition
from broker.errors import LeaseLost
from broker.testing.waiting import let_pass
from broker_jetstream.assigned_partition import AssignedPartition
from broker_jetstream.backend import JetStreamBackend
from tests.jetstream.conftest import Open
from tests.jetstream.support import GroupListener, make_topic, publish, read, until
from tests.servers.nats import NatsServer
from tests.servers.proxy import Proxy


async def join(
    backend: JetStreamBackend, topics: tuple[str, ...], listener: GroupListener | None = None
) -> RecordSource:
    return await backend.join(RecordSubscription(topics=topics, group="audit"), listener or GroupListener())


def messages(number: int) -> list[broker.OutboundMessage]:
    return [broker.OutboundMessage(b"%d" % n, partition=0) for n in range(number)]


async def die(
    open_backend: Open, server: NatsServer, *topics: str, read_first: int, owner_timeout: float = 1.0
) -> Proxy:
    """A member reads some records, and then stays silent, though its connection stays open."""
    proxy = Proxy(server.port).__enter__()
    doomed = await open_backend(servers=(proxy.url,), owner_timeout=owner_timeout)
    source = await join(doomed, topics)
    assert len(await read(source, read_first)) == read_first
    proxy.hold()
    return proxy


async def test_a_job_reads_the_partitions_of_a_dead_member_before_it_is_idle(
    open_backend: Open, nats_server: NatsServer, topic: str
) -> None:
    backend = await open_backend()
    await make_topic(backend, topic)
    await publish(backend, topic, *messages(6))
    proxy = await die(open_backend, nats_server, topic, read_first=6)
    try:
        async with (
            broker.connect(f"{nats_server.url}?owner_timeout=1") as bus,
            bus.records(topic, group="audit", stop_when_idle=0.1) as log,
        ):
            assert [record.data async for record in log] == [b"%d" % n for n in range(6)]
    finally:
        proxy.__exit__()


async def test_partitions_of_a_dead_member_are_assigned_once_they_can_be_read(
    open_backend: Open, nats_server: NatsServer, topic: str
) -> None:
    # Long enough for the second member to join on a busy machine while the first still owns its partition.
    backend = await open_backend(owner_timeout=4.0)
    await make_topic(backend, topic, partitions=2)
    await publish(backend, topic, *messages(3))
    proxy = await die(open_backend, nats_server, topic, read_first=3, owner_timeout=4.0)
    try:
        listener = GroupListener()
        source = await join(backend, (topic,), listener)
        assert source.assignment() == listener.given == []
        found = await read(source, 3)
        # Partition 1 was free, and is reported with partition 0: alone, it would make the member count as idle.
        assert listener.given == source.assignment() == [TopicPartition(topic, 0), TopicPartition(topic, 1)]
        assert [record.data for record in found] == [b"0", b"1", b"2"]
    finally:
        proxy.__exit__()


@pytest.mark.deep
async def test_a_partition_pinned_elsewhere_delays_the_free_ones_briefly(
    open_backend: Open, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a server where members have no permission for the announcements."""
    from broker_jetstream import membership

    async def join_unheard(self: membership.Membership) -> None: ...

    backend, other = await open_backend(owner_timeout=2.0), await open_backend(owner_timeout=2.0)
    await make_topic(backend, topic, partitions=2)
    await publish(backend, topic, *messages(3))
    owner = await join(backend, (topic,))
    assert len(await read(owner, 3)) == 3
    monkeypatch.setattr(membership.Membership, "join", join_unheard)
    listener = GroupListener()
    source = await join(other, (topic,), listener)
    assert listener.given == []
    assert await read(source, 1, 6) == []
    assert listener.given == [TopicPartition(topic, 1)]
    assert listener.gone == []


@pytest.mark.deep
async def test_a_late_owner_check_still_reports_lost_partitions(
    open_backend: Open, nats_server: NatsServer, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that was cut off learns of its losses before the new owner returns a share to it.

    Two checks take less than the time after which the new owner counts the member as gone again.
    """
    owner = AssignedPartition._owner

    async def late_owner(self: AssignedPartition) -> bytes:
        await let_pass(0.4)
        return await owner(self)

    backend = await open_backend(owner_timeout=3.0)
    await make_topic(backend, topic, partitions=2)
    await publish(backend, topic, *(broker.OutboundMessage(b"%d" % n, partition=n % 2) for n in range(6)))
    with Proxy(nats_server.port) as proxy:
        cut_off = await open_backend(servers=(proxy.url,), owner_timeout=3.0)
        listener = GroupListener()
        first = await join(cut_off, (topic,), listener)
        assert len(await read(first, 6)) == 6
        proxy.hold()
        second = await join(backend, (topic,))
        assert len(await read(second, 6, 20)) == 6
        monkeypatch.setattr(AssignedPartition, "_owner", late_owner)
        proxy.hold(False)
        await until(lambda: len(listener.gone) == 2, 20)
        assert sorted(listener.gone) == [TopicPartition(topic, 0), TopicPartition(topic, 1)]
        await until(lambda: len(first.assignment()) == len(second.assignment()) == 1, 20)


async def test_a_member_that_was_cut_off_does_not_move_the_new_owner(
    open_backend: Open, nats_server: NatsServer, topic: str
) -> None:
    """Its seek comes before it has heard of its loss."""
    backend = await open_backend(owner_timeout=1.0)
    await make_topic(backend, topic)
    await publish(backend, topic, *messages(6))
    with Proxy(nats_server.port) as proxy:
        cut_off, listener = await open_backend(servers=(proxy.url,), owner_timeout=1.0), GroupListener()
        first = await join(cut_off, (topic,), listener)
        assert len(await read(first, 2)) == 2
        proxy.hold()
        second = await join(backend, (topic,))
        assert len(await read(second, 6, 20)) == 6
        assert await delivered(backend, topic) == 6
        proxy.hold(False)
        with pytest.raises(LeaseLost):
            await first.seek({TopicPartition(topic, 0): None})
        assert listener.gone == [TopicPartition(topic, 0)]
        assert await delivered(backend, topic) == 6


async def delivered(backend: JetStreamBackend, topic: str) -> int:
    """Records since the last reset of the durable."""
    return (await backend.admin().describe_subscription(topic, "audit")).native["delivered"]["consumer_seq"]


async def test_a_member_that_leaves_at_once_is_unpinned(open_backend: Open, topic: str) -> None:
    backend = await open_backend(owner_timeout=90.0)
    await make_topic(backend, topic)
    await publish(backend, topic, *messages(3))
    for _ in range(20):
        source = await join(backend, (topic,))
        await source.close()
    source = await join(backend, (topic,))
    begun = time.monotonic()
    assert len(await read(source, 3, 60)) == 3
    assert time.monotonic() - begun < 60


async def test_partitions_are_assigned_when_the_consumer_is_open(both_ways: JetStreamBackend, topic: str) -> None:
    await make_topic(both_ways, topic, partitions=8)
    await publish(both_ways, topic, *messages(10))
    listener = GroupListener()
    source = await join(both_ways, (topic,), listener)
    assert sorted(listener.given) == source.assignment() == [TopicPartition(topic, n) for n in range(8)]
    assert len(await read(source, 10)) == 10
