"""Prints the queue and its workers while they work, and the accounts at the end."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from examples.flights_queue.accounts import Accounts
from examples.flights_queue.lives import WorkerLife
from examples.flights_queue.watching import Snapshot, held_by

__all__ = ["Board"]


class Board:
    """The terminal. Without one, prints the final table only.

    :ivar published: jobs that the broker confirmed.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self.published = 0
        self._live: Live | None = None

    def say(self, line: str) -> None:
        """Print a line, above the table if there is one."""
        self.console.print(line, highlight=False)

    @contextmanager
    def shown(self) -> Generator[None]:
        """Show the table within the block."""
        with Live(console=self.console, refresh_per_second=4) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None
        if not self.console.is_terminal:
            self.console.line()

    def show(self, snapshot: Snapshot, accounts: Accounts, lives: Sequence[WorkerLife]) -> None:
        """Update the table."""
        if self._live is not None:
            self._live.update(Group(self._queue(snapshot, accounts, lives), _workers(snapshot, lives)))

    def _queue(self, snapshot: Snapshot, accounts: Accounts, lives: Sequence[WorkerLife]) -> Table:
        states = snapshot.states
        columns = {
            "Published": self.published,
            "Done": accounts.done,
            "Dead letters": accounts.dead,
            "Waiting": snapshot.waiting,
            "Open leases": len(snapshot.leases),
            "Held": states["held"],
            "Delayed": states["waiting"],
            "Due": states["due"],
            "Redelivered": sum(life.report.redelivered for life in lives),
            "Most attempts": max(accounts.most_attempts, snapshot.most_attempts),
        }
        return _table("The queue", columns, [[f"{count:,}" for count in columns.values()]])

    def facts(self, title: str, lines: Sequence[tuple[str, int, str]]) -> None:
        """Print names, counts and explanations."""
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column()
        for what, count, meaning in lines:
            table.add_row(what, f"{count:,}", meaning)
        self.console.print(table)


def _workers(snapshot: Snapshot, lives: Sequence[WorkerLife]) -> Table:
    columns = ("Worker", "", "Holds", "Handled", "Redelivered", "Done", "Nacked", "Failed", "Dead", "Lost")
    rows = [
        [
            life.name,
            f"[bold red]{life.state}[/]" if life.killed_at else life.state,
            *(
                f"{count:,}"
                for count in (
                    held_by(snapshot.leases, life.pid),
                    life.report.handled,
                    life.report.redelivered,
                    life.report.done,
                    life.report.delayed,
                    life.report.failed,
                    life.report.dead,
                    len(life.report.lost),
                )
            ),
        ]
        for life in lives
    ]
    return _table("", columns, rows)


def _table(title: str, columns: Sequence[str] | dict[str, int], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title or None, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("Worker", "") else "right")
    for row in rows:
        table.add_row(*row)
    return table
