"""Arguments and options that several commands share, and their parsers. Pure functions."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from broker.cli.completion import complete_subscription, complete_topic
from broker.cli.errors import Exit, Failure, advice_of
from broker.driver.contract import Start
from broker.errors import InvalidName
from broker.names import known_name

__all__ = [
    "TIME_OR_AGE",
    "KnownTopic",
    "Listen",
    "Rate",
    "SubscriptionName",
    "TopicName",
    "Yes",
    "parse_address",
    "parse_duration",
    "parse_name",
    "parse_rate",
    "parse_start",
    "parse_time",
]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
TIME_OR_AGE = "a time such as 2030-01-31T12:00:00Z, or an age such as 5m or 7d"
"""What options with a time take, for their help and errors."""


def parse_name(text: str) -> str:
    """The name of something that exists: a name that is not portable becomes a native name.

    :raises Failure: the name is invalid.
    """
    try:
        return known_name(text)
    except InvalidName as error:
        raise Failure(
            f"The name {text!r} is invalid: {error.message}", advice=advice_of(error), code=Exit.USAGE
        ) from None


def parse_duration(text: str) -> timedelta:
    """A duration such as 90s, 12h or 7d; a number without a unit is seconds.

    :raises Failure: the text is not a duration.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw]?)", text.strip().lower())
    if not match or not float(match[1]):
        raise Failure(f"{text!r} is not a duration", advice="Write it like 90s, 15m, 12h, 7d or 2w", code=Exit.USAGE)
    try:
        return timedelta(seconds=float(match[1]) * _UNITS[match[2] or "s"])
    except OverflowError:
        raise Failure(
            f"{text!r} is too long", advice="Write it like 90s, 15m, 12h, 7d or 2w", code=Exit.USAGE
        ) from None


def parse_rate(text: str) -> float:
    """A number above 0.

    :raises Failure: the text is none.
    """
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < math.inf:
        raise Failure(f"--rate is {text!r}", advice="It takes messages per second, a number above 0", code=Exit.USAGE)
    return rate


def parse_time(option: str, text: str, others: str = "") -> datetime:
    """A time with a timezone in ISO 8601, or a duration with a unit: that long ago.

    :param option: the option, for the error.
    :param others: what else the option takes.
    :raises Failure: the text is neither.
    """
    advice = f"It takes {others}{TIME_OR_AGE}"
    try:
        if re.fullmatch(r"[\d.]+\s*[a-zA-Z]", text.strip()):
            return datetime.now(UTC) - parse_duration(text)
        moment = datetime.fromisoformat(text)
    except (Failure, ValueError, OverflowError):
        raise Failure(f"{option} is {text!r}", advice=advice, code=Exit.USAGE) from None
    if moment.tzinfo is None:
        raise Failure(
            f"{option} is {text!r}, which has no timezone",
            advice=f"Write {moment.isoformat()}Z for UTC, or another offset such as +02:00",
            code=Exit.USAGE,
        )
    return moment


def parse_start(text: str) -> Start:
    """Where a new subscription begins: earliest, latest, a time or an age.

    :raises Failure: the text is none of these.
    """
    if text == "earliest" or text == "latest":
        return text
    return parse_time("--start", text, "earliest, latest, ")


def parse_address(text: str) -> tuple[str, int]:
    """The host and port of `--listen`: PORT alone is on the loopback.

    :raises Failure: the text is no address.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 65_536):
        raise Failure(
            f"--listen is {text!r}", advice="It takes PORT or HOST:PORT, with a port up to 65535", code=Exit.USAGE
        )
    return host or "127.0.0.1", int(port)


TopicName = Annotated[
    str,
    typer.Argument(metavar="TOPIC", help="Name of the topic.", show_default=False, autocompletion=complete_topic),
]
Listen = Annotated[
    str | None,
    typer.Option(metavar="[HOST:]PORT", help="Serve /health and /metrics at this address; port 0 is any free one."),
]
KnownTopic = Annotated[
    str,
    typer.Argument(
        metavar="TOPIC",
        parser=parse_name,
        help="Name of the topic; one that is not portable is the broker's own name.",
        show_default=False,
        autocompletion=complete_topic,
    ),
]
"""For commands that create nothing, so that they also work on topics of other applications."""
SubscriptionName = Annotated[
    str,
    typer.Argument(
        metavar="SUBSCRIPTION",
        help="Name of the subscription.",
        show_default=False,
        autocompletion=complete_subscription,
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        "--rate",
        metavar="COUNT",
        parser=parse_rate,
        help="At most this many messages per second, on average.",
        show_default=False,
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
