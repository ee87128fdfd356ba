"""Publishes the flights as jobs, with corrupted ones among them. Raises what the topic raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import broker
from examples.flights.data import Flight
from examples.flights_pipeline.corruption import Corrupted
from examples.flights_pipeline.publishing import messages
from examples.flights_queue.topics import FLIGHTS

__all__ = ["publish"]

_BATCH: Final = 1000


async def publish(
    bus: broker.Bus, flights: Sequence[Flight], spoilt: Sequence[Corrupted], progress: Callable[[int], object]
) -> int:
    """Publish all messages. Returns how many the broker confirmed.

    :param progress: called with the number confirmed so far.
    """
    topic = bus.topic(FLIGHTS)
    jobs = list(messages(flights, spoilt))
    confirmed = 0
    for start in range(0, len(jobs), _BATCH):
        batch = jobs[start : start + _BATCH]
        await topic.publish_batch(batch, receipts=False)
        confirmed += len(batch)
        progress(confirmed)
    return confirmed
