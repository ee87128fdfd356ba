"""Messages as an Arrow table of the requested columns and an identity that recognizes redeliveries. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate, chain
from typing import Any, Final, cast

import pyarrow

from broker.arrow import column_of
from broker.envelopes import HasPlace, Place
from broker.messages import Message
from broker_spark.common.schema import arrow_schema
from broker_spark.spool.segments import IDENTITY

__all__ = ["Places", "Stamps", "identified_by_id", "place_of", "places_of", "stamps_of", "table_of", "unseen_rows"]

Messages = Sequence[Message[bytes]]
Stamps = tuple[list[int], list[int]]
"""Offsets and broker times in microseconds of messages, where the broker provides both at once.

For Pub/Sub, which has no offsets, the server's ids as unordered numbers.
"""
Places = Sequence[Place | None]
"""Where each message lay first; None if unknown."""

_arrow: Final[Any] = pyarrow


def stamps_of(messages: Messages) -> Stamps | None:
    """The stamps of messages, if their backend provides them."""
    stamps = getattr(messages[0].view, "stamps", None)
    return None if stamps is None else stamps([message.raw for message in messages])


def places_of(messages: Messages) -> Places:
    """The places of messages without stamps, one by one."""
    view = messages[0].view
    return [view.place(message.raw) for message in messages] if isinstance(view, HasPlace) else [None] * len(messages)


def table_of(
    messages: Messages, columns: Sequence[str], stamps: Stamps | None, places: Places | None = None
) -> pyarrow.Table:
    """The rows in the order of the messages, with an identity that is the same for each delivery of a message.

    The identity is the place in the log if the broker provides it, since publishers may use an id twice.

    :param places: without stamps.
    """
    schema: Any = arrow_schema(columns)
    headed = _headed(messages, columns)
    arrays = [_array(field, messages, stamps, places, headed.get(field.name)) for field in schema]
    arrays.append(_identities(messages, stamps, places))
    return _arrow.Table.from_arrays(arrays, schema=schema.append(_arrow.field(IDENTITY, _arrow.string())))


def identified_by_id(places: Places | None) -> frozenset[int]:
    """The numbers of messages whose identity is an id.

    :param places: None with stamps.
    """
    return frozenset(number for number, place in enumerate(places or ()) if place is None)


def unseen_rows(
    messages: Messages, names: Sequence[str], repeated: AbstractSet[str], by_id: AbstractSet[int]
) -> list[int]:
    """The numbers of the messages to write: each message once.

    :param names: their identities.
    :param repeated: identities that are written already.
    :param by_id: the messages identified by an id. Publishers may use an id twice: a first delivery is a new message.
    """
    found: list[int] = []
    seen: set[str] = set()
    for number, (message, name) in enumerate(zip(messages, names, strict=True)):
        is_another = number in by_id and message.delivery_attempt == 1
        if is_another or (name not in repeated and name not in seen):
            seen.add(name)
            found.append(number)
    return found


def _identities(messages: Messages, stamps: Stamps | None, places: Places | None) -> Any:
    if stamps is None:
        named = zip(messages, places or [None] * len(messages), strict=True)
        return _arrow.array([_identity(message, place) for message, place in named], _arrow.string())
    # Slow to import, and not needed to read a spool.
    from pyarrow import compute

    parts = [_equal([message.topic for message in messages], _arrow.string())]
    parts += [_arrow.array(each, _arrow.int64()).cast(_arrow.string()) for each in stamps]
    return cast("Any", compute).binary_join_element_wise(*parts, ":")


def _identity(message: Message[bytes], place: Place | None) -> str:
    if place is None:
        return f"{message.topic}#{message.id}"
    if place.partition is not None:
        return f"{message.topic}@{place.partition}-{place.offset}"
    # A recreated subscription counts from the beginning.
    return f"{message.topic}@{place.offset}@{message.broker_time and message.broker_time.timestamp()!r}"


def place_of(identity: str) -> tuple[str, int] | None:
    """Topic and offset of an identity made of stamps; None for others."""
    topic, *rest = identity.rsplit(":", 2)
    return (topic, int(rest[0])) if len(rest) == 2 and all(map(str.isdecimal, rest)) else None


def _headed(messages: Messages, columns: Sequence[str]) -> Mapping[str, list[Any]]:
    """The header columns that the view provides all at once, by name; none if one by one is faster."""
    header_columns = getattr(messages[0].view, "header_columns", None)
    if header_columns is None or sum(name in _HEADED for name in columns) < 2:
        return {}
    return dict(zip(_HEADED, header_columns([message.raw for message in messages]), strict=True))


def _array(
    field: Any,
    messages: Messages,
    stamps: Stamps | None,
    places: Places | None,
    headed: list[Any] | None,
) -> Any:
    if stamps is not None and field.name in _STAMPS and _is_column(field.name, messages):
        return _arrow.array(stamps[_STAMPS.index(field.name)], field.type)
    if field.name == "attributes":
        return _attributes([message.attributes for message in messages] if headed is None else headed, field.type)
    if field.name in Place._fields:
        if places is None:
            return _arrow.nulls(len(messages), field.type)
        return _arrow.array([each and getattr(each, field.name) for each in places], field.type)
    values = _VALUES[field.name](messages) if headed is None else headed
    return _equal(values, field.type) if field.name in _MOSTLY_EQUAL else _arrow.array(values, field.type)


def _is_column(name: str, messages: Messages) -> bool:
    """Whether a stamp is the value of the column: without a log, the first stamp is an id and not an offset."""
    return name != "offset" or getattr(messages[0].view, "has_offsets", True)


def _equal(values: list[Any], kind: Any) -> Any:
    """An array of values that are mostly equal: comparing is cheaper than converting."""
    if values.count(values[0]) == len(values):
        return _arrow.repeat(_arrow.scalar(values[0], kind), len(values))
    return _arrow.array(values, kind)


def _attributes(every: Sequence[Mapping[str, str]], kind: Any) -> Any:
    offsets = _arrow.array([0, *accumulate(map(len, every))], _arrow.int32())
    keys = _arrow.array(list(chain.from_iterable(every)), _arrow.string())
    items = _arrow.array([value for each in every if each for value in each.values()], _arrow.string())
    return _arrow.MapArray.from_arrays(offsets, keys, items).cast(kind)


_HEADED: Final = ("id", "key", "attributes", "publish_time")
_STAMPS: Final = ("offset", "broker_time")
_MOSTLY_EQUAL: Final = frozenset({"topic", "delivery_attempt"})
_VALUES: Final[Mapping[str, Callable[[Messages], list[Any]]]] = {
    "topic": lambda messages: [message.topic for message in messages],
    "id": lambda messages: [message.id for message in messages],
    "key": column_of("key"),
    "value": lambda messages: [message.data for message in messages],
    "publish_time": column_of("publish_time"),
    "broker_time": lambda messages: [message.broker_time for message in messages],
    "delivery_attempt": lambda messages: [message.delivery_attempt for message in messages],
}
