"""The process of a member: runs both groups until SIGTERM or SIGKILL. It prints its reports as lines of JSON."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final
from weakref import WeakKeyDictionary

import msgspec

import broker
from broker_streams import PartitionState, Processor
from broker_streams.partition import PartitionRunner
from examples.flights_streams.groups import GROUPS
from examples.flights_streams.topics import DEPARTURES, FLIGHTS

__all__ = ["MemberReport", "Recovery", "Reporter"]

_REPORT_SECONDS: Final = 0.25


class Recovery(msgspec.Struct, frozen=True):
    """A partition was recovered.

    :ivar rows: rows that were read from the table.
    :ivar at: when it was seen, in seconds since 1970.
    """

    group: str
    partition: int
    rows: int
    seconds: float
    at: float


class MemberReport(msgspec.Struct):
    """A report of a member.

    :ivar partitions: numbers of those that it handles, by group.
    :ivar flights: messages of `FLIGHTS` that are part of a checkpoint, likewise `departures`.
    :ivar late: departures that came after their hour had closed.
    :ivar undone: checkpoints that were undone and done again.
    """

    partitions: dict[str, list[int]] = {}
    flights: int = 0
    departures: int = 0
    late: int = 0
    undone: int = 0
    guarantee: str = ""
    how: str = ""
    recoveries: list[Recovery] = []

    @property
    def ready(self) -> bool:
        """Whether it has partitions of both groups."""
        return len(self.partitions) == len(GROUPS) and all(self.partitions.values())


class Reporter:
    """What the processors of a member have done, also on partitions that have gone."""

    def __init__(self, processors: Sequence[Processor]) -> None:
        self._processors = processors
        self._totals: Counter[str] = Counter()
        """Messages by topic, and those that were late."""
        self._seen: WeakKeyDictionary[PartitionRunner, Counter[str]] = WeakKeyDictionary()
        """What the totals have of a partition, for as long as it runs."""
        self._recovered: dict[tuple[str, int], tuple[float, int]] = {}
        self._recoveries: list[Recovery] = []

    def report(self) -> MemberReport:
        """What is known now."""
        report = MemberReport(recoveries=self._recoveries)
        for processor in self._processors:
            self._add_up(processor)
            self._recoveries += self._new_recoveries(processor)
            stats = processor.stats()
            report.guarantee, report.how = stats.guarantee, stats.how
            report.undone += stats.failed_checkpoints
            report.partitions[processor.group.name] = sorted(
                number for number, state in processor.partitions.items() if state is PartitionState.RUNNING
            )
        totals = self._totals
        report.flights, report.departures, report.late = totals[FLIGHTS], totals[DEPARTURES], totals["late"]
        return report

    def _add_up(self, processor: Processor) -> None:
        for runner in processor.runners:
            now = Counter({topic: messages for topic, (messages, _) in runner.handled.items()})
            now["late"] = runner.counts["late"]
            self._totals.update(now - self._seen.get(runner, Counter()))
            self._seen[runner] = now

    def _new_recoveries(self, processor: Processor) -> Iterator[Recovery]:
        name = processor.group.name
        for number, stats in processor.stats().partitions.items():
            seconds, rows = stats.table.recovery_seconds, stats.table.rows
            before, rows_before = self._recovered.get((name, number), (None, 0))
            if seconds is not None and seconds != before:
                self._recovered[name, number] = seconds, rows
                yield Recovery(name, number, rows - rows_before, seconds, time.time())


async def main(name: str, state_dir: str) -> None:
    """Run a member on the broker of BROKER_URL."""
    # That members come and go is part of the demo.
    logging.getLogger("broker").setLevel(logging.ERROR)
    logging.getLogger("broker_streams").setLevel(logging.ERROR)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    async with broker.connect() as bus:
        processors = [Processor(bus, group, state_dir=state_dir, name=name) for group in GROUPS]
        reporter = Reporter(processors)
        async with asyncio.TaskGroup() as tasks:
            # If this fails, the demo is gone, and the member ends too.
            reporting = tasks.create_task(_report_regularly(reporter))
            await broker.serve(*processors)
            reporting.cancel()


async def _report_regularly(reporter: Reporter) -> None:
    while True:
        print(msgspec.json.encode(reporter.report()).decode(), flush=True)
        await asyncio.sleep(_REPORT_SECONDS)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
