"""When a message may be handed over (`deliver_at`), as a header of its record. Pure.

The log takes the record at once. Consumers of `queue=markers` leave it to their tracker until it is due; whoever else
reads the topic sees it as any other.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from broker.errors import InvalidMessage

__all__ = ["DUE", "LONGEST_DELAY", "due_of", "encode_due"]

DUE: Final = "anybroker-deliver-at"
"""Milliseconds since 1970, in decimal."""
LONGEST_DELAY: Final = 30 * 86_400.0
"""Seconds. Trackers repeat what waits, so that the marker topic's retention does not bound it."""
_LONGEST: Final = timedelta(seconds=LONGEST_DELAY)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


def encode_due(moment: datetime, now: datetime) -> bytes:
    """The header's value, never earlier than the moment.

    :raises InvalidMessage: that is too far ahead.
    """
    if moment - now > _LONGEST:
        raise InvalidMessage(
            f"deliver_at is {moment.isoformat()}, and a queue on Kafka keeps a message for {_LONGEST.days} days",
            advice="Publish it later, or keep its time elsewhere until then",
        )
    return b"%d" % max(0, -((_EPOCH - moment) // _MILLISECOND))


def due_of(headers: tuple[tuple[str, bytes | None], ...]) -> int:
    """When a record's message is due, in milliseconds since 1970; 0 if it does not tell."""
    for name, value in headers:
        if name == DUE and value is not None and value.isdigit() and len(value) < 15:
            return int(value)
    return 0
