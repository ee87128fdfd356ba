"""A consumer that is suspended while its STARTs or acks are written."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from broker.bus import connect
from broker.driver.contract import TopicPartition
from broker.errors import BrokerError, LeaseLost, SettleError
from broker.hooks import Event, LeaseExpired, Received, SettleFailed
from broker.messages import Message, SettleState
from broker.outbound import OutboundMessage
from broker.testing.waiting import eventually, nothing_more, take
from broker_kafka.queue.consumer.queue_client import QueueClient
from broker_kafka.queue.markers.marker_producer import MarkerProducer, PlacedMarker
from broker_kafka.queue.markers.wire import Kind, read_markers
from tests.kafka.key_order import handed_over
from tests.servers.kafka import KafkaServer


@pytest.mark.deep
async def test_an_ack_within_the_lease_is_not_reported_lost(
    kafka: KafkaServer, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = MarkerProducer.write

    async def suspended(
        producer: MarkerProducer, markers: Sequence[PlacedMarker], **more: float
    ) -> list[BrokerError | None]:
        outcomes = await write(producer, markers, **more)
        ((marker, _),) = read_markers(markers[0].data)
        if marker is not None and marker.kind is Kind.END:
            time.sleep(1.2)  # noqa: ASYNC251
        return outcomes

    monkeypatch.setattr(MarkerProducer, "write", suspended)
    async with (
        connect(f"{kafka.url}?queue=markers&lease_seconds=1") as bus,
        bus.messages(topic, subscription=group, confirm_acks=True) as inbox,
    ):
        await bus.topic(topic).publish(b"once")
        (message,) = await take(inbox, 1, 20.0)
        with pytest.raises(SettleError) as raised:
            await message.ack()
        # LeaseLost would promise that it comes again, and it was done.
        assert not isinstance(raised.value, LeaseLost)
        assert message.state is SettleState.UNKNOWN
        await nothing_more(inbox, 1.5)
        assert (await bus.admin.lag(topic, group)).unsettled == 0


@pytest.mark.parametrize("transactions", [True, False])
async def test_a_message_started_too_slowly_precedes_the_next_of_its_key(
    kafka: KafkaServer, topic: str, group: str, monkeypatch: pytest.MonkeyPatch, transactions: bool
) -> None:
    slow = 2
    hand_over: Any = vars(QueueClient)["_hand_over"]

    def too_late(client: QueueClient, positions: Mapping[TopicPartition, int], until: float) -> list[Message[Any]]:
        nonlocal slow
        slow -= bool(positions)
        return hand_over(client, positions, until if slow < 0 else 0.0)

    monkeypatch.setattr(QueueClient, "_hand_over", too_late)
    events: list[Event] = []
    bodies = [b"%d" % number for number in range(6)]
    # One at a time is taken, so that the first two come too late, and what follows them does not.
    async with (
        connect(f"{kafka.url}?queue=markers&queue_transactions={str(transactions).lower()}") as bus,
        bus.messages(topic, subscription=group, ordered_by_key=True, max_outstanding=1) as inbox,
    ):
        bus.hooks.listen(events.append)
        handled = await handed_over(bus, topic, inbox, bodies)
    assert handled == bodies
    assert [event.message.data for event in events if isinstance(event, LeaseExpired)] == bodies[:2]


@pytest.mark.deep
@pytest.mark.parametrize("queue", ["markers&lease_seconds=1", "share&share_lock=1"])
async def test_buffered_messages_with_ended_leases_are_not_handed_over(
    kafka: KafkaServer, topic: str, group: str, queue: str
) -> None:
    events: list[Event] = []
    async with connect(f"{kafka.url}?queue={queue}") as bus, bus.messages(topic, subscription=group) as inbox:
        bus.hooks.listen(events.append)
        await bus.topic(topic).publish_batch([OutboundMessage(body, key="mail") for body in (b"0", b"1")])
        (held,) = await take(inbox, 1, 20.0)
        received = lambda: sum(len(event.messages) for event in events if isinstance(event, Received))  # noqa: E731
        await eventually(lambda: received() == 2, 20.0, "the second waits in the buffer")
        time.sleep(1.2)  # noqa: ASYNC251
        found = await take(inbox, 2, 20.0)
        assert sorted((each.data, each.delivery_attempt) for each in found) == [(b"0", 2), (b"1", 2)]
        with pytest.raises(LeaseLost):
            await held.ack()
        for message in found:
            await message.ack()
        lost = {event.message.data: event.message.state for event in events if isinstance(event, LeaseExpired)}
        assert lost == {b"0": SettleState.LOST, b"1": SettleState.LOST}


@pytest.mark.deep
async def test_an_unconfirmed_ack_after_a_suspension_is_reported_failed(
    kafka: KafkaServer, topic: str, group: str
) -> None:
    events: list[Event] = []
    async with (
        connect(f"{kafka.url}?queue=markers&lease_seconds=1") as bus,
        bus.messages(topic, subscription=group) as inbox,
    ):
        bus.hooks.listen(events.append)
        await bus.topic(topic).publish(b"once")
        (message,) = await take(inbox, 1, 20.0)
        time.sleep(1.2)  # noqa: ASYNC251
        await message.ack()
        (again,) = await take(inbox, 1, 20.0)
        assert (again.data, again.delivery_attempt) == (b"once", 2)
        (refused,) = [event for event in events if isinstance(event, SettleFailed)]
        assert (refused.message, type(refused.error), message.state) == (message, LeaseLost, SettleState.LOST)
        await again.ack()
