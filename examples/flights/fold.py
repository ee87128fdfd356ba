"""Delays per carrier. Pure. A flight counts once, however often it is added."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from examples.flights.data import Flight

__all__ = ["LATE_AFTER", "CarrierDelays", "Delay", "DelayFold"]

LATE_AFTER: Final = 15
"""Minutes after which a departure counts as late, as airlines count."""


class Delay(msgspec.Struct, frozen=True, gc=False):
    """The delays of one flight that departed."""

    number: int
    carrier: str
    aircraft: str | None
    leg: int
    hour: int
    departure: int
    arrival: int | None

    @classmethod
    def of(cls, flight: Flight) -> Delay | None:
        """None for a flight that never departed."""
        if flight.departure_delay is None:
            return None
        return cls(
            flight.number,
            flight.carrier,
            flight.aircraft,
            flight.leg,
            flight.hour,
            flight.departure_delay,
            flight.arrival_delay,
        )


class CarrierDelays(msgspec.Struct):
    """The delays of one carrier, in whole minutes.

    :ivar by_hour: (flights, sum of delays) by hour of the scheduled departure.
    """

    flights: int = 0
    late: int = 0
    departure: int = 0
    worst: int = -10_000
    arrived: int = 0
    arrival: int = 0
    by_hour: dict[int, tuple[int, int]] = {}

    @property
    def mean_departure(self) -> float:
        """Minutes; 0 without flights."""
        return self.departure / self.flights if self.flights else 0.0

    @property
    def mean_arrival(self) -> float:
        return self.arrival / self.arrived if self.arrived else 0.0

    @property
    def share_late(self) -> float:
        return self.late / self.flights if self.flights else 0.0

    def add(self, delay: Delay) -> None:
        self.flights += 1
        self.late += delay.departure > LATE_AFTER
        self.departure += delay.departure
        self.worst = max(self.worst, delay.departure)
        if delay.arrival is not None:
            self.arrived += 1
            self.arrival += delay.arrival
        flights, minutes = self.by_hour.get(delay.hour, (0, 0))
        self.by_hour[delay.hour] = (flights + 1, minutes + delay.departure)


class DelayFold:
    """The delays of all carriers."""

    def __init__(self) -> None:
        self._carriers: dict[str, CarrierDelays] = {}
        self._numbers: set[int] = set()

    def __contains__(self, number: int) -> bool:
        """Whether the flight with this number was added."""
        return number in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, delay: Delay) -> bool:
        """Add a flight. Returns False if it was added before."""
        if delay.number in self._numbers:
            return False
        self._numbers.add(delay.number)
        carrier = self._carriers.get(delay.carrier)
        if carrier is None:
            carrier = self._carriers[delay.carrier] = CarrierDelays()
        carrier.add(delay)
        return True

    @property
    def carriers(self) -> Mapping[str, CarrierDelays]:
        """By carrier code, in alphabetical order."""
        return {code: self._carriers[code] for code in sorted(self._carriers)}
