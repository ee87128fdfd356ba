"""`Receipt`: the broker's confirmation of a published message. Immutable; safe from any thread."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

__all__ = ["Receipt", "count_duplicates"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The broker has stored the message.

    :ivar id: the message's id, as consumers see it.
    :ivar partition: the partition of the message; None if the broker has no partitions.
    :ivar offset: its position in the log; None if the broker has no log.
    :ivar duplicate: the broker dropped this message, because it already had one with the same id.
    :ivar timestamp: the time that the broker stored with the message, in milliseconds since 1970; None if unknown.
    """

    id: str
    partition: int | None = None
    offset: int | None = None
    duplicate: bool = False
    timestamp: int | None = None

    @property
    def time(self) -> datetime | None:
        """The time that the broker stored with the message, UTC: its own, or on some brokers the producer's."""
        return None if self.timestamp is None else _EPOCH + timedelta(milliseconds=self.timestamp)

    def __repr__(self) -> str:
        time = None if self.time is None else self.time.isoformat()
        return (
            f"Receipt(id={self.id!r}, partition={self.partition}, offset={self.offset}, duplicate={self.duplicate}, "
            f"time={time})"
        )


def count_duplicates(outcomes: Iterable[object]) -> int:
    """How many of the outcomes are receipts of messages that the broker dropped as duplicates."""
    return len([True for outcome in outcomes if type(outcome) is Receipt and outcome.duplicate])
