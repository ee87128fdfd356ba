"""Prints alerts, recoveries, the comparison and the verdict at the end."""

from __future__ import annotations

from examples.flights_streams.board import Board
from examples.flights_streams.groups import MANY
from examples.flights_streams.story import Outcome

__all__ = ["show"]


def show(board: Board, outcome: Outcome) -> None:
    """Print everything."""
    results = outcome.results
    for alert in sorted(results.alerts.values(), key=lambda alert: alert.number):
        plane = "" if alert.plane is None else f", a {alert.plane.manufacturer} {alert.plane.model}"
        board.say(f"Alert: {alert.aircraft} of {alert.airline}{plane}, was late {MANY} times in a row")
    board.facts("Recoveries", _recoveries(outcome))
    board.facts(
        "What came out, beside a plain computation",
        (
            (
                each.what,
                each.found,
                f"equal, all {each.expected:,}" if not each.differences else "[bold red]not equal[/]",
            )
            for each in outcome.compared
        ),
    )
    board.facts(
        "The balance",
        (
            (
                "flights",
                outcome.flights,
                f"{outcome.with_aircraft:,} of them have an aircraft",
            ),
            ("counted at the kill", outcome.counted_at_kill, f"after {outcome.killed_at:.1f} s"),
            ("handled twice", results.again, f"{outcome.guarantee.replace('_', ' ')}, by {outcome.how}"),
            ("written twice", results.copies, "hours and alerts"),
        ),
    )
    board.say("Seconds: " + ", ".join(f"{what} {seconds:.0f}" for what, seconds in outcome.seconds.items()))
    rate = outcome.flights + outcome.with_aircraft
    board.say(f"Rate: {rate / outcome.seconds['handled']:,.0f} messages/s, both groups, publishing and kill included")
    for failure in outcome.failures:
        board.say(f"[bold red]Does not hold:[/] {failure}")
    if not outcome.failures:
        board.say("[bold green]Equal, to the row:[/] nothing lost, nothing counted twice")


def _recoveries(outcome: Outcome) -> list[tuple[str, int, str]]:
    lines: list[tuple[str, int, str]] = []
    for name, recoveries in outcome.recoveries.items():
        rows = sum(recovery.rows for recovery in recoveries)
        seconds = sum(recovery.seconds for recovery in recoveries)
        rate = f", {rows / seconds:,.0f} rows/s" if rows else ""
        lines.append((name, rows, f"rows of {len(recoveries)} partitions in {seconds:.2f} s{rate}"))
    results = outcome.results
    if results.seconds:
        rate = f"{results.read / results.seconds:,.0f} rows/s"
        lines.append(("a new view", results.read, f"rows in {results.seconds:.2f} s, {rate}"))
    return lines
