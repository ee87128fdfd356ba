"""The topics and their payloads."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import msgspec

import broker
from broker.codecs import Json, Text
from broker_streams import table_of
from examples.flights.known import Known
from examples.flights_pipeline.schemas import CarrierHour

__all__ = [
    "AIRCRAFT_JSON",
    "AIRCRAFT_TABLE",
    "AIRLINES",
    "AIRLINE_TEXT",
    "ALERTS",
    "ALERT_JSON",
    "BY_AIRCRAFT",
    "BY_CARRIER",
    "DEPARTURES",
    "FLIGHTS",
    "HOURS",
    "HOUR_JSON",
    "PARTITIONS",
    "PLANES",
    "PLANE_JSON",
    "Aircraft",
    "Alert",
    "Hour",
    "Plane",
    "make_topics",
]

BY_AIRCRAFT: Final = "demo.streams.by-aircraft"
"""The group that keeps the figures of each aircraft."""
BY_CARRIER: Final = "demo.streams.by-carrier"
"""The group that keeps the hours of each carrier."""

FLIGHTS: Final = "demo.streams.flights"
"""Every flight that has an aircraft, keyed by aircraft."""
DEPARTURES: Final = "demo.streams.departures"
"""Every scheduled departure, keyed by carrier."""
PLANES: Final = "demo.streams.planes"
"""A table: what is known of a plane, by aircraft."""
AIRLINES: Final = "demo.streams.airlines"
"""A table: names of airlines, by carrier."""
AIRCRAFT_TABLE: Final = table_of(BY_AIRCRAFT)
"""The table of figures, by aircraft."""
HOURS: Final = "demo.streams.hours"
"""The delays of each carrier in each hour."""
ALERTS: Final = "demo.streams.alerts"
"""Aircraft that were late ten times in a row."""

PARTITIONS: Final = 6
_FOREVER: Final = timedelta(days=24_000)


class Plane(msgspec.Struct, frozen=True):
    """What the table of planes says. `aircraft` is the key."""

    built: int | None
    manufacturer: str
    model: str
    seats: int


class Aircraft(msgspec.Struct):
    """The row of an aircraft.

    :ivar plane: from the table of planes; None if it does not have the aircraft.
    :ivar last: number of its last flight.
    :ivar scheduled: the departure of that.
    :ivar again: flights that were handled a second time, and counted once.
    """

    known: Known
    plane: Plane | None
    last: int = 0
    scheduled: str = ""
    again: int = 0


class Alert(msgspec.Struct, frozen=True):
    """An aircraft was late ten times in a row. The number is that of the tenth flight."""

    aircraft: str
    number: int
    airline: str | None
    plane: Plane | None


class Hour(msgspec.Struct, frozen=True):
    """A closed hour of a carrier.

    :ivar airline: its name.
    :ivar again: flights that were handled a second time, and counted once.
    """

    figures: CarrierHour
    airline: str | None
    again: int = 0


PLANE_JSON: Final = Json(Plane)
AIRLINE_TEXT: Final = Text()
AIRCRAFT_JSON: Final = Json(Aircraft)
HOUR_JSON: Final = Json(Hour)
ALERT_JSON: Final = Json(Alert)


async def make_topics(bus: broker.Bus) -> None:
    """Recreate the topics. Idempotent."""
    logs, tables = (FLIGHTS, DEPARTURES, HOURS, ALERTS), (PLANES, AIRLINES, AIRCRAFT_TABLE, table_of(BY_CARRIER))
    for name in (*logs, *tables):
        await bus.admin.delete_topic(name)
    for name in logs:
        # The messages have the time of their flights, and some brokers go by that to remove old ones.
        await bus.admin.ensure_topic(name, partitions=PARTITIONS, retention=_FOREVER)
    for name in tables:
        await bus.admin.ensure_topic(name, partitions=PARTITIONS, compacted=True)
