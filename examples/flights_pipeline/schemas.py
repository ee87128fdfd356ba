"""What is read and written: the payloads of the topics. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import msgspec

__all__ = ["AircraftFigures", "CarrierHour", "ScheduledFlight"]


@dataclass(frozen=True)
class ScheduledFlight:
    """A flight as the pipelines decode it: what has another type, misses a field or names no such airport is dead.

    :ivar aircraft: None if it was cancelled before one was chosen.
    :ivar leg: the how-manieth flight of this aircraft; 0 without one.
    :ivar scheduled: the planned departure, which is the time of the event.
    :ivar departure_delay: minutes; None if it never departed.
    """

    number: int
    carrier: str
    flight: str
    aircraft: str | None
    leg: int
    scheduled: datetime
    origin: Literal["EWR", "JFK", "LGA"]
    destination: str
    departure_delay: int | None
    arrival_delay: int | None


class CarrierHour(msgspec.Struct, frozen=True):
    """The flights of a carrier that were to depart in an hour. Delays are whole minutes, None where none departed.

    :ivar hour: its beginning in UTC, such as 2013-01-01T10:00:00Z.
    """

    carrier: str
    hour: str
    flights: int
    departed: int
    late: int
    departure: int | None
    worst: int | None
    arrived: int
    arrival: int | None


class AircraftFigures(msgspec.Struct, frozen=True):
    """What the flights of an aircraft come to, one after the other.

    :ivar departed: flights that did; the others are passed over.
    :ivar late: departures that were late.
    :ivar longest: the most late departures in a row.
    :ivar handed_on: late departures behind a late arrival of the flight before.
    """

    aircraft: str
    flights: int
    departed: int
    late: int
    longest: int
    handed_on: int
