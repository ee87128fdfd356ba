"""Handlers that block for longer than a lease: in a thread they cost nothing, on the event loop they come to an end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

import broker
from broker import BlockingMessage, Message
from broker.testing.waiting import eventually, until_seen
from tests.servers.nats import NatsServer

LEASE = 0.5
BLOCK = 0.8
PATIENCE = 60.0


@pytest.mark.parametrize("consumers", [1, 2])
async def test_plain_handlers_that_block_handle_each_message_once(
    nats_server: NatsServer, topic: str, consumers: int
) -> None:
    calls: list[bytes | None] = []
    ended: list[bytes | None] = []

    def handle(message: BlockingMessage[bytes]) -> None:
        calls.append(message.data)
        time.sleep(BLOCK)
        assert not message.lease_lost
        ended.append(message.data)

    async with broker.connect(f"{nats_server.url}?lease_seconds={LEASE}") as bus:
        await bus.admin.ensure_topic(topic)
        inboxes = [bus.messages(topic, subscription="billing") for _ in range(consumers)]
        for inbox in inboxes:
            await inbox.open()
        await bus.topic(topic).publish_batch([b"1", b"2"])
        work = [asyncio.create_task(inbox.receive(handle)) for inbox in inboxes]
        await eventually(lambda: len(ended) >= 2, PATIENCE, "both messages")
        for inbox in inboxes:
            await inbox.close()
        await asyncio.gather(*work)
        assert Counter(calls) == {b"1": 1, b"2": 1}
        lag = await bus.admin.lag(topic, "billing")
        assert (lag.waiting, lag.unsettled) == (0, 0)


@pytest.mark.deep
async def test_handlers_that_block_the_loop_are_named_once_and_come_to_an_end(
    nats_server: NatsServer, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls: Counter[bytes | None] = Counter()
    lost: list[bool] = []

    async def bill(message: Message[bytes]) -> None:
        calls[message.data] += 1
        time.sleep(BLOCK)  # noqa: ASYNC251  # this test is about a blocked loop
        lost.append(message.lease_lost)

    dead = f"{topic}.dead"
    async with broker.connect(f"{nats_server.url}?lease_seconds={LEASE}") as bus:
        for name in (topic, dead):
            await bus.admin.ensure_topic(name)
        await bus.topic(topic).publish_batch([b"1", b"2"])
        retry = broker.Retry(max_attempts=2, max_deliveries=3)
        async with (
            bus.messages(topic, subscription="billing", retry=retry, dead_letter=dead) as inbox,
            bus.messages(dead, subscription="look") as letters,
        ):
            work = asyncio.create_task(inbox.receive(bill))
            # The handler of the one may delay the letter of the other beyond its lease: then it is written again.
            found = await until_seen(letters, [b"1", b"2"], PATIENCE)
            for letter in found:
                assert letter.attributes["dead-letter-reason"].endswith("times without being settled")
            async with asyncio.timeout(PATIENCE):
                while (lag := await bus.admin.lag(topic, "billing")).waiting or lag.unsettled:
                    await asyncio.sleep(0.1)
            inbox.stop()
            await work
    assert all(lost)
    assert max(calls.values()) <= 3
    warnings = [text for text in caplog.messages if "event loop" in text and text.startswith("Handler")]
    assert len(warnings) == 1
    assert "bill held the event loop for 0." in warnings[0] or "bill has held the event loop for 0." in warnings[0]
