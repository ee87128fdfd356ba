"""Latency of a Kafka group: from the start to the first record, and of a rebalance with one more member.

Both group protocols run on one broker with the session and heartbeat settings of the tests, so that the figures show
the library and the protocol, not the broker's default delays.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from itertools import pairwise

import broker
from benchmarks.kafka_stage import BODY, KafkaStage, open_kafka
from benchmarks.measure import Spread
from benchmarks.report import Finding, Section

__all__ = ["measure_kafka_groups"]

_PARTITIONS = 6
_PAUSE = 0.005
"""Seconds between records of the stream."""
_PROTOCOLS: Mapping[str, str] = {
    "classic, cooperative": "partition_assignment_strategy=cooperative-sticky&heartbeat_interval_ms=500",
    "KIP-848": "group_protocol=consumer",
}


async def measure_kafka_groups(scale: float, rounds: int) -> Section:
    """Measure start and rebalance."""
    section = Section(
        "Kafka, groups",
        f"Seconds, with {_PARTITIONS} partitions: from opening a bus to the first record of a group; and, when a "
        "second member joins a group of one, until it has its first record, the longest pause of a partition that "
        f"stays, and of one that moves. Each partition gets a record every {_PARTITIONS * _PAUSE * 1e3:.0f} ms.",
    )
    async with open_kafka() as stage:
        for name, options in _PROTOCOLS.items():
            url = f"{stage.url}?{options}"
            starts = [await _first_record(stage, url) for _ in range(rounds)]
            section.findings.append(Finding(f"{name}: start to first record", Spread.of(starts), "s"))
            joins = [await _join(stage, url, seconds=1.0 if scale < 1 else 3.0) for _ in range(rounds)]
            for index, what in enumerate(("a joining member's first record", "pause that stays", "pause that moves")):
                spread = Spread.of([join[index] for join in joins])
                section.findings.append(Finding(f"{name}: {what}", spread, "s"))
    return section


async def _first_record(stage: KafkaStage, url: str) -> float:
    topic = stage.filled(600, partitions=_PARTITIONS)
    began = time.perf_counter()
    async with broker.connect(url) as bus, bus.records(topic, group=stage.name("first")) as log:
        await log.next_record()
        return time.perf_counter() - began


class _Member:
    """A member that notes the arrival times of records by partition."""

    def __init__(self, bus: broker.Bus, topic: str, group: str) -> None:
        self.times: dict[int, list[float]] = {}
        self.first = asyncio.Event()
        self.all = asyncio.Event()
        self._task = asyncio.create_task(self._run(bus, topic, group))

    async def _run(self, bus: broker.Bus, topic: str, group: str) -> None:
        async with bus.records(topic, group=group) as log:
            async for batch in log.batches(100):
                now = time.perf_counter()
                for record in batch:
                    self.times.setdefault(record.partition, []).append(now)
                self.first.set()
                if len(self.times) == _PARTITIONS:
                    self.all.set()
                await batch.commit()

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.wait((self._task,))


async def _join(stage: KafkaStage, url: str, seconds: float) -> tuple[float, float, float]:
    """Seconds to the second member's first record, and the longest pauses of partitions that stay and that move."""
    topic, group = stage.topic(_PARTITIONS), stage.name("join")
    async with broker.connect(url) as bus:
        publishing = asyncio.create_task(_stream(bus, topic))
        one = _Member(bus, topic, group)
        await one.all.wait()
        await asyncio.sleep(seconds / 2)
        began = time.perf_counter()
        two = _Member(bus, topic, group)
        await two.first.wait()
        joined = time.perf_counter() - began
        await asyncio.sleep(seconds)
        await one.end()
        await two.end()
        publishing.cancel()
    pauses: dict[bool, list[float]] = {True: [0.0], False: [0.0]}
    for partition in range(_PARTITIONS):
        moved = partition in two.times
        times = sorted([*one.times[partition], *two.times.get(partition, [])])
        later = [at for at in times if at >= began - 0.1]
        pauses[moved] += [b - a for a, b in pairwise(later)]
    return joined, max(pauses[False]), max(pauses[True])


async def _stream(bus: broker.Bus, topic: str) -> None:
    target, number = bus.topic(topic), 0
    while True:
        await target.publish(broker.OutboundMessage(BODY, partition=number % _PARTITIONS))
        number += 1
        await asyncio.sleep(_PAUSE)
