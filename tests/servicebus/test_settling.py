"""Settling in batches and one by one, and after lost locks, links and connections."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from broker.bus import Bus
from broker.consuming.retry.policy import DROP, Retry
from broker.driver.contract import MessageSubscription, Settlement
from broker.errors import LeaseLost, SettleError
from broker.hooks import Connected, Disconnected, Event
from broker.messages import Message, Outcome
from broker.names import native_name
from broker.outbound import OutboundMessage
from broker.testing.waiting import eventually, let_pass, numbered, take
from tests.servers.proxy import Proxy
from tests.servers.servicebus import ServiceBusDouble
from tests.servicebus.conftest import Listener, Open

SECONDS = 30.0


async def empty(bus: Bus, topic: str, subscription: str = "billing") -> bool:
    return (await bus.admin.lag(topic, subscription)).waiting == 0


async def test_a_batch_is_settled(both_ways: Bus, topic: str):
    bus = both_ways
    await bus.admin.ensure_topic(topic)
    async with bus.messages(topic, subscription="billing") as inbox:
        await bus.topic(topic).publish_batch(numbered(60))
        seen: list[bytes | None] = []
        while len(seen) < 60:
            batch = await inbox.next_batch(60, timeout=SECONDS)
            seen += [message.data for message in batch]
            await batch.ack()
        assert seen == numbered(60)
        assert await empty(bus, topic)


async def test_one_request_settles_a_batch(open_bus: Open, topic: str, double: ServiceBusDouble):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    async with bus.messages(topic, subscription="billing") as inbox:
        await bus.topic(topic).publish_batch(numbered(300))
        messages = await take(inbox, 300, SECONDS)
        double.fault()
        await asyncio.gather(*(message.ack() for message in messages))
        requests = double.requests()
        assert requests["update-disposition"] < 10
        assert await empty(bus, topic)


@pytest.mark.deep
@pytest.mark.parametrize("sessions", [False, True], ids=["messages", "sessions"])
async def test_locks_of_buffered_messages_are_renewed(open_bus: Open, topic: str, sessions: bool):
    bus = await open_bus(lease_seconds=2)
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_subscription(topic, "billing", requires_session=sessions)
    subscription = MessageSubscription(topic=topic, subscription="billing", ordered_by_key=sessions)
    source = await bus.backend.subscribe(subscription, Listener())
    await bus.topic(topic).publish_batch([OutboundMessage(bytes(4000), key="k") for _ in range(5)])
    while not (found := list(await source.fetch(5, 5000, 1.0))):
        pass
    assert len(found) == 1
    waited = asyncio.ensure_future(let_pass(5.0))  # two and a half lock durations
    while not waited.done():
        await source.extend(found)
        await asyncio.wait({waited}, timeout=0.5)
    while len(found) < 5:
        found += await source.fetch(5, 5000, 1.0)
    assert [message.delivery_attempt for message in found] == [1] * 5
    assert await source.settle([Settlement(message, Outcome.ACK) for message in found]) == [None] * 5
    await source.close()
    assert await empty(bus, topic)


async def test_delivery_attempts_and_the_reason_of_a_rejection(both_ways: Bus, topic: str):
    bus = both_ways
    await bus.admin.ensure_topic(topic)
    async with bus.messages(topic, subscription="billing", dead_letter=DROP, retry=Retry(initial=0.01)) as inbox:
        await bus.topic(topic).publish(b"x", key="k", attributes={"a": "b"})
        for attempt in (1, 2):
            (message,) = await take(inbox, 1, SECONDS)
            assert message.delivery_attempt == attempt
            await message.nack(delay=0)
        (message,) = await take(inbox, 1, SECONDS)
        await message.reject("worthless")
    dead = native_name(f"{topic}/Subscriptions/billing/$DeadLetterQueue")
    assert (await bus.admin.lag(dead, "queue")).waiting == 1
    async with bus.messages(dead, subscription="queue") as letters:
        (letter,) = await take(letters, 1, SECONDS)
        assert (letter.data, letter.key, letter.attributes["a"]) == (b"x", b"k", "b")
        assert letter.attributes["dead-letter-reason"] == "worthless"
        assert letter.attributes["dead-letter-topic"] == topic
        assert letter.native.dead_letter_reason == "worthless"


async def test_a_native_dead_letter_carries_the_error_of_the_handler(both_ways: Bus, topic: str):
    bus = both_ways

    async def handle(message: Message[bytes]) -> None:
        raise ValueError(f"no price for {message.data!r}")

    await bus.admin.ensure_topic(topic)
    async with bus.messages(topic, subscription="billing", dead_letter=DROP, retry=Retry(max_attempts=1)) as inbox:
        await bus.topic(topic).publish(b"x")
        work = asyncio.ensure_future(inbox.receive(handle))
        dead = native_name(f"{topic}/Subscriptions/billing/$DeadLetterQueue")

        async def is_dead() -> bool:
            return (await bus.admin.lag(dead, "queue")).waiting == 1

        await eventually(is_dead, SECONDS, "the dead letter")
        inbox.stop()
        await work
    (letter,) = await bus.admin.list_dead(dead)
    assert letter.error is not None
    assert "no price for b'x'" in letter.error
    assert letter.reason == "failed 1 times"


async def test_native_dead_letters_are_listed_and_redriven(open_bus: Open, topic: str):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    async with bus.messages(topic, subscription="billing", dead_letter=DROP) as inbox:
        await bus.topic(topic).publish_batch(numbered(5))
        for message in await take(inbox, 5, SECONDS):
            await message.reject("worthless")
        dead = native_name(f"{topic}/Subscriptions/billing/$DeadLetterQueue")
        letters = await bus.admin.list_dead(dead, limit=10)
        assert [(letter.data, letter.reason, letter.topic) for letter in letters] == [
            (body, "worthless", topic) for body in numbered(5)
        ]
        report = await bus.admin.redrive(dead)
        assert (report.moved, report.skipped, report.failed) == (5, 0, 0)
        assert sorted(message.data or b"" for message in await take(inbox, 5, SECONDS)) == numbered(5)


async def test_one_lost_lock_in_a_batch_needs_few_requests(open_bus: Open, topic: str, double: ServiceBusDouble):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    async with bus.messages(topic, subscription="billing") as inbox:
        await bus.topic(topic).publish_batch(numbered(200))
        messages = await take(inbox, 200, SECONDS)
        receiver = bus.backend.client.get_subscription_receiver(topic, "billing")
        async with receiver:
            # Another client settles one of them.
            await receiver._settle_message_via_mgmt_link("completed", [messages[77].native.lock_token])
        double.fault()
        results = await asyncio.gather(*(message.ack() for message in messages), return_exceptions=True)
        failed = [number for number, result in enumerate(results) if result is not None]
        assert failed == [77]
        assert isinstance(results[77], LeaseLost)
        assert double.requests()["update-disposition"] < 30
        assert await empty(bus, topic)


async def test_a_batch_of_lost_locks_needs_few_requests(open_bus: Open, topic: str, double: ServiceBusDouble):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    async with bus.messages(topic, subscription="billing") as inbox:
        await bus.topic(topic).publish_batch(numbered(200))
        messages = await take(inbox, 200, SECONDS)
        await asyncio.to_thread(double.restart)  # the double keeps no locks over a restart
        double.fault()
        results = await asyncio.gather(*(message.ack() for message in messages), return_exceptions=True)
        assert all(isinstance(result, LeaseLost | SettleError) for result in results)
        assert double.requests().get("update-disposition", 0) < 60


async def test_acks_succeed_after_a_dropped_link(both_ways: Bus, topic: str, double: ServiceBusDouble):
    bus = both_ways
    await bus.admin.ensure_topic(topic)
    async with bus.messages(topic, subscription="billing") as inbox:
        await bus.topic(topic).publish_batch(numbered(20))
        messages = await take(inbox, 20, SECONDS)
        double.fault(drop="links", address=f"{topic}/Subscriptions/billing")
        results = await asyncio.gather(*(message.ack() for message in messages), return_exceptions=True)
        assert [result for result in results if result is not None] == []
        assert await empty(bus, topic)


async def test_an_unanswered_ack_has_an_unknown_outcome(open_bus: Open, topic: str, double: ServiceBusDouble):
    # One request of five seconds, as other requests of this bus may take that long on a busy machine.
    bus = await open_bus(request_timeout=5, settle_timeout=6)
    await bus.admin.ensure_topic(topic)
    async with bus.messages(topic, subscription="billing") as inbox:
        await bus.topic(topic).publish(b"x")
        (message,) = await take(inbox, 1, SECONDS)
        double.fault(swallow="com.microsoft:update-disposition")
        # The server settled it, which the client cannot know.
        with pytest.raises(SettleError):
            await message.ack()
        assert await empty(bus, topic)


@pytest.mark.deep
async def test_no_message_is_lost_when_connections_are_cut_during_acks(
    open_bus: Open, topic: str, double: ServiceBusDouble
):
    with Proxy(double.port) as proxy:
        bus = await open_bus(double.url_at(proxy.port), lease_seconds=2, deduplication_window=0)
        events: list[Event] = []
        bus.hooks.listen(events.append)
        await bus.admin.ensure_topic(topic)
        seen: Counter[bytes | None] = Counter()
        async with asyncio.timeout(60), bus.messages(topic, subscription="billing") as inbox:
            await bus.topic(topic).publish_batch(numbered(200))
            while len(seen) < 200 or not await empty(bus, topic):
                batch = await inbox.next_batch(40, timeout=1.0)
                seen.update(message.data for message in batch)
                acking = asyncio.ensure_future(batch.ack())
                if len(seen) in range(40, 160):
                    await asyncio.sleep(0)
                    proxy.cut(after_bytes=50)
                await asyncio.gather(acking, return_exceptions=True)
        assert sorted(body or b"" for body in seen) == numbered(200)
        assert proxy.cuts
        assert any(isinstance(event, Disconnected) for event in events)
        assert any(isinstance(event, Connected) and event.again for event in events)


async def test_throttled_requests_are_retried(open_bus: Open, topic: str, double: ServiceBusDouble):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    busy = {"condition": "com.microsoft:server-busy", "text": "The request was terminated because it is throttled."}
    async with bus.messages(topic, subscription="billing") as inbox:
        double.fault(refuse="send", times=3, address=topic, **busy)
        await bus.topic(topic).publish(b"x")
        (message,) = await take(inbox, 1, SECONDS)
        double.fault(refuse="update-disposition", times=2, code=503, **busy)
        await message.ack()
        requests = double.requests()
        assert requests["send"] >= 4
        assert await empty(bus, topic)


async def test_a_deleted_entity_ends_its_consumer(open_bus: Open, topic: str):
    from broker.errors import NotFound

    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    async with bus.messages(topic, subscription="billing") as inbox:
        waiting = asyncio.ensure_future(inbox.next_message())
        await asyncio.wait({waiting}, timeout=0.2)
        await bus.admin.delete_topic(topic)
        with pytest.raises(NotFound):
            async with asyncio.timeout(SECONDS):
                await waiting


async def test_refused_credentials_fail_a_publish(open_bus: Open, topic: str, double: ServiceBusDouble):
    from broker.errors import AuthenticationFailed, BrokerError

    bus = await open_bus(publish_timeout=2)
    await bus.admin.ensure_topic(topic)
    double.fault(refuse="put-token", times=50, condition="amqp:unauthorized-access", text="ExpiredToken", code=401)
    with pytest.raises(BrokerError) as raised:
        await bus.topic(topic).publish(b"x")
    assert isinstance(raised.value, AuthenticationFailed)
    double.fault()
    await bus.topic(topic).publish(b"x")


async def test_a_dropped_connection_is_reported_as_connected_again(
    open_bus: Open, topic: str, double: ServiceBusDouble
):
    bus = await open_bus()
    events: list[Event] = []
    bus.hooks.listen(events.append)
    await bus.admin.ensure_topic(topic)
    async with bus.messages(topic, subscription="billing"):
        double.fault(drop="connections")
        await eventually(
            lambda: any(isinstance(event, Connected) and event.again for event in events), SECONDS, "the reconnect"
        )


@pytest.mark.parametrize("sessions", [False, True], ids=["messages", "sessions"])
async def test_a_lock_is_renewed_long_before_it_ends(
    open_bus: Open, topic: str, double: ServiceBusDouble, sessions: bool
):
    # A consumer renews every third of the lock duration: a lock that is skipped now has less than half left then.
    bus = await open_bus(lease_seconds=5.0)
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_subscription(topic, "billing", requires_session=sessions)
    subscription = MessageSubscription(topic=topic, subscription="billing", ordered_by_key=sessions)
    source = await bus.backend.subscribe(subscription, Listener())
    await bus.topic(topic).publish(b"x", key="k")
    messages: list[Message[bytes]] = []
    while not messages:
        messages += await source.fetch(1, 1_000_000, 1.0)
    await let_pass(0.9)
    assert await source.extend(messages) == [None]
    renewed = "renew-session-lock" if sessions else "renew-lock"
    assert double.requests().get(renewed) == 1
    await source.close()


async def test_messages_acked_meanwhile_are_not_renewed(open_bus: Open, topic: str, double: ServiceBusDouble):
    # The server refuses a whole request for one settled message, and valid locks would be reported lost.
    bus = await open_bus(lease_seconds=5.0)
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_subscription(topic, "billing")
    source = await bus.backend.subscribe(MessageSubscription(topic=topic, subscription="billing"), Listener())
    await bus.topic(topic).publish_batch([b"%d" % number for number in range(40)])
    messages: list[Message[bytes]] = []
    while len(messages) < 40:
        messages += await source.fetch(40, 1_000_000, 1.0)
    await let_pass(0.9)
    acks = [Settlement(message, Outcome.ACK) for message in messages[::2]]
    settled, extended = await asyncio.gather(source.settle(acks), source.extend(messages))
    assert settled == [None] * 20
    assert extended == [None] * 40
    assert double.requests()["renew-lock"] == 1
    await source.close()


@pytest.mark.parametrize("sessions", [False, True], ids=["messages", "sessions"])
async def test_a_cancelled_close_continues(open_bus: Open, topic: str, sessions: bool):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_subscription(topic, "billing", requires_session=sessions)
    subscription = MessageSubscription(topic=topic, subscription="billing", ordered_by_key=sessions)
    source = await bus.backend.subscribe(subscription, Listener())
    await bus.topic(topic).publish_batch([OutboundMessage(bytes(4000), key="k") for _ in range(2)])
    # One is returned, the other is buffered in the source.
    while not await source.fetch(2, 5000, 1.0):
        pass
    await let_pass(0.2)
    closing = asyncio.ensure_future(source.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing})
    await eventually(lambda: source.closed, SECONDS, "the end of the close")
    async with bus.messages(topic, subscription="billing", ordered_by_key=sessions) as inbox:
        assert await take(inbox, 1, SECONDS)


async def test_messages_that_arrive_between_fetches_go_to_other_consumers(open_bus: Open, topic: str):
    bus = await open_bus(lease_seconds=60.0)
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_subscription(topic, "billing")
    subscription = MessageSubscription(topic=topic, subscription="billing")
    busy = await bus.backend.subscribe(subscription, Listener())
    other = await bus.backend.subscribe(subscription, Listener())
    await bus.topic(topic).publish(b"one")
    assert [message.data for message in await busy.fetch(10, 1_000_000, SECONDS)] == [b"one"]
    # Its link has credit for nine more messages.
    await bus.topic(topic).publish(b"two")
    (message,) = await other.fetch(10, 1_000_000, SECONDS)
    assert (message.data, message.delivery_attempt) == (b"two", 1)
    await busy.close()
    await other.close()


async def test_releases_of_a_slow_consumer_need_few_requests(open_bus: Open, topic: str, double: ServiceBusDouble):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_subscription(topic, "billing")
    seen: Counter[tuple[bytes | None, int | None]] = Counter()

    async def publish() -> None:
        for body in numbered(60):
            await bus.topic(topic).publish(body)
            await asyncio.sleep(0.02)

    async with bus.messages(topic, subscription="billing", max_outstanding=10) as inbox:
        double.fault()
        publishing = asyncio.ensure_future(publish())
        while len(seen) < 60:
            batch = await inbox.next_batch(10, timeout=SECONDS)
            seen.update((message.data, message.delivery_attempt) for message in batch)
            await asyncio.sleep(0.15)  # longer than the source keeps its credit without a fetch
            await batch.ack()
        await publishing
        requests = double.requests()
    # Each is delivered once; messages that arrive between fetches need a round trip and a few dispositions.
    assert seen == Counter({(body, 1): 1 for body in numbered(60)})
    assert requests.get("peek-message", 0) <= 10
    assert requests.get("settle", 0) <= 30
