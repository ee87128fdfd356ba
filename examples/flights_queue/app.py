"""The command: parses arguments, runs the demo and sets the exit status."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit

import broker
from broker.errors import ConfigurationError
from broker.urls import mask_url
from examples.flights.command import status
from examples.flights.data import FLIGHTS_IN_ALL, read_flights
from examples.flights.screen import Screen
from examples.flights_queue.board import Board
from examples.flights_queue.shown import show
from examples.flights_queue.story import KILLS, Outcome, run_demo

__all__ = ["main", "queue_url", "run"]

_FLIGHTS: Final = 10_000
_LEAST_FLIGHTS: Final = 500
_WORKERS: Final = 4
_MOST_WORKERS: Final = 16
_WORK_SECONDS: Final = 0.03
# Quick redelivery after a kill; 6 s is the shortest session of Kafka's default settings.
_QUICK: Final = {"lease_seconds": "2", "session_timeout_ms": "6000", "heartbeat_interval_ms": "500"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every check passed, 1 if one failed or the broker failed."""
    parser = argparse.ArgumentParser(prog="python -m examples.flights_queue")
    parser.add_argument("--flights", type=int, default=_FLIGHTS, help="how many of the 336,776 flights (%(default)s)")
    parser.add_argument("--workers", type=int, default=_WORKERS, help="how many processes (%(default)s)")
    parser.add_argument("--url", default=os.environ.get("BROKER_URL", ""), help="a Kafka broker, else BROKER_URL")
    given = parser.parse_args(arguments)
    if not _LEAST_FLIGHTS <= given.flights <= FLIGHTS_IN_ALL:
        parser.error(f"--flights takes {_LEAST_FLIGHTS} to {FLIGHTS_IN_ALL}")
    if not len(KILLS) < given.workers <= _MOST_WORKERS:
        parser.error(f"--workers takes {len(KILLS) + 1} to {_MOST_WORKERS}, since {len(KILLS)} are killed")
    board = Board()
    return status(Screen(board.console), lambda: run(given.url, given.flights, given.workers, board).failures)


def run(url: str, count: int, workers: int, board: Board, *, work_seconds: float = _WORK_SECONDS) -> Outcome:
    """Run the whole demo.

    :param work_seconds: duration of a job.
    :raises ConfigurationError: the demo cannot run on this broker.
    """
    shared = queue_url(url)
    board.say("Reading the flights")
    flights = read_flights(count)
    board.say(f"{len(flights):,} flights are jobs of a queue at {mask_url(url)}, and {workers} workers do them")
    outcome = asyncio.run(run_demo(shared, flights, workers, work_seconds, board))
    show(board, outcome)
    return outcome


def queue_url(url: str) -> str:
    """The same broker with `queue=markers`, and with short leases and sessions.

    :raises ConfigurationError: the broker is not Kafka.
    """
    parts = urlsplit(url)
    if parts.scheme != "kafka":
        raise ConfigurationError(
            f"The queue of this demo is Kafka's, and the URL is {mask_url(url) if url else 'missing'}",
            advice="Give kafka://host:port as --url or BROKER_URL, or run `make demo-queue`, which starts one",
        )
    parameters = {**_QUICK, **dict(parse_qsl(parts.query, keep_blank_values=True)), "queue": "markers"}
    shared = parts._replace(query=urlencode(parameters)).geturl()
    broker.connect(shared)  # no I/O: raises for wrong settings before the workers start
    return shared
