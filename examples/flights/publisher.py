"""Publishes the flights in batches, by scheduled departure, keyed by aircraft.

A flight without an aircraft has no key: its order does not matter. Every flight has an id, so that a broker that
deduplicates drops a second copy. Raises what the topic raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import broker
from examples.flights.data import Flight
from examples.flights.topics import FLIGHT_JSON, FLIGHTS

__all__ = ["publish_flights"]

_BATCH: Final = 1000


async def publish_flights(bus: broker.Bus, flights: Sequence[Flight], progress: Callable[[int], object]) -> int:
    """Publish all flights. Returns how many the broker confirmed.

    :param progress: called with the number confirmed so far.
    """
    topic = bus.topic(FLIGHTS)
    confirmed = 0
    for start in range(0, len(flights), _BATCH):
        receipts = await topic.publish_batch(
            [
                broker.OutboundMessage(FLIGHT_JSON.encode(flight), key=flight.aircraft, id=flight.id)
                for flight in flights[start : start + _BATCH]
            ]
        )
        confirmed += sum(not receipt.duplicate for receipt in receipts)
        progress(confirmed)
    return confirmed
