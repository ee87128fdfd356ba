"""`Receipt`: the broker's word that it has a message. Immutable; safe from any thread."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

__all__ = ["Receipt"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The broker has the message.

    :ivar id: the message's id as consumers will see it.
    :ivar partition: where it was appended, None where the broker has no partitions.
    :ivar offset: its position in the log, None where the broker has no log.
    :ivar duplicate: the broker had a message of this id already and dropped this one.
    :ivar timestamp: the time that the broker keeps with it, in milliseconds since 1970; None where it tells none.
    """

    id: str
    partition: int | None = None
    offset: int | None = None
    duplicate: bool = False
    timestamp: int | None = None

    @property
    def time(self) -> datetime | None:
        """The time that the broker keeps with it, UTC: its own clock's, or the producer's where it takes that."""
        return None if self.timestamp is None else _EPOCH + timedelta(milliseconds=self.timestamp)
