"""`bus.topic`: one object per name and codec, none that is forgotten, none that is closed."""

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


async def test_closing_twice_at_once_closes_once_and_waits(bus: Bus) -> None:
    await bus.admin.ensure_topic("orders")
    topic = bus.topic("orders")
    receipts = [await topic.enqueue(b"%d" % number) for number in range(500)]
    await asyncio.gather(topic.close(), bus.close())
    assert len({(receipt.result().partition, receipt.result().offset) for receipt in receipts}) == 500


async def test_a_consumer_that_is_never_opened_is_forgotten(bus: Bus) -> None:
    consumer = bus.messages("orders", subscription="billing")
    gone = weakref.ref(consumer)
    del consumer
    gc.collect()
    assert gone() is None
