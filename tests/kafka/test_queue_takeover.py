"""Trackers that are paused, killed or cut off: each message is redelivered once."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from broker_kafka.queue.tracker.tracker import CLOSE_SECONDS
from tests.kafka import queue_tracker_process
from tests.kafka.group_members import eventually
from tests.kafka.queue_markers import Queue, connected, tracking
from tests.servers.kafka import KafkaServer


class TrackerProcess:
    """A tracker in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def wait_for(self, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Its state, once the condition holds."""
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            while True:
                line = await self.process.stdout.readline()
                assert line, "the process has ended"
                if condition(state := json.loads(line)):
                    return state

    async def frozen(self) -> None:
        """It has paused itself."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        await eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")


@asynccontextmanager
async def started(queue: Queue, where: str) -> AsyncGenerator[TrackerProcess]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        queue_tracker_process.__name__,
        queue.server.bootstrap,
        queue.subscription,
        where,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        tracker = TrackerProcess(process)
        await tracker.wait_for(lambda state: state["partitions"] == [0])
        yield tracker
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.deep
@pytest.mark.parametrize(("where", "then"), [("before", "goes on"), ("within", "goes on"), ("within", "dies")])
async def test_i9_a_tracker_paused_during_a_takeover_writes_nothing(kafka: KafkaServer, where: str, then: str) -> None:
    queue = await asyncio.to_thread(Queue, kafka)
    async with connected(kafka) as connection:
        await queue.prepare(connection)
        ids = await asyncio.to_thread(queue.send, 5)
        async with started(queue, where) as zombie:
            await asyncio.to_thread(queue.take, ids[:4], period=100)
            await zombie.frozen()
            if then == "dies":
                zombie.process.kill()
            async with tracking(connection, queue) as tracker:
                await asyncio.to_thread(queue.wait_for_again, 4, 5)
                if then == "goes on":
                    zombie.process.send_signal(signal.SIGCONT)
                    state = await zombie.wait_for(lambda state: state["unknown_outcomes"] or not state["partitions"])
                    assert state["redelivered"] == 0
                await eventually(lambda: tracker.state().open == 0)
                assert tracker.counts.redelivered == 4
            if then == "goes on":
                # It is a tracker like any other again.
                await zombie.wait_for(lambda state: state["partitions"] == [0])
                await asyncio.to_thread(queue.take, ids[4:], period=100)
                await zombie.wait_for(lambda state: state["redelivered"] == 1 and state["open"] == 0)
            values = sorted(each.value() or b"" for each in await asyncio.to_thread(queue.again, 5))
            assert values == [b"m%d" % number for number in range(4 if then == "dies" else 5)]


@pytest.mark.deep
async def test_the_clock_stops_while_the_broker_is_down() -> None:
    with KafkaServer() as server:
        queue = await asyncio.to_thread(Queue, server)
        async with connected(server) as connection:
            await queue.prepare(connection)
            ids = await asyncio.to_thread(queue.send, 60)
            async with tracking(connection, queue) as tracker:
                await asyncio.to_thread(queue.take, ids[:10], period=600_000)
                await asyncio.to_thread(queue.end, ids[:10])
                await asyncio.to_thread(queue.take, ids[10:50], period=1500)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
                found = await asyncio.to_thread(queue.wait_for_again, 40, 60)
                await eventually(lambda: tracker.state().open == 0)
                assert len({each.value() for each in found}) == len(found) == 40
                await asyncio.to_thread(queue.take, ids[50:], period=100)
                await asyncio.to_thread(queue.wait_for_again, 50, 60)
                await eventually(lambda: tracker.state().open == 0)
                assert len(await asyncio.to_thread(queue.again, 60)) == 50
                await asyncio.to_thread(server.stop)
                begun = time.monotonic()
                await tracker.close()
                assert time.monotonic() - begun < CLOSE_SECONDS
