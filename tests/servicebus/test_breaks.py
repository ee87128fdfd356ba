"""Links and connections that the server ends: they are reported as breaks and recreated."""

from __future__ import annotations

import asyncio

import pytest

from broker.driver.contract import MessageSubscription, Settlement
from broker.hooks import Disconnected, Event
from broker.messages import Message, Outcome
from broker.testing.waiting import eventually, take
from tests.servers.servicebus import ServiceBusDouble
from tests.servicebus.conftest import Listener, Open

SECONDS = 30.0


async def test_an_ended_management_link_loses_no_ack(open_bus: Open, topic: str, double: ServiceBusDouble):
    """The service ends links that are idle for some minutes, the management link first."""
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    async with bus.messages(topic, subscription="billing") as inbox:
        await bus.topic(topic).publish(b"a")
        (message,) = await take(inbox, 1, SECONDS)
        await message.ack()
        double.fault(drop="links", address=f"{topic}/Subscriptions/billing/$management")
        await bus.topic(topic).publish(b"b")
        (message,) = await take(inbox, 1, SECONDS)
        assert message.data == b"b"
        await message.ack()
        assert (await bus.admin.lag(topic, "billing")).waiting == 0


async def test_an_ack_that_crosses_the_end_of_its_link_is_retried(open_bus: Open, topic: str, double: ServiceBusDouble):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_subscription(topic, "billing")
    source = await bus.backend.subscribe(MessageSubscription(topic=topic, subscription="billing"), Listener())
    await bus.topic(topic).publish_batch([b"a", b"b"])
    messages: list[Message[bytes]] = []
    while len(messages) < 2:
        messages += await source.fetch(2, 1_000_000, 1.0)
    first, second = (Settlement(message, Outcome.ACK) for message in messages)
    assert await source.settle([first]) == [None]
    # No fetch is running, so the client sends the ack before it reads that the link has ended.
    double.fault(drop="links", address=f"{topic}/Subscriptions/billing/$management")
    assert await source.settle([second]) == [None]
    assert (await bus.admin.lag(topic, "billing")).waiting == 0
    await source.close()


@pytest.mark.parametrize("sessions", [False, True], ids=["messages", "sessions"])
async def test_a_consumer_reconnects_after_the_server_closed_the_connection(
    open_bus: Open, topic: str, double: ServiceBusDouble, sessions: bool
):
    bus = await open_bus()
    events: list[Event] = []
    bus.hooks.listen(events.append)
    await bus.admin.ensure_topic(topic)
    async with bus.messages(topic, subscription="billing", ordered_by_key=sessions) as inbox:
        await bus.topic(topic).publish(b"before", key="a")
        (message,) = await take(inbox, 1, SECONDS)
        await message.ack()
        waiting = asyncio.ensure_future(inbox.next_message(timeout=SECONDS))
        double.fault(drop="closed")
        await eventually(lambda: any(isinstance(each, Disconnected) for each in events), SECONDS, "the break")
        await bus.topic(topic).publish(b"after", key="a")
        message = await waiting
        assert message is not None and message.data == b"after"
        await message.ack()
