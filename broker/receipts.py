"""`Receipt`: the broker's word that it has a message. Immutable; safe from any thread."""

from __future__ import annotations

import msgspec

__all__ = ["Receipt"]


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The broker has the message.

    :ivar id: the message's id as consumers will see it.
    :ivar partition: where it was appended, None where the broker has no partitions.
    :ivar offset: its position in the log, None where the broker has no log.
    :ivar duplicate: the broker had a message of this id already and dropped this one.
    """

    id: str
    partition: int | None = None
    offset: int | None = None
    duplicate: bool = False
