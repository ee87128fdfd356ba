"""The command: parses arguments, runs the demo and sets the exit status."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import broker
from broker.errors import ConfigurationError
from broker.urls import mask_url
from examples.flights.command import parse, shared_url, status
from examples.flights.data import read_airlines, read_flights
from examples.flights.picture import draw
from examples.flights.screen import Screen
from examples.flights_pipeline.shown import carriers_of, show
from examples.flights_pipeline.story import Outcome, run_demo

__all__ = ["check", "main", "run"]

_PICTURE: Final = Path("build/flights-pipeline.png")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if the output is correct, 1 if not, or if the broker or Spark failed."""
    given = parse(arguments, "python -m examples.flights_pipeline", _PICTURE)
    screen = Screen()
    return status(screen, lambda: run(given.url, given.flights, given.picture, screen).failures)


def run(url: str, count: int, picture: Path, screen: Screen) -> Outcome:
    """Run the whole demo.

    :raises ConfigurationError: the demo cannot run here, or on this broker.
    """
    check(url)
    screen.say("Reading the flights")
    flights, airlines = read_flights(count), read_airlines()
    with shared_url(url) as shared, tempfile.TemporaryDirectory(prefix="anybroker-pipeline-") as directory:
        screen.say(f"{len(flights):,} flights go through {mask_url(url)} and Spark")
        outcome = asyncio.run(run_demo(shared, flights, Path(directory), screen))
    show(screen, outcome, airlines)
    draw(carriers_of(outcome.results.hours.values())[0], airlines, picture)
    screen.say(f"Picture: {picture.resolve()}")
    return outcome


def check(url: str) -> None:
    """Check that the demo can run here, on this broker. No I/O but a search for Java.

    :raises ConfigurationError: it cannot.
    """
    bus = broker.connect(url)
    if not bus.capabilities.shared and bus.capabilities.backend == "inmem":
        raise ConfigurationError(
            f"{mask_url(url)} is a broker within one process, and Spark runs several",
            advice="Use embedded: or a server's URL, or `make demo-sdk`, which runs in memory too",
        )
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java", path=f"{home}/bin" if home else None) is None:
        raise ConfigurationError(
            "There is no java, and Spark needs Java 17 or newer",
            advice="Install it, and set JAVA_HOME where it is not on the path; or use `make demo-sdk`, without Spark",
        )
