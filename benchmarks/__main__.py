"""`python -m benchmarks`: runs the benchmarks, prints what they found, writes `docs/performance.md` and its plot.

With `--quick` everything runs on few messages, which proves only that it runs; nothing is written unless `--output`
says where. The exit status is 0 whatever the verdicts are: they are for reading, since a busy machine misses bars.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

from rich.console import Console

from benchmarks import report
from benchmarks.command import conclude, read_arguments
from benchmarks.facade_cost import measure_facade
from benchmarks.faststream_beside import measure_faststream
from benchmarks.jetstream_speed import measure_jetstream
from benchmarks.kafka_groups import measure_kafka_groups
from benchmarks.kafka_handling import measure_kafka_handling
from benchmarks.kafka_markers import measure_markers
from benchmarks.kafka_queue import measure_queue
from benchmarks.kafka_speed import measure_kafka
from benchmarks.pubsub_speed import measure_pubsub
from benchmarks.pulsar_speed import measure_pulsar
from benchmarks.report import Section
from benchmarks.servicebus_speed import measure_servicebus
from benchmarks.six_backends import measure_six
from benchmarks.steadiness import measure_steadiness

__all__ = ["BENCHMARKS", "main"]

BENCHMARKS: dict[str, Callable[[float, int], Awaitable[Section]]] = {
    "facade": measure_facade,
    "backends": measure_six,
    "jetstream": measure_jetstream,
    "faststream": measure_faststream,
    "kafka": measure_kafka,
    "kafka-handling": measure_kafka_handling,
    "kafka-groups": measure_kafka_groups,
    "kafka-markers": measure_markers,
    "kafka-queue": measure_queue,
    "pubsub": measure_pubsub,
    "pulsar": measure_pulsar,
    "servicebus": measure_servicebus,
    "steadiness": measure_steadiness,
}


def main(arguments: Sequence[str] | None = None) -> int:
    asked = read_arguments(
        arguments, BENCHMARKS, prog="python -m benchmarks", description="Measure what the library costs.", rounds=5
    )
    console = Console()
    load = os.getloadavg()[0]
    if load > 1 and not asked.quick:
        console.print(
            f"[yellow]Something else runs here (load {load:.1f}): costs come out too high, ratios too wide[/]"
        )
    started = time.perf_counter()
    sections: list[Section] = []
    for name in asked.names or BENCHMARKS:
        section = asyncio.run(_run(BENCHMARKS[name], asked.scale, asked.rounds))
        report.print_section(section, console)
        sections.append(section)
    conclude(sections, asked, console, name="performance", started=started, load=load)
    return 0


async def _run(benchmark: Callable[[float, int], Awaitable[Section]], scale: float, rounds: int) -> Section:
    return await benchmark(scale, rounds)


if __name__ == "__main__":
    sys.exit(main())
