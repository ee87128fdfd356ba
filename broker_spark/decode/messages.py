"""Protobuf messages as trees of fields, by the descriptor of their class.

| Protobuf | column |
|---|---|
| a field that can be absent: `optional`, of a `oneof`, a message | null where it is absent |
| any other field | its default where it is absent, as Protobuf says |
| `uint32`, `fixed32`; `uint64`, `fixed64` | bigint; decimal(20,0) |
| an enum | the name of the value, or its number if the class does not know it |
| `repeated`; `map` | array; map |
| `google.protobuf.Timestamp`; wrappers, such as `StringValue` | timestamp, cut to microseconds; the value or null |

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    StringType,
    TimestampType,
)

from broker.errors import ConfigurationError
from broker_spark.decode.schema_tree import Field, Leaf, Listed, Mapped, Node, Structure

__all__ = ["structure_of_message"]

Get = Callable[[Any], Any]

_ENUM: Final = 14
_MESSAGE: Final = (10, 11)
"""Numbers of `FieldDescriptor.type`; 10 is a group."""
_LEAVES: Final[Mapping[int, DataType]] = {
    1: DoubleType(),
    2: FloatType(),
    3: LongType(),
    4: DecimalType(20, 0),
    5: IntegerType(),
    6: DecimalType(20, 0),
    7: LongType(),
    8: BooleanType(),
    9: StringType(),
    12: BinaryType(),
    13: LongType(),
    15: IntegerType(),
    16: LongType(),
    17: IntegerType(),
    18: LongType(),
}
_WRAPPERS: Final = {
    f"google.protobuf.{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def structure_of_message(type: Any) -> Structure:
    """The fields of a class that protoc generated.

    :raises ConfigurationError: a field cannot be read into a column; the error names it.
    """
    descriptor = type.DESCRIPTOR
    return _structure(descriptor, descriptor.name, ())


def _structure(descriptor: Any, where: str, above: tuple[str, ...]) -> Structure:
    if descriptor.full_name in above:
        raise ConfigurationError(
            f"{where}: {descriptor.full_name} holds itself, and columns have a depth that is known",
            advice="Decode its bytes in a function of your own, with mapInArrow",
        )
    if not descriptor.fields:
        raise ConfigurationError(f"{where}: {descriptor.full_name} has no field", advice="A column needs one")
    inner = (*above, descriptor.full_name)
    return Structure(tuple(_field(each, f"{where}.{each.name}", inner) for each in descriptor.fields))


def _field(field: Any, where: str, above: tuple[str, ...]) -> Field:
    name = field.name
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[part] for part in ("key", "value"))
        keys, _ = _node(key, f"{where}[]", above)
        assert isinstance(keys, Leaf)  # Protobuf has no others
        values, plain = _node(value, f"{where}[]", above)
        return Field(name, name, Mapped(values, nullable=False, key=keys), nullable=False, get=_map(name, plain))
    node, plain = _node(field, where, above)
    if field.is_repeated:
        return Field(name, name, Listed(node, nullable=False), nullable=False, get=_list(name, plain))
    return Field(name, name, node, field.has_presence, _value(name, plain, can_be_absent=field.has_presence))


def _value(name: str, plain: Get, *, can_be_absent: bool) -> Get:
    if can_be_absent:
        return lambda message: plain(getattr(message, name)) if message.HasField(name) else None
    return lambda message: plain(getattr(message, name))


def _list(name: str, plain: Get) -> Get:
    return lambda message: [plain(each) for each in getattr(message, name)]


def _map(name: str, plain: Get) -> Get:
    return lambda message: {key: plain(value) for key, value in getattr(message, name).items()}


def _node(field: Any, where: str, above: tuple[str, ...]) -> tuple[Node, Get]:
    """The column of one value of a field, and what makes a plain value of it."""
    if field.type == _ENUM:
        names = {each.number: each.name for each in field.enum_type.values}
        return Leaf(StringType(), object), lambda number: names.get(number, str(number))
    if field.type not in _MESSAGE:
        return Leaf(_LEAVES[field.type], object), _itself
    message = field.message_type
    if message.full_name == "google.protobuf.Timestamp":
        return Leaf(TimestampType(), object), _time
    if message.full_name in _WRAPPERS:
        return Leaf(_LEAVES[message.fields_by_name["value"].type], object), _wrapped
    return _structure(message, where, above), _itself


def _itself(value: Any) -> Any:
    return value


def _time(stamp: Any) -> datetime:
    return _EPOCH + timedelta(seconds=stamp.seconds, microseconds=stamp.nanos // 1000)


def _wrapped(message: Any) -> Any:
    return message.value
