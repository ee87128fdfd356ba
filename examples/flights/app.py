"""The command: parses arguments, runs the demo and sets the exit status."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from broker.urls import mask_url
from examples.flights.command import parse, shared_url, status
from examples.flights.data import read_airlines, read_flights
from examples.flights.picture import draw
from examples.flights.screen import Screen, carrier_rows
from examples.flights.story import Balance, run_demo

__all__ = ["main", "run"]

_PICTURE: Final = Path("build/flights-delays.png")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every check passed, 1 if one failed or the broker failed."""
    given = parse(arguments, "python -m examples.flights", _PICTURE)
    screen = Screen()
    return status(screen, lambda: run(given.url, given.flights, given.picture, screen)[0].failures)


def run(url: str, count: int, picture: Path, screen: Screen) -> tuple[Balance, list[tuple[str, ...]]]:
    """Run the whole demo. Returns the balance and the rows of the table."""
    screen.say("Reading the flights")
    flights, airlines = read_flights(count), read_airlines()
    with shared_url(url) as shared:
        screen.say(f"{len(flights):,} flights go through {mask_url(url)}")
        balance = asyncio.run(run_demo(shared, flights, screen))
    rows = carrier_rows(balance.report.carriers, balance.auditor.cancelled_by_carrier, airlines)
    screen.table(rows)
    screen.balance(balance)
    draw(balance.report.carriers, airlines, picture)
    screen.say(f"Picture: {picture.resolve()}")
    return balance, rows
