"""Arrow columns of decoded values: a column at a time, without an object per field. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, tzinfo
from enum import Enum
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, Final, TypeAlias
from uuid import UUID

import pyarrow
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import DataType, FloatType, TimestampType

from broker_spark.decode.schema_tree import Leaf, Listed, Mapped, Node, Structure

__all__ = ["Column", "Misfit", "column_of"]

Column: TypeAlias = "Callable[[list[Any]], pyarrow.Array[Any]]"
"""Makes a column of values. It raises `Misfit`."""

_SHOWN: Final = 60
"""Characters of a value that a reason shows."""
_TIMES: Final = (-62_135_596_800_000_000, 253_402_300_799_999_999)
"""The years 1 to 9999 in microseconds since 1970; a zone may put a time beyond them, where Python cannot receive it."""


# Its stubs know less than it takes.
_arrow: Any = pyarrow


class Misfit(ValueError):
    """Values of which one does not fit their column. The text names it and the path, as msgspec's errors do."""

    def __init__(self, node: Node, path: str, values: Sequence[Any], column: Column) -> None:
        self._parts = node, path, values, column

    def __str__(self) -> str:
        node, path, values, column = self._parts
        kind = node.type.simpleString()
        for each in values:
            try:
                column([each])
            except Misfit:
                text = "`null`" if each is None else str(each)
                shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
                return f"A column of {kind} cannot hold {shown} - at `{path}`"
        return f"A column of {kind} cannot hold the values together - at `{path}`"


def column_of(node: Node, zone: tzinfo, path: str = "$") -> Column:
    """What makes columns of a type.

    :param zone: of times without one.
    """
    if isinstance(node, Leaf):
        return _leaf(node, zone, path)
    whole = _whole(node, zone, path)

    def column(values: list[Any]) -> pyarrow.Array[Any]:
        present = [each for each in values if each is not None]
        if len(present) == len(values):
            return whole(values)
        places = iter(range(len(present)))
        rows = [None if each is None else next(places) for each in values]
        return whole(present).take(pyarrow.array(rows, pyarrow.int32()))

    return column


def _whole(node: Structure | Listed | Mapped, zone: tzinfo, path: str) -> Column:
    """`column_of` without nulls."""
    kind: Any = to_arrow_type(node.type, timezone="UTC")
    match node:
        case Structure(fields):
            parts = [
                (each.get or attrgetter(each.name), _part(each.node, each.nullable, zone, f"{path}.{each.encoded}"))
                for each in fields
            ]

            def structures(values: list[Any]) -> pyarrow.Array[Any]:
                arrays = [column(list(map(get, values))) for get, column in parts]
                return _arrow.StructArray.from_arrays(arrays, fields=list(kind))

            return structures
        case Listed(element, nullable):
            elements = _part(element, nullable, zone, f"{path}[...]")

            def lists(values: list[Any]) -> pyarrow.Array[Any]:
                flat = elements(list(chain.from_iterable(values)))
                return _arrow.ListArray.from_arrays(_offsets(values), flat, type=kind)

            return lists
        case Mapped(value, nullable, key):
            keys = _leaf(key, zone, f"{path}[...]")
            items = _part(value, nullable, zone, f"{path}[...]")

            def maps(values: list[Any]) -> pyarrow.Array[Any]:
                flat = keys(list(chain.from_iterable(values)))
                held = items(list(chain.from_iterable(each.values() for each in values)))
                return _arrow.MapArray.from_arrays(_offsets(values), flat, held, type=kind)

            return maps


def _part(node: Node, nullable: bool, zone: tzinfo, path: str) -> Column:
    """A column that has nulls only where it may."""
    column = column_of(node, zone, path)

    def checked(values: list[Any]) -> pyarrow.Array[Any]:
        found = column(values)
        if found.null_count:
            raise Misfit(node, path, values, checked)
        return found

    return column if nullable else checked


def _offsets(values: Sequence[Any]) -> pyarrow.Array[Any]:
    return pyarrow.array([0, *accumulate(map(len, values))], pyarrow.int32())


def _leaf(node: Leaf, zone: tzinfo, path: str) -> Column:
    kind = to_arrow_type(node.type, timezone="UTC")
    plain = _plain(node.hint, zone)
    # A float of JSON is too large if it became infinite; one of Protobuf may be infinite.
    is_float32 = isinstance(node.type, FloatType)
    is_out_of_range = _never if is_float32 and node.hint is not float else _RANGES.get(type(node.type), _never)

    def leaves(values: list[Any]) -> pyarrow.Array[Any]:
        try:
            made = values if plain is None else [None if each is None else plain(each) for each in values]
            found = pyarrow.array(made, kind)
        except (pyarrow.ArrowException, ArithmeticError, ValueError, TypeError, AttributeError):
            raise Misfit(node, path, values, leaves) from None
        if is_out_of_range(found):
            raise Misfit(node, path, values, leaves)
        return found

    return leaves


def _plain(hint: Any, zone: tzinfo) -> Callable[[Any], Any] | None:
    """What makes a value that Arrow takes; None if Arrow takes it as it is."""
    if hint is UUID:
        return str
    if hint is datetime and zone is not UTC:
        return lambda time: time if time.tzinfo is not None else time.replace(tzinfo=zone)
    if hint is Enum:
        # Pydantic may leave the values.
        return lambda member: getattr(member, "value", member)
    return None


def _compute() -> Any:
    """Loaded with the first column: workers that only read do without."""
    import pyarrow.compute

    return pyarrow.compute


def _is_beyond_python(times: pyarrow.Array[Any]) -> bool:
    if len(times) == times.null_count:
        return False
    found: Any = _compute().min_max(times.view(pyarrow.int64())).as_py()
    return found["min"] < _TIMES[0] or found["max"] > _TIMES[1]


def _is_infinite(numbers: pyarrow.Array[Any]) -> bool:
    compute = _compute()
    return bool(compute.any(compute.is_inf(numbers)).as_py())


def _never(_: pyarrow.Array[Any]) -> bool:
    return False


_RANGES: Final[dict[type[DataType], Callable[[Any], bool]]] = {
    TimestampType: _is_beyond_python,
    FloatType: _is_infinite,
}
"""Where Arrow takes more than Spark."""
