"""Prints progress bars while the demo runs, then the table, the balance and the rates."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.flights.fold import LATE_AFTER, CarrierDelays

if TYPE_CHECKING:
    from examples.flights.story import Balance

__all__ = ["Screen", "carrier_rows"]

_COLUMNS = ("Carrier", "Flights", "Cancelled", "Mean", "Late", "Worst", "Arrival")


def carrier_rows(
    carriers: Mapping[str, CarrierDelays], cancelled: Mapping[str, int], airlines: Mapping[str, str]
) -> list[tuple[str, ...]]:
    """The table as text: one row per carrier, the most punctual first, and the total."""
    codes = sorted({*carriers, *cancelled}, key=lambda code: (carriers.get(code, CarrierDelays()).mean_departure, code))
    rows = [
        _row(airlines.get(code, code), carriers.get(code, CarrierDelays()), cancelled.get(code, 0)) for code in codes
    ]
    whole = CarrierDelays()
    for carrier in carriers.values():
        whole.flights += carrier.flights
        whole.late += carrier.late
        whole.departure += carrier.departure
        whole.worst = max(whole.worst, carrier.worst)
        whole.arrived += carrier.arrived
        whole.arrival += carrier.arrival
    return [*rows, _row("All", whole, sum(cancelled.values()))]


def _row(name: str, carrier: CarrierDelays, cancelled: int) -> tuple[str, ...]:
    if not carrier.flights:
        return (name, "0", f"{cancelled:,}", "", "", "", "")
    return (
        name,
        f"{carrier.flights:,}",
        f"{cancelled:,}",
        f"{carrier.mean_departure:.1f}",
        f"{100 * carrier.share_late:.1f} %",
        f"{carrier.worst:,}",
        f"{carrier.mean_arrival:.1f}",
    )


class Screen:
    """The terminal. Without one, prints lines instead of bars."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def say(self, line: str) -> None:
        """Print a line, above the bars if there are any."""
        (self._console if self._bars is None else self._bars.console).print(line, highlight=False)

    @contextmanager
    def progress(self, totals: Mapping[str, int]) -> Generator[None]:
        """Show bars within the block, with their totals."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console, expand=True, refresh_per_second=8) as bars:
            self._bars = bars
            self._tasks = {what: bars.add_task(what, total=total, rate="") for what, total in totals.items()}
            try:
                yield
            finally:
                self._bars = None

    def advance(self, what: str, count: int) -> None:
        """Set the bar of this name."""
        if self._bars is not None:
            task = self._tasks[what]
            speed = next((shown.speed for shown in self._bars.tasks if shown.id == task), None)
            self._bars.update(task, completed=count, rate="" if speed is None else f"{speed:,.0f}/s")

    def table(self, rows: Sequence[tuple[str, ...]]) -> None:
        """Print the carriers."""
        table = Table(
            title="Flights from New York City in 2013, by carrier",
            title_justify="left",
            caption=f"Delays at departure and the mean at arrival in minutes; late is more than {LATE_AFTER}",
            caption_justify="left",
        )
        for index, column in enumerate(_COLUMNS):
            table.add_column(column, justify="right" if index else "left", no_wrap=True)
        for row in rows[:-1]:
            table.add_row(*row)
        table.add_section()
        table.add_row(*rows[-1], style="bold")
        self._console.print(table)

    def facts(self, title: str, lines: Iterable[tuple[str, int, str]]) -> None:
        """Print names, counts and explanations."""
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column()
        for what, count, meaning in lines:
            table.add_row(what, f"{count:,}", meaning)
        self._console.print(table)

    def balance(self, balance: Balance) -> None:
        """Print the result for all flights, and the rates."""
        auditor, report = balance.auditor, balance.report
        lines = (
            ("published", balance.published, "confirmed by the broker, keyed by aircraft"),
            ("= folded", len(auditor.delays), "departed, in the fold of delays"),
            ("+ dead-lettered", len(auditor.cancelled), "; ".join(sorted(auditor.reasons))),
            ("lost", auditor.lost, "published, and neither folded nor dead-lettered"),
            ("handled before the kill", balance.handled_before, "outcomes that the auditor had read by then"),
            (
                "redelivered after it",
                report.redelivered,
                f"{report.known:,} of them were already folded, but not acked",
            ),
            ("written twice", auditor.again, "outcomes published twice, recognised and counted once"),
            ("out of order", auditor.out_of_order, f"flights of {auditor.order_published.aircraft:,} aircraft"),
        )
        self.facts("The balance", lines)
        rates = ", ".join(f"{what} {rate:,.0f}/s" for what, rate in balance.rates.items())
        self.say(f"Rates: {rates}; {balance.seconds:.0f} s in all")
        for failure in balance.failures:
            self.say(f"[bold red]Does not hold:[/] {failure}")
        if not balance.failures:
            self.say("[bold green]Every promise holds:[/] nothing lost, order kept, the fold survived the kill")
