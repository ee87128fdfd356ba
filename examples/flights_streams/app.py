"""The command: parses arguments, runs the demo and sets the exit status."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit

import broker
from broker.errors import ConfigurationError
from broker.urls import mask_url
from examples.flights.command import parse, shared_url, status
from examples.flights.data import read_flights
from examples.flights.screen import Screen
from examples.flights_streams.board import Board
from examples.flights_streams.picture import draw
from examples.flights_streams.shown import show
from examples.flights_streams.story import Outcome, run_demo

__all__ = ["main", "run", "suited_url"]

_PICTURE: Final = Path("build/flights-streams.png")
_OWNER: Final = {"owner_timeout": "2"}
# How soon a member that was killed is missed; 6 s is the shortest session of Kafka's default settings. Pulsar's default
# batches have one key each, so that carriers would come out of the order of time.
_SUITED: Final = {
    "embedded": _OWNER,
    "nats": _OWNER,
    "tls": _OWNER,
    "kafka": {"session_timeout_ms": "6000", "heartbeat_interval_ms": "500"},
    "pulsar": {"batching": "default"},
    "pulsar+ssl": {"batching": "default"},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if the output is correct, 1 if not, or if the broker or a process failed."""
    given = parse(arguments, "python -m examples.flights_streams", _PICTURE)
    board = Board()
    return status(Screen(board.console), lambda: run(given.url, given.flights, given.picture, board).failures)


def run(url: str, count: int, picture: Path, board: Board) -> Outcome:
    """Run the whole demo.

    :raises ConfigurationError: the demo cannot run on this broker.
    """
    with shared_url(suited_url(url)) as shared, tempfile.TemporaryDirectory(prefix="anybroker-streams-") as directory:
        _check(shared)
        board.say("Reading the flights")
        flights = read_flights(count)
        board.say(f"{len(flights):,} flights go through {mask_url(url)} and three stream processors")
        outcome = asyncio.run(run_demo(shared, flights, Path(directory), board))
    show(board, outcome)
    draw(outcome, picture)
    board.say(f"Picture: {picture.resolve()}")
    return outcome


def suited_url(url: str) -> str:
    """The same broker, with short sessions of members, and messages of a partition in the order of the calls."""
    parts = urlsplit(url)
    parameters = {**_SUITED.get(parts.scheme, {}), **dict(parse_qsl(parts.query, keep_blank_values=True))}
    return parts._replace(query=urlencode(parameters)).geturl()


def _check(url: str) -> None:
    """:raises ConfigurationError: the broker is within one process."""
    if not broker.connect(url).capabilities.shared:
        raise ConfigurationError(
            f"{mask_url(url)} is a broker within one process, and this demo runs several",
            advice="Use embedded: or a server's URL",
        )
