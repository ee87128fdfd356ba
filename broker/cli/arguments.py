"""Arguments and options that several commands share, and their parsers. Pure functions."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Annotated

import typer

from broker.cli.errors import Exit, Failure, advice_of
from broker.driver.contract import Start
from broker.errors import InvalidName
from broker.names import known_name

__all__ = [
    "KnownTopic",
    "SubscriptionName",
    "TopicName",
    "Yes",
    "parse_duration",
    "parse_name",
    "parse_start",
    "parse_time",
]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


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
    return timedelta(seconds=float(match[1]) * _UNITS[match[2] or "s"])


def parse_time(text: str) -> datetime:
    """A time in ISO 8601, local time if it has no timezone.

    :raises Failure: the text is not a time.
    """
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise Failure(f"{text!r} is not a time", advice="Write it like 2030-01-31T12:00:00Z", code=Exit.USAGE) from None


def parse_start(text: str) -> Start:
    """Where a new subscription begins: earliest, latest or a time.

    :raises Failure: the text is none of these.
    """
    if text == "earliest" or text == "latest":
        return text
    try:
        return parse_time(text)
    except Failure:
        raise Failure(
            f"--start is {text!r}",
            advice="It takes earliest, latest or a time such as 2030-01-31T12:00:00Z",
            code=Exit.USAGE,
        ) from None


TopicName = Annotated[str, typer.Argument(metavar="TOPIC", help="Name of the topic.", show_default=False)]
KnownTopic = Annotated[
    str,
    typer.Argument(
        metavar="TOPIC",
        parser=parse_name,
        help="Name of the topic; one that is not portable is the broker's own name.",
        show_default=False,
    ),
]
"""For commands that create nothing, so that they also work on topics of other applications."""
SubscriptionName = Annotated[
    str, typer.Argument(metavar="SUBSCRIPTION", help="Name of the subscription.", show_default=False)
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
