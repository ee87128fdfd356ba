"""Consumer processes are killed, or frozen for longer than their session; every record is accounted for."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import broker
from tests.chaos.kafka_accounts import Account
from tests.chaos.test_kafka_server import reached
from tests.servers.kafka import KafkaServer, shared_server
from tests.servers.kafka_client import RawAdmin

pytestmark = pytest.mark.deep

PARTITIONS = 4
SESSION = 2.0
PROTOCOLS = {
    "classic": f"session_timeout_ms={int(SESSION * 1000)}&heartbeat_interval_ms=300",
    # Here the broker sets the session timeout.
    "consumer": "group_protocol=consumer",
}
SESSIONS = {"classic": SESSION, "consumer": 6.0}
OF_PROTOCOLS = pytest.mark.parametrize("protocol", list(PROTOCOLS))


class Member:
    """One consumer process and its deliveries."""

    def __init__(self, name: str, kind: str, url: str, account: Account, group: str, directory: Path) -> None:
        self.name = name
        self._account = account
        self._file = directory / name
        self._file.touch()
        self._booked = 0
        self.lost = 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.kafka_process", kind, url, account.topic, group, str(self._file)],
            stdout=subprocess.DEVNULL,
        )

    @property
    def entries(self) -> int:
        return len(self._file.read_bytes().splitlines())

    def book(self, reader: str) -> None:
        """Add new deliveries to the account."""
        lines = self._file.read_bytes().splitlines(keepends=True)
        read = self._account.read.setdefault(reader, [])
        for line in lines[self._booked :]:
            if line == b"lost\n":
                self.lost += 1
            elif line.endswith(b"\n"):
                partition, offset, number = map(int, line.split())
                read.append((partition, offset, number))
        self._booked = len(lines)

    def end(self, how: signal.Signals = signal.SIGKILL) -> int:
        # Not by its pid, which may be reused.
        self.process.send_signal(how)
        self.process.send_signal(signal.SIGCONT)
        return self.process.wait(20)


@pytest.fixture
def server() -> KafkaServer:
    return shared_server()


@pytest.fixture
def members() -> Iterator[list[Member]]:
    members: list[Member] = []
    yield members
    for member in members:
        member.end()


def numbers(members: list[Member], account: Account) -> set[int]:
    for member in members:
        member.book(member.name)
    return {number for entries in account.read.values() for _, _, number in entries}


# Each kind is killed or frozen with each protocol: commits do not depend on the kind of failure.
@pytest.mark.xdist_group("kafka-chaos-killed")
@pytest.mark.parametrize(
    ("kind", "protocol"),
    [("messages", "classic"), pytest.param("records", "consumer", marks=pytest.mark.deep)],
)
async def test_killed_consumers_lose_nothing(
    server: KafkaServer,
    kind: str,
    protocol: str,
    members: list[Member],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dice = random.Random(4)
    account = Account(RawAdmin(server.bootstrap).make_topic(partitions=PARTITIONS), PARTITIONS)
    url, group = f"{server.url}?{PROTOCOLS[protocol]}", f"{account.topic}-group"
    stopped = asyncio.Event()

    def start() -> Member:
        members.append(Member(f"member-{len(members)}", kind, url, account, group, tmp_path))
        return members[-1]

    async with broker.connect(server.url) as bus:
        publishing = asyncio.create_task(account.publish_until(bus, stopped, pause=0.1))
        alive = [start(), start()]
        kills = 2
        for _ in range(kills):
            victim = dice.choice(alive)
            before = victim.entries
            await reached(lambda victim=victim, before=before: victim.entries > before + 30)
            victim.end()
            alive.remove(victim)
            alive.append(start())
        stopped.set()
        await publishing
        written = await asyncio.to_thread(account.written, server.bootstrap)
        try:
            await reached(lambda: numbers(members, account) >= written.keys(), 40)
        finally:
            account.say(capsys, f"{kind}, {protocol}, {kills} members killed", written, shared=True)
    assert all(member.end(signal.SIGTERM) is not None for member in alive)
    places = {(partition, offset): number for number, (partition, offset) in written.items()}
    entries = [entry for read in account.read.values() for entry in read]
    assert all(places[partition, offset] == number for partition, offset, number in entries)
    # A kill repeats uncommitted deliveries: with these readers, less than a batch or a second's work.
    again = len(entries) - len(set(entries))
    assert again <= kills * 1200, again


@pytest.mark.xdist_group("kafka-chaos-stopped")
@pytest.mark.parametrize(
    ("kind", "protocol"),
    [pytest.param("records", "classic", marks=pytest.mark.deep), ("messages", "consumer")],
)
async def test_a_consumer_stopped_for_longer_than_its_session_loses_nothing(
    server: KafkaServer,
    kind: str,
    protocol: str,
    members: list[Member],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    admin = RawAdmin(server.bootstrap)
    account = Account(admin.make_topic(partitions=PARTITIONS), PARTITIONS)
    url, group = f"{server.url}?{PROTOCOLS[protocol]}", f"{account.topic}-group"
    stopped = asyncio.Event()
    async with broker.connect(server.url) as bus:
        # No more than the watcher reads alone.
        publishing = asyncio.create_task(account.publish_until(bus, stopped, pause=0.3))
        members += [Member(name, kind, url, account, group, tmp_path) for name in ("sleeper", "watcher")]
        sleeper, watcher = members
        await reached(lambda: sleeper.entries > 30 and watcher.entries > 30)
        sleeper.process.send_signal(signal.SIGSTOP)
        watcher.book("watcher")
        begun = len(account.read["watcher"])

        def all_with_the_watcher() -> bool:
            watcher.book("watcher")
            since = account.read["watcher"][begun:]
            return {partition for partition, _, _ in since} == set(range(PARTITIONS))

        await reached(all_with_the_watcher, SESSIONS[protocol] + 15)
        before = sleeper.entries
        sleeper.process.send_signal(signal.SIGCONT)
        # It rejoins after it learned that it was fenced.
        await reached(lambda: sleeper.entries > before + 100, 30)
        stopped.set()
        await publishing
        written = await asyncio.to_thread(account.written, server.bootstrap)
        try:
            await reached(lambda: numbers(members, account) >= written.keys(), 30)
        finally:
            account.say(
                capsys, f"{kind}, {protocol}, stopped; {sleeper.lost} settlements refused", written, shared=True
            )
    for member in members:
        assert member.process.poll() is None
        member.end(signal.SIGTERM)
    places = {(partition, offset): number for number, (partition, offset) in written.items()}
    entries = [entry for read in account.read.values() for entry in read]
    assert all(places[partition, offset] == number for partition, offset, number in entries)
    # Only commits of the owner count: none moved back or beyond the end.
    for partition in range(PARTITIONS):
        end = sum(place[0] == partition for place in written.values())
        assert admin.committed(group, account.topic, partition).offset <= end
