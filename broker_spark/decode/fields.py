"""Types of Python as trees of fields: dataclasses, attrs classes, pydantic models and msgspec structs, to any depth.

What JSON and Spark cannot both say is an error that names the field. Pure.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from functools import cache
from typing import Annotated, Any, Final, Literal, NoReturn, Union, cast, get_args, get_origin, get_type_hints
from uuid import UUID

import msgspec
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    TimestampType,
)

from broker.errors import ConfigurationError
from broker_spark.decode.columns import Misfit, column_of
from broker_spark.decode.schema_tree import Field, Leaf, Listed, Mapped, Node, Structure

__all__ = ["same_but_for_case", "structure_of"]

_KINDS: Final = "dataclass, attrs class, pydantic model or msgspec struct"
_TAKES: Final = (
    "str, int, float, bool, bytes, datetime, date, Decimal, UUID, enums and literals of str or int, lists, dicts with "
    "str keys, dataclasses, attrs classes, pydantic models and msgspec structs can be read, and each of them or None"
)
_DECIMAL: Final = DecimalType(38, 18)
_LEAVES: Final[Mapping[Any, DataType]] = {
    str: StringType(),
    int: LongType(),
    float: DoubleType(),
    bool: BooleanType(),
    bytes: BinaryType(),
    datetime: TimestampType(),
    date: DateType(),
    Decimal: _DECIMAL,
    UUID: StringType(),
}
_NARROWER: Final[Mapping[Any, tuple[type[DataType], ...]]] = {
    int: (LongType, IntegerType, ShortType),
    float: (DoubleType, FloatType),
    Decimal: (DecimalType,),
}
"""What `Annotated[int, IntegerType()]` may say."""
_LISTS: Final = (list, set, frozenset, Sequence, AbstractSet)
_NOTHING: Final = object()
"""The default of a field that has none; None is one, whatever the field's type."""


def structure_of(type: Any) -> Structure:
    """The fields of a dataclass, an attrs class, a pydantic model or a msgspec struct.

    :raises ConfigurationError: it is none of them, or a field cannot be read into a column; the error names it.
    """
    if not _is_structure(type):
        raise ConfigurationError(f"{_shown(type)} is no {_KINDS}", advice="Decode with a class of one of them")
    return _whole_structure(type)


def same_but_for_case(node: Node) -> tuple[str, str] | None:
    """Two fields of one structure, at any depth, whose names differ in nothing else; None if there are none."""
    match node:
        case Structure(fields):
            known: dict[str, str] = {}
            for each in fields:
                if known.setdefault(each.name.lower(), each.name) != each.name:
                    return known[each.name.lower()], each.name
            inner = [each.node for each in fields]
        case Listed(part) | Mapped(part):
            inner = [part]
        case Leaf():
            inner = []
    return next((found for each in inner if (found := same_but_for_case(each))), None)


@cache
def _whole_structure(type: Any) -> Structure:
    return _structure(type, _shown(type), ())


def _is_structure(given: object) -> bool:
    if not isinstance(given, builtin_type):
        return False
    kind = cast("type[Any]", given)
    known = ("__attrs_attrs__", "model_fields")
    return dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct) or any(hasattr(kind, n) for n in known)


builtin_type: Final = type


def _structure(type: Any, where: str, above: tuple[Any, ...]) -> Structure:
    if type in above:
        _refuse(where, type, "holds itself, and columns have a depth that is known")
    try:
        hints = get_type_hints(type, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigurationError(
            f"The types of {_shown(type)} cannot be found: {error}", advice="Define them where its module sees them"
        ) from error
    try:
        found = _of_model(type) if hasattr(type, "model_fields") else _of_class(type)
    except TypeError as error:
        raise ConfigurationError(f"{where}: msgspec cannot decode {_shown(type)}: {error}", advice=_TAKES) from error
    if not found:
        _refuse(where, type, "has no field")
    fields: list[Field] = []
    models: Mapping[str, Any] = getattr(type, "model_fields", {})
    for name, encoded, default, factory in found:
        place = f"{where}.{name}"
        # What `= Field(max_digits=...)` says is not in the hint.
        notes = models[name].metadata if name in models else ()
        hint: Any = Annotated[(hints[name], *notes)] if notes else hints[name]
        node, nullable = _node(hint, place, (*above, type))
        value = _default(default, factory, place, hints[name])
        if value is not _NOTHING and value is not None:
            try:
                column_of(node, UTC, place)([value])
            except (Misfit, TypeError, ValueError, AttributeError):
                column = f"a column of {node.type.simpleString()}"
                _refuse(place, hints[name], f"has the default {value!r}, which {column} cannot hold")
        fields.append(Field(name, encoded, node, nullable or value is None))
    return Structure(tuple(fields))


def _of_class(type: Any) -> list[tuple[str, str, Any, Any]]:
    """Of each field that msgspec reads: its name, its name in JSON, its default and the factory of that."""
    info: Any = msgspec.inspect.type_info(type)
    missing = msgspec.NODEFAULT
    return [
        (
            each.name,
            each.encode_name,
            _NOTHING if each.default is missing else each.default,
            None if each.default_factory is missing else each.default_factory,
        )
        for each in info.fields
    ]


def _of_model(type: Any) -> list[tuple[str, str, Any, Any]]:
    found: list[tuple[str, str, Any, Any]] = []
    for name, info in type.model_fields.items():
        alias = info.validation_alias if info.validation_alias is not None else info.alias
        encoded = alias if isinstance(alias, str) else name
        # A factory that takes the other fields has no default before these are there.
        factory = None if info.default_factory_takes_validated_data else info.default_factory
        is_given = not info.is_required() and info.default_factory is None
        found.append((name, encoded, info.default if is_given else _NOTHING, factory))
    return found


def _default(value: Any, factory: Any, where: str, hint: Any) -> Any:
    if factory is None:
        return value
    try:
        return factory()
    except Exception as error:
        raise ConfigurationError(
            f"{where}: the default of {_shown(hint)} cannot be made: {type(error).__name__}: {error}",
            advice="Use a factory without arguments, or a constant",
        ) from error


def _node(hint: Any, where: str, above: tuple[Any, ...]) -> tuple[Node, bool]:
    """The field of a type, and whether it admits None."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        node, nullable = _node(arguments[0], where, above)
        return _narrowed(node, arguments[0], arguments[1:], where), nullable
    if origin in (Union, types.UnionType):
        rest = [each for each in arguments if each is not types.NoneType]
        if len(rest) != 1:
            _refuse(where, hint, "is a union, and a column has one type")
        return _node(rest[0], where, above)[0], len(rest) < len(arguments)
    if origin is Literal:
        return _choices(arguments, hint, where), None in arguments
    if hint in _LEAVES:
        return Leaf(_LEAVES[hint], hint), False
    if isinstance(hint, builtin_type) and issubclass(hint, Enum):
        return _choices([member.value for member in hint], hint, where), False
    if origin in _LISTS or (origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis):
        return Listed(*_node(arguments[0], f"{where}[]", above)), False
    if origin in (dict, Mapping):
        if arguments[0] is not str:
            _refuse(where, hint, "has keys other than str, which JSON has not")
        return Mapped(*_node(arguments[1], f"{where}[]", above)), False
    if origin is None and _is_structure(cast("object", hint)):
        return _structure(hint, where, above), False
    return _refuse(where, hint, "cannot be read from JSON into a column")


def _choices(values: Sequence[Any], hint: Any, where: str) -> Leaf:
    allowed = [each for each in values if each is not None]
    for kind in (str, int):
        if allowed and all(type(each) is kind for each in allowed):
            return Leaf(_LEAVES[kind], kind if get_origin(hint) is Literal else Enum)
    return _refuse(where, hint, "has values that are neither all str nor all int")


def _narrowed(node: Node, hint: Any, notes: Sequence[Any], where: str) -> Node:
    """The node, as pyspark's type or pydantic's digits among the notes of an `Annotated` want it."""
    if not isinstance(node, Leaf):
        return node
    wanted = node.type
    # Pydantic's `Field` holds notes itself.
    for note in [inner for outer in notes for inner in (outer, *getattr(outer, "metadata", ()))]:
        if isinstance(note, DataType):
            if not isinstance(note, _NARROWER.get(hint, ())):
                _refuse(where, hint, f"is annotated with {note.simpleString()}, which is not its type")
            wanted = note
        digits, places = getattr(note, "max_digits", None), getattr(note, "decimal_places", None)
        if isinstance(wanted, DecimalType) and (digits, places) != (None, None):
            wanted = _decimal_of(digits, places, hint, where)
    return Leaf(wanted, node.hint)


def _decimal_of(digits: int | None, places: int | None, hint: Any, where: str) -> DecimalType:
    """The column of pydantic's digits; what one leaves open has room for every number that it lets through."""
    most = _DECIMAL.precision
    if max(digits or 0, places or 0) > (most if digits is None else min(digits, most)):
        _refuse(
            where,
            hint,
            f"has max_digits={digits} and decimal_places={places}, and a column at most {most} digits in all",
        )
    if places is not None:
        return DecimalType(most if digits is None else digits, places)
    assert digits is not None  # one of them is given
    # They may be on either side of the point.
    return DecimalType(min(2 * digits, most), min(digits, _DECIMAL.scale))


def _refuse(where: str, type: Any, reason: str) -> NoReturn:
    raise ConfigurationError(f"{where}: {_shown(type)} {reason}", advice=_TAKES)


def _shown(type: Any) -> str:
    return str(getattr(type, "__name__", type)) if get_origin(type) is None else str(type)
