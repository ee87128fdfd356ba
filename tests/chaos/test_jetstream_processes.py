"""A consumer process that is killed, or frozen for longer than its lease."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from broker.hooks import Hooks
from broker.outbound import OutboundMessage
from broker_jetstream.backend import JetStreamBackend
from broker_jetstream.settings import JetStreamSettings
from tests.jetstream.support import make_topic, publish, until
from tests.servers.nats import shared_server

pytestmark = pytest.mark.deep


class Line(NamedTuple):
    partition: int
    offset: int
    body: str


class Consumer:
    """One consumer process, and the file with the messages that it received."""

    def __init__(self, kind: str, topic: str, path: Path, lease: float) -> None:
        url = f"{shared_server().url}?lease_seconds={lease:g}&owner_timeout=1"
        self.path = path
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.jetstream_process", kind, url, topic, str(path)],
            stdout=subprocess.PIPE,
            text=True,
        )

    async def ready(self) -> None:
        def wait() -> None:
            assert self.process.stdout is not None
            while self.process.stdout.readline().strip() != "ready":
                assert self.process.poll() is None

        await asyncio.to_thread(wait)

    def lines(self) -> list[Line]:
        if not self.path.exists():
            return []
        rows = [line.split() for line in self.path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [Line(int(row[0]), int(row[1]), row[2]) for row in rows]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


Start = Callable[..., Consumer]


@pytest.fixture
def topic() -> str:
    return f"chaos.{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def backend() -> AsyncIterator[JetStreamBackend]:
    backend = JetStreamBackend(JetStreamSettings(servers=(shared_server().url,)), Hooks())
    await backend.open()
    yield backend
    await backend.close()


@pytest.fixture
def start(topic: str, tmp_path: Path) -> Iterator[Start]:
    running: list[Consumer] = []

    def start_one(kind: str, lease: float = 1.0) -> Consumer:
        consumer = Consumer(kind, topic, tmp_path / f"consumer-{len(running)}", lease)
        running.append(consumer)
        return consumer

    yield start_one
    for consumer in running:
        consumer.close()


def bodies(*consumers: Consumer) -> list[str]:
    return [line.body for consumer in consumers for line in consumer.lines() if line.offset >= 0]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_messages_of_a_dead_or_frozen_consumer_are_redelivered(
    backend: JetStreamBackend, topic: str, start: Start, how: signal.Signals
) -> None:
    await make_topic(backend, topic)
    await publish(backend, topic, *(OutboundMessage(b"%d" % n) for n in range(1000)))
    # Long enough that a busy machine causes no redelivery.
    first = start("messages", lease=5.0)
    await first.ready()
    await until(lambda: len(first.lines()) > 100)
    first.signal(how)
    second = start("messages", lease=5.0)
    wanted = {str(n) for n in range(1000)}
    await until(lambda: set(bodies(first, second)) == wanted, 30)
    seen = bodies(first, second)
    # Duplicates only of messages in flight at the signal: one fetch that was returned, and the next one.
    assert len(seen) - len(wanted) <= 40
    if how is signal.SIGSTOP:
        first.signal(signal.SIGCONT)
        await publish(backend, topic, *(OutboundMessage(b"%d" % n) for n in range(1000, 1200)))
        await until(lambda: len(set(bodies(first, second))) == 1200, 30)
        assert len(bodies(first, second)) - 1200 <= 80
    lag = None
    async with asyncio.timeout(20):
        while lag != (0, 0):
            found = await backend.admin().lag(topic, "billing")
            lag = (found.waiting, found.unsettled)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_records_go_to_the_next_owner_in_order(
    backend: JetStreamBackend, topic: str, start: Start, how: signal.Signals
) -> None:
    await make_topic(backend, topic, partitions=2)
    first, second = start("records"), start("records")
    await first.ready()
    await second.ready()
    gone = asyncio.Event()
    publishing = asyncio.create_task(keep_publishing(backend, topic, gone))
    await until(lambda: len(first.lines()) > 50 and len(second.lines()) > 50, 30)
    first.signal(how)
    gone.set()
    count = await publishing
    wanted = {str(n) for n in range(count)}
    await until(lambda: set(bodies(first, second)) == wanted, 30)
    if how is signal.SIGSTOP:
        await all_committed(backend, topic)
        before = len(first.lines())
        ends = {number: max(line.offset for line in second.lines() if line.partition == number) for number in range(2)}
        first.signal(signal.SIGCONT)
        await publish(
            backend, topic, *(OutboundMessage(b"%d" % n, key=f"k{n % 10}") for n in range(count, count + 200))
        )
        await until(lambda: len(set(bodies(first, second))) == count + 200, 20)

        def stale() -> list[Line]:
            return [line for line in first.lines()[before:] if 0 <= line.offset <= ends[line.partition]]

        def refusals() -> set[str]:
            return {line.body for line in first.lines()[before:] if line.offset < 0}

        # It ends its last fetch, gets LeaseLost, and reads no more of the partition.
        await until(lambda: not stale() or bool(refusals()), 20)
        assert len(stale()) <= 20
        assert refusals() <= {"LeaseLost"}
    for partition in range(2):
        check_order([line for line in second.lines() if line.partition == partition])
        check_order([line for line in first.lines() if line.partition == partition])
    # The new owner begins at the commit: duplicates only of one fetch per move of a partition.
    assert len(bodies(first, second)) - len(set(bodies(first, second))) <= 120


async def test_a_frozen_member_continues_at_the_commits_of_the_group(
    backend: JetStreamBackend, topic: str, start: Start
) -> None:
    await make_topic(backend, topic)
    first = start("records")
    await first.ready()
    await publish(backend, topic, *(OutboundMessage(b"%d" % n) for n in range(400)))
    await until(lambda: len(first.lines()) > 50)
    first.signal(signal.SIGSTOP)
    second = start("records")
    await until(lambda: len(set(bodies(first, second))) == 400, 20)
    await all_committed(backend, topic)
    second.signal(signal.SIGKILL)
    await unowned(backend, topic)
    before = len(first.lines())
    first.signal(signal.SIGCONT)
    await publish(backend, topic, *(OutboundMessage(b"%d" % n) for n in range(400, 500)))
    await until(lambda: len(set(bodies(first, second))) == 500, 20)
    # Its last fetch cannot be committed; records that the group committed are not read again.
    after = first.lines()[before:]
    assert len([line for line in after if line.offset >= 0 and int(line.body) < 400]) <= 20
    assert "LeaseLost" in {line.body for line in after}
    await all_committed(backend, topic)


async def unowned(backend: JetStreamBackend, topic: str) -> None:
    """Wait until no member is pinned to the topic's one partition."""
    async with asyncio.timeout(60):
        while True:
            found = (await backend.admin().describe_subscription(topic, "audit")).native
            if not any(group.get("pinned_client_id") for group in found["priority_groups"]):
                return
            await asyncio.sleep(0.05)


async def all_committed(backend: JetStreamBackend, topic: str) -> None:
    async with asyncio.timeout(60):
        while (await backend.admin().lag(topic, "audit")).waiting:
            await asyncio.sleep(0.02)


async def keep_publishing(backend: JetStreamBackend, topic: str, gone: asyncio.Event) -> int:
    """Publish 0, 1, 2, … until `gone` is set, and 60 batches more; returns the number of messages."""
    target = backend.publish_target(topic)
    count, left = 0, 60
    while left:
        left -= gone.is_set()
        await target.publish([OutboundMessage(b"%d" % n, key=f"k{n % 10}") for n in range(count, count + 20)])
        count += 20
        await asyncio.sleep(0.02)
    return count


def check_order(lines: list[Line]) -> None:
    """Offsets increase, except where an owner restarted at the committed position."""
    offsets = [line.offset for line in lines if line.offset >= 0]
    restarts = [index for index in range(1, len(offsets)) if offsets[index] <= offsets[index - 1]]
    assert len(restarts) <= 2, offsets
    for begin, end in zip([0, *restarts], [*restarts, len(offsets)], strict=True):
        assert offsets[begin:end] == sorted(set(offsets[begin:end]))
