"""A consumer of several topics: fair shares, and acks of a batch per source."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from broker.errors import LeaseLost
from broker.messages import Message, Outcome
from tests.unit.broker.consuming.scripted_source import ScriptedSource, consuming, until


def filled(*names: str, count: int) -> list[ScriptedSource]:
    sources: list[ScriptedSource] = []
    for name in names:
        source = ScriptedSource()
        source.add(*(f"{name}-{number}" for number in range(count)), key=name.encode())
        sources.append(source)
    return sources


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_topic_with_a_backlog_does_not_block_others(ordered: bool) -> None:
    sources = filled("one", "two", count=500)
    came: Counter[str] = Counter()
    async with consuming(*sources, ordered_by_key=ordered) as consumer:

        async def handle(message: Message) -> None:
            came[message.id.partition("-")[0]] += 1
            if came.total() == 100:
                consumer.stop()
            # Let the fetch loops run: the buffer never runs empty.
            for _ in range(5):
                await asyncio.sleep(0)

        await consumer.receive(handle)
    assert min(came["one"], came["two"]) >= 30


async def test_batches_start_with_each_topic_in_turn() -> None:
    sources = filled("one", "two", count=500)
    came: Counter[str] = Counter()
    async with consuming(*sources) as consumer:
        for _ in range(20):
            batch = await consumer.next_batch(10)
            came.update(message.id.partition("-")[0] for message in batch)
            await batch.ack()
            await asyncio.sleep(0)
    assert min(came["one"], came["two"]) >= 30


async def test_a_batch_of_several_topics_acks_in_one_settle_each() -> None:
    sources = filled("one", "two", count=10)
    sources[0].refuse["one-0"] = LeaseLost("gone")
    async with consuming(*sources) as consumer:
        await until(lambda: all(source.fetched for source in sources))
        batch = await consumer.next_batch(20)
        with pytest.raises(LeaseLost, match="gone"):
            await batch.ack()
        assert [message.id for message in batch] == ["one-0", "two-0"]
        assert [source.settle_calls for source in sources] == [1, 1]
    assert [source.outcomes(Outcome.ACK) for source in sources] == [[], ["two-0"]]
