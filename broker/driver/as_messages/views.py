"""Shows a Record as a Message. Pure; the views hold no state, and are shared by all messages."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from broker.driver.retry_message import Delivery, origin_of
from broker.envelopes import Place, View
from broker.messages import Message
from broker.records import Record

__all__ = ["FIRST", "delivery_of", "message_of"]


class _FirstView:
    """Of records delivered for the first time: the raw object is the record itself."""

    __slots__ = ()

    def id(self, raw: Record[Any], /) -> str:
        return raw.id

    def key(self, raw: Record[Any], /) -> bytes | None:
        return raw.key

    def attributes(self, raw: Record[Any], /) -> Mapping[str, str]:
        return raw.attributes

    def publish_time(self, raw: Record[Any], /) -> datetime | None:
        return raw.publish_time

    def broker_time(self, raw: Record[Any], /) -> datetime | None:
        return raw.broker_time

    def delivery_attempt(self, raw: Record[Any], /) -> int | None:
        return 1

    def place(self, raw: Record[Any], /) -> Place | None:
        return Place(raw.partition, raw.offset)

    def native(self, raw: Record[Any], /) -> Any:
        return raw.native


class _AgainView:
    """Of records delivered again: the raw object is a `Delivery`."""

    __slots__ = ()

    def id(self, raw: Delivery, /) -> str:
        return raw.record.id if raw.letter is None else raw.letter.id

    def key(self, raw: Delivery, /) -> bytes | None:
        return raw.record.key

    def attributes(self, raw: Delivery, /) -> Mapping[str, str]:
        return raw.record.attributes if raw.letter is None else raw.letter.attributes

    def publish_time(self, raw: Delivery, /) -> datetime | None:
        return raw.record.publish_time

    def broker_time(self, raw: Delivery, /) -> datetime | None:
        return raw.record.broker_time

    def delivery_attempt(self, raw: Delivery, /) -> int | None:
        return raw.attempt

    def place(self, raw: Delivery, /) -> Place | None:
        return origin_of(raw)

    def native(self, raw: Delivery, /) -> Any:
        return raw.record.native


FIRST: Final[View] = _FirstView()
_AGAIN: Final[View] = _AgainView()


def message_of(record: Record[Any], lease: Any = None) -> Message[Any]:
    """The record as a message that is delivered for the first time; its native object stays the record's."""
    return Message(record.topic, record.data, record, FIRST, lease, record.size)


def delivery_of(delivery: Delivery, topic: str, lease: Any) -> Message[Any]:
    """The record as a message of this topic that is delivered again."""
    record = delivery.record
    return Message(topic, record.data, delivery, _AGAIN, lease, record.size)
