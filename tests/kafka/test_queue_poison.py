"""A message that kills the process that handles it, on a real broker with a process that is really killed."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from typing import Any

import pytest

from broker.bus import connect
from broker.hooks import Hooks
from broker_kafka.queue.tracker.tracker import Tracker
from broker_kafka.queue.tracker.tracker_state import TrackerOptions
from tests.kafka.conftest import MakeTopic
from tests.kafka.group_members import eventually
from tests.kafka.queue_markers import connected
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import produce, read_all

QUICK = "session_timeout_ms=6000&heartbeat_interval_ms=300&queue=markers&lease_seconds=5"


async def killed_at(url: str, *names: str) -> bytes:
    """Run a worker until its message kills it; which delivery that was."""
    command = (sys.executable, "-m", "tests.kafka.queue_poison_process", url, *names)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    try:
        async with asyncio.timeout(60):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    return out.strip()


@pytest.mark.deep
async def test_the_tracker_dead_letters_a_message_that_kills_its_workers(
    kafka: KafkaServer, make_topic: MakeTopic, topic: str, group: str
) -> None:
    dead, url = make_topic(partitions=1), f"{kafka.url}?{QUICK}"
    headers = [("color", b"red"), ("color", b"blue"), ("raw", b"\xff")]
    produce(kafka.bootstrap, topic, [b"poison"], key=b"k", headers=headers)
    assert await killed_at(url, topic, group, dead) == b"1"
    async with connected(kafka) as connection:
        tracker = Tracker(connection, group, Hooks(), options=TrackerOptions(topics=[topic]))
        await tracker.open()
        try:
            await eventually(lambda: tracker.counts.dead_lettered == 1 and tracker.state().open == 0)
            assert tracker.counts.redelivered == 0
        finally:
            await tracker.close()
    (record,) = await asyncio.to_thread(read_all, kafka.bootstrap, dead)
    found: Any = record.headers()
    assert found[: len(headers)] == headers
    # What a redrive goes by is there as in a consumer's letter.
    async with connect(url) as bus:
        (letter,) = await bus.admin.list_dead(dead)
    assert (letter.key, letter.data, letter.attempts) == (b"k", b"poison", 1)
    assert (letter.topic, letter.subscription, letter.id) == (topic, group, f"{topic}:0:0")
    assert (letter.partition, letter.offset) == (0, 0)
    assert letter.reason == "delivered once without being settled"
    assert letter.time is not None
    assert len(await asyncio.to_thread(read_all, kafka.bootstrap, topic)) == 1
