"""Publishes the tables of planes and airlines, then the flights: by aircraft, and by carrier as departures.

A message has the time of the scheduled departure, so that event time is that of 2013. Raises what the topics raise.
"""

from __future__ import annotations

import asyncio
import csv
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Final

import broker
from examples.flights.data import Flight, data_file, read_airlines
from examples.flights.topics import FLIGHT_JSON
from examples.flights_streams.topics import AIRLINE_TEXT, AIRLINES, DEPARTURES, FLIGHTS, PLANE_JSON, PLANES, Plane

__all__ = ["cut", "publish_flights", "publish_tables", "read_planes"]

_BATCH: Final = 2000
_MISSING: Final = "NA"


def read_planes() -> dict[str, Plane]:
    """The planes of the package, by aircraft."""
    with data_file("planes.csv").open(encoding="utf-8", newline="") as file:
        return {
            row["tailnum"]: Plane(
                None if row["year"] == _MISSING else int(row["year"]),
                row["manufacturer"],
                row["model"],
                int(row["seats"]),
            )
            for row in csv.DictReader(file)
        }


async def publish_tables(bus: broker.Bus) -> None:
    """Publish planes and airlines."""
    planes = [broker.OutboundMessage(PLANE_JSON.encode(plane), aircraft) for aircraft, plane in read_planes().items()]
    airlines = [broker.OutboundMessage(AIRLINE_TEXT.encode(name), code) for code, name in read_airlines().items()]
    await bus.topic(PLANES).publish_batch(planes, receipts=False)
    await bus.topic(AIRLINES).publish_batch(airlines, receipts=False)


async def publish_flights(bus: broker.Bus, flights: Sequence[Flight], confirmed: Callable[[int], object]) -> None:
    """Publish flights to both topics.

    :param confirmed: called with the number of flights of each batch.
    """
    by_aircraft, by_carrier = bus.topic(FLIGHTS), bus.topic(DEPARTURES)
    for batch in _batches(flights):
        messages = [(flight, FLIGHT_JSON.encode(flight), datetime.fromisoformat(flight.scheduled)) for flight in batch]
        await asyncio.gather(
            by_aircraft.publish_batch(
                [
                    broker.OutboundMessage(data, flight.aircraft, id=flight.id, publish_time=time)
                    for flight, data, time in messages
                    if flight.aircraft is not None
                ],
                receipts=False,
            ),
            by_carrier.publish_batch(
                [
                    broker.OutboundMessage(data, flight.carrier, id=flight.id, publish_time=time)
                    for flight, data, time in messages
                ],
                receipts=False,
            ),
        )
        confirmed(len(batch))


def cut(flights: Sequence[Flight], *shares: float) -> list[Sequence[Flight]]:
    """Cut at these shares, each moved to the end of an hour, so that a pause there does not part an hour."""
    places = [0]
    for share in shares:
        place = max(places[-1], int(share * len(flights)))
        while 0 < place < len(flights) and _hour(flights[place]) == _hour(flights[place - 1]):
            place += 1
        places.append(place)
    return [flights[start:stop] for start, stop in zip(places, [*places[1:], len(flights)], strict=True)]


def _hour(flight: Flight) -> str:
    return flight.scheduled[:13]


def _batches(flights: Sequence[Flight]) -> Iterator[Sequence[Flight]]:
    for start in range(0, len(flights), _BATCH):
        yield flights[start : start + _BATCH]
