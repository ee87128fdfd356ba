"""The expected output, by the plain computation of the pipelines, and its comparison with what came out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from examples.flights.fold import LATE_AFTER
from examples.flights_pipeline.comparison import Compared, compare
from examples.flights_pipeline.plain import compute
from examples.flights_pipeline.schemas import AircraftFigures, CarrierHour
from examples.flights_streams.groups import MANY
from examples.flights_streams.results import Results
from examples.flights_streams.topics import Alert, Plane

__all__ = ["Expected", "compare_all", "expect"]

_COLUMNS: Final = (
    "number",
    "carrier",
    "aircraft",
    "departure_delay",
    "built",
    "manufacturer",
    "model",
    "seats",
)


@dataclass(frozen=True, slots=True)
class Expected:
    """Rows of aircraft with their planes, hours with the names of airlines, and alerts."""

    aircraft: dict[str, tuple[AircraftFigures, Plane | None]]
    hours: dict[tuple[str, str], tuple[CarrierHour, str | None]]
    alerts: dict[tuple[str, int], Alert]


def expect(limit: int, airlines: Mapping[str, str]) -> Expected:
    """Compute everything for the first flights of the year.

    :param airlines: names by carrier.
    """
    computed = compute(limit, _COLUMNS)
    table: Any = computed.joined
    planes: dict[str, Plane | None] = {}
    runs: dict[str, int] = {}
    alerts: dict[tuple[str, int], Alert] = {}
    for row in table.sort_by("number").to_pylist():
        aircraft, delay = row["aircraft"], row["departure_delay"]
        if aircraft is None:
            continue
        if aircraft not in planes:
            planes[aircraft] = (
                None if row["model"] is None else Plane(row["built"], row["manufacturer"], row["model"], row["seats"])
            )
        if delay is not None:
            runs[aircraft] = runs.get(aircraft, 0) + 1 if delay > LATE_AFTER else 0
            if runs[aircraft] == MANY:
                alert = Alert(aircraft, row["number"], airlines.get(row["carrier"]), planes[aircraft])
                alerts[aircraft, row["number"]] = alert
    return Expected(
        {aircraft: (figures, planes[aircraft]) for aircraft, figures in computed.aircraft.items()},
        {key: (hour, airlines.get(hour.carrier)) for key, hour in computed.hours.items()},
        alerts,
    )


def compare_all(expected: Expected, found: Results) -> list[Compared]:
    """Compare aircraft, hours and alerts, row for row."""
    aircraft = {key: (AircraftFigures(key, *row.known[:5]), row.plane) for key, row in found.aircraft.items()}
    hours = {key: (hour.figures, hour.airline) for key, hour in found.hours.items()}
    return [
        compare("aircraft", expected.aircraft, aircraft),
        compare("hours of carriers", expected.hours, hours),
        compare("alerts", expected.alerts, found.alerts),
    ]
