"""Retry topics, on the in-memory broker with simulated time."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

import broker
from broker import Retry, RetryTopics
from broker.errors import (
    ConfigurationError,
    InvalidName,
    InvalidSetting,
    Unsupported,
)
from broker.hooks import DeadLettered, Event, HandlerFailed, RetryScheduled
from broker.messages import Message
from broker.outbound import OutboundMessage
from broker_inmem import Broker
from tests.unit.broker.consuming.retry_bench import DELAYS, GROUP, all_of, connect, handled, log, ready, until
from tests.unit.broker.consuming.warp import warped


def test_each_failure_waits_longer_and_the_last_is_dead_lettered_with_its_origin() -> None:
    async def test(server: Broker) -> None:
        async with connect(server) as bus:
            await ready(bus)
            events: list[Event] = []
            bus.hooks.listen(events.append)
            sent = OutboundMessage(b"bad", key=b"k", attributes={"colour": "red"}, id="order-1")
            receipt = await bus.topic("orders").publish(sent)
            tries: list[tuple[float, Any]] = []

            async def handle(message: Message[bytes]) -> None:
                tries.append((asyncio.get_running_loop().time(), message))
                assert (message.topic, message.id, message.key, message.data) == ("orders", "order-1", b"k", b"bad")
                assert dict(message.attributes) == {"colour": "red"}
                assert message.delivery_attempt == len(tries)
                assert message.publish_time == tries[0][1].publish_time
                raise ValueError("no such order")

            inbox = log(bus).as_messages(retry_topics=DELAYS, dead_letter="orders.dead")
            async with inbox:
                await handled(inbox, handle, lambda: any(isinstance(event, DeadLettered) for event in events))
            waits = [after - before for (before, _), (after, _) in pairwise(tries)]
            assert [round(wait, 1) for wait in waits] == [5, 60, 600]
            assert all(wait > due - 0.001 for wait, due in zip(waits, DELAYS.delays, strict=True))
            (letter,) = await all_of(bus, "orders.dead")
            attributes = letter.attributes
            assert (letter.key, letter.data, attributes["colour"]) == (b"k", b"bad", "red")
            assert (attributes["dead-letter-topic"], attributes["dead-letter-id"]) == ("orders", "order-1")
            assert (attributes["dead-letter-reason"], attributes["dead-letter-attempts"]) == ("failed 4 times", "4")
            assert not [name for name in attributes if name.startswith("retry-letter-")]
            for number, name in enumerate(DELAYS.names("orders", GROUP), 1):
                (record,) = await all_of(bus, name)
                assert (record.key, record.data, record.attributes["colour"]) == (b"k", b"bad", "red")
                assert record.publish_time == tries[0][1].publish_time
                letter = record.attributes
                place = letter["retry-letter-topic"], letter["retry-letter-partition"], letter["retry-letter-offset"]
                assert place == ("orders", str(receipt.partition), str(receipt.offset))
                assert letter["retry-letter-reason"] == f"failed {number} times: ValueError: no such order"
                assert letter["retry-letter-attempts"] == letter["retry-letter-failures"] == str(number)
                assert letter["retry-letter-subscription"] == GROUP
            assert [event.failures for event in events if isinstance(event, HandlerFailed)] == [1, 2, 3, 4]
            assert [event.retry_in for event in events if isinstance(event, HandlerFailed)] == [5, 60, 600, None]
            assert [event.delay for event in events if isinstance(event, RetryScheduled)] == [5, 60, 600]
            for name in ("orders", *DELAYS.names("orders", GROUP)):
                assert (await bus.admin.lag(name, GROUP)).waiting == 0

    warped(test)


def test_a_waiting_message_blocks_no_other() -> None:
    async def test(server: Broker) -> None:
        async with connect(server) as bus:
            await ready(bus, partitions=1)
            seen: list[tuple[bytes | None, float]] = []
            start = asyncio.get_running_loop().time()

            async def handle(message: Message[bytes]) -> None:
                seen.append((message.data, asyncio.get_running_loop().time() - start))
                if message.data in (b"slow", b"slower") and message.delivery_attempt == 1:
                    await message.nack(delay=60 if message.data == b"slower" else 5)

            async with log(bus).as_messages(retry_topics=DELAYS) as inbox:
                work = asyncio.ensure_future(inbox.receive(handle))
                await bus.topic("orders").publish_batch([b"slower", b"slow"])
                await until(lambda: len(seen) == 2)
                await bus.topic("orders").publish_batch([b"%d" % n for n in range(2000)])
                await until(lambda: len(seen) == 2004)
                await inbox.close()
                await work
            times = dict(seen)
            assert max(time for data, time in seen if data not in (b"slow", b"slower")) < 5
            assert 4.999 < times[b"slow"] < 6
            assert 59.999 < times[b"slower"] < 62

    warped(test)


def test_messages_of_a_retry_topic_are_delivered_in_order_when_due() -> None:
    async def test(server: Broker) -> None:
        async with connect(server) as bus:
            await ready(bus, partitions=1)
            failed: dict[bytes | None, float] = {}
            again: dict[bytes | None, float] = {}

            async def handle(message: Message[bytes]) -> None:
                if message.delivery_attempt == 1:
                    failed[message.data] = time.time()
                    raise ValueError("later")
                again[message.data] = time.time()

            async with log(bus).as_messages(retry_topics=DELAYS, max_outstanding=10) as inbox:
                work = asyncio.ensure_future(inbox.receive(handle, concurrency=4))
                for number in range(100):
                    await bus.topic("orders").publish(b"%d" % number)
                    await asyncio.sleep(0.1)
                await until(lambda: len(again) == 100)
                await inbox.close()
                await work
            assert list(again) == [b"%d" % number for number in range(100)]
            waits = [again[data] - failed[data] for data in failed]
            assert min(waits) > 4.999
            assert max(waits) < 7

    warped(test)


def test_a_nack_waits_on_the_shortest_topic_that_keeps_its_delay() -> None:
    async def test(server: Broker) -> None:
        async with connect(server) as bus:
            await ready(bus)
            first, second, third = DELAYS.names("orders", GROUP)
            await bus.topic("orders").publish(b"x")
            async with log(bus).as_messages(retry_topics=DELAYS) as inbox:
                for attempt, (delay, name) in enumerate([(6, second), (None, first), (600, third), (0.1, first)], 1):
                    message = await inbox.next_message()
                    assert message is not None
                    assert message.delivery_attempt == attempt
                    if attempt == 1:
                        with pytest.raises(Unsupported, match="601"):
                            await message.nack(delay=601)
                        with pytest.raises(ConfigurationError, match="delay"):
                            await message.nack(delay=-1)
                    before = len(await all_of(bus, name))
                    await message.nack(delay)
                    assert len(await all_of(bus, name)) == before + 1
                message = await inbox.next_message()
                assert message is not None
                await message.nack(delay=0)
                message = await inbox.next_message(timeout=1)
                assert message is not None, "What is wanted at once comes from memory"
                assert message.delivery_attempt == 6
                assert message.topic == "orders"
                await message.ack()
            assert not await all_of(bus, "orders.dead")

    warped(test)


def test_nacks_use_up_deliveries_and_no_failures() -> None:
    async def test(server: Broker) -> None:
        async with connect(server) as bus:
            await ready(bus)
            retry = Retry(max_attempts=1, max_deliveries=6)
            await bus.topic("orders").publish(b"x")
            tries: list[int | None] = []

            async def handle(message: Message[bytes]) -> None:
                tries.append(message.delivery_attempt)
                await message.nack(delay=1)

            letters: list[Event] = []
            bus.hooks.listen(lambda event: letters.append(event) if isinstance(event, DeadLettered) else None)
            async with log(bus).as_messages(retry=retry, retry_topics=DELAYS, dead_letter="orders.dead") as inbox:
                await handled(inbox, handle, lambda: letters)
            assert tries == [1, 2, 3, 4, 5, 6]

    warped(test)


def test_a_retry_round_may_have_several_attempts_in_memory() -> None:
    async def test(server: Broker) -> None:
        topics = RetryTopics((30,))
        async with connect(server) as bus:
            await ready(bus, topics=topics)
            await bus.topic("orders").publish(b"x")
            tries: list[tuple[int | None, float]] = []

            async def handle(message: Message[bytes]) -> None:
                tries.append((message.delivery_attempt, time.time()))
                raise ValueError("always")

            letters: list[Event] = []
            bus.hooks.listen(lambda event: letters.append(event) if isinstance(event, DeadLettered) else None)
            retry = Retry(max_attempts=2, initial=1, jitter=0)
            async with log(bus).as_messages(retry=retry, retry_topics=topics, dead_letter="orders.dead") as inbox:
                await handled(inbox, handle, lambda: letters)
            assert [attempt for attempt, _ in tries] == [1, 2, 3, 4]
            waits = [round(after - before) for (_, before), (_, after) in pairwise(tries)]
            assert waits == [1, 30, 1]
            (letter,) = await all_of(bus, "orders.dead")
            assert letter.attributes["dead-letter-reason"] == "failed 4 times"

    warped(test)


def test_a_message_that_is_not_retried_is_dead_lettered_at_once() -> None:
    async def test(server: Broker) -> None:
        async with connect(server) as bus:
            await ready(bus)
            await bus.topic("orders").publish(b"x")

            async def handle(message: Message[bytes]) -> None:
                raise KeyError("never")

            letters: list[Event] = []
            bus.hooks.listen(lambda event: letters.append(event) if isinstance(event, DeadLettered) else None)
            retry = Retry(max_attempts=1, never=(KeyError,))
            async with log(bus).as_messages(retry=retry, retry_topics=DELAYS, dead_letter="orders.dead") as inbox:
                await handled(inbox, handle, lambda: letters)
            assert not await all_of(bus, DELAYS.names("orders", GROUP)[0])

    warped(test)


def test_without_dead_letters_the_last_retry_topic_repeats() -> None:
    async def test(server: Broker) -> None:
        topics = RetryTopics((5, 20))
        async with connect(server) as bus:
            await ready(bus, topics=topics)
            await bus.topic("orders").publish(b"x")
            tries: list[float] = []

            async def handle(message: Message[bytes]) -> None:
                tries.append(time.time())
                raise ValueError("always")

            async with log(bus).as_messages(retry_topics=topics) as inbox:
                await handled(inbox, handle, lambda: len(tries) >= 5)
            waits = [round(after - before) for before, after in pairwise(tries)]
            assert waits[:4] == [5, 20, 20, 20]

    warped(test)


def test_each_topic_has_its_own_retry_topics() -> None:
    async def test(server: Broker) -> None:
        topics = RetryTopics((5,))
        async with connect(server) as bus:
            for topic in ("orders", "refunds"):
                for name in (topic, *topics.names(topic, GROUP)):
                    await bus.admin.ensure_topic(name, partitions=2)
                await bus.topic(topic).publish(topic.encode())
            seen: defaultdict[str, list[bytes | None]] = defaultdict(list)

            async def handle(message: Message[bytes]) -> None:
                seen[message.topic].append(message.data)
                if message.delivery_attempt == 1:
                    raise ValueError("once")

            both = bus.records(["orders", "refunds"], group=GROUP).as_messages(retry_topics=topics)
            async with both as inbox:
                await handled(inbox, handle, lambda: sum(map(len, seen.values())) == 4)
            assert seen == {"orders": [b"orders"] * 2, "refunds": [b"refunds"] * 2}

    warped(test)


async def test_options_that_contradict_each_other_are_refused() -> None:
    async with broker.connect("inmem://retry-topic-options") as bus:
        with pytest.raises(ConfigurationError, match="ordered_by_key"):
            log(bus).as_messages(retry_topics=DELAYS, ordered_by_key=True)
        with pytest.raises(ConfigurationError, match="ephemeral"):
            bus.records("orders", group=broker.ephemeral()).as_messages(retry_topics=DELAYS)
        with pytest.raises(ConfigurationError, match="dead_letter"):
            log(bus).as_messages(retry_topics=DELAYS, dead_letter="orders.billing.retry.3")
        with pytest.raises(ConfigurationError, match="a consumed topic and a retry topic"):
            bus.records(["orders", "orders.billing.retry.1"], group=GROUP).as_messages(retry_topics=DELAYS)
        with pytest.raises(ConfigurationError, match="max_deliveries"):
            log(bus).as_messages(retry_topics=DELAYS, retry=Retry(max_attempts=2, max_deliveries=7))
        with pytest.raises(ConfigurationError, match="retry_topics"):
            log(bus).as_messages(retry_topics=(5, 60))  # pyright: ignore[reportArgumentType]
        with pytest.raises(InvalidName, match="retry topic"):
            bus.records("o" * 190, group=GROUP).as_messages(retry_topics=DELAYS)
        with pytest.raises(Unsupported, match="retry topics"):
            bus.messages("orders", subscription=GROUP, retry_topics=DELAYS)


@pytest.mark.parametrize("delays", [(), (0,), (-1,), (5, 4), (float("inf"),), (True,), ("5",), 5, [5, 60]])
def test_invalid_delays_are_refused(delays: Any) -> None:
    with pytest.raises(InvalidSetting, match="delays"):
        RetryTopics(delays)
