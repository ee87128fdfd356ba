"""A transactional copy job whose workers and brokers are killed; every record is accounted for."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Final

import pytest

import broker
from broker.errors import PublishError
from broker.outbound import OutboundMessage
from broker.testing.waiting import eventually
from tests.chaos import kafka_copy_process
from tests.servers.kafka_client import RawAdmin, read_all

__all__ = ["CopyWorker", "copy_while_losing"]

_PARTITIONS: Final = 3
_WORKERS: Final = 2
_KILLS: Final = 4
_KILLS_PER_BROKER: Final = 2
"""One broker is lost with every so many workers."""
_STUCK_SECONDS: Final = 60.0
"""No transaction takes so long, also where one has to time out first."""
# A broker that restarts for longer than a transaction timeout forgets the markers of those that timed out.
_OPTIONS: Final = "session_timeout_ms=2000&heartbeat_interval_ms=300&transaction_timeout_ms=20000"


class CopyWorker:
    """Successive copy processes with one transactional id.

    :param module: the module that they run, with its arguments, followed by the path of `hold`.
    :param directory: where they log.
    """

    def __init__(self, number: int, module: str, arguments: Sequence[str], directory: Path) -> None:
        self.hold = directory / f"hold-{number}"
        self._command = [sys.executable, "-m", module, *arguments, str(self.hold)]
        self._said = directory / f"said-{number}"
        self.errors = directory / f"errors-{number}"
        self.start()

    def start(self) -> None:
        with self._said.open("ab") as said, self.errors.open("ab") as errors:
            self._process = subprocess.Popen(self._command, stdout=said, stderr=errors)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def hold_in_transaction(self) -> None:
        """Wait until the process holds a transaction open after a write, to be killed there."""
        before = self.words()["held"]
        self.hold.touch()
        await eventually(lambda: self.words()["held"] > before, _STUCK_SECONDS, "a transaction has written")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.hold.unlink(missing_ok=True)

    def words(self) -> Counter[str]:
        return Counter(self._said.read_text().split())


async def copy_while_losing(
    url: str,
    admin: RawAdmin,
    lose_broker: Callable[[str], object],
    *,
    copies: int,
    directory: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Have workers copy one topic to another; kill one after the other, and a broker at every second kill.

    In the end the sink has exactly the source's records, once each, in order by partition.

    :param lose_broker: kills a broker, given the source topic, and restarts it.
    :param copies: replicas of the topics.
    """
    dice = random.Random(20261121)
    url = f"{url}?{_OPTIONS}"
    bootstrap = str(admin.config["bootstrap.servers"])
    source, sink = [admin.make_topic(partitions=_PARTITIONS, copies=copies) for _ in range(2)]
    stopped = asyncio.Event()
    feeding = asyncio.create_task(_feed(url, source, stopped))
    workers = [
        CopyWorker(number, kafka_copy_process.__name__, [url, f"copy-{number}", source, sink], directory)
        for number in range(_WORKERS)
    ]
    brokers_lost = 0
    try:
        for kill in range(_KILLS):
            victim = dice.choice(workers)
            # It is killed during its work, not before its first transaction.
            done = victim.words()["committed"]
            until = monotonic() + 6
            while victim.words()["committed"] < done + 3 and monotonic() < until:
                await asyncio.sleep(0.02)
            if kill % 2:
                await victim.hold_in_transaction()
            else:
                await asyncio.sleep(dice.uniform(0, 0.1))
            assert victim.alive
            victim.kill()
            if kill % _KILLS_PER_BROKER == _KILLS_PER_BROKER - 1:
                brokers_lost += 1
                await asyncio.to_thread(lose_broker, source)
            victim.start()
        stopped.set()
        tried = await feeding
        written = _bodies_of(bootstrap, source)
        ends = await asyncio.to_thread(_rest, admin, source, [len(bodies) for bodies in written])
        # The last transaction's marker may reach the sink a moment after the one of the group's offsets.
        until = monotonic() + _STUCK_SECONDS
        while _count(copied := _bodies_of(bootstrap, sink)) < _count(written) and monotonic() < until:
            await asyncio.sleep(0.2)
    finally:
        stopped.set()
        feeding.cancel()
        for worker in workers:
            worker.kill()
    said = sum((worker.words() for worker in workers), Counter[str]())
    undone = _count(_bodies_of(bootstrap, sink, "read_uncommitted")) - _count(copied)
    twice = sum(seen - 1 for seen in Counter(body for bodies in copied for body in bodies).values())
    missing = _count(written) - sum(len(set(bodies)) for bodies in copied)
    accounting = (
        f"{tried} records published in {_PARTITIONS} partitions, {_count(written)} of them in the source; {_WORKERS} "
        f"workers, {_KILLS} kills of a worker, {brokers_lost} brokers lost; {said['committed']} transactions "
        f"committed, {said['aborted']} aborted, {said['reopened']} connections opened again; {undone} records undone, "
        f"and in the sink {_count(copied)}, missing {missing}, twice {twice}, partitions out of order "
        f"{sum(theirs != ours for theirs, ours in zip(written, copied, strict=True))}"
    )
    with capsys.disabled():
        sys.stdout.write(f"\n{accounting}\n")
    assert copied == written, "\n".join([accounting, *(worker.errors.read_text()[-6000:] for worker in workers)])
    assert _count(written) > 500
    assert ends == [len(bodies) for bodies in written]
    # Every second kill hit a transaction with writes.
    assert undone > 0, accounting


def _bodies_of(bootstrap: str, topic: str, isolation: str = "read_committed") -> list[list[bytes | None]]:
    """The bodies of each partition, in order."""
    return [
        [message.value() for message in read_all(bootstrap, topic, partition, isolation=isolation)]
        for partition in range(_PARTITIONS)
    ]


def _count(partitions: list[list[bytes | None]]) -> int:
    return sum(map(len, partitions))


def _rest(admin: RawAdmin, source: str, wanted: list[int]) -> list[int]:
    """The position of the group when it has copied all, or makes no more progress."""
    ends: list[int] = []
    moved = monotonic()
    while ends != wanted and monotonic() < moved + _STUCK_SECONDS:
        time.sleep(0.1)
        # A killed worker may have left a transaction open; the request must not wait for it.
        found = [
            admin.committed(kafka_copy_process.GROUP, source, number, isolation="read_uncommitted")
            for number in range(_PARTITIONS)
        ]
        before, ends = ends, [each.offset for each in found]
        if ends != before:
            moved = monotonic()
    return ends


async def _feed(url: str, topic: str, stopped: asyncio.Event) -> int:
    """Publish numbered records until `stop` is set; return the number of attempts."""
    number = 0
    async with broker.connect(url) as bus:
        while not stopped.is_set():
            batch = [OutboundMessage(b"%d" % n, b"%d" % (n % 17)) for n in range(number, number + 20)]
            number += len(batch)
            with suppress(PublishError):
                await bus.topic(topic).publish_batch(batch, receipts=False)
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), 0.05)
    return number
