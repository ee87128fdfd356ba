"""The expected result of each job. Pure: it depends on the flight alone, so it can be checked afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final

from broker.errors import DecodeError
from examples.flights.data import Flight
from examples.flights.topics import FLIGHT_JSON
from examples.flights_pipeline.corruption import Corrupted, corrupted

__all__ = ["TRIES", "Fate", "delay_of", "expected", "fate_of", "unreadable"]

TRIES: Final = 3
"""Failures after which a job is dead-lettered."""
_LATE_MINUTES: Final = 60
_LONGEST_DELAY: Final = 3.0


class Fate(Enum):
    """:ivar least: the attempt that settles such a job, unless a worker is killed."""

    ON_TIME = "done at once", 1
    LATE = "nacked with a delay, then done", 2
    DIVERTED = "fails until its last try, then done", TRIES
    CANCELLED = "fails each time, a dead letter", TRIES
    UNREADABLE = "does not decode, a dead letter", 1

    def __init__(self, meaning: str, least: int) -> None:
        self.meaning = meaning
        self.least = least

    @property
    def is_dead(self) -> bool:
        """Whether it ends as a dead letter."""
        return self in (Fate.CANCELLED, Fate.UNREADABLE)


def fate_of(flight: Flight) -> Fate:
    """The expected result for a flight."""
    if flight.departure_delay is None:
        return Fate.CANCELLED
    if flight.arrival_delay is None:
        return Fate.DIVERTED
    return Fate.LATE if flight.departure_delay >= _LATE_MINUTES else Fate.ON_TIME


def delay_of(flight: Flight) -> float:
    """Seconds of delay for a late flight: one per hour of lateness, up to a maximum."""
    return min(_LONGEST_DELAY, (flight.departure_delay or 0) / 60)


def unreadable(flights: Sequence[Flight]) -> list[Corrupted]:
    """The corrupted copies that a worker cannot decode."""
    return [each for each in corrupted(flights) if not _decodes(each.data)]


def expected(flights: Iterable[Flight], spoilt: Iterable[Corrupted]) -> dict[str, Fate]:
    """The fate of each job, by the id of its message."""
    return {flight.id: fate_of(flight) for flight in flights} | {each.id: Fate.UNREADABLE for each in spoilt}


def _decodes(data: bytes | None) -> bool:
    try:
        FLIGHT_JSON.decode(data)
    except DecodeError:
        return False
    return True
