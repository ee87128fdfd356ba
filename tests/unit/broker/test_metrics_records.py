"""What `Metrics` counts of records, records served as messages and connections, and its label for topics."""

from __future__ import annotations

import asyncio

import pytest

import broker
import broker.blocking
from broker.hooks import PositionReset, Published, Warned
from broker.metrics import OTHER, Metrics, Series
from broker_inmem import Broker
from tests.unit.broker.consuming.scripted_source import until
from tests.unit.broker.test_metrics import fail_once, histogram, in_flight, number, received

RETRIES = broker.RetryTopics(delays=(0.02,))


@pytest.fixture
async def metrics(broker_bus: broker.Bus) -> Metrics:
    for topic in ("orders", *RETRIES.names("orders", "billing")):
        await broker_bus.admin.ensure_topic(topic, partitions=2)
    return Metrics(broker_bus)


async def test_records_and_their_commits(broker_bus: broker.Bus, metrics: Metrics) -> None:
    await broker_bus.topic("orders").publish_batch([broker.OutboundMessage(b"x", partition=n % 2) for n in range(10)])
    async with broker_bus.records("orders", group="audit", stop_when_idle=0.1) as log:
        async for batch in log.batches():
            assert batch
        assert number(metrics, "received_records_total") == 10
        assert number(metrics, "commits_total") == 0
        await log.commit()
    assert number(metrics, "commits_total") == 2
    assert number(metrics, "partitions_assigned_total") == 2
    assert number(metrics, "received_messages_total", delivery="first") == 0


async def test_retry_topics(broker_bus: broker.Bus, inmem_broker: Broker, metrics: Metrics) -> None:
    await broker_bus.topic("orders").publish(b"1")
    inmem_broker.faults.fail("publish", topic=RETRIES.names("orders", "billing")[0])
    async with broker_bus.records("orders", group="billing").as_messages(retry_topics=RETRIES) as inbox:
        await fail_once(inbox)
    assert number(metrics, "retry_write_failures_total") == number(metrics, "retries_scheduled_total") == 1
    assert received(metrics) == (1, 1)
    assert number(metrics, "acked_messages_total") == 2
    assert in_flight(metrics) == (0, 0)


async def test_partitions_that_move_leave_nothing_in_flight(broker_bus: broker.Bus, metrics: Metrics) -> None:
    await broker_bus.topic("orders").publish_batch([broker.OutboundMessage(b"x", partition=n % 2) for n in range(40)])
    first = broker_bus.records("orders", group="billing").as_messages(prefetch=40)
    second = broker_bus.records("orders", group="billing").as_messages(prefetch=40)
    async with first:
        messages = [await anext(aiter(first)) for _ in range(20)]
        assert in_flight(metrics)[0] >= 20
        async with second:
            for message in messages:
                await message.ack()
            await until(lambda: number(metrics, "partitions_revoked_total") >= 1)
            mine = await second.next_message(timeout=60)
            assert mine is not None
            await mine.ack()
            for inbox in (first, second):
                while (message := await inbox.next_message(timeout=0.2)) is not None:
                    await message.ack()
            assert in_flight(metrics) == (0, 0)
    assert number(metrics, "acked_messages_total") == 40
    assert sum(received(metrics)) == 40 + number(metrics, "lost_leases_total")


async def test_connections_that_break_and_fetches_that_fail(
    broker_bus: broker.Bus, inmem_broker: Broker, metrics: Metrics
) -> None:
    connections = [Series(f"anybroker_{name}_total") for name in ("disconnects", "reconnects", "warnings")]
    assert [metrics.read()[series] for series in connections] == [0, 0, 0]
    async with broker_bus.messages("orders", subscription="billing") as inbox:
        assert await inbox.next_message(timeout=0.01) is None
        inmem_broker.faults.fail("fetch")
        inmem_broker.faults.restart()
        await until(lambda: number(metrics, "fetch_failures_total") >= 1)
        await until(lambda: metrics.read()[connections[1]] == 1)
    broker_bus.hooks.emit(Warned(text="look here"))
    assert [metrics.read()[series] for series in connections] == [1, 1, 1]


async def test_positions_that_are_reset(broker_bus: broker.Bus, metrics: Metrics) -> None:
    # In memory no position is ever lost.
    broker_bus.hooks.emit(PositionReset(partition=("orders", 1), position=7, to=9, policy="earliest"))
    assert number(metrics, "position_resets_total") == 1


async def test_the_topics_of_one_group_share_a_label(broker_bus: broker.Bus, metrics: Metrics) -> None:
    await broker_bus.admin.ensure_topic("invoices")
    for topic in ("orders", "invoices"):
        await broker_bus.topic(topic).publish(b"x")
    log = broker_bus.records(["orders", "invoices"], group="billing", stop_when_idle=0.1)
    async with log.as_messages(dead_letter=broker.DROP) as inbox:
        async for message in inbox:
            await message.reject("wrong")
    together = "orders, invoices"
    for name in ("acked_messages_total", "dropped_messages_total"):
        assert number(metrics, name, together) == 2
        assert number(metrics, name) == 0


async def test_topics_beyond_the_maximum_share_a_label(broker_bus: broker.Bus) -> None:
    metrics = Metrics(broker_bus.hooks, max_topics=2)
    for number_of_topic in range(5):
        name = f"topic-{number_of_topic}"
        await broker_bus.admin.ensure_topic(name)
        await broker_bus.topic(name).publish(b"x")
        async with broker_bus.messages(name, subscription="billing") as inbox:
            await inbox.next_message()
            assert number(metrics, "in_flight_messages", OTHER) == (number_of_topic > 1)
    assert number(metrics, "published_messages_total", "topic-1") == 1
    assert number(metrics, "published_messages_total", "topic-2") == 0
    assert number(metrics, "published_messages_total", OTHER) == 3
    assert number(metrics, "in_flight_messages", OTHER) == 0
    assert len({dict(series.labels)["topic"] for series in metrics.read() if series.labels}) == 3


async def test_a_close_ends_the_counting_and_keeps_the_counts(broker_bus: broker.Bus, metrics: Metrics) -> None:
    later = Metrics(broker_bus, broker_bus.hooks)
    await broker_bus.topic("orders").publish(b"1")
    metrics.close()
    metrics.close()
    await broker_bus.topic("orders").publish(b"2")
    assert number(metrics, "published_messages_total") == 1
    assert number(later, "published_messages_total") == 4
    later.close()
    assert not broker_bus.hooks.listening


async def test_messages_received_before_listening_are_in_flight(broker_bus: broker.Bus, metrics: Metrics) -> None:
    metrics.close()
    await broker_bus.topic("orders").publish_batch([b"1", b"2"])
    async with broker_bus.messages("orders", subscription="billing") as inbox:
        messages = [await anext(aiter(inbox)) for _ in range(2)]
        late = Metrics(broker_bus)
        assert in_flight(late)[0] == 2
        for message in messages:
            await message.ack()
        assert in_flight(late) == (0, 0)
    # Their arrival was not recorded.
    assert number(late, "acked_messages_total") == 2
    assert sum(histogram(late, "received_to_acked_seconds").counts) == 0


async def test_a_failing_metric_does_not_affect_consumers(broker_bus: broker.Bus, metrics: Metrics) -> None:
    broker_bus.hooks.emit(Published(topic="orders", outcomes=None, seconds=0.0))  # pyright: ignore[reportArgumentType]
    await broker_bus.topic("orders").publish(b"1")
    assert number(metrics, "published_messages_total") == 1


@pytest.mark.parametrize("most", [0, -1, 1.5, "many"])
def test_max_topics_is_a_number(most: object) -> None:
    with pytest.raises(broker.ConfigurationError, match="max_topics"):
        Metrics(max_topics=most)  # pyright: ignore[reportArgumentType]


def test_a_blocking_bus_is_read_from_another_thread(inmem_broker: Broker) -> None:
    with broker.blocking.connect(inmem_broker.url) as bus:
        metrics = Metrics(bus)
        bus.admin.ensure_topic("orders")
        bus.topic("orders").publish_batch([b"x"] * 500)
        with bus.messages("orders", subscription="billing", stop_when_idle=0.1) as inbox:
            for message in inbox:
                message.ack()
                assert metrics.text()
        assert number(metrics, "acked_messages_total") == 500
        assert in_flight(metrics) == (0, 0)


async def test_several_buses_share_metrics(broker_bus: broker.Bus, inmem_broker: Broker) -> None:
    async with broker.connect(inmem_broker.url) as other:
        metrics = Metrics(broker_bus, other)
        await other.admin.ensure_topic("orders")
        await asyncio.gather(*(bus.topic("orders").publish(b"x") for bus in (broker_bus, other)))
        async with (
            broker_bus.messages("orders", subscription="billing") as one,
            other.messages("orders", subscription="audit") as two,
        ):
            await one.next_message()
            await two.next_message()
            await until(lambda: in_flight(metrics)[0] >= 2)
    assert number(metrics, "published_messages_total") == 2
    assert in_flight(metrics) == (0, 0)
