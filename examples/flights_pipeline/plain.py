"""Computes the expected output from the tables of the package, without a broker and without Spark.

Shares only column names with the pipelines, so an error in one does not repeat in the other. Reads files; otherwise
pure.
"""

from __future__ import annotations

import io
import zipfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Final

import pyarrow
import pyarrow.compute
import pyarrow.csv

from examples.flights.data import data_file
from examples.flights_pipeline.schemas import AircraftFigures, CarrierHour

__all__ = ["Expected", "compute"]

_LATE: Final = 15
_compute: Any = pyarrow.compute
_TIME: Final = pyarrow.timestamp("us", "UTC")


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected output, in the form of `Results`."""

    joined: pyarrow.Table
    hours: dict[tuple[str, str], CarrierHour]
    aircraft: dict[str, AircraftFigures]


def compute(limit: int, columns: Sequence[str]) -> Expected:
    """Compute everything for the first flights of the year.

    :param columns: of the joined rows, in this order.
    """
    flights = _flights(limit)
    rows = flights.select(["carrier", "tailnum", "scheduled", "dep_delay", "arr_delay"]).to_pylist()
    return Expected(_joined(flights).select(list(columns)), _hours(flights), _aircraft(rows))


def _flights(limit: int) -> Any:
    """The flights by scheduled departure, numbered from 1."""
    with zipfile.ZipFile(data_file("flights.csv.zip")) as archive:
        table = _read(io.BytesIO(archive.read("flights.csv")))
    order = [(name, "ascending") for name in ("time_hour", "minute", "carrier", "flight")]
    table = table.sort_by(order).slice(0, limit)
    minutes = _compute.multiply(table["minute"], 60_000_000).cast(pyarrow.duration("us"))
    numbers = pyarrow.array(range(1, table.num_rows + 1), pyarrow.int64())
    table = table.append_column("number", numbers)
    return table.append_column("scheduled", _compute.add(table["time_hour"], minutes))


def _joined(flights: Any) -> Any:
    """The flights joined with the other tables, one row per flight."""
    name = _compute.binary_join_element_wise(flights["carrier"], flights["flight"].cast("string"), "")
    airlines = _read(data_file("airlines.csv")).rename_columns(["carrier", "airline"])
    airports = _read(data_file("airports.csv")).select(["faa", "name", "lat", "lon"])
    planes = _read(data_file("planes.csv")).select(["tailnum", "year", "manufacturer", "model", "seats"])
    weather = _read(data_file("weather.csv"))
    weather = weather.select(["origin", "time_hour", "temp", "wind_speed", "precip", "visib"])
    table = flights.select(["number", "carrier", "tailnum", "scheduled", "origin", "dest", "time_hour"])
    table = table.append_column("flight", name)
    table = table.append_column("departure_delay", flights["dep_delay"])
    table = table.append_column("arrival_delay", flights["arr_delay"])
    table = table.join(airlines, "carrier").join(airports, "dest", "faa").join(planes, "tailnum")
    table = table.join(weather, ["origin", "time_hour"])
    return table.rename_columns({**dict(zip(table.column_names, table.column_names, strict=True)), **_NAMES})


_NAMES: Final = {
    "tailnum": "aircraft",
    "dest": "destination",
    "name": "airport",
    "lat": "latitude",
    "lon": "longitude",
    "year": "built",
    "temp": "temperature",
    "precip": "precipitation",
    "visib": "visibility",
}


def _hours(flights: Any) -> dict[tuple[str, str], CarrierHour]:
    late = _compute.greater(flights["dep_delay"], _LATE).cast(pyarrow.int64())
    table = flights.select(["carrier", "time_hour", "dep_delay", "arr_delay"]).append_column("late", late)
    sums = table.group_by(["carrier", "time_hour"]).aggregate(
        [
            ([], "count_all"),
            ("dep_delay", "count"),
            ("late", "sum"),
            ("dep_delay", "sum"),
            ("dep_delay", "max"),
            ("arr_delay", "count"),
            ("arr_delay", "sum"),
        ]
    )
    found: dict[tuple[str, str], CarrierHour] = {}
    for row in sums.to_pylist():
        hour = row["time_hour"].strftime("%Y-%m-%dT%H:%M:%SZ")
        found[row["carrier"], hour] = CarrierHour(
            row["carrier"],
            hour,
            row["count_all"],
            row["dep_delay_count"],
            row["late_sum"] or 0,
            row["dep_delay_sum"],
            row["dep_delay_max"],
            row["arr_delay_count"],
            row["arr_delay_sum"],
        )
    return found


def _aircraft(rows: Sequence[dict[str, Any]]) -> dict[str, AircraftFigures]:
    by_aircraft: dict[str, list[tuple[int | None, int | None]]] = defaultdict(list)
    for row in rows:
        if row["tailnum"] is not None:
            by_aircraft[row["tailnum"]].append((row["dep_delay"], row["arr_delay"]))
    return {aircraft: _figures(aircraft, flights) for aircraft, flights in by_aircraft.items()}


def _figures(aircraft: str, flights: Sequence[tuple[int | None, int | None]]) -> AircraftFigures:
    flown = [(departure, arrival) for departure, arrival in flights if departure is not None]
    late = [departure > _LATE for departure, _ in flown]
    arrived_late = [(arrival or 0) > _LATE for _, arrival in flown]
    return AircraftFigures(
        aircraft,
        len(flights),
        len(flown),
        sum(late),
        max((len(list(run)) for was_late, run in groupby(late) if was_late), default=0),
        sum(before and now for (before, _), (_, now) in pairwise(zip(arrived_late, late, strict=True))),
    )


def _read(source: Any) -> Any:
    """Read a table. A column without a decimal point in any row is a whole number."""
    real = ("lat", "lon", "temp", "dewp", "humid", "wind_dir", "wind_speed", "wind_gust", "precip", "pressure", "visib")
    types = {name: pyarrow.float64() for name in real}
    convert = pyarrow.csv.ConvertOptions(
        null_values=["NA"], strings_can_be_null=True, column_types={**types, "time_hour": _TIME}
    )
    return pyarrow.csv.read_csv(source, convert_options=convert)
