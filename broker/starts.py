"""Checks where a new subscription or group is to begin. Pure."""

from __future__ import annotations

from datetime import datetime

from broker.errors import ConfigurationError
from broker.spi import Start

__all__ = ["check_start"]


def check_start(start: Start) -> Start:
    """Return the start if it is one.

    :raises ConfigurationError: it is neither "earliest" nor "latest" nor a time with a timezone.
    """
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise ConfigurationError(
                f"start {start.isoformat()} has no timezone", advice="Use datetime(..., tzinfo=UTC)"
            )
    elif start not in ("earliest", "latest"):
        raise ConfigurationError(f"start is {start!r}", advice='It takes "earliest", "latest" or a datetime')
    return start
