"""Times and durations as the server spells them. It counts nanoseconds in 64 bits, and knows nothing beyond.

Pure functions.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Final

from broker.errors import InvalidMessage, InvalidSetting

__all__ = ["NANOSECONDS", "nanoseconds", "schedule_time", "server_time", "ttl_seconds"]

NANOSECONDS: Final = 1_000_000_000
LAST_MOMENT: Final = datetime(2262, 4, 11, tzinfo=UTC)
"""The last day that the server can tell."""
LONGEST: Final = timedelta(days=365 * 290)
"""The longest duration that it can tell, in round figures."""
SHORTEST: Final = 0.1
"""Seconds; a topic counts in no shorter time."""
_FIRST_MOMENT: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FORMAT: Final = "%Y-%m-%dT%H:%M:%S.%fZ"


def server_time(moment: datetime) -> str:
    """A moment to look from. No message is older than 1970 or younger than the last moment, so these stand for what is
    beyond them.
    """
    try:
        moment = moment.astimezone(UTC)
    except OverflowError:
        # The first or the last hours of the calendar, in a timezone in which UTC lies beyond it.
        moment = _FIRST_MOMENT if moment.year < LAST_MOMENT.year else LAST_MOMENT
    return min(max(moment, _FIRST_MOMENT), LAST_MOMENT).strftime(_FORMAT)


def schedule_time(moment: datetime) -> str:
    """A moment to deliver at.

    :raises InvalidMessage: the server cannot wait so long.
    """
    # The naive comparison cannot overflow, and a day more or less does not matter here.
    if moment.replace(tzinfo=UTC) >= LAST_MOMENT:
        raise InvalidMessage(
            f"deliver_at is {moment.isoformat()}, and a NATS server can tell no time from {LAST_MOMENT:%Y-%m-%d} on",
            advice="Give an earlier time",
        )
    return server_time(moment)


def ttl_seconds(ttl: float) -> int:
    """A time to live in whole seconds; rounded up, which keeps a message rather longer than shorter.

    :raises InvalidMessage: the server cannot count so far.
    """
    if ttl > LONGEST.total_seconds():
        raise InvalidMessage(
            f"ttl is {ttl:g} seconds, and a NATS server counts {LONGEST.total_seconds():.0f} at most",
            advice="Leave it out to keep the message as long as its topic does",
        )
    return math.ceil(ttl)


def nanoseconds(option: str, duration: timedelta | float) -> int:
    """A duration of a topic's option.

    :raises InvalidSetting: it is no time of 0.1 seconds or more that the server can count.
    """
    try:
        seconds = duration.total_seconds() if isinstance(duration, timedelta) else float(duration)
    except (TypeError, ValueError):
        seconds = -1.0
    if not SHORTEST <= seconds <= LONGEST.total_seconds():
        raise InvalidSetting(
            f"{option} is {duration!r}",
            advice=f"It takes a timedelta, or seconds, from {SHORTEST} s on and below {LONGEST.days // 365} years",
        )
    return round(seconds * NANOSECONDS)
