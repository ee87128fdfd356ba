"""Prints the final tables: carriers, the longest run of late departures, and the comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from zoneinfo import ZoneInfo

from examples.flights.fold import CarrierDelays
from examples.flights.screen import Screen, carrier_rows
from examples.flights_pipeline.schemas import CarrierHour
from examples.flights_pipeline.story import Outcome

__all__ = ["carriers_of", "show"]

_NEW_YORK = ZoneInfo("America/New_York")


def carriers_of(hours: Iterable[CarrierHour]) -> tuple[dict[str, CarrierDelays], dict[str, int]]:
    """Sum up the windows. Returns delays per carrier by hour of day in New York, and cancelled flights."""
    carriers: dict[str, CarrierDelays] = {}
    cancelled: dict[str, int] = {}
    for each in sorted(hours, key=lambda each: each.carrier):
        found = carriers.setdefault(each.carrier, CarrierDelays())
        cancelled[each.carrier] = cancelled.get(each.carrier, 0) + each.flights - each.departed
        if each.departure is None or each.worst is None:
            continue
        found.flights += each.departed
        found.late += each.late
        found.departure += each.departure
        found.worst = max(found.worst, each.worst)
        found.arrived += each.arrived
        found.arrival += each.arrival or 0
        hour = datetime.fromisoformat(each.hour).astimezone(_NEW_YORK).hour
        flights, minutes = found.by_hour.get(hour, (0, 0))
        found.by_hour[hour] = (flights + each.departed, minutes + each.departure)
    return carriers, cancelled


def show(screen: Screen, outcome: Outcome, airlines: Mapping[str, str]) -> None:
    """Print the tables and the verdict."""
    results = outcome.results
    screen.table(carrier_rows(*carriers_of(results.hours.values()), airlines))
    worst = max(results.aircraft.values(), key=lambda each: (each.longest, each.aircraft), default=None)
    if worst is not None:
        screen.say(
            f"{worst.aircraft} was late {worst.longest} times in a row; of all late departures of the year"
            f" {sum(each.handed_on for each in results.aircraft.values()):,} followed a late arrival of that aircraft"
        )
    screen.facts(
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
    redone = ", ".join(f"batch {batch} of {name}" for name, batch in outcome.cut_off.items())
    screen.facts(
        "The balance",
        (
            ("published", outcome.published, f"{outcome.flights:,} flights and {len(outcome.spoilt):,} corrupted"),
            ("killed", len(outcome.killed), "processes: Python, the JVM, and the workers of both"),
            ("done before", sum(outcome.committed.values()), "rows of committed batches, of all three pipelines"),
            ("done again", len(outcome.cut_off), f"batches that the kill interrupted: {redone}"),
            ("written twice", results.copies, f"of {results.messages:,} messages in topics, recognised by their ids"),
        ),
    )
    screen.say("Seconds: " + ", ".join(f"{what} {seconds:.0f}" for what, seconds in outcome.seconds.items()))
    for failure in outcome.failures:
        screen.say(f"[bold red]Does not hold:[/] {failure}")
    if not outcome.failures:
        copies = f"{results.copies:,} copies in topics, recognised by their ids" if results.copies else "nothing twice"
        screen.say(f"[bold green]Equal, to the row:[/] nothing lost, {copies}, every corrupted message a dead letter")
