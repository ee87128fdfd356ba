"""Positions are committed while a rebalance is open: a member was killed, and another joins before its session ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from broker.bus import Bus, connect
from broker.hooks import Warned
from broker.testing.waiting import eventually
from broker.testing.worker import Worker
from broker_kafka.group import GroupConsumer
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin

pytestmark = pytest.mark.deep

PATIENCE = 60.0
QUICK = "session_timeout_ms=120000&heartbeat_interval_ms=200"
"""The rebalance is open for as long as the session of the killed member lasts: until the test is over."""

Handle = Callable[[], Awaitable[int]]
"""Handles and commits the next message; returns its partition."""


@asynccontextmanager
async def messages(bus: Bus, topic: str, group: str) -> AsyncGenerator[Handle]:
    async with bus.messages(topic, subscription=group) as inbox:

        async def handle() -> int:
            message = await inbox.next_message(timeout=PATIENCE)
            assert message is not None
            await message.ack()
            return message.native.partition()

        yield handle


@asynccontextmanager
async def records(bus: Bus, topic: str, group: str) -> AsyncGenerator[Handle]:
    async with bus.records(topic, group=group) as log:

        async def handle() -> int:
            record = await log.next_record(timeout=PATIENCE)
            assert record is not None
            await log.commit()
            return record.partition

        yield handle


@asynccontextmanager
async def marks(bus: Bus, topic: str, group: str) -> AsyncGenerator[Handle]:
    async with GroupConsumer(bus, topic, group=group, commit_interval=0.2) as consumer:
        stream = aiter(consumer)

        async def handle() -> int:
            record = await anext(stream)
            consumer.mark(record)
            return record.partition

        yield handle


KINDS: dict[str, Any] = {"messages": messages, "records": records, "marks": marks}


@asynccontextmanager
async def in_open_rebalance(
    kafka: KafkaServer, topic: str, group: str, kind: str
) -> AsyncGenerator[tuple[Bus, Handle, AsyncExitStack, list[str]]]:
    """A member in a rebalance that stays open, how it handles a message, and its warnings."""
    url = f"{kafka.url}?{QUICK}"
    warned: list[str] = []
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connect(url))
        bus.hooks.listen(lambda event: warned.append(event.text) if isinstance(event, Warned) else None)
        member = await stack.enter_async_context(AsyncExitStack())
        handle = await member.enter_async_context(KINDS[kind](bus, topic, group))
        worker = await Worker.start(url, topic, group, 0)
        stack.push_async_callback(worker.kill)
        await publish(bus, topic)
        await worker.until_holding(PATIENCE)
        await worker.kill()
        other = await stack.enter_async_context(connect(url))
        await stack.enter_async_context(other.messages(topic, subscription=group))

        async def is_open() -> bool:
            return "preparing" in (await bus.admin.describe_group(group)).state.replace("_", "")

        await eventually(is_open, PATIENCE, "a rebalance")
        yield bus, handle, member, warned
        assert await is_open(), "the rebalance ended before the test"


async def publish(bus: Bus, topic: str) -> None:
    for partition in range(2):
        await bus.topic(topic).publish(b"m", partition=partition)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_handled_is_committed_while_a_killed_member_is_waited_for(
    kafka: KafkaServer, admin: RawAdmin, make_topic: MakeTopic, group: str, kind: str
) -> None:
    topic = make_topic(partitions=2)
    async with in_open_rebalance(kafka, topic, group, kind) as (bus, handle, member, warned):
        partition = await handle()

        async def committed() -> int:
            return (await asyncio.to_thread(admin.committed, group, topic, partition)).offset

        async def all_committed() -> bool:
            return await committed() == admin.bounds(topic, partition)[1]

        began = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() < began + 3.0:
            # Heartbeats tell the member of the rebalance in the first of these rounds.
            await publish(bus, topic)
            assert await handle() == partition
        await eventually(all_committed, PATIENCE, "the position after the last message")
        # An orderly close leaves nothing behind.
        await publish(bus, topic)
        assert await handle() == partition
        await member.aclose()
        assert await all_committed()
        assert not [text for text in warned if "commit" in text]
