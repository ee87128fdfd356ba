"""Twenty queues in two processes, one of which is killed: every message is accounted for."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Sequence

import pytest

from broker.bus import Bus, connect
from broker.outbound import OutboundMessage
from broker.testing.waiting import eventually
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import KafkaServer

PATIENCE = 90.0
QUEUES = [f"queue-{number:02}" for number in range(20)]
EACH = 200
SLOW = QUEUES[7]
PARTITIONS = range(4)


class Worker:
    """A process that says what it has done."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int, str]] = []
        self.acked: list[tuple[str, int, str]] = []
        self.unsure: list[tuple[str, int, str]] = []
        self.process: Process
        self._hearing: asyncio.Task[None]

    async def start(self, *arguments: str) -> None:
        command = (sys.executable, "-m", "tests.kafka.queue_dispatch_process", *arguments)
        self.process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
        self._hearing = asyncio.create_task(self._hear())

    async def _hear(self) -> None:
        assert self.process.stdout is not None
        # What it was killed in the middle of saying it has not said.
        while (line := await self.process.stdout.readline()).endswith(b"\n"):
            what, queue, attempt, body = line.decode().split()
            {"begun": self.begun, "acked": self.acked, "unsure": self.unsure}[what].append((queue, int(attempt), body))

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()
        await self._hearing


def settled(workers: Sequence[Worker]) -> int:
    return sum(len(worker.acked) + len(worker.unsure) for worker in workers)


async def publish(bus: Bus, topic: str, first: int, end: int) -> int:
    """Send each queue the messages of these numbers, by turns of the partitions."""
    for at in range(first, end, 100):
        sent = [
            OutboundMessage(f"{queue}/{number}".encode(), queue, partition=number % len(PARTITIONS))
            for number in range(at, min(end, at + 100))
            for queue in QUEUES
        ]
        await bus.topic(topic).publish_batch(sent)
    return end


@pytest.mark.deep
async def test_of_many_queues_nothing_is_lost_with_a_process_that_is_killed(
    kafka: KafkaServer, make_topic: MakeTopic, group: str
) -> None:
    topic = make_topic(partitions=len(PARTITIONS))
    url = (
        f"{kafka.url}?queue=markers&session_timeout_ms=3000&heartbeat_interval_ms=300&lease_seconds=3"
        f"&queue_group={group}&queue_ids={','.join(QUEUES)}&queue_waiting=50"
    )
    workers = [Worker(), Worker()]
    async with connect(url) as bus:
        numbers = 0
        try:
            for worker in workers:
                await worker.start(url, topic, SLOW, *QUEUES)
            async with asyncio.timeout(PATIENCE):
                # Whoever joins first has all partitions, and would be done with the work before the other is there.
                while not all(worker.acked for worker in workers):
                    numbers = await publish(bus, topic, numbers, numbers + len(PARTITIONS))
                    due = numbers * len(QUEUES)
                    await eventually(lambda due=due: settled(workers) >= due, PATIENCE)
                numbers = await publish(bus, topic, numbers, numbers + EACH)
                begun = [len(worker.acked) + 100 for worker in workers]
                await eventually(
                    lambda: all(len(each.acked) > least for each, least in zip(workers, begun, strict=True)), PATIENCE
                )
            await workers[0].kill()
            async with asyncio.timeout(PATIENCE):
                while True:
                    lag = await bus.admin.lag(topic, group)
                    if (lag.waiting, lag.unsettled) == (0, 0):
                        break
                    await asyncio.sleep(0.2)
        finally:
            for worker in workers:
                await worker.kill()
    wanted = {f"{queue}/{number}" for queue in QUEUES for number in range(numbers)}
    killed, other = workers
    assert all(body.startswith(f"{queue}/") for queue, _, body in killed.begun + other.begun)
    acked = Counter(body for _, _, body in killed.acked + other.acked)
    assert set(acked.values()) == {1}
    # It was killed while the END of one message of each queue at most was on the wire.
    last = {queue: body for queue, _, body in killed.begun}
    unsure = {body for _, _, body in killed.unsure + other.unsure}
    assert wanted - set(acked) <= {*last.values(), *unsure}
    assert not set(acked) - wanted
    assert len(killed.acked) < len(wanted)
    # What it had in memory came again.
    assert any(attempt > 1 for _, attempt, _ in other.acked)
