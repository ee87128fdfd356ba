"""Prints the accounts at the end."""

from __future__ import annotations

from collections import Counter

from examples.flights_queue.accounts import Twice
from examples.flights_queue.board import Board
from examples.flights_queue.fates import Fate
from examples.flights_queue.story import Outcome

__all__ = ["show"]


def show(board: Board, outcome: Outcome) -> None:
    """Print jobs, accounts and the verdict."""
    accounts, deaths, totals = outcome.accounts, outcome.deaths, outcome.totals
    fates = Counter(accounts.expected.values())
    board.facts("The jobs", [(fate.name.lower().replace("_", " "), fates[fate], fate.meaning) for fate in Fate])
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in accounts.reasons.most_common())
    held = ", ".join(f"{count} by {name}" for name, count in outcome.held.items())
    board.facts(
        "The accounts",
        [
            ("published", outcome.published, "confirmed by the broker"),
            ("= done", accounts.done, "with a result each"),
            ("+ dead-lettered", accounts.dead, reasons),
            ("lost", len(accounts.lost), "published, and neither done nor dead-lettered"),
            ("done twice", accounts.done_twice(deaths).count, _why(accounts.done_twice(deaths))),
            ("dead letters twice", accounts.dead_twice(deaths).count, _why(accounts.dead_twice(deaths))),
            ("held by the killed", sum(outcome.held.values()), f"{held}; unsettled jobs were redelivered"),
            ("leases lost", sum(map(len, deaths.lost.values())), "by workers that paused for longer than a lease"),
            (
                "redelivered",
                outcome.republished,
                f"by the trackers: {totals['delayed']:,} nacks, {totals['failed']:,} failures, and ended leases",
            ),
            ("most attempts", accounts.most_attempts, "deliveries of one job that was done"),
        ],
    )
    board.say(f"{outcome.seconds:.0f} s in all")
    for failure in outcome.failures:
        board.say(f"[bold red]Does not hold:[/] {failure}")
    if not outcome.failures:
        board.say("[bold green]The accounts hold:[/] every job done or dead-lettered, 0 lost, every copy explained")


def _why(twice: Twice) -> str:
    return (
        f"{twice.killed:,} by a kill between the result and the ack, {twice.lost:,} by a lost lease, "
        f"{len(twice.unexplained):,} unexplained"
    )
