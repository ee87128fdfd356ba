"""Sessions: keys in order with one consumer at a time, over processes, crashes and lost locks."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from broker.errors import LeaseLost
from broker.messages import Message
from broker.outbound import OutboundMessage
from broker.testing.waiting import eventually, numbered, take
from tests.servers.servicebus import ServiceBusDouble
from tests.servicebus.conftest import Open

SECONDS = 40.0


async def test_many_sessions_at_once_each_in_order(open_bus: Open, topic: str):
    bus = await open_bus(max_sessions=4, session_idle=0.1)
    other = await open_bus(max_sessions=4, session_idle=0.1)
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_subscription(topic, "billing", requires_session=True)
    for body in numbered(10):
        await bus.topic(topic).publish_batch([OutboundMessage(body, key=f"key-{key}") for key in range(12)])
    seen: defaultdict[bytes | None, list[bytes | None]] = defaultdict(list)
    running: set[bytes | None] = set()

    async def handle(message: Message[bytes]) -> None:
        assert message.key not in running
        running.add(message.key)
        await asyncio.sleep(0)
        seen[message.key].append(message.data)
        running.discard(message.key)

    inboxes = [each.messages(topic, subscription="billing", ordered_by_key=True) for each in (bus, other)]
    for inbox in inboxes:
        await inbox.__aenter__()
    work = [asyncio.ensure_future(inbox.receive(handle, concurrency=4)) for inbox in inboxes]
    await eventually(lambda: sum(map(len, seen.values())) >= 120, SECONDS, "all messages")
    for inbox in inboxes:
        await inbox.close()
    await asyncio.gather(*work)
    assert all(bodies == numbered(10) for bodies in seen.values())
    assert len(seen) == 12


async def test_ordered_consumers_make_subscriptions_with_sessions(open_bus: Open, topic: str):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    async with bus.messages(topic, subscription="billing", ordered_by_key=True):
        described = await bus.admin.describe_subscription(topic, "billing")
        assert described.native["requires_session"] is True


async def test_session_lock_lost(open_bus: Open, topic: str, double: ServiceBusDouble):
    bus = await open_bus(session_idle=0.1)
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_subscription(topic, "billing", requires_session=True)
    async with bus.messages(topic, subscription="billing", ordered_by_key=True) as inbox:
        await bus.topic(topic).publish_batch([OutboundMessage(body, key="k") for body in numbered(4)])
        (head,) = await take(inbox, 1, SECONDS)
        assert head.data == b"m-000000"
        double.fault(drop="links", address=f"{topic}/Subscriptions/billing")
        await eventually(lambda: head.lease_lost, SECONDS, "the news that the session is lost")
        try:
            await head.ack()
        except LeaseLost:
            pass
        else:
            raise AssertionError("an ack of a lost session went through")
        again: list[bytes | None] = []
        while len(again) < 4:
            (message,) = await take(inbox, 1, SECONDS)
            again.append(message.data)
            await message.ack()
        assert again == numbered(4)


async def test_session_state_by_the_client(open_bus: Open, topic: str):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic, kind="queue", requires_session=True)
    await bus.topic(topic).publish(b"x", key="42")
    async with bus.backend.client.get_queue_receiver(topic, session_id="42") as receiver:
        await receiver.session.set_state(b"half done")
    async with bus.backend.client.get_queue_receiver(topic, session_id="42") as receiver:
        assert await receiver.session.get_state() == b"half done"
