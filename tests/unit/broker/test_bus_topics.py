"""`bus.topic`: one open object per name and codec."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest

import broker
from broker.bus import Bus
from broker.codecs import Bytes, Json, Text
from broker.consuming.retry.policy import Retry
from broker.errors import Closed
from broker.hooks import DeadLetterFailed
from broker.messages import Message


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with broker.connect("inmem:bus-topics") as bus:
        yield bus


class Unhashable:
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def encode(self, payload: Any) -> bytes:
        return b"x"

    def decode(self, data: bytes | None) -> Any:
        return data


async def test_equal_codecs_share_a_topic(bus: Bus) -> None:
    assert bus.topic("orders", Json(dict)) is bus.topic("orders", Json(dict))
    assert bus.topic("orders", Json(int | None)) is bus.topic("orders", Json(int | None))
    assert bus.topic("orders", Text()) is bus.topic("orders", Text())
    different: list[Any] = [None, Bytes(), Text(), Json(), Json(int), Json(bool), Unhashable(), Unhashable()]
    assert len({id(bus.topic("orders", codec)) for codec in different}) == len(different)


async def test_a_closed_topic_is_replaced(bus: Bus) -> None:
    await bus.admin.ensure_topic("orders")
    await bus.topic("orders").close()
    assert (await bus.topic("orders").publish(b"again")).offset is not None


async def test_concurrent_closes_close_once_and_wait(bus: Bus) -> None:
    await bus.admin.ensure_topic("orders")
    topic = bus.topic("orders")
    receipts = [await topic.enqueue(b"%d" % number) for number in range(500)]
    await asyncio.gather(topic.close(), bus.close())
    assert len({(receipt.result().partition, receipt.result().offset) for receipt in receipts}) == 500


async def test_a_consumer_that_is_never_opened_is_not_kept(bus: Bus) -> None:
    consumer = bus.messages("orders", subscription="billing")
    gone = weakref.ref(consumer)
    del consumer
    gc.collect()
    assert gone() is None


async def test_a_flushing_topic_is_not_replaced(bus: Bus) -> None:
    await bus.admin.ensure_topic("orders")
    topic = bus.topic("orders")
    receipts = [await topic.enqueue(b"%d" % number) for number in range(2000)]
    closing = asyncio.create_task(topic.close())
    await asyncio.sleep(0)
    assert bus.topic("orders") is topic
    with pytest.raises(Closed):
        await bus.topic("orders").publish(b"late")
    await bus.close()
    assert closing.done()
    assert len({(receipt.result().partition, receipt.result().offset) for receipt in receipts}) == 2000


@pytest.mark.parametrize("family", ["messages", "records"])
async def test_an_open_consumer_without_references_is_closed_with_the_bus(bus: Bus, family: str) -> None:
    await bus.admin.ensure_topic("orders")

    async def open_and_forget() -> weakref.ref[Any]:
        consumer: Any = (
            bus.messages("orders", subscription="billing")
            if family == "messages"
            else bus.records("orders", group="audit")
        )
        await consumer.__aenter__()
        return weakref.ref(consumer)

    forgotten = await open_and_forget()
    gc.collect()
    consumer = forgotten()
    assert consumer is not None
    await bus.close()
    assert consumer.closed


async def test_dead_letters_are_written_after_the_application_closes_their_topic(bus: Bus) -> None:
    for name in ("payments", "payments.dead"):
        await bus.admin.ensure_topic(name)
    failed: list[DeadLetterFailed] = []
    bus.hooks.listen(lambda event: failed.append(event) if isinstance(event, DeadLetterFailed) else None)

    async def fail(_: Message[bytes]) -> None:
        raise ValueError("no")

    once_only = Retry(max_attempts=1)
    async with (
        bus.messages("payments", subscription="billing", retry=once_only, dead_letter="payments.dead") as inbox,
        bus.messages("payments.dead", subscription="readers") as letters,
    ):
        await bus.topic("payments.dead").close()
        work = asyncio.create_task(inbox.receive(fail))
        await bus.topic("payments").publish(b"bad")
        letter = await letters.next_message(timeout=10)
        assert letter is not None
        assert letter.data == b"bad"
        await inbox.close()
        await work
    assert failed == []
