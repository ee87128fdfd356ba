"""The common part of the benchmark commands: arguments and written files."""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks import plot, report
from benchmarks.report import PERFORMANCE, Page, Section

__all__ = ["Arguments", "conclude", "read_arguments"]

_DOCS: Final = Path(__file__).parents[1] / "docs"
_QUICK: Final = 0.01


class Arguments:
    """The arguments.

    :ivar names: names of benchmarks, in the given order; empty is all.
    :ivar scale: the fraction of its messages that each benchmark uses.
    :ivar everything: whether no benchmark is left out.
    :ivar output: the directory of the page and the plot; None writes nothing.
    """

    def __init__(self, given: argparse.Namespace, known: Collection[str]) -> None:
        self.names: Sequence[str] = given.names
        self.quick: bool = given.quick
        self.scale, self.rounds = (_QUICK, 1) if given.quick else (1.0, int(given.rounds))
        self.everything = not given.names or len(given.names) == len(known)
        self.output: Path | None = given.output or (_DOCS if self.everything and not given.quick else None)


def read_arguments(
    arguments: Sequence[str] | None, known: Collection[str], *, prog: str, description: str, rounds: int
) -> Arguments:
    """Parse the command line; an error ends the process with the usage.

    :param known: the names of all benchmarks.
    :param rounds: the default number of rounds.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("names", nargs="*", metavar="name", help=f"some of {', '.join(known)}; else all")
    parser.add_argument("--quick", action="store_true", help="few messages, one round: does it run?")
    parser.add_argument("--rounds", type=int, default=rounds, help="how often each variant runs (%(default)s)")
    parser.add_argument(
        "--output",
        type=Path,
        help="directory of the page and the plot (docs/, if all ran at full size); some update their sections",
    )
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in known]
    if unknown or given.rounds < 1:
        parser.error(f"there is no benchmark {unknown[0]!r}" if unknown else "--rounds takes 1 or more")
    return Arguments(given, known)


def conclude(
    sections: list[Section],
    options: Arguments,
    console: Console,
    *,
    name: str,
    started: float,
    load: float,
    page: Page = PERFORMANCE,
) -> None:
    """Write `NAME.md` and `NAME.png` if requested, and print the missed targets.

    If only some benchmarks ran, their sections replace those of a page that is there already.

    :param started: start time, by `time.perf_counter`.
    :param load: the load average before the start.
    """
    seconds = time.perf_counter() - started
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        text, picture = options.output / f"{name}.md", options.output / f"{name}.png"
        drawn = False
        if text.exists() and not options.everything:
            report.update(sections, text, rounds=options.rounds, load=load)
        else:
            drawn = plot.draw(sections, picture)
            shown = picture if drawn else None
            report.write(sections, text, shown, rounds=options.rounds, seconds=seconds, load=load, page=page)
        console.print(f"Written: {text}, {picture}" if drawn else f"Written: {text}")
    missed = [finding.what for section in sections for finding in section.findings if finding.verdict == "MISSED"]
    console.print(f"{len(missed)} bars missed, {seconds:.0f} s in all" + "".join(f"\n  {what}" for what in missed))
