"""Times and durations as the server and our headers spell them: nanoseconds in 64 bits. Pure functions."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final

from broker import InvalidMessage, InvalidSetting

__all__ = [
    "NANOSECONDS",
    "microseconds",
    "microseconds_at",
    "nanoseconds",
    "parse_time",
    "schedule_time",
    "server_time",
    "ttl_seconds",
]

NANOSECONDS: Final = 1_000_000_000
LAST_MOMENT: Final = datetime(2262, 4, 11, tzinfo=UTC)
"""The first moment that does not fit into the server's 64-bit nanoseconds."""
LONGEST: Final = timedelta(days=365 * 290)
"""The longest duration of the server, rounded down."""
SHORTEST: Final = 0.1
"""Seconds; the shortest duration of a topic's option."""
_FIRST_MOMENT: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_EARLIEST: Final = (datetime.min.replace(tzinfo=UTC) - _FIRST_MOMENT) // _MICROSECOND
_LATEST: Final = (datetime.max.replace(tzinfo=UTC) - _FIRST_MOMENT) // _MICROSECOND
_FORMAT: Final = "%Y-%m-%dT%H:%M:%S.%fZ"


def server_time(moment: datetime) -> str:
    """A start time, clamped to the range of the server, which holds every message."""
    try:
        moment = moment.astimezone(UTC)
    except OverflowError:
        # The first or last hours of the calendar, which UTC cannot express.
        moment = _FIRST_MOMENT if moment.year < LAST_MOMENT.year else LAST_MOMENT
    return min(max(moment, _FIRST_MOMENT), LAST_MOMENT).strftime(_FORMAT)


def schedule_time(moment: datetime) -> str:
    """A delivery time.

    :raises InvalidMessage: beyond the range of the server.
    """
    # A naive comparison cannot overflow; hours do not matter here.
    if moment.replace(tzinfo=UTC) >= LAST_MOMENT:
        raise InvalidMessage(
            f"deliver_at is {moment.isoformat()}; NATS supports times before {LAST_MOMENT:%Y-%m-%d}",
            advice="Give an earlier time",
        )
    return server_time(moment)


def ttl_seconds(ttl: float) -> int:
    """A time to live in whole seconds, rounded up.

    :raises InvalidMessage: beyond the range of the server.
    """
    if ttl > LONGEST.total_seconds():
        raise InvalidMessage(
            f"ttl is {ttl:g} seconds; NATS supports at most {LONGEST.total_seconds():.0f}",
            advice="Omit ttl to keep the message as long as its topic does",
        )
    return math.ceil(ttl)


def nanoseconds(option: str, duration: timedelta | float) -> int:
    """A duration of a topic's option.

    :raises InvalidSetting: not a duration, or out of range.
    """
    try:
        seconds = duration.total_seconds() if isinstance(duration, timedelta) else float(duration)
    except (TypeError, ValueError):
        seconds = -1.0
    if not SHORTEST <= seconds <= LONGEST.total_seconds():
        raise InvalidSetting(
            f"{option} is {duration!r}",
            advice=f"Use a timedelta or seconds, from {SHORTEST} s to {LONGEST.days // 365} years",
        )
    return round(seconds * NANOSECONDS)


def parse_time(text: str) -> datetime:
    """Parse a time of the server: RFC 3339 with up to nine digits of a second."""
    head, dot, rest = text.partition(".")
    if not dot:
        return datetime.fromisoformat(text).astimezone(UTC)
    digits = rest.rstrip("Z").split("+")[0].split("-")[0]
    zone = rest[len(digits) :].replace("Z", "+00:00")
    return datetime.fromisoformat(f"{head}.{digits[:6].ljust(6, '0')}{zone}").astimezone(UTC)


def microseconds(time: bytes) -> int | None:
    """A time in an `anybroker-` header, in microseconds since 1970; None if no datetime can express it."""
    try:
        found = int(time)
    except ValueError:
        return None
    return found if _EARLIEST <= found <= _LATEST else None


def microseconds_at(stamp: bytes) -> int:
    """`parse_time` as microseconds since 1970, fast for many times of the same second."""
    second, _, rest = stamp.partition(b".")
    if rest[-1:] != b"Z":
        return (parse_time(stamp.decode()) - _FIRST_MOMENT) // _MICROSECOND
    return _microseconds_of(second) + int(rest[:6].rstrip(b"Z").ljust(6, b"0"))


@lru_cache(maxsize=64)
def _microseconds_of(second: bytes) -> int:
    return (parse_time(second.decode() + "Z") - _FIRST_MOMENT) // _MICROSECOND
