"""Messages on a retry topic: what is written, what is read, and what happens while no consumer runs."""

from __future__ import annotations

import asyncio
import time

import pytest

from broker.driver.record_messages import read_retry_letter
from broker.errors import BackendError, InvalidMessage
from broker.hooks import DeadLettered, Event, RetryWriteFailed
from broker.messages import Message
from broker.outbound import OutboundMessage
from broker_inmem import Broker
from tests.unit.broker.consuming.retry_bench import DELAYS, GROUP, all_of, connect, handled, log, ready, until
from tests.unit.broker.consuming.warp import warped


def test_the_original_is_settled_after_its_copy_is_stored() -> None:
    async def test(server: Broker) -> None:
        async with connect(server) as bus:
            await ready(bus)
            events: list[Event] = []
            bus.hooks.listen(events.append)
            await bus.topic("orders").publish(b"x")
            first = DELAYS.names("orders", GROUP)[0]
            server.faults.fail_publish(BackendError("the disk is full"), topic=first, times=3)
            tries: list[bytes | None] = []

            async def handle(message: Message[bytes]) -> None:
                tries.append(message.data)
                if len(tries) == 1:
                    raise ValueError("once")

            async with log(bus).as_messages(retry_topics=DELAYS, commit_every=1) as inbox:
                work = asyncio.ensure_future(inbox.receive(handle))
                await until(lambda: any(isinstance(event, RetryWriteFailed) for event in events))
                assert (await bus.admin.lag("orders", GROUP)).waiting == 1
                await until(lambda: len(tries) == 2)
                await inbox.close()
                await work
            assert len([event for event in events if isinstance(event, RetryWriteFailed)]) == 3
            assert (await bus.admin.lag("orders", GROUP)).waiting == 0
            assert len(await all_of(bus, first)) == 1

    warped(test)


def test_a_refused_retry_message_is_dead_lettered() -> None:
    async def test(server: Broker) -> None:
        async with connect(server) as bus:
            await ready(bus)
            first = DELAYS.names("orders", GROUP)[0]
            server.faults.fail_publish(InvalidMessage("too red"), topic=first, times=100)
            await bus.topic("orders").publish(b"x", attributes={"colour": "red"})
            letters: list[Event] = []
            bus.hooks.listen(lambda event: letters.append(event) if isinstance(event, DeadLettered) else None)

            async def handle(message: Message[bytes]) -> None:
                raise ValueError("always")

            async with log(bus).as_messages(retry_topics=DELAYS, dead_letter="orders.dead") as inbox:
                await handled(inbox, handle, lambda: letters)
            (letter,) = await all_of(bus, "orders.dead")
            assert f"{first} does not take it: too red" in letter.attributes["dead-letter-reason"]
            assert letter.attributes["colour"] == "red"

    warped(test)


def test_waiting_messages_survive_the_process_and_keep_their_due_time() -> None:
    async def test(server: Broker) -> None:
        failed = 0.0
        async with connect(server) as bus:
            await ready(bus)
            await bus.topic("orders").publish(b"x")
            crashing = connect(server)
            await crashing.open()
            inbox = log(crashing).as_messages(retry_topics=DELAYS)
            await inbox.open()
            for delay in (5, 60):
                message = await inbox.next_message()
                assert message is not None
                failed = time.time()
                await message.nack(delay)
            await asyncio.sleep(20)
            server.faults.kill(crashing)
            await crashing.close()
            async with log(bus).as_messages(retry_topics=DELAYS) as inbox:
                message = await inbox.next_message()
                assert message is not None
                assert 59.999 < time.time() - failed < 62
                assert (message.delivery_attempt, message.topic, message.data) == (3, "orders", b"x")
                await message.ack()

    warped(test)


def test_a_group_with_start_latest_reads_its_retry_topics_from_the_start() -> None:
    async def test(server: Broker) -> None:
        async with connect(server) as bus:
            await ready(bus)
            await bus.topic("orders").publish(b"old")
            await bus.topic(DELAYS.names("orders", GROUP)[2]).publish(b"of another program")
            async with log(bus, start="latest").as_messages(retry_topics=DELAYS) as inbox:
                message = await inbox.next_message(timeout=60)
                assert message is not None, "What no letter says to be due later is due"
                assert (message.data, message.topic, message.delivery_attempt) == (b"of another program", "orders", 1)
                await message.ack()
                assert await inbox.next_message(timeout=1000) is None

    warped(test)


@pytest.mark.parametrize("name", ["due", "attempts", "failures", "step"])
def test_an_invalid_retry_message_is_treated_as_foreign(name: str) -> None:
    good = {"topic": "orders", "id": "1", "due": "2026-01-01T00:00:00+00:00", "attempts": "1", "failures": "1"}
    letter = {f"retry-letter-{key}": value for key, value in (good | {"step": "1"}).items()}
    assert read_retry_letter(letter) is not None
    assert read_retry_letter(letter | {f"retry-letter-{name}": "soon"}) is None
    del letter[f"retry-letter-{name}"]
    assert read_retry_letter(letter) is None


def test_retry_attributes_are_reserved() -> None:
    with pytest.raises(InvalidMessage, match="retry-letter-"):
        OutboundMessage(b"x", attributes={"retry-letter-due": "soon"})
