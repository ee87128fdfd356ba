"""Checks where a new subscription or group is to begin. Pure."""

from __future__ import annotations

from datetime import datetime

from broker.checks import check_time, refused
from broker.spi import Start

__all__ = ["check_start"]


def check_start(start: Start, name: str = "start", *, also: str = "") -> Start:
    """Return the start if it is one.

    :param name: of the argument.
    :param also: what the argument takes besides, for the error.
    :raises ConfigurationError: it is neither "earliest" nor "latest" nor a time with a timezone.
    """
    if isinstance(start, datetime):
        check_time(name, start)
    elif start not in ("earliest", "latest"):
        raise refused(name, start, f'"earliest", "latest"{also and f", {also}"} or a datetime')
    return start
