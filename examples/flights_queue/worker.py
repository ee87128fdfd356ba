"""The worker: does the jobs of the queue in a process of its own, until SIGTERM, or until it is killed.

What it has done is on the topic of results, confirmed, before the job is acked. A worker that dies between the two
leaves a job that is done again by another; that shows as a second result, and nothing is lost. What it tells of
itself goes to its standard output as lines of JSON, which the demo reads.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Final

import msgspec

import broker
from broker.hooks import DeadLettered, Event, LeaseExpired, SettleFailed
from examples.flights.data import Flight
from examples.flights.topics import FLIGHT_JSON
from examples.flights_queue.fates import TRIES, Fate, delay_of, fate_of
from examples.flights_queue.topics import DEAD, DONE, DONE_JSON, FLIGHTS, SUBSCRIPTION, Done

__all__ = ["FlightWorker", "Told"]

_CONCURRENCY: Final = 20
_OUTSTANDING: Final = 200
_TELL_SECONDS: Final = 0.25


class Told(msgspec.Struct):
    """What a worker tells of itself.

    :ivar handled: jobs that were handed to it; `again`, those of them that were delivered before.
    :ivar delayed: jobs that it gave back with a delay.
    :ivar lost: ids of jobs whose lease ended before they were settled.
    """

    handled: int = 0
    again: int = 0
    done: int = 0
    delayed: int = 0
    failed: int = 0
    dead: int = 0
    lost: list[str] = []


class NotFlown(Exception):
    """The job failed."""


class FlightWorker:
    """:param work_seconds: how long a job takes."""

    def __init__(self, bus: broker.Bus, name: str, work_seconds: float) -> None:
        self._name = name
        self._work_seconds = work_seconds
        self._done = bus.topic(DONE)
        self.told: Final = Told()
        self.inbox: Final[broker.MessageConsumer[Flight]] = bus.messages(
            FLIGHTS,
            subscription=SUBSCRIPTION,
            codec=FLIGHT_JSON,
            dead_letter=DEAD,
            retry=broker.Retry(max_attempts=TRIES, initial=0.2, maximum=1.0),
            max_outstanding=_OUTSTANDING,
        )
        bus.hooks.listen(self._see)

    async def handle(self, message: broker.Message[Flight]) -> None:
        """Do one job.

        :raises NotFlown: it failed, and the retry policy decides.
        """
        flight, attempt = message.payload, message.delivery_attempt or 1
        self.told.handled += 1
        self.told.again += attempt > 1
        # The work itself, of which a demo has none.
        await asyncio.sleep(self._work_seconds)
        fate = fate_of(flight)
        if fate.is_dead or (fate is Fate.DIVERTED and attempt < fate.least):
            self.told.failed += 1
            raise NotFlown(f"{flight.flight} from {flight.origin} to {flight.destination}: {fate.name.lower()}")
        if fate is Fate.LATE and attempt < fate.least:
            await message.nack(delay=delay_of(flight))
            self.told.delayed += 1
            return
        done = DONE_JSON.encode(Done(message.id, self._name, attempt))
        await (await self._done.enqueue(broker.OutboundMessage(done, key=flight.aircraft)))
        self.told.done += 1

    async def tell(self) -> None:
        """Tell now and then, until it is cancelled."""
        while True:
            self.say()
            await asyncio.sleep(_TELL_SECONDS)

    def say(self) -> None:
        """Tell now."""
        print(msgspec.json.encode(self.told).decode(), flush=True)

    def _see(self, event: Event) -> None:
        match event:
            case DeadLettered():
                self.told.dead += 1
            case LeaseExpired(message=message) | SettleFailed(message=message):
                self.told.lost.append(message.id)
            case _:
                return


async def main(name: str, work_seconds: float) -> None:
    """A worker on the broker that BROKER_URL names."""
    # Jobs that fail are what this is about, and each would be a warning.
    logging.getLogger("broker").setLevel(logging.ERROR)
    async with broker.connect() as bus:
        worker = FlightWorker(bus, name, work_seconds)
        async with asyncio.TaskGroup() as tasks:
            # Who reads what is told is gone if that fails, and then the worker goes too.
            telling = tasks.create_task(worker.tell())
            await broker.serve(worker.inbox.handled_by(worker.handle, concurrency=_CONCURRENCY))
            telling.cancel()
        worker.say()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
