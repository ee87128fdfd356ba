"""How long a partition that stays with its member handles nothing when a second member joins and leaves a Kafka group.

Both group protocols run on one broker with the session and heartbeat settings of the tests, so that the figures show
the library and the protocol, not the broker's default delays.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Final

import broker
from benchmarks.measure import Spread
from benchmarks.report import Finding, Section
from benchmarks.streams.stage import Stage, open_stage, state_directory
from broker import Json, OutboundMessage
from broker_streams import Context, Group, Input, Lmdb, Persist, Processor

__all__ = ["measure_rebalance"]

_PARTITIONS: Final = 6
_PAUSE: Final = 0.005
"""Seconds between messages of a topic."""
_BAR: Final = 0.25
_PATIENCE: Final = 60.0
_PROTOCOLS: Final[Mapping[str, str]] = {
    "classic": "?heartbeat_interval_ms=500",
    "KIP-848": "?group_protocol=consumer",
}
_TOPICS: Final = (1, 2)


async def measure_rebalance(scale: float, rounds: int) -> list[Section]:
    """Measure both protocols, with one input and with two."""
    section = Section(
        "Rebalances",
        f"Seconds, with {_PARTITIONS} partitions under load on Kafka, exactly once, a checkpoint every 0.2 s: the "
        "longest time for which a partition that stays handled nothing while a second member joined, and one that "
        f"moved. Two inputs are copartitioned. Each gets a message every {_PARTITIONS * _PAUSE * 1e3:.0f} ms.",
        "s",
    )
    async with open_stage("kafka") as stage:
        for name, options in _PROTOCOLS.items():
            for inputs in _TOPICS:
                runs = [await _join(stage, options, inputs, 1.0 if scale < 1 else 3.0) for _ in range(rounds)]
                stays, moves = (Spread.of(pauses) for pauses in zip(*runs, strict=True))
                what = f"{name}, {inputs} input{'s' * (inputs > 1)}"
                section.findings += [
                    Finding(f"{what}: a partition that stays", stays, "s", at_most=_BAR),
                    Finding(f"{what}: a partition that moves", moves, "s"),
                ]
    return [section]


class _Member:
    """A processor that notes when it handles messages, by partition."""

    def __init__(self, bus: broker.Bus, name: str, sources: list[str], directory: Path) -> None:
        self.times: dict[int, list[float]] = {}
        counts = Persist(Json(int))

        def on_message(ctx: Context, value: int) -> None:
            ctx[counts] = (ctx[counts] or 0) + value
            self.times.setdefault(ctx.partition, []).append(time.perf_counter())

        group = Group(name, Input(sources, Json(int), on_message), counts, order="arrival")
        self.processor = Processor(bus, group, state_dir=directory, store=Lmdb(), checkpoint_interval=0.2)

    async def has_handled(self, partitions: int) -> None:
        """Wait until it has handled messages of so many partitions."""
        async with asyncio.timeout(_PATIENCE):
            while len(self.times) < partitions:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def _join(stage: Stage, options: str, inputs: int, seconds: float) -> tuple[float, float]:
    """The longest pauses of partitions that stay and of those that move."""
    sources = [await stage.topic(_PARTITIONS) for _ in range(inputs)]
    name = stage.unique("rebalanced")
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(state_directory())
        buses = [await stack.enter_async_context(broker.connect(stage.url + options)) for _ in range(2)]
        members = [_Member(bus, name, sources, directory / str(number)) for number, bus in enumerate(buses)]
        publishing = asyncio.create_task(_stream(stage.bus, sources))
        stack.callback(publishing.cancel)
        one, two = members
        await stack.enter_async_context(one.processor)
        await one.has_handled(_PARTITIONS)
        await asyncio.sleep(seconds / 2)
        began = time.perf_counter()
        await stack.enter_async_context(two.processor)
        await two.has_handled(1)
        await asyncio.sleep(seconds)
        ended = time.perf_counter()
        publishing.cancel()
    pauses: dict[bool, list[float]] = {True: [0.0], False: [0.0]}
    for partition in range(_PARTITIONS):
        moved = partition in two.times
        times = sorted([*one.times.get(partition, []), *two.times.get(partition, [])])
        seen = [at for at in times if began - 0.1 <= at <= ended]
        pauses[moved] += [after - before for before, after in pairwise(seen)]
    for source in sources:
        await stage.bus.admin.delete_topic(source)
    return max(pauses[False]), max(pauses[True])


async def _stream(bus: broker.Bus, topics: list[str]) -> None:
    number = 0
    while True:
        for topic in topics:
            message = OutboundMessage(b"1", f"key-{number % _PARTITIONS}", partition=number % _PARTITIONS)
            await bus.topic(topic).publish(message)
        number += 1
        await asyncio.sleep(_PAUSE)
