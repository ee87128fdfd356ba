"""The auditor: reads every topic of the demo from the beginning and counts independently of the other tasks.

It computes the fold again from the published flights. It checks the order of each aircraft's flights, as published and
as handled. It reads until `finish` is called and the topics are empty. Cancelling it loses nothing: it only reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import broker
from examples.flights.data import Flight
from examples.flights.fold import Delay, DelayFold
from examples.flights.reading import Entry, follow
from examples.flights.topics import AUDIT, CANCELLED, DELAY_JSON, DELAYS, FLIGHT_JSON, FLIGHTS

__all__ = ["Auditor"]


class _Order:
    """Checks that the legs of each aircraft arrive in order."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self.broken = 0

    def see(self, aircraft: str | None, leg: int) -> None:
        if aircraft is not None:
            self.broken += leg <= self._last.get(aircraft, 0)
            self._last[aircraft] = leg

    @property
    def aircraft(self) -> int:
        return len(self._last)


class Auditor:
    """Counts from the logs of the topics.

    :ivar published, cancelled: numbers of the flights found in these topics.
    :ivar delays: the fold of the consumer's output; `expected` is the fold of the published flights.
    :ivar again: flights and outcomes found more than once.
    """

    def __init__(self, progress: Callable[[], object]) -> None:
        self.published: set[int] = set()
        self.cancelled: set[int] = set()
        self.cancelled_by_carrier: dict[str, int] = {}
        self.reasons: dict[str, int] = {}
        self.delays = DelayFold()
        self.expected = DelayFold()
        self.again = 0
        self.records = 0
        self.order_published = _Order()
        self.order_handled = _Order()
        self.order_cancelled = _Order()
        self._progress = progress
        self._finished = asyncio.Event()

    @property
    def handled(self) -> int:
        """Flights that have an outcome."""
        return len(self.delays) + len(self.cancelled)

    @property
    def lost(self) -> int:
        """Flights that were published and have no outcome."""
        return sum(number not in self.delays and number not in self.cancelled for number in self.published)

    @property
    def out_of_order(self) -> int:
        return self.order_published.broken + self.order_handled.broken + self.order_cancelled.broken

    def finish(self) -> None:
        """End `run` once everything is read. Call it when publishing is over."""
        self._finished.set()

    async def run(self, bus: broker.Bus) -> None:
        """Read until `finish` is called and the topics are empty."""
        take = {FLIGHTS: self._take_flight, DELAYS: self._take_delay, CANCELLED: self._take_cancelled}
        async with aclosing(follow(bus, list(take), AUDIT)) as batches:
            async for batch in batches:
                if not batch and self._finished.is_set():
                    return
                for entry in batch:
                    take[entry.topic](entry)
                self.records += len(batch)
                self._progress()

    def _take_flight(self, record: Entry) -> None:
        flight = FLIGHT_JSON.decode(record.data)
        if flight.number in self.published:
            self.again += 1
            return
        self.published.add(flight.number)
        self.order_published.see(_aircraft(record, flight.aircraft), flight.leg)
        delay = Delay.of(flight)
        if delay is not None:
            self.expected.add(delay)

    def _take_delay(self, record: Entry) -> None:
        delay = DELAY_JSON.decode(record.data)
        if not self.delays.add(delay):
            self.again += 1
            return
        self.order_handled.see(_aircraft(record, delay.aircraft), delay.leg)

    def _take_cancelled(self, record: Entry) -> None:
        flight: Flight = FLIGHT_JSON.decode(record.data)
        if flight.number in self.cancelled:
            self.again += 1
            return
        self.cancelled.add(flight.number)
        self.cancelled_by_carrier[flight.carrier] = self.cancelled_by_carrier.get(flight.carrier, 0) + 1
        reason = record.attributes.get("dead-letter-reason", "no reason")
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.order_cancelled.see(_aircraft(record, flight.aircraft), flight.leg)


def _aircraft(record: Entry, aircraft: str | None) -> str | None:
    """The key. Exits if it is not the aircraft of the payload."""
    key = None if record.key is None else record.key.decode()
    if key != aircraft:
        raise SystemExit(f"A record of {record.topic} has the key {key!r} and the aircraft {aircraft!r}")
    return key
