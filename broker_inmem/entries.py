"""Stored messages, and the views that read them as messages and records.

Entries are written once, before any reader sees them, and shared by all subscriptions and groups. The cyclic collector
does not track them, so they must not take part in reference cycles.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from broker import Outcome, Record
from broker.driver import Place

__all__ = ["DELIVERY_VIEW", "ENTRY_VIEW", "Delivery", "Entry", "TransactionState", "as_datetime", "as_record"]

_FOREVER: Final = float("inf")


class TransactionState(msgspec.Struct, eq=False, gc=False):
    """The state of a transaction; shared by all its entries."""

    open: bool = True
    committed: bool = False

    @property
    def aborted(self) -> bool:
        return not self.open and not self.committed


class Entry(msgspec.Struct, eq=False, gc=False):
    """A message in the log of one partition."""

    topic: str
    partition: int
    offset: int
    seq: int
    """Counts the messages of the topic over all partitions."""
    key: bytes | None
    data: bytes | None
    attributes: Mapping[str, str]
    given_id: str | None
    publish_time: datetime | None
    """None if the producer gave none; then it is the server's time."""
    time: float
    """When it was appended, by the server's clock."""
    size: int
    expires: float = _FOREVER
    transaction: TransactionState | None = None
    scheduled: int = 0
    """Counts the scheduled messages of the topic, for their ids: they have no offset yet. 0 is none."""

    @property
    def id(self) -> str:
        if self.given_id is not None:
            return self.given_id
        place = f"scheduled:{self.scheduled}" if self.scheduled else f"{self.partition}:{self.offset}"
        return f"{self.topic}:{place}"


class Delivery(msgspec.Struct, eq=False, gc=False):
    """One delivery of an entry to one consumer: the lease."""

    entry: Entry
    attempt: int
    tag: int
    member: int
    expires: float
    outcome: Outcome | None = None
    """How it was settled; None while it is leased and after the lease ended."""


def as_datetime(seconds: float) -> datetime:
    """A time of the server's clock as a datetime, UTC."""
    return datetime.fromtimestamp(seconds, UTC)


class _EntryView:
    """Shows an entry of a record."""

    __slots__ = ()

    def id(self, raw: Entry, /) -> str:
        return raw.id

    def given_id(self, raw: Entry, /) -> str | None:
        return raw.given_id

    def key(self, raw: Entry, /) -> bytes | None:
        return raw.key

    def attributes(self, raw: Entry, /) -> Mapping[str, str]:
        return raw.attributes

    def publish_time(self, raw: Entry, /) -> datetime | None:
        return raw.publish_time or as_datetime(raw.time)

    def broker_time(self, raw: Entry, /) -> datetime | None:
        return as_datetime(raw.time)

    def delivery_attempt(self, raw: Entry, /) -> int | None:
        return None

    def native(self, raw: Entry, /) -> Entry:
        return raw


class _DeliveryView:
    """Shows the entry of a message's delivery."""

    __slots__ = ()

    def id(self, raw: Delivery, /) -> str:
        return raw.entry.id

    def given_id(self, raw: Delivery, /) -> str | None:
        return raw.entry.given_id

    def key(self, raw: Delivery, /) -> bytes | None:
        return raw.entry.key

    def attributes(self, raw: Delivery, /) -> Mapping[str, str]:
        return raw.entry.attributes

    def publish_time(self, raw: Delivery, /) -> datetime | None:
        return raw.entry.publish_time or as_datetime(raw.entry.time)

    def broker_time(self, raw: Delivery, /) -> datetime | None:
        return as_datetime(raw.entry.time)

    def delivery_attempt(self, raw: Delivery, /) -> int | None:
        return raw.attempt

    def place(self, raw: Delivery, /) -> Place | None:
        return Place(raw.entry.partition, raw.entry.offset)

    def native(self, raw: Delivery, /) -> Delivery:
        return raw


ENTRY_VIEW: Final = _EntryView()
DELIVERY_VIEW: Final = _DeliveryView()


def as_record(entry: Entry) -> Record[Any]:
    """An entry as a record of a read without a group."""
    return Record(entry.topic, entry.partition, entry.offset, entry.key, entry.data, entry, ENTRY_VIEW, entry.size)
