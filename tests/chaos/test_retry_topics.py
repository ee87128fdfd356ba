"""Consumers with retry topics are killed repeatedly; every message is handled or dead-lettered."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import uuid
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import broker
from broker.bus import Bus
from broker.outbound import OutboundMessage
from broker.testing.waiting import eventually
from tests.chaos.retry_process import DELAYS, FAILURES
from tests.servers import kafka, nats

pytestmark = pytest.mark.deep

COUNT = 600
KILLS = 6
PATIENCE = 90.0
URLS = {
    "kafka": lambda: f"{kafka.shared_server().url}?session_timeout_ms=2000&heartbeat_interval_ms=300",
    "jetstream": lambda: f"{nats.shared_server().url}?lease_seconds=1&owner_timeout=1",
}


class Workers:
    """Processes that are replaced when they die."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._directory = directory
        self._arguments = arguments
        self._running: list[subprocess.Popen[bytes]] = []
        self.files: list[Path] = []

    def start(self) -> None:
        path = self._directory / f"worker-{len(self.files)}"
        path.touch()
        self.files.append(path)
        command = [sys.executable, "-m", "tests.chaos.retry_process", *self._arguments, str(path)]
        self._running.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))

    def kill_one(self) -> None:
        victim = self._running.pop(0)
        assert victim.poll() is None, "A worker ended by itself"
        victim.kill()
        victim.wait()

    def tries(self) -> dict[int, dict[int, float]]:
        """The first time of each attempt of each number."""
        found: defaultdict[int, dict[int, float]] = defaultdict(dict)
        for path in self.files:
            for line in path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    number, attempt, time = line.split()
                    known = found[int(number)].get(int(attempt), float(time))
                    found[int(number)][int(attempt)] = min(known, float(time))
        return found

    def close(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[Workers]]:
    made: list[Workers] = []
    yield made
    for each in made:
        each.close()


async def dead_numbers(bus: Bus, dead: str) -> set[int]:
    found: set[int] = set()
    for partition in await bus.log.partitions(dead):
        async for batch in bus.log.read(dead, partition):
            found |= {int(record.data or b"") for record in batch}
    return found


@pytest.mark.parametrize("backend", [pytest.param("jetstream", marks=pytest.mark.deep), "kafka"])
async def test_killed_consumers_lose_nothing(backend: str, workers: list[Workers], tmp_path: Path) -> None:
    url, tag = URLS[backend](), uuid.uuid4().hex[:8]
    topic, dead, group = f"retried-{tag}", f"dead-{tag}", f"group-{tag}"
    chance = random.Random(7)
    async with broker.connect(url) as bus:
        for name in (topic, dead, *DELAYS.names(topic, group)):
            await bus.admin.ensure_topic(name, partitions=2)
        crew = Workers(tmp_path, url, topic, group, dead)
        workers.append(crew)
        for _ in range(2):
            crew.start()
        sent = [OutboundMessage(b"%d" % n, key=f"key-{n % 20}", id=f"id-{n}") for n in range(COUNT)]
        share = COUNT // (KILLS + 1) + 1
        for round_ in range(KILLS + 1):
            least = len(crew.tries()) + share // 4
            await bus.topic(topic).publish_batch(sent[round_ * share : (round_ + 1) * share])
            if round_ < KILLS:
                await eventually(lambda least=least: len(crew.tries()) >= least, PATIENCE, f"{least} numbers")
                await asyncio.sleep(chance.random())
                crew.kill_one()
                crew.start()

        def succeeded() -> bool:
            tries = crew.tries()
            return all(max(tries.get(n, {0: 0.0})) > FAILURES.get(n % 10, 0) for n in range(COUNT) if n % 10 != 7)

        async def all_dead() -> bool:
            return await dead_numbers(bus, dead) == {n for n in range(COUNT) if n % 10 == 7}

        async def settled() -> bool:
            lags = [await bus.admin.lag(name, group) for name in (topic, *DELAYS.names(topic, group))]
            return not any(lag.waiting for lag in lags)

        await eventually(succeeded, PATIENCE, "the success of all that may succeed")
        await eventually(all_dead, PATIENCE, "the dead letters of all that may not")
        await eventually(settled, PATIENCE, "the settling of everything")
    for number, tries in crew.tries().items():
        for attempt, time in tries.items():
            if attempt > 1:
                waited = time - tries[attempt - 1]
                due = DELAYS.delays[attempt - 2]
                assert waited >= due - 0.01, f"{number} waited {waited:.3f} s of {due} s after try {attempt - 1}"
