"""Consumer processes and a broker are killed under load; every message is accounted for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid
from collections import Counter
from pathlib import Path

import pytest

import broker
from broker.outbound import OutboundMessage
from tests.servers.pulsar import shared_server

pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("pulsar")]

COUNT = 3000
KEYS = 20


class Consumer:
    """One consumer process and the file of its deliveries."""

    def __init__(self, kind: str, topic: str, path: Path) -> None:
        self._path = path
        command = [sys.executable, "-m", "tests.chaos.pulsar_process", kind, shared_server().url, topic, str(path)]
        self._process = subprocess.Popen(command)

    def lines(self) -> list[str]:
        text = self._path.read_text() if self._path.exists() else ""
        return [line.rstrip("\n") for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def state(self) -> str:
        """For people."""
        code = self._process.poll()
        return "One that runs" if code is None else f"One that ended with {code}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


async def until(condition: object, seconds: float, what: str) -> None:
    """Wait for it. :raises AssertionError: it does not come true in time."""
    assert callable(condition)
    try:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"{what} did not come within {seconds} s") from None


@pytest.mark.parametrize("kind", ["messages", "keyed", "records"])
async def test_killed_consumers_lose_nothing(kind: str, tmp_path: Path) -> None:
    topic = f"chaos-{uuid.uuid4().hex[:12]}"
    paths = (tmp_path / f"consumer-{number}" for number in range(10))
    async with broker.connect(shared_server().url) as bus:
        await bus.admin.ensure_topic(topic, partitions=2)
        await bus.admin.ensure_subscription(topic, "billing")
        running = [Consumer(kind, topic, next(paths)) for _ in range(2)]
        killed: list[Consumer] = []

        def seen() -> Counter[str]:
            return Counter(line for consumer in [*killed, *running] for line in consumer.lines())

        try:
            for first in range(0, COUNT, 300):
                numbers = range(first, first + 300)
                await bus.topic(topic).publish_batch(
                    [OutboundMessage(b"%d" % number, key=f"key-{number % KEYS}") for number in numbers]
                )
                if first in (600, 1500):
                    await until(lambda: len(seen()) > 100 + 300 * len(killed), 60, "work under way")
                    killed.append(running.pop(0))
                    killed[-1].kill()
                    running.append(Consumer(kind, topic, next(paths)))
            try:
                await until(lambda: len(seen()) == COUNT, 90, f"{COUNT} different messages")
            except AssertionError as error:
                missing = sorted(set(range(COUNT)) - set(map(int, seen())))
                error.add_note(f"Missing are {len(missing)}, from {missing[:20]} to {missing[-5:]}")
                for consumer in [*killed, *running]:
                    error.add_note(f"{consumer.state()} has {len(consumer.lines())}, at last {consumer.lines()[-3:]}")
                error.add_note(f"The broker says {await bus.admin.lag(topic, 'billing')}")
                raise
        finally:
            for consumer in running:
                consumer.kill()
        counts = seen()
        assert set(counts) == {str(number) for number in range(COUNT)}
        if kind != "messages":
            for consumer in [*killed, *running]:
                assert_in_order(consumer.lines())
        await bus.admin.delete_topic(topic)


def assert_in_order(lines: list[str]) -> None:
    """First deliveries of each key are in order, without gaps."""
    for key in range(KEYS):
        numbers = list(dict.fromkeys(int(line) for line in lines if int(line) % KEYS == key))
        assert numbers == sorted(numbers), f"key {key} came as {numbers}"
