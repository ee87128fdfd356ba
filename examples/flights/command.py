"""Arguments, broker URL and exit status, shared by the commands of the demos."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import parse_qsl, urlencode, urlsplit

import broker
from examples.flights.data import FLIGHTS_IN_ALL
from examples.flights.lives import LifeEnded
from examples.flights.screen import Screen

__all__ = ["Arguments", "parse", "shared_url", "status"]

_DEFAULT_URL: Final = "embedded:"
_EMBEDDED: Final = {"lease_seconds": "5"}
_PARAMETERS: Final = {
    "embedded": _EMBEDDED,
    "nats": _EMBEDDED,
    "tls": _EMBEDDED,
    # The shortest ack deadline of the service.
    "pubsub": {"lease_seconds": "10"},
    # Each aircraft is a session, and most sessions stay empty for long.
    "servicebus": {"lease_seconds": "5", "max_sessions": "16", "session_idle": "0.02"},
}
"""Default URL parameters by scheme."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a demo.

    :ivar flights: number of flights, counted from the first of the year.
    """

    url: str
    flights: int
    picture: Path


def parse(arguments: Sequence[str] | None, program: str, picture: Path) -> Arguments:
    """Parse the command line. Exits if it is wrong.

    :param picture: default path of the picture.
    """
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--flights", type=int, default=FLIGHTS_IN_ALL, help="how many of the 336,776 flights")
    parser.add_argument("--picture", type=Path, default=picture, help="where the picture goes (%(default)s)")
    parser.add_argument(
        "--url", default=os.environ.get("BROKER_URL") or _DEFAULT_URL, help="the broker, else BROKER_URL (%(default)s)"
    )
    given = parser.parse_args(arguments)
    if not 100 <= given.flights <= FLIGHTS_IN_ALL:
        parser.error(f"--flights takes 100 to {FLIGHTS_IN_ALL}")
    return Arguments(given.url, given.flights, given.picture)


def status(screen: Screen, demo: Callable[[], Sequence[str]]) -> int:
    """Run a demo that returns its failed checks. Returns 0 if there are none and nothing raised, else 1."""
    try:
        return 1 if demo() else 0
    except BaseExceptionGroup as group:
        failures, others = group.split((broker.BrokerError, LifeEnded))
        if failures is None or others is not None:
            raise
        return _say_failures(screen, *_leaves(failures))
    except (broker.BrokerError, LifeEnded) as error:
        return _say_failures(screen, error)


@contextmanager
def shared_url(url: str) -> Generator[str]:
    """The same broker as a URL that several processes can use, with a short lease.

    A temporary embedded server belongs to one connection, so it gets a temporary directory for the block.
    """
    parts = urlsplit(url)
    if parts.scheme not in _PARAMETERS:
        yield url
        return
    parameters = {**_PARAMETERS[parts.scheme], **dict(parse_qsl(parts.query, keep_blank_values=True))}
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
