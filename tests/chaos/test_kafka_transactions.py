"""Exactly once: a copy job whose workers and whose broker are killed and started again, with every record counted."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic

import pytest

import broker
from broker.errors import PublishError
from broker.outbound import OutboundMessage
from tests.chaos.kafka_copy_process import GROUP
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin, read_all

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

PARTITIONS = 3
WORKERS = 2
KILLS = 6
BROKER_KILLS = 2
STUCK_SECONDS = 60.0
"""No transaction takes so long, also where one has to time out first."""
# A broker that needs longer to come back than a transaction may last forgets the markers of those that timed out.
OPTIONS = "session_timeout_ms=2000&heartbeat_interval_ms=300&transaction_timeout_ms=20000"


class Worker:
    """One copying process after another, under one transactional id."""

    def __init__(self, number: int, arguments: list[str], directory: Path) -> None:
        self._arguments = [arguments[0], f"copy-{number}", *arguments[1:]]
        self.said = directory / f"said-{number}"
        self.errors = directory / f"errors-{number}"
        self.start()

    def start(self) -> None:
        with self.said.open("ab") as said, self.errors.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.kafka_copy_process", *self._arguments], stdout=said, stderr=errors
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def words(self) -> Counter[str]:
        return Counter(self.said.read_text().split())


def bodies_of(bootstrap: str, topic: str, isolation: str = "read_committed") -> list[list[bytes | None]]:
    """What is in each partition, in its order."""
    return [
        [message.value() for message in read_all(bootstrap, topic, partition, isolation=isolation)]
        for partition in range(PARTITIONS)
    ]


def count(partitions: list[list[bytes | None]]) -> int:
    return sum(map(len, partitions))


def rest(admin: RawAdmin, source: str, wanted: list[int]) -> list[int]:
    """Where the group is when it has copied all, or gets on no more."""
    ends: list[int] = []
    moved = monotonic()
    while ends != wanted and monotonic() < moved + STUCK_SECONDS:
        time.sleep(0.1)
        before, ends = ends, [admin.committed(GROUP, source, number).offset for number in range(PARTITIONS)]
        if ends != before:
            moved = monotonic()
    return ends


@pytest.fixture
def server() -> Iterator[KafkaServer]:
    with KafkaServer() as server:
        yield server


async def feed(url: str, topic: str, stopped: asyncio.Event) -> int:
    """Publish numbered records until told to stop; how many were tried."""
    number = 0
    async with broker.connect(url) as bus:
        while not stopped.is_set():
            batch = [OutboundMessage(b"%d" % n, b"%d" % (n % 17)) for n in range(number, number + 20)]
            number += len(batch)
            with suppress(PublishError):
                await bus.topic(topic).publish_all(batch)
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), 0.05)
    return number


async def test_copy_job_is_exactly_once_whatever_is_killed(
    server: KafkaServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dice = random.Random(20261121)
    url = f"{server.url}?{OPTIONS}"
    admin = RawAdmin(server.bootstrap)
    source, sink = admin.make_topic(partitions=PARTITIONS), admin.make_topic(partitions=PARTITIONS)
    stopped = asyncio.Event()
    feeding = asyncio.create_task(feed(url, source, stopped))
    workers = [Worker(number, [url, source, sink], tmp_path) for number in range(WORKERS)]
    broker_kills = 0
    try:
        for kill in range(KILLS):
            victim = dice.choice(workers)
            # It is killed in the middle of its work, not before its first transaction.
            done = victim.words()["committed"]
            until = monotonic() + 6
            while victim.words()["committed"] < done + 3 and monotonic() < until:
                await asyncio.sleep(0.02)
            await asyncio.sleep(dice.uniform(0, 0.1))
            assert victim.alive
            victim.kill()
            if kill % (KILLS // BROKER_KILLS) == 2:
                broker_kills += 1
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            victim.start()
        stopped.set()
        tried = await feeding
        written = bodies_of(server.bootstrap, source)
        ends = await asyncio.to_thread(rest, admin, source, [len(bodies) for bodies in written])
        # The last transaction's marker may come to the sink a moment after the one for the group's offsets.
        until = monotonic() + 10
        while count(copied := bodies_of(server.bootstrap, sink)) < count(written) and monotonic() < until:
            await asyncio.sleep(0.2)
    finally:
        stopped.set()
        feeding.cancel()
        for worker in workers:
            worker.kill()
    said = sum((worker.words() for worker in workers), Counter[str]())
    undone = count(bodies_of(server.bootstrap, sink, "read_uncommitted")) - count(copied)
    twice = sum(seen - 1 for seen in Counter(body for bodies in copied for body in bodies).values())
    missing = count(written) - sum(len(set(bodies)) for bodies in copied)
    accounting = (
        f"{tried} records published in {PARTITIONS} partitions, {count(written)} of them in the source; {WORKERS} "
        f"workers, {KILLS} kills of a worker, {broker_kills} of the broker; {said['committed']} transactions "
        f"committed, {said['aborted']} aborted, {said['reopened']} connections opened again; {undone} records undone, "
        f"and in the sink {count(copied)}, missing {missing}, twice {twice}, partitions out of order "
        f"{sum(theirs != ours for theirs, ours in zip(written, copied, strict=True))}"
    )
    with capsys.disabled():
        sys.stdout.write(f"\n{accounting}\n")
    assert copied == written, "\n".join([accounting, *(worker.errors.read_text()[-6000:] for worker in workers)])
    assert count(written) > 1000
    assert ends == [len(bodies) for bodies in written]
    # Else no kill has met a transaction, and nothing was shown.
    assert undone > 0, accounting
