"""The command: reads its arguments, runs the demo and says how it went by its exit status."""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import parse_qsl, urlencode, urlsplit

import broker
from broker.urls import mask_url
from examples.flights.data import FLIGHTS_IN_ALL, read_airlines, read_flights
from examples.flights.lives import LifeEnded
from examples.flights.picture import draw
from examples.flights.screen import Screen, carrier_rows
from examples.flights.story import Balance, tell

__all__ = ["main", "run", "shared_url"]

_DEFAULT_URL: Final = "embedded:"
_PICTURE: Final = Path("build/flights-delays.png")
_LEASE_SECONDS: Final = "5"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every promise held, 1 if one did not or the broker failed."""
    parser = argparse.ArgumentParser(prog="python -m examples.flights", description=__doc__)
    parser.add_argument("--flights", type=int, default=FLIGHTS_IN_ALL, help="how many of the 336,776 flights")
    parser.add_argument("--picture", type=Path, default=_PICTURE, help="where the picture goes (%(default)s)")
    parser.add_argument(
        "--url", default=os.environ.get("BROKER_URL") or _DEFAULT_URL, help="the broker, else BROKER_URL (%(default)s)"
    )
    given = parser.parse_args(arguments)
    if not 100 <= given.flights <= FLIGHTS_IN_ALL:
        parser.error(f"--flights takes 100 to {FLIGHTS_IN_ALL}")
    screen = Screen()
    try:
        balance, _ = run(given.url, given.flights, given.picture, screen)
    except BaseExceptionGroup as group:
        failures, others = group.split((broker.BrokerError, LifeEnded))
        if failures is None or others is not None:
            raise
        return _say_failures(screen, *_leaves(failures))
    except (broker.BrokerError, LifeEnded) as error:
        return _say_failures(screen, error)
    return 1 if balance.failures else 0


def run(url: str, count: int, picture: Path, screen: Screen) -> tuple[Balance, list[tuple[str, ...]]]:
    """The demo from the data to the picture; the balance and the rows of the table."""
    screen.say("Reading the flights")
    flights, airlines = read_flights(count), read_airlines()
    with shared_url(url) as shared:
        screen.say(f"{len(flights):,} flights go through {mask_url(url)}")
        balance = asyncio.run(tell(shared, flights, screen))
    rows = carrier_rows(balance.report.carriers, balance.auditor.cancelled_by_carrier, airlines)
    screen.table(rows)
    screen.balance(balance)
    draw(balance.report.carriers, airlines, picture)
    screen.say(f"Picture: {picture.resolve()}")
    return balance, rows


@contextmanager
def shared_url(url: str) -> Generator[str]:
    """The same broker as a URL that several processes can use, and with a lease short enough to watch.

    A temporary embedded server belongs to one connection: it gets a directory instead, for the time of the block.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("embedded", "nats", "tls"):
        yield url
        return
    parameters = {"lease_seconds": _LEASE_SECONDS, **dict(parse_qsl(parts.query, keep_blank_values=True))}
    parts = parts._replace(query=urlencode(parameters))
    if parts.scheme != "embedded" or parts.path.strip("/"):
        yield parts.geturl()
        return
    with tempfile.TemporaryDirectory(prefix="anybroker-demo-") as directory:
        yield f"embedded://{directory}?{parts.query}"


def _say_failures(screen: Screen, *errors: BaseException) -> int:
    for error in errors:
        screen.say(f"[bold red]The demo failed:[/] {error}")
    return 1


def _leaves(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(cast("BaseExceptionGroup[Any]", error))
        else:
            yield error
