"""The state of a consumer, as probes read it."""

from __future__ import annotations

import pytest

import broker
from broker.consumer_state import ConsumerState
from broker.errors import ConnectionFailed
from broker.hooks import Event, FetchFailed
from broker.testing.harness import unique
from tests.unit.broker.consuming.scripted_source import ScriptedSource, consuming, until
from tests.unit.broker.consuming.warp import in_jumping_time


@in_jumping_time
async def test_the_state_of_a_consumer_follows_its_life() -> None:
    source = ScriptedSource()
    async with consuming(source) as consumer:
        assert consumer.state is ConsumerState.RUNNING
        consumer.pause()
        assert consumer.state is ConsumerState.PAUSED
        consumer.resume()
        assert consumer.state is ConsumerState.RUNNING
    assert consumer.state is ConsumerState.STOPPED


@in_jumping_time
async def test_the_state_tells_of_a_fetch_that_fails() -> None:
    source, events = ScriptedSource(), list[Event]()
    async with consuming(source, events=events) as consumer:
        source.fail(ConnectionFailed("cut"))
        await until(lambda: any(isinstance(event, FetchFailed) for event in events))
        assert consumer.state is ConsumerState.RETRYING
        source.add("1")
        assert await consumer.next_message(timeout=60) is not None
        assert consumer.state is ConsumerState.RUNNING


async def test_the_state_before_and_after() -> None:
    async with broker.connect(f"inmem://{unique('states')}") as bus:
        await bus.admin.ensure_topic("orders")
        inbox = bus.messages("orders", subscription="readers")
        assert inbox.state is ConsumerState.NEW
        async with inbox:
            await bus.admin.delete_topic("orders")
            with pytest.raises(broker.TopicNotFound):
                await inbox.next_message(timeout=30)
            assert inbox.state is ConsumerState.FAILED
