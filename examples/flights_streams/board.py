"""Prints the members and the ten latest aircraft while the demo runs."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from examples.flights_streams.lives import Life
from examples.flights_streams.member import MemberReport
from examples.flights_streams.results import Results
from examples.flights_streams.viewer import ViewReport

__all__ = ["Board"]


class Board:
    """The terminal. Without one, prints the final tables only."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._live: Live | None = None

    def say(self, line: str) -> None:
        """Print a line, above the tables if there are any."""
        self.console.print(line, highlight=False)

    @contextmanager
    def shown(self) -> Generator[None]:
        """Show the tables within the block."""
        with Live(console=self.console, refresh_per_second=4) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None
        if not self.console.is_terminal:
            self.console.line()

    def show(
        self,
        published: int,
        counted: int,
        results: Results,
        members: Sequence[Life[MemberReport]],
        viewer: Life[ViewReport],
    ) -> None:
        """Update the tables."""
        if self._live is not None:
            table = _latest(viewer.report or ViewReport())
            self._live.update(Group(_progress(published, counted, results), _members(members), table))

    def facts(self, title: str, lines: Iterable[tuple[str, int, str]]) -> None:
        """Print names, counts and explanations."""
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column()
        for what, count, meaning in lines:
            table.add_row(what, f"{count:,}", meaning)
        self.console.print(table)


def _progress(published: int, counted: int, results: Results) -> Table:
    columns = {
        "Published": published,
        "Counted": counted,
        "Lag": published - counted,
        "Hours closed": len(results.hours),
        "Alerts": len(results.alerts),
    }
    return _table("Flights", columns, [[f"{count:,}" for count in columns.values()]])


def _members(members: Sequence[Life[MemberReport]]) -> Table:
    columns = ("Member", "", "Aircraft partitions", "Carrier partitions", "Flights", "Departures", "Recovered rows")
    rows: list[list[str]] = []
    for life in members:
        if not life.is_started:
            continue
        report = life.report or MemberReport()
        numbers = [", ".join(map(str, each)) for each in report.partitions.values()] or ["", ""]
        state = "[bold red]killed[/]" if life.killed else "works" if report.ready else "starts"
        recovered = sum(recovery.rows for recovery in report.recoveries)
        counts = (report.flights, report.departures, recovered)
        rows.append([life.name, state, *numbers, *(f"{count:,}" for count in counts)])
    return _table("", columns, rows)


def _latest(report: ViewReport) -> Table:
    columns = ("Aircraft", "Model", "Flights", "Late", "In a row", "Longest", "Last departure")
    rows = [
        [
            each.aircraft,
            "" if each.row.plane is None else f"{each.row.plane.manufacturer} {each.row.plane.model}",
            *(f"{count:,}" for count in (each.row.known.flights, each.row.known.late, each.row.known.run)),
            f"{each.row.known.longest:,}",
            each.row.scheduled.replace("T", " ").removesuffix(":00Z"),
        ]
        for each in report.latest
    ]
    return _table(f"The latest of {report.rows:,} aircraft, as the view has them", columns, rows)


def _table(title: str, columns: Iterable[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title or None, title_justify="left")
    for column in columns:
        left = column in ("Member", "", "Aircraft", "Model", "Last departure")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
