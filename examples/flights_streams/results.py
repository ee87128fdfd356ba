"""Reads the output: follows hours and alerts while the demo runs, and reads the table at its end. Changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import broker
from broker_streams import View
from examples.flights_streams.topics import (
    AIRCRAFT_JSON,
    AIRCRAFT_TABLE,
    ALERT_JSON,
    ALERTS,
    HOUR_JSON,
    HOURS,
    Aircraft,
    Alert,
    Hour,
)

__all__ = ["Results"]


@dataclass(slots=True)
class Results:
    """The output.

    :ivar aircraft: rows of the table.
    :ivar hours: by carrier and start. Of an hour that was written again, the copy with the most flights counts: where
        rows are at least once, the end of an hour may come a second time alone.
    :ivar alerts: by aircraft and flight.
    :ivar copies: hours and alerts that were there before.
    :ivar read, seconds: rows that were read for `aircraft`, and how long that took.
    """

    aircraft: dict[str, Aircraft] = field(default_factory=dict[str, Aircraft])
    hours: dict[tuple[str, str], Hour] = field(default_factory=dict[tuple[str, str], Hour])
    alerts: dict[tuple[str, int], Alert] = field(default_factory=dict[tuple[str, int], Alert])
    copies: int = 0
    read: int = 0
    seconds: float = 0.0

    async def follow(self, bus: broker.Bus, heard: Callable[[], object]) -> None:
        """Read hours and alerts until cancelled.

        :param heard: called when there were new ones.
        """
        await asyncio.gather(
            self._follow(bus, HOURS, self._take_hour, heard), self._follow(bus, ALERTS, self._take_alert, heard)
        )

    async def read_table(self, bus: broker.Bus) -> None:
        """Read the table as a view that has just been opened."""
        async with View(bus, AIRCRAFT_TABLE, AIRCRAFT_JSON) as view:
            await view.ready()
            self.aircraft = dict(view.items())
            stats = view.stats()
        self.read, self.seconds = stats.read, stats.recovery_seconds or 0.0

    @property
    def again(self) -> int:
        """Flights that were handled a second time."""
        return sum(each.again for each in (*self.aircraft.values(), *self.hours.values()))

    async def _follow(
        self, bus: broker.Bus, topic: str, take: Callable[[bytes], None], heard: Callable[[], object]
    ) -> None:
        async with bus.log.follow(topic) as log:
            async for batch in log.batches():
                datas: Any = batch.rows("data")
                for (data,) in datas:
                    take(data)
                heard()

    def _take_hour(self, data: bytes) -> None:
        hour = HOUR_JSON.decode(data)
        key = hour.figures.carrier, hour.figures.hour
        before = self.hours.get(key)
        self.copies += before is not None
        if before is None or hour.figures.flights > before.figures.flights:
            self.hours[key] = hour

    def _take_alert(self, data: bytes) -> None:
        alert = ALERT_JSON.decode(data)
        self.copies += (alert.aircraft, alert.number) in self.alerts
        self.alerts[alert.aircraft, alert.number] = alert
