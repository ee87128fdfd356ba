"""Plain handlers that block their threads: a rebalance releases partitions with positions, and repeats nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter

import pytest

import broker.blocking
from broker import BlockingMessage
from broker.testing.waiting import eventually
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import KafkaServer

REVOKE = 10.0
"""Seconds for which a rebalance waits."""
BLOCK = 3.0
MESSAGES = 10
PATIENCE = 120.0


@pytest.mark.deep
async def test_a_rebalance_repeats_no_finished_message(
    kafka: KafkaServer, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker_kafka.records._REVOKE_SECONDS", REVOKE)
    topic, handled = make_topic(partitions=2), Counter[bytes | None]()
    url = f"{kafka.url}?session_timeout_ms=6000&heartbeat_interval_ms=300"

    def block(message: BlockingMessage[bytes]) -> None:
        time.sleep(BLOCK)
        handled[message.data] += 1

    def join() -> None:
        with broker.blocking.connect(url) as bus, bus.messages(topic, subscription="billing") as inbox:
            joined.append(inbox)
            inbox.receive(block)

    joined: list[broker.blocking.MessageConsumer[bytes]] = []
    other = threading.Thread(target=join, daemon=True)
    async with broker.connect(url) as bus:
        await bus.topic(topic).publish_batch(
            [broker.OutboundMessage(b"%d" % number, partition=number % 2) for number in range(MESSAGES)]
        )
        async with bus.messages(topic, subscription="billing") as inbox:
            work = asyncio.create_task(inbox.receive(block))
            await eventually(lambda: len(handled) >= 2, PATIENCE, "the first messages")
            other.start()
            await eventually(lambda: len(handled) >= MESSAGES, PATIENCE, "all messages")
            inbox.stop()
            await work
        joined[0].stop()
        await asyncio.to_thread(other.join, PATIENCE)
    assert dict(handled) == {b"%d" % number: 1 for number in range(MESSAGES)}
