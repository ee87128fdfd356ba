"""Injected faults: their effect, and that they lose nothing."""

from __future__ import annotations

import asyncio

import pytest

from broker.errors import AuthenticationFailed, ConnectionFailed, LeaseLost, OperationTimeout
from broker.hooks import Connected, Disconnected
from broker.messages import Outcome
from broker.outbound import OutboundMessage
from broker_inmem import Broker, ManualClock
from tests.inmem.clients import Client, MessageListener, PartitionListener, bodies, published, read, settle, soon, take


async def test_calls_fail_as_often_as_requested_and_without_effect(client: Client, broker: Broker) -> None:
    source = await client.subscribe()
    broker.faults.fail("publish", times=2, topic="orders")
    for _ in range(2):
        with pytest.raises(ConnectionFailed):
            await client.publish([b"lost"])
    await client.publish([b"a"])
    broker.faults.fail("fetch", OperationTimeout("slow"))
    with pytest.raises(OperationTimeout):
        await take(source)
    messages = await take(source)
    assert bodies(messages) == [b"a"]
    broker.faults.fail("settle")
    with pytest.raises(ConnectionFailed):
        await settle(source, messages)
    broker.faults.fail("extend")
    with pytest.raises(ConnectionFailed):
        await source.extend(messages)
    assert await settle(source, messages) == [None]


async def test_opening_can_be_refused(broker: Broker) -> None:
    broker.faults.fail("open", AuthenticationFailed("no"))
    with pytest.raises(AuthenticationFailed):
        async with Client(broker):
            pass
    async with Client(broker):
        pass


async def test_faults_of_one_topic_do_not_affect_others(client: Client, broker: Broker) -> None:
    await client.topic("events")
    broker.faults.fail("publish", topic="events")
    await published(client, [b"a"])
    with pytest.raises(ConnectionFailed):
        await client.publish([b"a"], "events")


@pytest.mark.parametrize("stored", [False, True])
async def test_single_messages_fail_to_be_published(client: Client, broker: Broker, stored: bool) -> None:
    broker.faults.fail_publish(stored=stored)
    first, second = await client.publish([b"a", b"b"])
    assert isinstance(first, OperationTimeout)
    assert not isinstance(second, Exception)
    assert sorted(bodies(await take(await client.subscribe()))) == ([b"a", b"b"] if stored else [b"b"])


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("reported", [False, True])
async def test_settlements_get_lost(
    client: Client, broker: Broker, clock: ManualClock, applied: bool, reported: bool
) -> None:
    await client.publish([b"a"])
    source = await client.subscribe()
    broker.faults.lose_acks(applied=applied, reported=reported)
    messages = await take(source)
    [error] = await settle(source, messages)
    assert isinstance(error, OperationTimeout) if reported else error is None
    # A repeated settlement succeeds.
    assert await settle(source, messages) == [None] if reported else True
    clock.advance(30)
    assert len(await take(source)) == (0 if applied or reported else 1)


async def test_messages_are_delivered_twice(client: Client, broker: Broker) -> None:
    await client.publish([b"a", b"b", b"c"])
    source = await client.subscribe()
    broker.faults.duplicate(2)
    first = await take(source)
    again = await take(source)
    assert len(first) == 3
    assert len(again) == 2
    assert {message.delivery_attempt for message in again} == {2}
    assert await settle(source, [*first, *again]) == [None] * 5
    assert await take(source) == []


async def test_leases_end_at_once_and_silently(client: Client, broker: Broker) -> None:
    await client.publish([b"a", b"b"])
    listener = MessageListener()
    source = await client.subscribe(listener=listener)
    first, second = await take(source)
    assert broker.faults.expire([first]) == 1
    await asyncio.sleep(0)
    assert listener.lost_messages == []
    [again] = await take(source)
    assert again.id == first.id
    error, fine = await settle(source, [first, second])
    assert isinstance(error, LeaseLost)
    assert fine is None
    assert broker.faults.expire() == 1


async def test_a_restart_breaks_fetches_and_redelivers_unsettled_messages(client: Client, broker: Broker) -> None:
    await client.publish([b"a"])
    listener, waiting_listener = MessageListener(), PartitionListener()
    source = await client.subscribe(listener=listener)
    member = await client.join(listener=waiting_listener)
    [held] = await take(source)
    await read(member)
    fetching = asyncio.create_task(take(source, wait=30)), asyncio.create_task(read(member, wait=30))
    await asyncio.sleep(0)
    broker.faults.restart()
    for task in fetching:
        with pytest.raises(ConnectionFailed) as caught:
            await task
        assert caught.value.retriable
    assert listener.lost_messages == [held]
    [again] = await take(source)
    assert (again.data, again.delivery_attempt) == (b"a", 2)
    await client.publish([b"b"])
    assert bodies(await read(member)) == [b"b"]
    await asyncio.sleep(0)
    for events in (listener.events, waiting_listener.events):
        assert [type(event) for event in events] == [Disconnected, Connected]


async def test_a_stopped_server_refuses_everything_until_it_is_started(client: Client, broker: Broker) -> None:
    source = await client.subscribe()
    broker.faults.stop()
    with pytest.raises(ConnectionFailed):
        await client.publish([b"a"])
    for _ in range(2):
        with pytest.raises(ConnectionFailed):
            await take(source)
    with pytest.raises(ConnectionFailed):
        async with Client(broker):
            pass
    with pytest.raises(ConnectionFailed):
        await client.backend.check_health()
    broker.faults.start()
    assert await client.backend.check_health() >= 0
    await client.publish([b"a"])
    assert bodies(await take(source)) == [b"a"]


@pytest.mark.parametrize("drop_leases", [False, True])
async def test_a_killed_client_releases_nothing(
    broker: Broker, client: Client, clock: ManualClock, drop_leases: bool
) -> None:
    async with Client(broker) as victim:
        await client.publish([b"a"])
        dead = await victim.subscribe()
        messages = await take(dead)
        broker.faults.kill(victim.backend, drop_leases=drop_leases)
        with pytest.raises(ConnectionFailed) as caught:
            await take(dead)
        assert not caught.value.retriable
        with pytest.raises(ConnectionFailed):
            await settle(dead, messages)
        await dead.close()
        heir = await client.subscribe()
        if not drop_leases:
            assert await take(heir) == []
            clock.advance(30)
        [message] = await take(heir)
        assert message.delivery_attempt == 2


async def test_an_isolated_client_reconnects(broker: Broker, client: Client) -> None:
    source = await client.subscribe()
    fetching = asyncio.create_task(take(source, wait=30))
    await asyncio.sleep(0)
    broker.faults.isolate(client.backend)
    with pytest.raises(ConnectionFailed) as caught:
        await soon(fetching)
    assert caught.value.retriable
    with pytest.raises(ConnectionFailed):
        await client.publish([b"a"])
    broker.faults.heal(client.backend)
    await client.publish([b"a"])
    messages = await take(source)
    assert await settle(source, messages) == [None]


async def test_fetches_are_slow_by_the_clock_and_can_be_interrupted(
    client: Client, broker: Broker, clock: ManualClock
) -> None:
    source = await client.subscribe()
    await client.publish([b"a", b"b"])
    broker.faults.slow_fetches(5)
    fetching = asyncio.create_task(take(source, 1, wait=30))
    await asyncio.sleep(0)
    clock.advance(4.9)
    await asyncio.sleep(0)
    assert not fetching.done()
    clock.advance(0.1)
    assert len(await soon(fetching)) == 1
    fetching = asyncio.create_task(take(source, 1, wait=30))
    await asyncio.sleep(0)
    source.interrupt()
    assert len(await soon(fetching)) == 1


async def test_faults_that_were_not_used_up_can_be_removed(client: Client, broker: Broker) -> None:
    broker.faults.fail("publish", times=100)
    broker.faults.duplicate(100)
    broker.faults.clear()
    await client.publish([OutboundMessage(b"a")])
    source = await client.subscribe()
    assert await settle(source, await take(source), Outcome.ACK) == [None]
    assert await take(source) == []


def test_only_connections_can_be_killed(broker: Broker) -> None:
    with pytest.raises(TypeError):
        broker.faults.kill("another")
