"""The message consumer: folds delays per carrier, and can be killed at any time.

It handles up to `CONCURRENCY` flights at once; flights of one aircraft strictly in order. It publishes the delay of a
flight and waits for the confirmation before it acks the flight. After a crash, a flight whose delay is missing is
redelivered, and the fold is rebuilt from the topic of delays. A delay that was published but whose flight was not acked
may be published twice; its number identifies it, so it counts once.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from time import perf_counter
from typing import Final

import broker
from examples.flights.data import Flight
from examples.flights.fold import Delay, DelayFold
from examples.flights.reading import read_all
from examples.flights.topics import (
    CANCELLED,
    DELAY_JSON,
    DELAYS,
    FLIGHT_JSON,
    FLIGHTS,
    FOLD,
    REPORT_JSON,
    REPORTS,
    WORK,
    Report,
)

__all__ = ["DelayConsumer"]

CONCURRENCY: Final = 250
_CANCELLED: Final = "cancelled: it never departed"


def _is_unexpected(line: logging.LogRecord) -> bool:
    return _CANCELLED not in line.getMessage()


# The demo counts its cancelled flights, and thousands of warnings of dead letters would hide what it shows.
logging.getLogger("broker").addFilter(_is_unexpected)


class DelayConsumer:
    """One life of the consumer, on a bus of its own."""

    def __init__(self, bus: broker.Bus) -> None:
        self._bus = bus
        self._delays = bus.topic(DELAYS)
        self._fold = DelayFold()
        self._restored = 0
        self._handled = 0
        self._redelivered = 0
        self._known = 0
        self._rejected = 0
        self._first: float | None = None
        self._last = 0.0
        self.inbox: Final[broker.MessageConsumer[Flight]] = bus.messages(
            FLIGHTS,
            subscription=WORK,
            codec=FLIGHT_JSON,
            dead_letter=CANCELLED,
            ordered_by_key=True,
            max_outstanding=2000,
        )

    async def begin(self) -> None:
        """Rebuild the fold from the output of earlier lives."""
        async for batch in read_all(self._bus, DELAYS, FOLD):
            for entry in batch:
                self._fold.add(DELAY_JSON.decode(entry.data))
        self._restored = len(self._fold)
        await self._report("restored")

    async def end(self) -> None:
        """Publish the fold and its statistics."""
        await self._report("finished")

    async def run(self) -> None:
        """Handle flights until the inbox is stopped."""
        await self.begin()
        async with self.inbox:
            await self.inbox.receive(self.handle, concurrency=CONCURRENCY)
        await self.end()

    async def handle(self, message: broker.Message[Flight]) -> None:
        """Fold one flight, or reject it."""
        self._count(message)
        flight = message.payload
        delay = Delay.of(flight)
        if delay is None:
            await message.reject(_CANCELLED)
            self._rejected += 1
        elif delay.number in self._fold:
            self._known += 1
        else:
            written = await self._delays.enqueue(
                broker.OutboundMessage(DELAY_JSON.encode(delay), key=flight.aircraft, id=flight.id)
            )
            await written
            self._fold.add(delay)
        self._last = perf_counter()

    def _count(self, message: broker.Message[Flight]) -> None:
        if self._first is None:
            self._first = perf_counter()
        self._handled += 1
        self._redelivered += (message.delivery_attempt or 1) > 1

    async def _report(self, stage: str) -> None:
        report = Report(
            stage=stage,
            restored=self._restored,
            handled=self._handled,
            redelivered=self._redelivered,
            known=self._known,
            rejected=self._rejected,
            seconds=0.0 if self._first is None else self._last - self._first,
            carriers=dict(self._fold.carriers) if stage == "finished" else {},
        )
        await self._bus.topic(REPORTS, REPORT_JSON).publish(report)


async def main() -> None:
    """Run a consumer as a process on the broker of BROKER_URL until SIGTERM.

    Prints a line once it handles SIGTERM.
    """
    async with broker.connect() as bus:
        consumer = DelayConsumer(bus)
        await consumer.begin()
        serving = asyncio.create_task(broker.serve(consumer.inbox.handled_by(consumer.handle, concurrency=CONCURRENCY)))
        await asyncio.sleep(0)  # until it has begun
        sys.stdout.write("serving\n")
        sys.stdout.flush()
        await serving
        await consumer.end()


if __name__ == "__main__":
    asyncio.run(main())
