"""The demo: publish, consume, audit, kill the consumer half-way, restart it, and check the balance.

Publisher, auditor and consumer run concurrently. The first error cancels the others and is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import broker
from examples.flights.auditor import Auditor
from examples.flights.data import Flight
from examples.flights.lives import Life, new_life
from examples.flights.publisher import publish_flights
from examples.flights.reading import keeps_log, read_all
from examples.flights.screen import Screen
from examples.flights.topics import FOLD, REPORT_JSON, REPORTS, Report, make_topics

__all__ = ["Balance", "run_demo"]

_LEASE_MARGIN = 1.0


@dataclass(slots=True)
class Balance:
    """The result of the demo.

    :ivar handled_before: flights with an outcome when the first consumer was killed.
    :ivar report: of the second consumer.
    :ivar rates: messages per second, by activity.
    """

    flights: int
    published: int
    auditor: Auditor
    report: Report
    handled_before: int
    rates: dict[str, float] = field(default_factory=dict[str, float])
    seconds: float = 0.0

    @property
    def fold_survived(self) -> bool:
        """Whether the consumer's fold equals what the auditor computed from the flights themselves."""
        return self.report.carriers == dict(self.auditor.expected.carriers)

    @property
    def failures(self) -> list[str]:
        """The failed checks; empty if all passed."""
        auditor = self.auditor
        checks = {
            "every flight is published once": self.published == len(auditor.published) == self.flights,
            "published = folded + dead-lettered": len(auditor.published) == auditor.handled,
            "no flight is lost": auditor.lost == 0,
            "no flight is both folded and dead-lettered": not any(n in auditor.delays for n in auditor.cancelled),
            "the flights of every aircraft are in order": auditor.out_of_order == 0,
            "the fold survived the kill": self.fold_survived,
            "every dead letter has the reason": set(auditor.reasons) <= {"cancelled: it never departed"},
            "the consumer was killed while it worked": 0 < self.handled_before < self.flights,
        }
        return [promise for promise, holds in checks.items() if not holds]


async def run_demo(url: str, flights: Sequence[Flight], screen: Screen) -> Balance:
    """Run the whole demo on the broker at `url`.

    :raises LifeEnded: a consumer ended on its own.
    :raises BrokerError: the broker failed.
    """
    started = perf_counter()
    async with broker.connect(url) as bus:
        if not keeps_log(bus):
            screen.say(
                f"{bus.capabilities.backend} keeps no log: the auditor and the fold read subscriptions of their own, "
                "each of which can be read only once"
            )
        await make_topics(bus)
        half = asyncio.Event()
        complete = asyncio.Event()

        def audited() -> None:
            screen.advance("handled", auditor.handled)
            screen.advance("audited", auditor.records)
            if auditor.handled * 2 >= len(flights):
                half.set()
            if auditor.handled == len(flights) == len(auditor.published):
                complete.set()

        auditor = Auditor(audited)
        with screen.progress({"published": len(flights), "handled": len(flights), "audited": 2 * len(flights)}):
            async with asyncio.TaskGroup() as tasks:
                audit = tasks.create_task(auditor.run(bus))
                publishing = tasks.create_task(_publish(bus, flights, screen))
                first, second = new_life(url, bus), new_life(url, bus)
                handled_before, seconds_before = await _first_life(first, half, auditor, screen)
                await _second_life(second, first, complete, screen)
                published, publish_seconds = await publishing
                auditor.finish()
                await audit
        restored, report = await _reports(bus)
        screen.say(f"The second consumer restored {restored:,} flights of its fold")
        balance = Balance(len(flights), published, auditor, report, handled_before)
        balance.rates = {
            "published and confirmed": published / publish_seconds,
            "handled, first consumer": handled_before / seconds_before,
            "handled, second consumer": report.handled / report.seconds if report.seconds else 0.0,
        }
    balance.seconds = perf_counter() - started
    return balance


async def _publish(bus: broker.Bus, flights: Sequence[Flight], screen: Screen) -> tuple[int, float]:
    started = perf_counter()
    published = await publish_flights(bus, flights, partial(screen.advance, "published"))
    return published, perf_counter() - started


async def _first_life(life: Life, half: asyncio.Event, auditor: Auditor, screen: Screen) -> tuple[int, float]:
    """Kill the consumer when half of the flights are done."""
    started = perf_counter()
    async with _begun(life):
        screen.say(f"The first consumer is {life.name}")
        await life.outlive(half.wait())
        handled, seconds = auditor.handled, perf_counter() - started
        await life.kill()
    screen.say(f"Half-way, the consumer was {life.death}")
    return handled, seconds


@asynccontextmanager
async def _begun(life: Life) -> AsyncGenerator[None]:
    """Start the consumer. Kills it if the block raises."""
    await life.start()
    try:
        yield
    except BaseException:
        await life.kill()
        raise


async def _second_life(life: Life, dead: Life, complete: asyncio.Event, screen: Screen) -> None:
    """Let the second consumer finish the work, and stop it cleanly."""
    if dead.lease_seconds:
        # Keeps each aircraft's order: what the dead consumer held must be redelivered before later flights.
        screen.say(f"Its leases end in {dead.lease_seconds:g} s; until then its messages are not redelivered")
        await asyncio.sleep(dead.lease_seconds + _LEASE_MARGIN)
    async with _begun(life):
        screen.say(f"The second consumer is {life.name}")
        await life.outlive(complete.wait())
        await life.stop()


async def _reports(bus: broker.Bus) -> tuple[int, Report]:
    """Flights that the second consumer restored, and its final report."""
    reports: list[Report] = []
    async for batch in read_all(bus, REPORTS, FOLD):
        reports.extend(REPORT_JSON.decode(entry.data) for entry in batch)
    restored = max(report.restored for report in reports)
    return restored, next(report for report in reports if report.stage == "finished")
