"""The payloads of the topics."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import msgspec

__all__ = ["AircraftFigures", "CarrierHour", "ScheduledFlight"]


@dataclass(frozen=True)
class ScheduledFlight:
    """A flight as the pipelines decode it. A wrong type, a missing field or another airport makes a dead letter.

    :ivar aircraft: None if cancelled before an aircraft was assigned.
    :ivar leg: counts the flights of this aircraft from 1; 0 without an aircraft.
    :ivar scheduled: planned departure, the event time.
    :ivar departure_delay: minutes; None if the flight never departed.
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
    """A carrier's flights scheduled to depart in an hour. Delays are whole minutes, None if no flight departed.

    :ivar hour: start of the hour in UTC, such as 2013-01-01T10:00:00Z.
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
    """Figures of an aircraft over its flights in order.

    :ivar departed: flights that departed; the others are skipped.
    :ivar late: late departures.
    :ivar longest: longest run of late departures.
    :ivar handed_on: late departures after a late arrival of the previous flight.
    """

    aircraft: str
    flights: int
    departed: int
    late: int
    longest: int
    handed_on: int
