"""The worker process: does the jobs of the queue until SIGTERM or SIGKILL.

It publishes a result and waits for the confirmation before it acks the job. If it is killed between the two, another
worker does the job again: there is a second result, and nothing is lost. It prints its reports as lines of JSON.
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

__all__ = ["FlightWorker", "Report"]

_CONCURRENCY: Final = 20
_OUTSTANDING: Final = 200
_REPORT_SECONDS: Final = 0.25


class Report(msgspec.Struct):
    """A report of a worker.

    :ivar handled: jobs it received; `redelivered` of them had been delivered before.
    :ivar delayed: jobs it nacked with a delay.
    :ivar lost: ids of jobs whose lease ended before they were settled.
    """

    handled: int = 0
    redelivered: int = 0
    done: int = 0
    delayed: int = 0
    failed: int = 0
    dead: int = 0
    lost: list[str] = []


class NotFlown(Exception):
    """The job failed."""


class FlightWorker:
    """:param work_seconds: duration of a job."""

    def __init__(self, bus: broker.Bus, name: str, work_seconds: float) -> None:
        self._name = name
        self._work_seconds = work_seconds
        self._done = bus.topic(DONE)
        self.report: Final = Report()
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

        :raises NotFlown: the job failed; the retry policy applies.
        """
        flight, attempt = message.payload, message.delivery_attempt or 1
        self.report.handled += 1
        self.report.redelivered += attempt > 1
        # Stands for the work.
        await asyncio.sleep(self._work_seconds)
        fate = fate_of(flight)
        if fate.is_dead or (fate is Fate.DIVERTED and attempt < fate.least):
            self.report.failed += 1
            raise NotFlown(f"{flight.flight} from {flight.origin} to {flight.destination}: {fate.name.lower()}")
        if fate is Fate.LATE and attempt < fate.least:
            await message.nack(delay=delay_of(flight))
            self.report.delayed += 1
            return
        done = DONE_JSON.encode(Done(message.id, self._name, attempt))
        await (await self._done.enqueue(broker.OutboundMessage(done, key=flight.aircraft)))
        self.report.done += 1

    async def report_regularly(self) -> None:
        """Report regularly until cancelled."""
        while True:
            self.print_report()
            await asyncio.sleep(_REPORT_SECONDS)

    def print_report(self) -> None:
        """Print a report."""
        print(msgspec.json.encode(self.report).decode(), flush=True)

    def _see(self, event: Event) -> None:
        match event:
            case DeadLettered():
                self.report.dead += 1
            case LeaseExpired(message=message) | SettleFailed(message=message):
                self.report.lost.append(message.id)
            case _:
                return


async def main(name: str, work_seconds: float) -> None:
    """Run a worker on the broker of BROKER_URL."""
    # Failing jobs are part of the demo; each would log a warning.
    logging.getLogger("broker").setLevel(logging.ERROR)
    async with broker.connect() as bus:
        worker = FlightWorker(bus, name, work_seconds)
        async with asyncio.TaskGroup() as tasks:
            # If this fails, the demo is gone, and the worker ends too.
            reporting = tasks.create_task(worker.report_regularly())
            await broker.serve(worker.inbox.handled_by(worker.handle, concurrency=_CONCURRENCY))
            reporting.cancel()
        worker.print_report()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
