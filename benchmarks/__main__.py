"""`python -m benchmarks`: runs the benchmarks, prints what they found, writes `docs/performance.md` and its plot.

With `--quick` everything runs on few messages, which proves only that it runs; nothing is written unless `--output`
says where. The exit status is 0 whatever the verdicts are: they are for reading, since a busy machine misses bars.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import plot, report
from benchmarks.facade_cost import measure_facade
from benchmarks.faststream_beside import measure_faststream
from benchmarks.jetstream_speed import measure_jetstream
from benchmarks.kafka_groups import measure_kafka_groups
from benchmarks.kafka_handling import measure_kafka_handling
from benchmarks.kafka_speed import measure_kafka
from benchmarks.report import Section
from benchmarks.steadiness import measure_steadiness

__all__ = ["BENCHMARKS", "main"]

BENCHMARKS: dict[str, Callable[[float, int], Awaitable[Section]]] = {
    "facade": measure_facade,
    "jetstream": measure_jetstream,
    "faststream": measure_faststream,
    "kafka": measure_kafka,
    "kafka-handling": measure_kafka_handling,
    "kafka-groups": measure_kafka_groups,
    "steadiness": measure_steadiness,
}
_DOCS = Path(__file__).parents[1] / "docs"
_QUICK = 0.01


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure what the library costs.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"some of {', '.join(BENCHMARKS)}; else all")
    parser.add_argument("--quick", action="store_true", help="few messages, one round: does it run?")
    parser.add_argument("--rounds", type=int, default=5, help="how often each variant runs (%(default)s)")
    parser.add_argument(
        "--output", type=Path, help="directory of the page and the plot (docs/, if all ran at full size)"
    )
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in BENCHMARKS]
    if unknown or given.rounds < 1:
        parser.error(f"there is no benchmark {unknown[0]!r}" if unknown else "--rounds takes 1 or more")
    names = given.names or list(BENCHMARKS)
    scale, rounds = (_QUICK, 1) if given.quick else (1.0, given.rounds)
    console = Console()
    load = os.getloadavg()[0]
    if load > 1 and not given.quick:
        console.print(
            f"[yellow]Something else runs here (load {load:.1f}): costs come out too high, ratios too wide[/]"
        )
    started = time.perf_counter()
    sections: list[Section] = []
    for name in names:
        section = asyncio.run(_run(BENCHMARKS[name], scale, rounds))
        report.print_section(section, console)
        sections.append(section)
    output: Path | None = given.output
    if output is None and not given.quick and len(names) == len(BENCHMARKS):
        output = _DOCS
    seconds = time.perf_counter() - started
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        page, picture = output / "performance.md", output / "performance.png"
        drawn = plot.draw(sections, picture)
        report.write(sections, page, picture if drawn else None, rounds=rounds, seconds=seconds, load=load)
        console.print(f"Written: {page}, {picture}" if drawn else f"Written: {page}")
    missed = [finding.what for section in sections for finding in section.findings if finding.verdict == "MISSED"]
    console.print(f"{len(missed)} bars missed, {seconds:.0f} s in all" + "".join(f"\n  {what}" for what in missed))
    return 0


async def _run(benchmark: Callable[[float, int], Awaitable[Section]], scale: float, rounds: int) -> Section:
    return await benchmark(scale, rounds)


if __name__ == "__main__":
    sys.exit(main())
