"""Reads the spans and moments of time that options take; pure functions."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from broker.cli.exits import Exit, Failure
from broker.driver.contract import Start

__all__ = ["parse_duration", "parse_start", "parse_time"]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_duration(text: str) -> timedelta:
    """A span of time such as 90s, 12h or 7d; a bare number is seconds.

    :raises Failure: it is something else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw]?)", text.strip().lower())
    if not match or not float(match[1]):
        raise Failure(
            f"{text!r} is not a span of time", advice="Write it like 90s, 15m, 12h, 7d or 2w", code=Exit.USAGE
        )
    return timedelta(seconds=float(match[1]) * _UNITS[match[2] or "s"])


def parse_time(text: str) -> datetime:
    """A moment in ISO 8601; one without a timezone is local time.

    :raises Failure: it is something else.
    """
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise Failure(f"{text!r} is not a time", advice="Write it like 2030-01-31T12:00:00Z", code=Exit.USAGE) from None


def parse_start(text: str) -> Start:
    """Where a new subscription begins.

    :raises Failure: it is neither earliest, latest nor a time.
    """
    if text == "earliest" or text == "latest":
        return text
    try:
        return parse_time(text)
    except Failure:
        raise Failure(
            f"--start {text!r} is no place to start",
            advice="Use earliest, latest or a time such as 2030-01-31T12:00:00Z",
            code=Exit.USAGE,
        ) from None
