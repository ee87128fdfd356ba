"""Types of Python as trees of fields: dataclasses, pydantic models and msgspec structs, to any depth. Pure.

What JSON and Spark cannot both say, or what could not be checked, is an error that names the field.
"""

from __future__ import annotations

import dataclasses
import time
import types
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from functools import cache
from typing import Annotated, Any, Final, Literal, NoReturn, Union, cast, get_args, get_origin, get_type_hints
from uuid import UUID

import msgspec
import pyarrow
from pyspark.sql.pandas.types import to_arrow_type
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
from broker_spark.decode.schema_tree import Field, Leaf, Listed, Mapped, Node, Structure

__all__ = ["same_but_for_case", "structure_of"]

_TAKES: Final = (
    "str, int, float, bool, bytes, datetime, date, Decimal, UUID, enums and literals of str or int, lists, dicts "
    "with str keys, dataclasses, pydantic models and msgspec structs can be read, and each of them or None"
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
_SAME: Final[tuple[Any, ...]] = (list, dict, set, frozenset, tuple)
"""Factories of defaults that need no look at the clock."""

_Found = tuple[str, tuple[str, ...], Any, Any]
"""Of a field: its name, its names in JSON, its default and the factory of that."""
_NOTHING: Final = object()
"""The default of a field that has none; None is one, whatever the field's type."""


def structure_of(type: Any) -> Structure:
    """The fields of a dataclass, a pydantic model or a msgspec struct.

    :raises ConfigurationError: it is none of them, or a field cannot be read from JSON by Spark; the error names it.
    """
    if not _is_structure(type):
        raise ConfigurationError(
            f"{_shown(type)} is no dataclass, pydantic model or msgspec struct",
            advice="Decode with a class of one of them",
        )
    return _whole_structure(type)


def same_but_for_case(node: Node) -> tuple[str, str] | None:
    """Two fields of one structure, at any depth, whose names differ in nothing else; None if there are none."""
    match node:
        case Structure(fields):
            for names in ([each.name for each in fields], [name for each in fields for name in each.names]):
                known: dict[str, str] = {}
                for name in names:
                    if known.setdefault(name.lower(), name) != name:
                        return known[name.lower()], name
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
    return dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct) or hasattr(kind, "model_fields")


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
    if issubclass(type, msgspec.Struct):
        found = _of_struct(type, where)
    elif hasattr(type, "model_fields"):
        found = _of_model(type, where)
    else:
        found = [
            (each.name, (each.name,), *_given(each.default, each.default_factory, dataclasses.MISSING))
            for each in dataclasses.fields(type)
            if each.init
        ]
    if not found:
        _refuse(where, type, "has no field")
    fields: list[Field] = []
    models: Mapping[str, Any] = getattr(type, "model_fields", {})
    taken: dict[str, str] = {}
    for name, (encoded, *others), value, factory in found:
        place = f"{where}.{name}"
        for known in (encoded, *others):
            if taken.setdefault(known, name) != name:
                _refuse(place, hints[name], f"is {known!r} in JSON, and so is field {taken[known]!r}")
        # What `= Field(max_digits=...)` says is not in the hint.
        notes = models[name].metadata if name in models else ()
        hint: Any = Annotated[(hints[name], *notes)] if notes else hints[name]
        node, nullable = _node(hint, place, (*above, type))
        default = _default(value, factory, place, hints[name])
        if default is not None and not _holds(node, default):
            column = f"a column of {node.type.simpleString()}"
            _refuse(place, hints[name], f"has the default {default!r}, which {column} cannot hold")
        required = not nullable and value is _NOTHING and factory is None
        fields.append(Field(name, encoded, node, required, default, *others))
    return Structure(tuple(fields))


def _of_struct(type: Any, where: str) -> list[_Found]:
    config = type.__struct_config__
    for option, reason in (
        (config.tag is not None, "is tagged, and Spark does not look at the tag"),
        (config.array_like, "is an array in JSON"),
        (config.forbid_unknown_fields, "forbids unknown fields, and Spark does not see them"),
    ):
        if option:
            _refuse(where, type, reason)
    return [
        (each.name, (each.encode_name,), *_given(each.default, each.default_factory, msgspec.NODEFAULT))
        for each in msgspec.structs.fields(type)
    ]


def _of_model(type: Any, where: str) -> list[_Found]:
    from pydantic_core import PydanticUndefined

    if type.model_config.get("extra") == "forbid":
        _refuse(where, type, "forbids unknown fields, and Spark does not see them")
    config = type.model_config
    by_name = bool(config.get("populate_by_name") or config.get("validate_by_name"))
    by_alias = config.get("validate_by_alias") is not False
    found: list[_Found] = []
    for name, info in type.model_fields.items():
        alias = info.validation_alias if info.validation_alias is not None else info.alias
        if alias is not None and not isinstance(alias, str):
            _refuse(f"{where}.{name}", alias, "is an alias with a path or choices")
        factory = info.default_factory if info.default_factory is not None else PydanticUndefined
        names = [alias] if alias is not None and by_alias else []
        if name not in names and (by_name or not names):
            names.append(name)
        found.append((name, tuple(names), *_given(info.default, factory, PydanticUndefined)))
    return found


def _given(value: Any, factory: Any, missing: Any) -> tuple[Any, Any]:
    """A default and its factory, as `_Found` has them."""
    return _NOTHING if value is missing else value, None if factory is missing else factory


def _default(value: Any, factory: Any, where: str, hint: Any) -> Any:
    """What stands for the field in every row, a builtin; None is nothing but null."""
    if factory is None:
        return None if value is None or value is _NOTHING else _plain(value, where, hint)
    try:
        first = factory()
        if factory not in _SAME:
            # A clock shows another time by then.
            time.sleep(0.001)
        again = factory()
    except Exception as error:
        raise ConfigurationError(
            f"{where}: the default of {_shown(hint)} cannot be made: {type(error).__name__}: {error}",
            advice="Use a factory without arguments, or a constant",
        ) from error
    if first is None:
        return None
    made = _plain(first, where, hint)
    if made != _plain(again, where, hint):
        raise ConfigurationError(
            f"{where}: the default of {_shown(hint)} changes with each call, but all rows would get the same",
            advice="Make it None, and fill it in the transform",
        )
    return made


def _plain(value: Any, where: str, hint: Any) -> Any:
    try:
        return msgspec.to_builtins(value, builtin_types=(bytes, datetime, date, Decimal))
    except TypeError:
        _refuse(where, hint, f"has the default {value!r}, which cannot be written as a constant")


def _holds(node: Node, value: Any) -> bool:
    """Whether a column can hold a builtin."""
    parts: list[tuple[Node, Any]]
    try:
        match node:
            case Structure(fields):
                # What a struct leaves out is its own field's default.
                parts = [(each.node, value.get(each.encoded, each.default)) for each in fields]
            case Listed(element):
                parts = [(element, each) for each in value]
                if isinstance(value, str):
                    return False
            case Mapped(every):
                parts = [(every, each) for each in value.values()]
            case Leaf(type):
                pyarrow.scalar(value, to_arrow_type(type, timezone="UTC"))
                parts = []
    except (pyarrow.ArrowException, OverflowError, ValueError, TypeError, AttributeError):
        return False
    return all(each is None or _holds(inner, each) for inner, each in parts)


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
        return Leaf(_LEAVES[hint], uuid=hint is UUID), False
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
    allowed = tuple(each for each in values if each is not None)
    for kind in (str, int):
        if allowed and all(type(each) is kind for each in allowed):
            return Leaf(_LEAVES[kind], cast("tuple[str | int, ...]", allowed))
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
    return Leaf(wanted, node.allowed, node.uuid)


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
