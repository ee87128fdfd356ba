"""How long a partition that stays with its member handles nothing when a second member joins and leaves a Kafka group.

Both group protocols run on one broker with the session and heartbeat settings of the tests, so that the figures show
the library and the protocol, not the broker's default delays. Each member is a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.measure import Spread
from benchmarks.report import Finding, Section
from benchmarks.streams.rebalance_member import CHECKPOINT_INTERVAL
from benchmarks.streams.stage import Stage, open_stage, state_directory
from broker import OutboundMessage

__all__ = ["measure_rebalance"]

_PARTITIONS: Final = 6
_PAUSE: Final = 0.005
"""Seconds between messages of a topic."""
_BAR: Final = 0.25
_PATIENCE: Final = 120.0
_PROTOCOLS: Final[Mapping[str, str]] = {
    "classic": "?heartbeat_interval_ms=500",
    "KIP-848": "?group_protocol=consumer",
}
_TOPICS: Final = (1, 2)

_Handled = Mapping[str, Sequence[tuple[int, float]]]
"""By partition the number of each message, and when it was handled."""


class _Pauses(NamedTuple):
    joining: float
    leaving: float
    moved: float


async def measure_rebalance(scale: float, rounds: int) -> list[Section]:
    """Measure both protocols, with one input and with two."""
    section = Section(
        "Rebalances",
        f"Seconds, with {_PARTITIONS} partitions under load on Kafka, exactly once, a checkpoint every "
        f"{CHECKPOINT_INTERVAL:g} s: the longest time for which a partition handled nothing, though messages waited, "
        "while a second member joined and while it left. Each member is a process of its own. Two inputs "
        f"are copartitioned. Each gets a message every {_PARTITIONS * _PAUSE * 1e3:.0f} ms.",
        "s",
    )
    async with open_stage("kafka") as stage:
        for name, options in _PROTOCOLS.items():
            for inputs in _TOPICS:
                runs = [await _rebalance(stage, options, inputs, 1.0 if scale < 1 else 3.0) for _ in range(rounds)]
                joining, leaving, moved = (Spread.of(pauses) for pauses in zip(*runs, strict=True))
                what = f"{name}, {inputs} input{'s' * (inputs > 1)}"
                section.findings += [
                    Finding(f"{what}: a partition that stays, one joins", joining, "s", at_most=_BAR),
                    Finding(f"{what}: a partition that stays, one leaves", leaving, "s", at_most=_BAR),
                    Finding(f"{what}: a partition that moves", moved, "s"),
                ]
    return [section]


async def _rebalance(stage: Stage, options: str, inputs: int, seconds: float) -> _Pauses:
    """The longest pauses of partitions that stay, and of those that move there and back."""
    sources = [await stage.topic(_PARTITIONS) for _ in range(inputs)]
    job = {"url": stage.url + options, "group": stage.unique("rebalanced"), "sources": sources}
    published: dict[int, float] = {}
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(state_directory())
        one, two = _Member(job, directory / "one"), _Member(job, directory / "two")
        publishing = asyncio.create_task(_stream(stage, sources, published))
        stack.callback(publishing.cancel)
        async with one.running():
            await asyncio.sleep(seconds / 2)
            joins = time.monotonic()
            async with two.running():
                await asyncio.sleep(seconds)
                leaves = time.monotonic()
            await asyncio.sleep(seconds)
            ends = time.monotonic()
            publishing.cancel()
    pauses: dict[tuple[bool, bool], float] = {}
    for partition in map(str, range(_PARTITIONS)):
        mine, theirs = one.handled.get(partition, ()), two.handled.get(partition, ())
        for leaving, (begin, end) in enumerate([(joins, leaves), (leaves, ends)]):
            kind = bool(theirs), bool(leaving)
            pauses[kind] = max(pauses.get(kind, 0.0), _longest([*mine, *theirs], published, begin, end))
    for source in sources:
        await stage.bus.admin.delete_topic(source)
    return _Pauses(
        joining=pauses.get((False, False), 0.0),
        leaving=pauses.get((False, True), 0.0),
        moved=max(pauses.get((True, False), 0.0), pauses.get((True, True), 0.0)),
    )


def _longest(handled: Sequence[tuple[int, float]], published: Mapping[int, float], begin: float, end: float) -> float:
    """The longest time between these in which nothing was handled, though the message that came next was there."""
    longest, before = 0.0, begin
    for number, at in sorted(handled, key=lambda each: each[1]):
        if begin <= at <= end:
            longest = max(longest, at - max(before, published.get(number, at)))
            before = at
    return longest


class _Member:
    """A process that handles messages.

    :ivar handled: what it has handled, once it has ended.
    """

    def __init__(self, job: Mapping[str, object], directory: Path) -> None:
        self._job = {**job, "directory": str(directory)}
        self.handled: _Handled = {}

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Join the group, and leave it at the end of the block."""
        command = (sys.executable, "-m", "benchmarks.streams.rebalance_member", json.dumps(self._job))
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=2**24)
        try:
            assert await self._line(process) == "ready"
            yield
            assert process.stdin is not None
            process.stdin.close()
            self.handled = json.loads(await self._line(process))
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _line(self, process: Process) -> str:
        assert process.stdout is not None
        async with asyncio.timeout(_PATIENCE):
            return (await process.stdout.readline()).decode().strip()


async def _stream(stage: Stage, topics: Sequence[str], published: dict[int, float]) -> None:
    """Publish to every partition in turn, without waiting for the broker in between.

    :param published: gets the number of each message, and when the broker had it.
    """

    async def publish(topic: str, number: int, partition: int) -> None:
        message = OutboundMessage(b"%d" % number, f"key-{partition}", partition=partition)
        await stage.bus.topic(topic).publish(message)
        published[number] = time.monotonic()

    number = 0
    async with asyncio.TaskGroup() as tasks:
        while True:
            partition = number // len(topics) % _PARTITIONS
            for topic in topics:
                tasks.create_task(publish(topic, number, partition))
                number += 1
            await asyncio.sleep(_PAUSE)
