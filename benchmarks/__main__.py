"""`python -m benchmarks`: runs the benchmarks, prints the results, writes `docs/performance.md` and its plot.

With `--quick` every benchmark runs on few messages, which only shows that it works, and the page is written only with
`--output`. `python -m benchmarks state --output docs` updates one section. The exit status is 0 even if a target is
missed, because a busy machine misses targets.
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
from benchmarks.report import Section
from benchmarks.sections import BENCHMARKS, run_alone

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_arguments(
        arguments, BENCHMARKS, prog="python -m benchmarks", description="Measure what the library costs.", rounds=5
    )
    console = Console()
    load = os.getloadavg()[0]
    if load > 1 and not options.quick:
        console.print(
            f"[yellow]Something else runs here (load {load:.1f}): costs come out too high, ratios too wide[/]"
        )
    started = time.perf_counter()
    sections: list[Section] = []
    # Each in a subprocess, so that the servers and memory of one benchmark do not slow another.
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for name in options.names or BENCHMARKS:
            section = processes.submit(run_alone, name, options.scale, options.rounds).result()
            report.print_section(section, console)
            sections.append(section)
    conclude(sections, options, console, name="performance", started=started, load=load)
    return 0


if __name__ == "__main__":
    sys.exit(main())
