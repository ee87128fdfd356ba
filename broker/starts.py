"""Checks where a new subscription or group is to begin. Pure."""

from __future__ import annotations

from datetime import datetime

from broker.checks import check_time, refused
from broker.spi import Start

__all__ = ["check_start"]


def check_start(start: Start) -> Start:
    """Return the start if it is one.

    :raises ConfigurationError: it is neither "earliest" nor "latest" nor a time with a timezone.
    """
    if isinstance(start, datetime):
        check_time("start", start)
    elif start not in ("earliest", "latest"):
        raise refused("start", start, '"earliest", "latest" or a datetime')
    return start
