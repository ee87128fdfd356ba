"""Messages as an Arrow table of the columns that are asked for, with what tells a message from all others. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, Final, cast

import pyarrow

from broker.arrow import asked
from broker.envelopes import Place, TellsPlace
from broker.messages import Message
from broker_spark.schema import arrow_schema
from broker_spark.spool.segments import IDENTITY

__all__ = ["Stamps", "place_of", "stamps_of", "table_of"]

Messages = Sequence[Message[bytes]]
Stamps = tuple[list[int], list[int]]
"""Offsets and broker's times of messages, in microseconds, where the broker tells both at once.

Of Pub/Sub, which has no offsets, it is the server's ids, as numbers in no order.
"""

_arrow: Final[Any] = pyarrow


def stamps_of(messages: Messages) -> Stamps | None:
    """The places of messages in their log, where the broker tells them."""
    tell = getattr(messages[0].view, "stamps", None)
    return None if tell is None else tell([message.raw for message in messages])


def table_of(messages: Messages, columns: Sequence[str], stamps: Stamps | None) -> pyarrow.Table:
    """The rows, in the order of the messages, and an identity each.

    The identity stays the same when a message is delivered again. Where the broker tells a message's place in its log
    it is that, since publishers may use an id twice.
    """
    schema: Any = arrow_schema(columns)
    headed = _headed(messages, columns)
    # Who tells stamps has told the offsets by them, and no message's partition.
    places = _places(messages) if stamps is None and any(name in Place._fields for name in columns) else None
    arrays = [_array(field, messages, stamps, places, headed.get(field.name)) for field in schema]
    arrays.append(_identities(messages, stamps))
    return _arrow.Table.from_arrays(arrays, schema=schema.append(_arrow.field(IDENTITY, _arrow.string())))


def _identities(messages: Messages, stamps: Stamps | None) -> Any:
    if stamps is None:
        return _arrow.array([f"{message.topic}#{message.id}" for message in messages], _arrow.string())
    # It takes a while to load, and who reads a spool has no use for it.
    from pyarrow import compute

    parts = [_equal([message.topic for message in messages], _arrow.string())]
    parts += [_arrow.array(each, _arrow.int64()).cast(_arrow.string()) for each in stamps]
    return cast("Any", compute).binary_join_element_wise(*parts, ":")


def place_of(identity: str) -> tuple[str, int] | None:
    """The topic and the place in its log that an identity tells; None if it is made of an id."""
    topic, *rest = identity.rsplit(":", 2)
    return (topic, int(rest[0])) if len(rest) == 2 and all(map(str.isdecimal, rest)) else None


def _headed(messages: Messages, columns: Sequence[str]) -> Mapping[str, list[Any]]:
    """The columns that the view of the messages tells all at once, by name; none if it is quicker to ask for each."""
    tell = getattr(messages[0].view, "header_columns", None)
    if tell is None or sum(name in _HEADED for name in columns) < 2:
        return {}
    return dict(zip(_HEADED, tell([message.raw for message in messages]), strict=True))


def _array(
    field: Any,
    messages: Messages,
    stamps: Stamps | None,
    places: Sequence[Place | None] | None,
    headed: list[Any] | None,
) -> Any:
    if stamps is not None and field.name in _STAMPS and _told(field.name, messages):
        return _arrow.array(stamps[_STAMPS.index(field.name)], field.type)
    if field.name == "attributes":
        return _attributes([message.attributes for message in messages] if headed is None else headed, field.type)
    if field.name in Place._fields:
        if places is None:
            return _arrow.nulls(len(messages), field.type)
        return _arrow.array([each and getattr(each, field.name) for each in places], field.type)
    values = _VALUES[field.name](messages) if headed is None else headed
    return _equal(values, field.type) if field.name in _MOSTLY_EQUAL else _arrow.array(values, field.type)


def _places(messages: Messages) -> list[Place | None] | None:
    """Where messages lay first; None if the broker tells of none."""
    view = messages[0].view
    return [view.place(message.raw) for message in messages] if isinstance(view, TellsPlace) else None


def _told(name: str, messages: Messages) -> bool:
    """Whether a stamp is what the column says: of a broker without a log the first is an id made a number."""
    return name != "offset" or getattr(messages[0].view, "tells_offsets", True)


def _equal(values: list[Any], kind: Any) -> Any:
    """An array of values that are mostly equal: to convert one costs more than to compare it."""
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
    "key": asked("key"),
    "value": lambda messages: [message.data for message in messages],
    "publish_time": asked("publish_time"),
    "broker_time": lambda messages: [message.broker_time for message in messages],
    "delivery_attempt": lambda messages: [message.delivery_attempt for message in messages],
}
