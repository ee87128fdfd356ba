"""Records as messages: delivered for the first time or again, or from a retry topic. Pure.

A message on a retry topic is the original with attributes for its due time and origin. Consumers see the id, the
attributes and the delivery count of the original.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from broker.driver.contract import RetryTopic
from broker.envelopes import RETRY_LETTER_PREFIX, Envelope, Place, View
from broker.messages import Message
from broker.outbound import OutboundMessage
from broker.records import Record

__all__ = [
    "FIRST",
    "Delivery",
    "RetryLetter",
    "delivery_of",
    "letter_of",
    "make_retry_letter",
    "message_of",
    "origin_of",
    "place_of",
    "read_retry_letter",
    "record_of",
]


_LONGEST_TEXT: Final = 256
_LONGEST_ID: Final = 100
_DIGITS: Final = 40
_LARGEST_COUNT: Final = 2**31 - 2
"""One more still fits where counts have 32 bits, as in Spark."""


class RetryLetter(NamedTuple):
    """The retry attributes of a message on a retry topic."""

    id: str
    attributes: Mapping[str, str]
    """The attributes of the original."""
    due: float
    """Seconds since 1970."""
    attempts: int
    """The number of earlier deliveries."""
    failures: int
    """The number of handler failures."""
    step: int
    """The number of finished rounds of failures."""
    place: tuple[str, str]
    """Partition and offset of the original, as text; empty if unknown."""
    id_given: bool = False
    """Whether the publisher gave the id of the original."""


class Delivery(NamedTuple):
    """A record that is redelivered, or delivered from a retry topic."""

    record: Record[Any]
    attempt: int
    returns: int
    """How often it was released or nacked before."""
    letter: RetryLetter | None = None
    """The retry attributes if the record is from a retry topic; consumers then see the original."""


def record_of(message: Message[Any]) -> Delivery:
    """The record of a message, and which delivery of it this is."""
    raw = message.raw
    return raw if type(raw) is Delivery else Delivery(raw, 1, 0)


def letter_of(message: Message[Any]) -> RetryLetter | None:
    """The retry attributes of a message from a retry topic; None for any other message."""
    raw = message.raw
    return raw.letter if type(raw) is Delivery else None


def place_of(message: Message[Any]) -> tuple[str, str]:
    """Partition and offset of the original, as text."""
    delivery = record_of(message)
    if delivery.letter is not None:
        return delivery.letter.place
    return str(delivery.record.partition), str(delivery.record.offset)


def origin_of(delivery: Delivery) -> Place | None:
    """The position of the original of a record; None if the retry attributes lack it."""
    record, letter = delivery.record, delivery.letter
    if letter is None:
        return Place(record.partition, record.offset)
    # Any program may have written the letter.
    if all(text.isdecimal() and len(text) <= _DIGITS for text in letter.place):
        return Place(*map(int, letter.place))
    return None


def make_retry_letter(
    original: Envelope,
    *,
    id: str,
    id_given: bool,
    target: RetryTopic,
    due: float,
    attempts: int,
    failures: int,
    step: int,
    place: tuple[str, str],
    subscription: str,
    reason: str,
    brief: bool = False,
) -> OutboundMessage:
    """The original with `retry-letter-*` attributes.

    Key, body and attributes of the original stay unchanged, so that a handler sees the same message again. `brief`
    omits the attributes that a redelivery does not need. The letter has an id of its own, because a broker with
    deduplication would drop the second letter of a message.
    """
    needed = {
        "topic": target.origin,
        "id": id,
        "due": datetime.fromtimestamp(due, UTC).isoformat(),
        "attempts": str(attempts),
        "failures": str(failures),
        "step": str(step),
    } | ({"id-given": "true"} if id_given else {})
    details = {
        "partition": place[0],
        "offset": place[1],
        "subscription": subscription,
        "reason": reason[:_LONGEST_TEXT],
    }
    added = needed if brief else needed | {name: text for name, text in details.items() if text}
    own = {name: text for name, text in original.attributes.items() if not name.startswith(RETRY_LETTER_PREFIX)}
    return OutboundMessage(
        original.data,
        original.key,
        own | {RETRY_LETTER_PREFIX + name: _text(text) for name, text in added.items()},
        id=f"{id[:_LONGEST_ID]}-{uuid.uuid4().hex}",
        publish_time=original.publish_time,
        native=original.native,
    )


def read_retry_letter(attributes: Mapping[str, str]) -> RetryLetter | None:
    """The retry attributes of a message; None if they are missing or invalid."""
    found = {
        name.removeprefix(RETRY_LETTER_PREFIX): text
        for name, text in attributes.items()
        if name.startswith(RETRY_LETTER_PREFIX)
    }
    try:
        due = datetime.fromisoformat(found["due"])
        return RetryLetter(
            found["id"],
            {name: text for name, text in attributes.items() if not name.startswith(RETRY_LETTER_PREFIX)},
            due.timestamp(),
            _count(found["attempts"]),
            _count(found["failures"]),
            _count(found["step"]),
            (found.get("partition", ""), found.get("offset", "")),
            "id-given" in found,
        )
    except (KeyError, ValueError, OverflowError):
        return None


def _count(text: str) -> int:
    """:raises ValueError: the text is no number."""
    return min(max(0, int(text)), _LARGEST_COUNT)


def _text(text: str) -> str:
    return text.encode(errors="replace").decode()


class _FirstView:
    """The view of records delivered for the first time: the raw object is the record."""

    __slots__ = ()

    def id(self, raw: Record[Any], /) -> str:
        return raw.id

    def given_id(self, raw: Record[Any], /) -> str | None:
        return raw.given_id

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
    """The view of redelivered records: the raw object is a `Delivery`."""

    __slots__ = ()

    def id(self, raw: Delivery, /) -> str:
        return raw.record.id if raw.letter is None else raw.letter.id

    def given_id(self, raw: Delivery, /) -> str | None:
        letter = raw.letter
        return raw.record.given_id if letter is None else letter.id if letter.id_given else None

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
    """The record as a message that is delivered for the first time."""
    return Message(record.topic, record.data, record, FIRST, lease, record.size)


def delivery_of(delivery: Delivery, topic: str, lease: Any) -> Message[Any]:
    """The record as a redelivered message of this topic."""
    record = delivery.record
    return Message(topic, record.data, delivery, _AGAIN, lease, record.size)
