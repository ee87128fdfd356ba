"""The Message family of the in-memory broker: leases, attempts, redelivery, delays, time to live."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from broker.errors import (
    AlreadySettled,
    Closed,
    ConfigurationError,
    LeaseLost,
    SubscriptionNotFound,
    TopicNotFound,
    Unsupported,
)
from broker.messages import Outcome
from broker.outbound import OutboundMessage
from broker_inmem import Broker, BrokerOptions, ManualClock
from tests.inmem.clients import Client, bodies, published, settle, soon, take


async def test_an_expired_lease_redelivers_with_the_next_attempt(client: Client, clock: ManualClock) -> None:
    await client.publish([b"a"])
    source = await client.subscribe()
    [first] = await take(source)
    clock.advance(29.9)
    assert await take(source) == []
    clock.advance(0.1)
    [second] = await take(source)
    assert (second.data, second.delivery_attempt, second.id) == (b"a", 2, first.id)
    [error] = await settle(source, [first])
    assert isinstance(error, LeaseLost)
    assert await settle(source, [second]) == [None]


async def test_a_renewed_lease_continues(client: Client, clock: ManualClock) -> None:
    await client.publish([b"a", b"b"])
    source = await client.subscribe()
    first, second = await take(source)
    clock.advance(20)
    assert await source.extend([first]) == [None]
    clock.advance(20)
    [again] = await take(source)
    assert again.id == second.id
    assert await settle(source, [first]) == [None]
    [error] = await source.extend([second])
    assert isinstance(error, LeaseLost)


async def test_a_sleeping_fetch_gets_messages_whose_lease_ends(client: Client, clock: ManualClock) -> None:
    await client.publish([b"a"])
    holder = await client.subscribe()
    waiter = await client.subscribe()
    await take(holder)
    fetching = asyncio.create_task(take(waiter, wait=30))
    await asyncio.sleep(0)
    clock.advance(30)
    [message] = await soon(fetching)
    assert message.delivery_attempt == 2


async def test_a_delayed_nack_wakes_a_sleeping_fetch_when_due(client: Client, clock: ManualClock) -> None:
    await client.publish([b"a"])
    source, other = await client.subscribe(), await client.subscribe()
    [message] = await take(source)
    fetching = asyncio.create_task(take(other, wait=30))
    await asyncio.sleep(0)
    assert await settle(source, [message], Outcome.NACK, 5.0) == [None]
    clock.advance(4.9)
    await asyncio.sleep(0)
    assert not fetching.done()
    clock.advance(0.1)
    assert [m.delivery_attempt for m in await soon(fetching)] == [2]


async def test_closing_releases_at_once_and_without_an_attempt(client: Client) -> None:
    await client.publish([b"a", b"b", b"c"])
    source = await client.subscribe()
    assert len(await take(source)) == 3
    await source.close()
    await source.close()
    again = await take(await client.subscribe())
    assert sorted(bodies(again)) == [b"a", b"b", b"c"]
    assert {message.delivery_attempt for message in again} == {1}
    with pytest.raises(Closed):
        await take(source)


async def test_settling_twice_alike_is_harmless_and_differently_refused(client: Client) -> None:
    await client.publish([b"a"])
    source = await client.subscribe()
    taken = await take(source)
    assert await settle(source, taken) == [None]
    assert await settle(source, taken) == [None]
    [error] = await settle(source, taken, Outcome.NACK)
    assert isinstance(error, AlreadySettled)


async def test_a_delay_above_native_delay_is_refused_and_the_lease_kept(clock: ManualClock) -> None:
    async with Client(Broker(BrokerOptions(native_delay=10), clock=clock)) as client:
        assert client.backend.capabilities.messages is not None
        assert client.backend.capabilities.messages.native_delay == 10
        await client.topic()
        await client.publish([b"a"])
        source = await client.subscribe()
        taken = await take(source)
        [error] = await settle(source, taken, Outcome.NACK, 11)
        assert isinstance(error, Unsupported)
        assert await settle(source, taken) == [None]


async def test_scheduled_messages_arrive_when_due(client: Client, clock: ManualClock) -> None:
    source = await client.subscribe()
    fetching = asyncio.create_task(take(source, wait=30))
    await asyncio.sleep(0)
    later = OutboundMessage(b"later", deliver_at=clock.now() + timedelta(seconds=60))
    [receipt] = await published(client, [later])
    clock.advance(59)
    await asyncio.sleep(0)
    assert not fetching.done()
    clock.advance(1)
    [message] = await soon(fetching)
    assert message.id == receipt.id
    assert message.broker_time == clock.now()


async def test_messages_expire_after_their_ttl(client: Client, clock: ManualClock) -> None:
    source = await client.subscribe()
    await client.publish([OutboundMessage(b"short", ttl=10), b"long"])
    clock.advance(10)
    assert bodies(await take(source)) == [b"long"]


async def test_deleting_a_subscription_ends_its_waiting_fetch(client: Client) -> None:
    source = await client.subscribe()
    fetching = asyncio.create_task(take(source, wait=30))
    await asyncio.sleep(0)
    await client.backend.admin().delete_subscription("orders", "billing")
    with pytest.raises(SubscriptionNotFound):
        await soon(fetching)


async def test_deleting_a_topic_ends_its_waiting_fetch(client: Client) -> None:
    source = await client.subscribe()
    fetching = asyncio.create_task(take(source, wait=30))
    await asyncio.sleep(0)
    await client.backend.admin().delete_topic("orders")
    with pytest.raises(TopicNotFound):
        await soon(fetching)


async def test_interrupt_ends_only_the_waiting_fetch(client: Client) -> None:
    source = await client.subscribe()
    source.interrupt()
    fetching = asyncio.create_task(take(source, wait=30))
    await asyncio.sleep(0)
    assert not fetching.done()
    source.interrupt()
    assert await soon(fetching) == []
    await client.publish([b"a"])
    assert bodies(await take(source)) == [b"a"]


async def test_closing_ends_a_waiting_fetch(client: Client) -> None:
    source = await client.subscribe()
    fetching = asyncio.create_task(take(source, wait=30))
    await asyncio.sleep(0)
    await source.close()
    assert await soon(fetching) == []


async def test_a_cancelled_fetch_loses_nothing(client: Client) -> None:
    source, other = await client.subscribe(), await client.subscribe()
    cancelled = asyncio.create_task(take(source, wait=30))
    waiting = asyncio.create_task(take(other, wait=30))
    await asyncio.sleep(0)
    await client.publish([b"a"])
    cancelled.cancel()
    assert bodies(await waiting) == [b"a"]


async def test_bytes_are_exceeded_by_one_message_at_most(client: Client) -> None:
    await client.publish([b"x" * 100] * 10)
    source = await client.subscribe()
    assert len(await source.fetch(10, 250, 0)) == 3
    assert len(await source.fetch(10, 1, 0)) == 1


async def test_the_seed_determines_the_order_between_keys() -> None:
    async def order(seed: int, shuffle: int = 8) -> list[bytes]:
        async with Client(Broker(BrokerOptions(seed=seed, shuffle=shuffle))) as client:
            await client.topic()
            source = await client.subscribe()
            await client.publish([OutboundMessage(f"{key}{n}".encode(), key) for n in range(20) for key in "abc"])
            return bodies(await take(source))

    published = [f"{key}{n}".encode() for n in range(20) for key in "abc"]
    one, other, unmixed = await order(1), await order(2), await order(1, shuffle=0)
    assert one == await order(1)
    assert one != other
    assert unmixed == published
    assert one != published
    for key in b"abc":
        assert [body for body in one if body[0] == key] == [body for body in published if body[0] == key]


async def test_messages_without_a_key_are_shuffled(client: Client) -> None:
    source = await client.subscribe()
    published = [str(n).encode() for n in range(64)]
    await client.publish(published)
    got = bodies(await take(source))
    assert got != published
    assert sorted(got, key=published.index) == published


class TestOrderedByKey:
    """Messages of a key are with one consumer at a time."""

    async def test_a_key_stays_with_the_consumer_that_has_its_unsettled_messages(self, client: Client) -> None:
        one = await client.subscribe(ordered_by_key=True)
        two = await client.subscribe(ordered_by_key=True)
        await client.publish([OutboundMessage(b"a1", "a"), OutboundMessage(b"a2", "a"), OutboundMessage(b"b1", "b")])
        [first] = await take(one, 1)
        mine, theirs = (b"a", b"b") if first.key == b"a" else (b"b", b"a")
        assert {message.key for message in await take(two)} == {theirs}
        await client.publish([OutboundMessage(b"more", mine)])
        assert await take(two) == []
        rest = await take(one)
        assert {message.key for message in rest} == {mine}
        await settle(one, [first, *rest])
        await client.publish([OutboundMessage(b"last", mine)])
        assert bodies(await take(two)) == [b"last"]

    async def test_a_parked_message_wakes_its_consumer(self, client: Client) -> None:
        one = await client.subscribe(ordered_by_key=True)
        two = await client.subscribe(ordered_by_key=True)
        await client.publish([OutboundMessage(b"a1", "a")])
        [first] = await take(one)
        fetching = asyncio.create_task(take(one, wait=30))
        await asyncio.sleep(0)
        await client.publish([OutboundMessage(b"a2", "a")])
        assert await take(two) == []
        assert bodies(await soon(fetching)) == [b"a2"]
        await settle(one, [first])

    async def test_a_failed_message_precedes_its_followers(self, client: Client, clock: ManualClock) -> None:
        source = await client.subscribe(ordered_by_key=True)
        await client.publish([OutboundMessage(f"a{n}".encode(), "a") for n in range(3)])
        [head] = await take(source, 1)
        await settle(source, [head], Outcome.NACK, 10)
        assert await take(source) == []
        clock.advance(10)
        assert bodies(await take(source)) == [b"a0", b"a1", b"a2"]

    async def test_the_death_of_a_consumer_frees_its_keys_in_order(
        self, client: Client, broker: Broker, clock: ManualClock
    ) -> None:
        async with Client(broker) as victim:
            dying = await victim.subscribe(ordered_by_key=True)
            heir = await client.subscribe(ordered_by_key=True)
            await client.publish([OutboundMessage(f"a{n}".encode(), "a") for n in range(5)])
            assert len(await take(dying, 3)) == 3
            broker.faults.kill(victim.backend)
            assert await take(heir) == []
            clock.advance(30)
            got = await take(heir)
            assert bodies(got) == [b"a0", b"a1", b"a2", b"a3", b"a4"]
            assert [message.delivery_attempt for message in got] == [2, 2, 2, 1, 1]

    async def test_consumers_of_one_subscription_must_agree(self, client: Client) -> None:
        await client.subscribe(ordered_by_key=True)
        with pytest.raises(ConfigurationError):
            await client.subscribe(ordered_by_key=False)

    async def test_order_enabled_later_applies_to_unsettled_messages(self, client: Client) -> None:
        await client.publish([OutboundMessage(b"a1", "a"), OutboundMessage(b"a2", "a")])
        plain = await client.subscribe()
        assert bodies(await take(plain, 1)) == [b"a1"]
        await plain.close()
        ordered = await client.subscribe(ordered_by_key=True)
        assert bodies(await take(ordered)) == [b"a1", b"a2"]
