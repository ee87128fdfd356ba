"""The process of the view: follows the table of aircraft until SIGTERM. It prints its reports as lines of JSON."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterable
from heapq import nlargest
from typing import Final

import msgspec

import broker
from broker_streams import Change, View
from examples.flights_streams.topics import AIRCRAFT_JSON, AIRCRAFT_TABLE, Aircraft

__all__ = ["LATEST", "Latest", "ViewReport", "Watcher"]

LATEST: Final = 10
_REPORT_SECONDS: Final = 0.25


class Latest(msgspec.Struct, frozen=True):
    """One of the rows that are shown."""

    aircraft: str
    row: Aircraft


class ViewReport(msgspec.Struct):
    """A report of the view.

    :ivar rows: aircraft in the table.
    :ivar flights: flights in its rows.
    :ivar again: flights that were handled a second time.
    :ivar staleness: seconds since the view was known to be up to date.
    """

    rows: int = 0
    flights: int = 0
    again: int = 0
    staleness: float | None = None
    latest: list[Latest] = []


class Watcher:
    """Sums up the changes of the table."""

    def __init__(self) -> None:
        self._rows: dict[str, Aircraft] = {}
        self._flights = 0
        self._again = 0

    async def watch(self, changes: AsyncIterable[Change[Aircraft]]) -> None:
        """Take changes until they end."""
        async for change in changes:
            self.take(change)

    def take(self, change: Change[Aircraft]) -> None:
        for row, sign in ((change.old, -1), (change.new, 1)):
            if row is not None:
                self._flights += sign * row.known.flights
                self._again += sign * row.again
        if change.new is None:
            self._rows.pop(change.key, None)
        else:
            self._rows[change.key] = change.new

    def report(self, staleness: float | None = None) -> ViewReport:
        latest = nlargest(LATEST, self._rows.items(), key=lambda item: item[1].last)
        return ViewReport(
            len(self._rows), self._flights, self._again, staleness, [Latest(key, row) for key, row in latest]
        )


async def main() -> None:
    """Watch the table on the broker of BROKER_URL."""
    ended, watcher = asyncio.Event(), Watcher()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with broker.connect() as bus, View(bus, AIRCRAFT_TABLE, AIRCRAFT_JSON) as view:
        watching = asyncio.create_task(watcher.watch(view.changes()))
        await view.ready()
        while not ended.is_set():
            print(msgspec.json.encode(watcher.report(view.staleness)).decode(), flush=True)
            try:
                async with asyncio.timeout(_REPORT_SECONDS):
                    await ended.wait()
            except TimeoutError:
                pass
        watching.cancel()


if __name__ == "__main__":
    asyncio.run(main())
