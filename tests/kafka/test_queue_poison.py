"""Messages that kill the processes that handle them, on a real broker with processes that are really killed."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from asyncio.subprocess import PIPE
from typing import Any

import pytest

from broker.bus import Bus, connect
from broker.errors import OperationTimeout
from broker.hooks import Hooks
from broker_kafka.queue.tracker.tracker import Tracker
from broker_kafka.queue.tracker.tracker_state import TrackerOptions
from tests.kafka.conftest import MakeTopic
from tests.kafka.group_members import eventually
from tests.kafka.queue_markers import connected
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import produce, read_all

LEASE, SESSION = 5, 6
LOOK = 5
"""How often, in seconds, a tracker looks whether the messages of a dead reader were read again."""
QUICK = f"session_timeout_ms={1000 * SESSION}&heartbeat_interval_ms=300&queue=markers&lease_seconds={LEASE}"


class Workers:
    """Processes of one queue, each started again when a message has killed it."""

    def __init__(self, *arguments: str) -> None:
        self.handled: set[str] = set()
        self.kills: list[tuple[str, int]] = []
        self.last_kill = 0.0
        self._command = (sys.executable, "-m", "tests.kafka.queue_poison_process", *arguments)

    async def run(self) -> None:
        """One worker and its successors, until this is cancelled."""
        while True:
            assert await self.run_one() == -signal.SIGKILL

    async def run_one(self) -> int:
        process = await asyncio.create_subprocess_exec(*self._command, stdout=PIPE)
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                what, body, attempt, at = line.decode().split()
                if what == "kill":
                    self.kills.append((body, int(attempt)))
                    self.last_kill = float(at)
                else:
                    self.handled.add(body)
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.deep
async def test_the_tracker_dead_letters_a_message_that_kills_its_workers(
    kafka: KafkaServer, make_topic: MakeTopic, topic: str, group: str
) -> None:
    dead, url = make_topic(partitions=1), f"{kafka.url}?{QUICK}"
    headers = [("color", b"red"), ("color", b"blue"), ("raw", b"\xff")]
    produce(kafka.bootstrap, topic, [b"poison"], key=b"k", headers=headers)
    workers = Workers(url, topic, group, dead, "1")
    async with asyncio.timeout(60):
        assert await workers.run_one() == -signal.SIGKILL
    assert workers.kills == [("poison", 1)]
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


async def unfinished(bus: Bus, topic: str, group: str) -> int | None:
    """Messages that wait or are open; None if a busy broker did not answer."""
    try:
        lag = await bus.admin.lag(topic, group)
    except OperationTimeout:
        return None
    return lag.waiting + (lag.unsettled or 0)


@pytest.mark.deep
@pytest.mark.timeout(600)
async def test_eight_messages_that_kill_their_workers_come_to_an_end_and_so_do_those_beside_them(
    kafka: KafkaServer, make_topic: MakeTopic, group: str
) -> None:
    topic, dead = make_topic(partitions=4), make_topic(partitions=1)
    good = [f"good-{number}" for number in range(200)]
    poison = [f"poison-{number}" for number in range(8)]
    bodies = [*good]
    for number, body in enumerate(poison):
        bodies.insert(25 * number + 10, body)
    for number in range(4):
        produce(kafka.bootstrap, topic, [body.encode() for body in bodies[number::4]], partition=number)
    url = f"{kafka.url}?{QUICK}"
    workers = Workers(url, topic, group, dead, "2")
    running = [asyncio.create_task(workers.run()) for _ in range(2)]
    letters: list[str] = []
    try:
        async with asyncio.timeout(500), connect(url) as bus:
            while not {*bodies} <= {*workers.handled, *letters} or await unfinished(bus, topic, group) != 0:
                for task in running:
                    assert not task.done(), task.exception()
                await asyncio.sleep(0.5)
                records = await asyncio.to_thread(read_all, kafka.bootstrap, dead)
                letters = [(record.value() or b"").decode() for record in records]
            seconds = time.time() - workers.last_kill
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    assert len(letters) == len({*letters})
    # Messages that were in a buffer at each of their deliveries are letters, too.
    assert {*poison} <= {*letters}
    assert all(attempt <= 2 for _, attempt in workers.kills)
    # Until the lease ends, another member has the partitions, and a tracker looks; and until a worker has started.
    assert seconds < LEASE + SESSION + LOOK + 30
