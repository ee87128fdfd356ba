"""`Metrics` of publishers and message consumers, in memory, through the public API."""

from __future__ import annotations

import asyncio

import pytest

import broker
from broker.hooks import Event, FlowBlocked, LeaseExpired, LeasesNotRenewed, Settled
from broker.metrics import Histogram, Metrics, Series
from broker_inmem import Broker, BrokerOptions, InmemSettings
from tests.unit.broker.consuming.scripted_source import until


def number(metrics: Metrics, name: str, topic: str = "orders", **labels: str) -> float:
    """The value of a counter or gauge; 0 if there is none."""
    found = metrics.read().get(Series.of(f"anybroker_{name}", topic=topic, **labels), 0)
    assert not isinstance(found, Histogram)
    return found


def histogram(metrics: Metrics, name: str, topic: str = "orders") -> Histogram:
    found = metrics.read()[Series.of(f"anybroker_{name}", topic=topic)]
    assert isinstance(found, Histogram)
    return found


def received(metrics: Metrics) -> tuple[float, float]:
    """First deliveries, and redeliveries."""
    assert number(metrics, "received_messages_total", delivery="unknown") == 0
    first = number(metrics, "received_messages_total", delivery="first")
    return first, number(metrics, "received_messages_total", delivery="redelivery")


def in_flight(metrics: Metrics) -> tuple[float, float]:
    """Messages and bytes."""
    return number(metrics, "in_flight_messages"), number(metrics, "in_flight_bytes")


async def fail_once(inbox: broker.MessageConsumer) -> None:
    """Receive until a message was handled a second time."""
    tries = 0

    async def bill(message: broker.Message) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ValueError("not now")
        inbox.stop()

    await inbox.receive(bill)


@pytest.fixture
async def metrics(broker_bus: broker.Bus) -> Metrics:
    for topic in ("orders", "orders.dead"):
        await broker_bus.admin.ensure_topic(topic, partitions=2)
    return Metrics(broker_bus)


async def test_publishing(broker_bus: broker.Bus, inmem_broker: Broker, metrics: Metrics) -> None:
    orders = broker_bus.topic("orders")
    await orders.publish(b"1")
    await orders.publish_batch([b"2", b"3"], receipts=False)
    await (await orders.enqueue(b"4"))
    await orders.publish_batch([broker.OutboundMessage(b"4", id="4")] * 3, receipts=False)
    inmem_broker.faults.fail_publish()
    with pytest.raises(broker.PublishError):
        await orders.publish_batch([b"5", b"6"])
    inmem_broker.faults.fail("publish")
    with pytest.raises(broker.ConnectionFailed):
        await orders.publish(b"7")
    assert number(metrics, "published_messages_total") == 6
    assert number(metrics, "duplicate_messages_total") == 2
    assert number(metrics, "publish_failures_total") == 2
    calls = histogram(metrics, "publish_seconds")
    assert sum(calls.counts) == 6
    assert calls.sum > 0


async def test_acks_and_messages_in_flight(broker_bus: broker.Bus, metrics: Metrics) -> None:
    await broker_bus.topic("orders").publish_batch([b"x" * 100] * 3)
    async with broker_bus.messages("orders", subscription="billing") as inbox:
        assert in_flight(metrics) == (0, 0)
        messages = [await anext(aiter(inbox)) for _ in range(3)]
        assert received(metrics) == (3, 0)
        count, size = in_flight(metrics)
        assert count == 3
        assert size >= 300
        assert number(metrics, "received_bytes_total") == size
        for message in messages:
            await message.ack()
        assert in_flight(metrics) == (0, 0)
    assert number(metrics, "acked_messages_total") == 3
    for name in ("end_to_end_seconds", "received_to_acked_seconds"):
        took = histogram(metrics, name)
        assert sum(took.counts) == 3
        assert 0 <= took.sum < 100
    assert histogram(metrics, "end_to_end_seconds").sum >= histogram(metrics, "received_to_acked_seconds").sum


async def test_redeliveries_by_the_broker(broker_bus: broker.Bus, metrics: Metrics) -> None:
    await broker_bus.topic("orders").publish(b"1")
    async with broker_bus.messages("orders", subscription="billing") as inbox:
        await (await anext(aiter(inbox))).nack(0)
        await (await anext(aiter(inbox))).ack()
    assert received(metrics) == (1, 1)
    assert number(metrics, "nacked_messages_total") == 1
    assert number(metrics, "acked_messages_total") == 1
    assert in_flight(metrics) == (0, 0)


async def test_retries_from_memory(broker_bus: broker.Bus, metrics: Metrics) -> None:
    await broker_bus.topic("orders").publish(b"1", key="a")
    retry = broker.Retry(initial=0.02, jitter=0)
    async with broker_bus.messages("orders", subscription="billing", ordered_by_key=True, retry=retry) as inbox:
        await fail_once(inbox)
    assert received(metrics) == (1, 1)
    assert number(metrics, "nacked_messages_total") == number(metrics, "handler_failures_total") == 1
    delays = histogram(metrics, "retry_delay_seconds")
    assert sum(delays.counts) == 1
    assert delays.sum == pytest.approx(0.02)
    took = histogram(metrics, "received_to_acked_seconds")
    assert sum(took.counts) == 1
    assert took.sum >= 0.02
    assert in_flight(metrics) == (0, 0)


async def test_a_close_releases_and_leaves_nothing_in_flight(broker_bus: broker.Bus, metrics: Metrics) -> None:
    await broker_bus.topic("orders").publish_batch([b"x"] * 10)
    async with broker_bus.messages("orders", subscription="billing") as inbox:
        async for _ in inbox:
            break
        assert in_flight(metrics)[0] > 0
        (source,) = broker_bus.hooks.in_flight
        assert (source.topic, source.count) == ("orders", in_flight(metrics)[0])
    assert in_flight(metrics) == (0, 0)
    assert not broker_bus.hooks.in_flight
    assert number(metrics, "released_messages_total") == received(metrics)[0] > 0
    assert number(metrics, "acked_messages_total") == 0


async def test_a_consumer_that_cannot_settle_leaves_nothing_in_flight(
    broker_bus: broker.Bus, inmem_broker: Broker, metrics: Metrics
) -> None:
    await broker_bus.topic("orders").publish_batch([b"x"] * 3)
    async with broker_bus.messages("orders", subscription="billing", close_timeout=0.1) as inbox:
        messages = await inbox.next_batch(1)
        inmem_broker.faults.stop()
        await asyncio.wait({asyncio.ensure_future(messages[0].ack())}, timeout=0.01)
    assert in_flight(metrics) == (0, 0)


async def test_leases_that_end(broker_bus: broker.Bus, metrics: Metrics) -> None:
    ended = asyncio.Event()
    broker_bus.hooks.listen(lambda event: ended.set() if isinstance(event, LeaseExpired) else None)
    await broker_bus.topic("orders").publish(b"1")
    async with broker_bus.messages("orders", subscription="billing", max_lease=0.02, max_outstanding=1) as inbox:
        await inbox.next_message()
        await ended.wait()
        assert number(metrics, "lost_leases_total") == 1
        again = await inbox.next_message()
        assert again is not None
        await again.ack()
        assert in_flight(metrics) == (0, 0)
    assert received(metrics) == (1, 1)


async def test_settlements_that_are_refused(broker_bus: broker.Bus, inmem_broker: Broker, metrics: Metrics) -> None:
    await broker_bus.topic("orders").publish(b"1")
    async with broker_bus.messages("orders", subscription="billing", max_outstanding=1) as inbox:
        message = await inbox.next_message()
        assert message is not None
        inmem_broker.faults.expire()
        with pytest.raises(broker.LeaseLost):
            await message.ack()
        assert number(metrics, "settle_failures_total") == 1
        assert number(metrics, "acked_messages_total") == 0
        again = await inbox.next_message()
        assert again is not None
        await again.ack()
        assert in_flight(metrics) == (0, 0)
    assert number(metrics, "acked_messages_total") == 1


async def test_leases_that_are_not_renewed() -> None:
    server = Broker(BrokerOptions(lease_seconds=1.0))
    async with broker.connect(InmemSettings(broker=server)) as bus:
        metrics, emitted = Metrics(bus), asyncio.Event()
        bus.hooks.listen(lambda event: emitted.set() if isinstance(event, LeasesNotRenewed) else None)
        await bus.admin.ensure_topic("orders")
        await bus.topic("orders").publish(b"1")
        async with bus.messages("orders", subscription="billing") as inbox:
            await inbox.next_message()
            server.faults.fail("extend")
            await emitted.wait()
            assert number(metrics, "lease_renewal_failures_total") == 1
            server.faults.clear()


async def test_dead_letters(broker_bus: broker.Bus, inmem_broker: Broker, metrics: Metrics) -> None:
    await broker_bus.topic("orders").publish(b"1")
    inmem_broker.faults.fail("publish", topic="orders.dead")
    async with broker_bus.messages("orders", subscription="billing", dead_letter="orders.dead") as inbox:
        await (await anext(aiter(inbox))).reject("wrong")
        assert in_flight(metrics) == (0, 0)
    assert number(metrics, "dead_letter_failures_total") == 1
    assert number(metrics, "dead_lettered_messages_total") == 1
    assert number(metrics, "acked_messages_total") == 1
    assert sum(histogram(metrics, "end_to_end_seconds").counts) == 0
    assert number(metrics, "published_messages_total", "orders.dead") == 1


async def test_dropped_messages(broker_bus: broker.Bus, metrics: Metrics) -> None:
    await broker_bus.topic("orders").publish(b"1")
    async with broker_bus.messages("orders", subscription="billing", dead_letter=broker.DROP) as inbox:
        await (await anext(aiter(inbox))).reject("wrong")
    assert number(metrics, "dropped_messages_total") == number(metrics, "acked_messages_total") == 1
    assert number(metrics, "dead_lettered_messages_total") == 0


async def test_messages_that_are_forgotten(broker_bus: broker.Bus, metrics: Metrics) -> None:
    emitted = asyncio.Event()
    broker_bus.hooks.listen(lambda event: emitted.set() if isinstance(event, FlowBlocked) else None)
    await broker_bus.topic("orders").publish_batch([b"1", b"2"])
    async with broker_bus.messages("orders", subscription="billing", max_outstanding=1, blocked_after=0.04) as inbox:
        forgotten = await inbox.next_message()
        waiting = asyncio.ensure_future(inbox.next_message())
        await emitted.wait()
        waiting.cancel()
        assert forgotten is not None
    assert number(metrics, "flow_blocked_total") >= 1


async def test_everything_that_came_went(broker_bus: broker.Bus, inmem_broker: Broker, metrics: Metrics) -> None:
    """Each message that arrived is counted, whatever handlers do, in any order."""
    await broker_bus.topic("orders").publish_batch([b"%d" % index for index in range(300)])

    async def bill(message: broker.Message) -> None:
        index = int(message.data or b"")
        if index % 5 == 0:
            raise ValueError("never")
        if index % 7 == 0 and message.delivery_attempt == 1:
            await message.nack(0.01)
        elif index % 11 == 0:
            await message.ack()

    async with broker_bus.messages(
        "orders",
        subscription="billing",
        retry=broker.Retry(max_attempts=3, initial=0.01),
        dead_letter="orders.dead",
        max_outstanding=50,
        stop_when_idle=0.2,
    ) as inbox:
        await inbox.receive(bill, concurrency=5)
        await until(lambda: in_flight(metrics) == (0, 0))
    acked = number(metrics, "acked_messages_total")
    assert acked == 300
    assert number(metrics, "dead_lettered_messages_total") == 60
    assert sum(received(metrics)) == acked + sum(
        number(metrics, f"{what}_messages_total") for what in ("nacked", "released")
    )
    assert sum(histogram(metrics, "end_to_end_seconds").counts) == 240
    assert number(metrics, "handler_failures_total") == 180


async def test_refused_settlements_are_not_counted_as_settled(broker_bus: broker.Bus, inmem_broker: Broker) -> None:
    events: list[Event] = []
    await broker_bus.admin.ensure_topic("orders")
    await broker_bus.topic("orders").publish_batch([b"1", b"2"])
    async with broker_bus.messages("orders", subscription="billing") as inbox:
        batch = [await anext(aiter(inbox)) for _ in range(2)]
        broker_bus.hooks.listen(events.append)
        inmem_broker.faults.lose_acks()
        ends = await asyncio.gather(*(message.ack() for message in batch), return_exceptions=True)
        settled = [event for event in events if isinstance(event, Settled)]
        assert sum(event.acked for event in settled) == ends.count(None) == 1
        assert [message.id for event in settled for message in event.handled] == [
            message.id for message, end in zip(batch, ends, strict=True) if end is None
        ]
