"""Batches that wait to fill: handed over when they are full, old enough, or cannot grow."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from broker.errors import ConfigurationError
from broker.messages import MessageBatch, Outcome
from tests.unit.broker.consuming.scripted_source import ScriptedSource, consuming
from tests.unit.broker.consuming.warp import in_jumping_time


def ids(batch: MessageBatch) -> list[str]:
    return [message.id for message in batch]


def now() -> float:
    return asyncio.get_running_loop().time()


async def passed(batches: list[tuple[float, list[str]]], batch: MessageBatch) -> None:
    batches.append((round(now(), 3), ids(batch)))


@in_jumping_time
async def test_a_handler_gets_full_batches_at_once_and_others_when_they_are_old() -> None:
    source = ScriptedSource()
    batches: list[tuple[float, list[str]]] = []
    async with consuming(source) as consumer:
        work = asyncio.create_task(consumer.receive_batches(partial(passed, batches), max_messages=3, max_wait=10.0))
        await asyncio.sleep(100)
        source.add("1")
        await asyncio.sleep(4)
        source.add("2", "3", "4")
        await asyncio.sleep(100)
        source.add("5")
        await asyncio.sleep(100)
        consumer.stop()
        await work
    assert batches == [(104.0, ["1", "2", "3"]), (114.0, ["4"]), (214.0, ["5"])]


@in_jumping_time
async def test_workers_do_not_split_what_one_batch_can_hold() -> None:
    source = ScriptedSource()
    batches: list[tuple[float, list[str]]] = []
    async with consuming(source) as consumer:
        work = asyncio.create_task(
            consumer.receive_batches(partial(passed, batches), max_messages=4, max_wait=10.0, concurrency=3)
        )
        for number in range(8):
            source.add(str(number))
            await asyncio.sleep(2)
        await asyncio.sleep(3)
        # Young: those that were there when the other workers began to wait are gone.
        source.add("8")
        await asyncio.sleep(100)
        consumer.stop()
        await work
    assert [len(batch) for _, batch in batches] == [4, 4, 1]
    assert batches[2] == (29.0, ["8"])


@in_jumping_time
async def test_next_batch_and_batches_wait_too_and_a_timeout_comes_first() -> None:
    source = ScriptedSource()
    async with consuming(source) as consumer:
        assert ids(await consumer.next_batch(3, timeout=5, max_wait=10)) == []
        assert now() == 5.0
        source.add("1")
        assert ids(await consumer.next_batch(3, timeout=5, max_wait=10)) == ["1"]
        assert now() == 10.0
        source.add("2", "3")
        assert ids(await consumer.next_batch(3, timeout=50, max_wait=10)) == ["2", "3"]
        assert now() == 20.0
        source.add("4", "5", "6", "7")
        batches = consumer.batches(3, max_wait=10)
        assert ids(await anext(batches)) == ["4", "5", "6"]
        assert now() == 20.0
        assert ids(await anext(batches)) == ["7"]
        assert now() == 30.0


@in_jumping_time
async def test_a_batch_that_cannot_grow_is_handed_over() -> None:
    source = ScriptedSource()
    source.add("1", "2", "3", data=bytes(100))
    async with consuming(source, max_outstanding_bytes=150) as consumer:
        assert ids(await consumer.next_batch(3, max_wait=3600)) == ["1", "2"]
        assert now() == 0.0


@in_jumping_time
async def test_a_batch_from_several_topics_fills_together() -> None:
    first, second = ScriptedSource(), ScriptedSource()
    async with consuming(first, second) as consumer:
        waiting = asyncio.create_task(consumer.next_batch(2, max_wait=3600))
        first.add("1")
        await asyncio.sleep(1)
        second.add("2")
        assert sorted(ids(await waiting)) == ["1", "2"]
        assert now() == 1.0


@in_jumping_time
async def test_a_paused_consumer_hands_an_old_batch_over_when_it_is_resumed() -> None:
    source = ScriptedSource()
    async with consuming(source) as consumer:
        waiting = asyncio.create_task(consumer.next_batch(2, max_wait=10))
        source.add("1")
        await asyncio.sleep(5)
        consumer.pause()
        await asyncio.sleep(100)
        assert not waiting.done()
        consumer.resume()
        assert ids(await waiting) == ["1"]


@in_jumping_time
async def test_a_close_gives_back_what_waits_for_a_batch() -> None:
    source = ScriptedSource(redelivers=False)
    batches: list[tuple[float, list[str]]] = []
    async with consuming(source) as consumer:
        work = asyncio.create_task(consumer.receive_batches(partial(passed, batches), max_wait=10.0))
        source.add("1", "2")
        await asyncio.sleep(5)
        await consumer.close()
        await work
    assert batches == []
    assert source.outcomes(Outcome.RELEASE) == ["1", "2"]


@in_jumping_time
async def test_a_cancelled_wait_leaves_its_messages_to_others() -> None:
    source = ScriptedSource()
    async with consuming(source) as consumer:
        batch = asyncio.create_task(consumer.next_batch(2, max_wait=3600))
        await asyncio.sleep(0)
        one = asyncio.create_task(consumer.next_message())
        await asyncio.sleep(0)
        source.add("1")
        await asyncio.sleep(1)
        batch.cancel()
        message = await one
        assert message is not None
        assert message.id == "1"
        assert now() == 1.0


async def test_an_impossible_wait_is_refused() -> None:
    async with consuming(ScriptedSource()) as consumer:
        calls: list[Any] = [
            lambda: consumer.next_batch(max_wait=-1),
            lambda: consumer.receive_batches(partial(passed, []), max_wait=float("inf")),
        ]
        for call in calls:
            with pytest.raises(ConfigurationError, match="max_wait"):
                await call()
        with pytest.raises(ConfigurationError, match="max_wait"):
            consumer.batches(max_wait="1")  # pyright: ignore[reportArgumentType]


@in_jumping_time
@pytest.mark.parametrize("max_wait", [0, None])
async def test_without_a_wait_a_batch_is_handed_over_at_once(max_wait: float | None) -> None:
    source = ScriptedSource()
    batches: list[tuple[float, list[str]]] = []
    async with consuming(source) as consumer:
        work = asyncio.create_task(consumer.receive_batches(partial(passed, batches), max_wait=max_wait))
        await asyncio.sleep(10)
        source.add("1", "2")
        await asyncio.sleep(10)
        source.add("3")
        await asyncio.sleep(10)
        consumer.stop()
        await work
    assert batches == [(10.0, ["1", "2"]), (20.0, ["3"])]
