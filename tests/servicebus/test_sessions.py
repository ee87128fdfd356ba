"""Sessions: the order per key with one consumer at a time, over several consumers and lost locks."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest

from broker.driver.contract import MessageSubscription, Settlement
from broker.errors import LeaseLost, SettleError
from broker.hooks import Disconnected, Event
from broker.messages import Message, Outcome
from broker.outbound import OutboundMessage
from broker.testing.waiting import eventually, nothing_more, numbered, take
from broker_servicebus import sessions
from tests.servers.servicebus import ServiceBusDouble
from tests.servicebus.conftest import NAMESPACE, Listener, Open

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


async def test_ordered_consumers_create_subscriptions_with_sessions(open_bus: Open, topic: str):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    async with bus.messages(topic, subscription="billing", ordered_by_key=True):
        described = await bus.admin.describe_subscription(topic, "billing")
        assert described.native["requires_session"] is True


async def test_a_lost_session_is_redelivered_in_order(open_bus: Open, topic: str, double: ServiceBusDouble):
    bus = await open_bus(session_idle=0.1)
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_subscription(topic, "billing", requires_session=True)
    async with bus.messages(topic, subscription="billing", ordered_by_key=True) as inbox:
        await bus.topic(topic).publish_batch([OutboundMessage(body, key="k") for body in numbered(4)])
        (head,) = await take(inbox, 1, SECONDS)
        assert head.data == b"m-000000"
        double.fault(drop="links", address=f"{topic}/Subscriptions/billing")
        await eventually(lambda: head.lease_lost, SECONDS, "the loss of the session")
        try:
            await head.ack()
        except LeaseLost:
            pass
        else:
            raise AssertionError("an ack of a lost session succeeded")
        again: list[bytes | None] = []
        while len(again) < 4:
            (message,) = await take(inbox, 1, SECONDS)
            again.append(message.data)
            await message.ack()
        assert again == numbered(4)


@pytest.mark.parametrize("most", [1, 2], ids=["full", "with room"])
async def test_a_lock_that_cannot_be_renewed_frees_its_slot(
    open_bus: Open, topic: str, double: ServiceBusDouble, most: int
):
    bus = await open_bus(lease_seconds=3, max_sessions=1)
    await bus.admin.ensure_topic(topic)
    async with bus.messages(topic, subscription="billing", ordered_by_key=True, max_outstanding=most) as inbox:
        await bus.topic(topic).publish(b"x", key="k")
        (message,) = await take(inbox, 1, SECONDS)
        # After the fetch: an earlier refusal would redeliver the message, and its next lock would be renewed.
        lost = {"condition": "com.microsoft:session-lock-lost", "code": 410}
        double.fault(refuse="renew-session-lock", address=f"{topic}/Subscriptions/billing", **lost)
        await eventually(lambda: message.lease_lost, SECONDS, "the loss of the session")
        (message,) = await take(inbox, 1, SECONDS)
        assert message.data == b"x"
        await message.ack()


async def test_an_unanswered_ack_does_not_block_its_key(open_bus: Open, topic: str, double: ServiceBusDouble):
    patient, bus = await open_bus(), await open_bus(request_timeout=2, session_idle=0.1)
    await patient.admin.ensure_topic(topic)
    await patient.admin.ensure_subscription(topic, "billing", requires_session=True)
    async with bus.messages(topic, subscription="billing", ordered_by_key=True) as inbox:
        await bus.topic(topic).publish_batch([OutboundMessage(body, key="k") for body in numbered(3)])
        (head,) = await take(inbox, 1, SECONDS)
        double.fault(swallow="com.microsoft:update-disposition")
        with pytest.raises(SettleError):
            await head.ack()
        # The server settled it, so the next messages follow.
        for body in numbered(3)[1:]:
            (message,) = await take(inbox, 1, SECONDS)
            assert message.data == body
            await message.ack()


async def test_a_throttled_ack_keeps_its_session(open_bus: Open, topic: str, double: ServiceBusDouble):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    async with bus.messages(topic, subscription="billing", ordered_by_key=True) as inbox:
        await bus.topic(topic).publish_batch([OutboundMessage(body, key="k") for body in numbered(2)])
        (head,) = await take(inbox, 1, SECONDS)
        busy = {"condition": "com.microsoft:server-busy", "text": "The request was terminated because it is throttled."}
        double.fault(refuse="update-disposition", times=2, code=503, **busy)
        await head.ack()
        (follower,) = await take(inbox, 1, SECONDS)
        assert follower.data == numbered(2)[1]
        await follower.ack()


@pytest.mark.deep
async def test_a_session_is_renewed_while_a_handler_works(open_bus: Open, topic: str):
    lock = 5.0 if NAMESPACE else 2.0
    bus = await open_bus(lease_seconds=lock, session_idle=0.1)
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_subscription(topic, "billing", requires_session=True)
    inboxes = [bus.messages(topic, subscription="billing", ordered_by_key=True) for _ in range(2)]
    async with inboxes[0] as inbox, inboxes[1] as other:
        await bus.topic(topic).publish_batch([OutboundMessage(body, key="k") for body in numbered(2)])
        waiting = [asyncio.ensure_future(each.next_message()) for each in (inbox, other)]
        (first,), (idle,) = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        head = first.result()
        assert head is not None
        await asyncio.wait({idle}, timeout=2 * lock)
        assert not idle.done(), "the session went to another consumer"
        assert not head.lease_lost
        await head.ack()
        holder = inbox if first is waiting[0] else other
        (follower,) = await take(holder, 1, SECONDS)
        await follower.ack()
        assert [head.data, follower.data] == numbered(2)
        idle.cancel()
        await asyncio.wait({idle})


@pytest.mark.deep
@pytest.mark.parametrize("fast", [True, False])
async def test_waiting_for_a_session_reports_no_failure(
    open_bus: Open, topic: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fast: bool
):
    monkeypatch.setattr(sessions, "_ACCEPT_SECONDS", 0.3)
    bus = await open_bus(session_idle=0.1, private_calls=fast)
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_subscription(topic, "billing", requires_session=True)
    breaks: list[Event] = []
    bus.hooks.listen(lambda event: breaks.append(event) if isinstance(event, Disconnected) else None)
    async with bus.messages(topic, subscription="billing", ordered_by_key=True) as inbox:
        await nothing_more(inbox, 1.5)
        await bus.topic(topic).publish(b"x", key="k")
        assert [message.data for message in await take(inbox, 1, SECONDS)] == [b"x"]
        await nothing_more(inbox, 1.5)
    assert breaks == []
    lines = [record.getMessage() for record in caplog.records if record.name.startswith(("broker", "azure"))]
    assert [text for text in lines if "failed" in text or "raised" in text] == []


async def test_an_interrupted_consumer_accepts_no_session(open_bus: Open, topic: str):
    bus = await open_bus(session_idle=5)
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_subscription(topic, "billing", requires_session=True)
    subscription = MessageSubscription(topic=topic, subscription="billing", ordered_by_key=True)
    stopped = await bus.backend.subscribe(subscription, Listener())
    # It has one session, and waits for another.
    await bus.topic(topic).publish(b"one", key="a")
    held = await stopped.fetch(10, 1_000_000, SECONDS)
    assert [message.data for message in held] == [b"one"]
    # A consumer accepts sessions before its first fetch, so this one must start after the first message.
    other = await bus.backend.subscribe(subscription, Listener())
    assert await stopped.fetch(10, 1_000_000, 1.0) == []
    stopped.interrupt()
    await bus.topic(topic).publish_batch([OutboundMessage(b"two", key="b"), OutboundMessage(b"three", key="a")])
    (message,) = await other.fetch(10, 1_000_000, 3.0)
    assert message.data == b"two"
    # A session without unsettled messages is released.
    assert await stopped.settle([Settlement(held[0], Outcome.ACK)]) == [None]
    (message,) = await other.fetch(10, 1_000_000, 3.0)
    assert (message.data, message.delivery_attempt) == (b"three", 1)
    # The next fetch accepts sessions again.
    await bus.topic(topic).publish(b"four", key="c")
    await other.close()
    seen: set[bytes | None] = set()
    async with asyncio.timeout(SECONDS):
        while len(seen) < 3:
            seen |= {message.data for message in await stopped.fetch(10, 1_000_000, 1.0)}
    assert seen == {b"two", b"three", b"four"}
    await stopped.close()


async def test_no_more_sessions_than_outstanding_messages(open_bus: Open, topic: str):
    bus = await open_bus(session_idle=0.1)
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_subscription(topic, "billing", requires_session=True)
    subscription = MessageSubscription(topic=topic, subscription="billing", ordered_by_key=True, max_outstanding=1)
    busy = await bus.backend.subscribe(subscription, Listener())
    await bus.topic(topic).publish_batch([OutboundMessage(b"%d" % number, key=f"key-{number}") for number in range(4)])
    (held,) = await busy.fetch(1, 1_000_000, SECONDS)
    # It is full, so the other keys go to the next consumer.
    other = await bus.backend.subscribe(subscription, Listener())
    seen: set[bytes | None] = set()
    async with asyncio.timeout(SECONDS):
        while len(seen) < 3:
            for message in await other.fetch(1, 1_000_000, 1.0):
                seen.add(message.data)
                assert await other.settle([Settlement(message, Outcome.ACK)]) == [None]
    assert seen | {held.data} == {b"0", b"1", b"2", b"3"}
    assert await busy.settle([Settlement(held, Outcome.ACK)]) == [None]
    await other.close()
    await busy.close()


async def test_session_state_by_the_client(open_bus: Open, topic: str):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic, kind="queue", requires_session=True)
    await bus.topic(topic).publish(b"x", key="42")
    async with bus.backend.client.get_queue_receiver(topic, session_id="42") as receiver:
        await receiver.session.set_state(b"half done")
    async with bus.backend.client.get_queue_receiver(topic, session_id="42") as receiver:
        assert await receiver.session.get_state() == b"half done"
