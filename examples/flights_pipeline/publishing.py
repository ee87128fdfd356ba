"""Publishes the flights by scheduled departure, keyed by aircraft, with corrupted messages among them.

Raises what the topic raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import broker
from examples.flights.data import Flight
from examples.flights.topics import FLIGHT_JSON
from examples.flights_pipeline.corruption import Corrupted
from examples.flights_pipeline.topics import FLIGHTS

__all__ = ["messages", "publish"]

_BATCH: Final = 2000


def messages(flights: Iterable[Flight], spoilt: Iterable[Corrupted]) -> Iterator[broker.OutboundMessage]:
    """The flights, and each corrupted message after the flight that it follows."""
    waiting = iter(spoilt)
    coming = next(waiting, None)
    for flight in flights:
        yield broker.OutboundMessage(FLIGHT_JSON.encode(flight), key=flight.aircraft, id=flight.id)
        if coming is not None and coming.after == flight.number:
            yield broker.OutboundMessage(coming.data, key=coming.key, id=coming.id)
            coming = next(waiting, None)


async def publish(
    bus: broker.Bus, flights: Sequence[Flight], spoilt: Sequence[Corrupted], progress: Callable[[int], object]
) -> int:
    """Publish all messages. Returns how many the broker confirmed.

    :param progress: called with the number confirmed so far.
    """
    topic = bus.topic(FLIGHTS)
    confirmed = 0
    batch: list[broker.OutboundMessage] = []
    for message in messages(flights, spoilt):
        batch.append(message)
        if len(batch) == _BATCH:
            await topic.publish_batch(batch, receipts=False)
            confirmed += len(batch)
            progress(confirmed)
            batch = []
    await topic.publish_batch(batch, receipts=False)
    progress(confirmed + len(batch))
    return confirmed + len(batch)
