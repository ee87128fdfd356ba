"""Records as Arrow columns. Pure; safe from any thread. Needs pyarrow, which nothing else in `broker` imports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, Final, Protocol

from broker.envelopes import Envelope
from broker.errors import ConfigurationError, MissingClient

__all__ = ["COLUMNS", "check_columns", "record_schema", "records_to_arrow"]


@cache
def record_schema(*columns: str) -> Any:
    """The one schema of records: topic, partition, offset, id, key, data, attributes, publish_time, broker_time.

    Times are microseconds in UTC; key, data and times may be null. It is a `pyarrow.Schema`.

    :param columns: only these, in this order.
    :raises ConfigurationError: there is no such column.
    :raises MissingClient: pyarrow is not installed.
    """
    arrow = _pyarrow()
    time = arrow.timestamp("us", tz="UTC")
    fields = {
        field.name: field
        for field in (
            arrow.field("topic", arrow.string(), nullable=False),
            arrow.field("partition", arrow.int32(), nullable=False),
            arrow.field("offset", arrow.int64(), nullable=False),
            arrow.field("id", arrow.string(), nullable=False),
            arrow.field("key", arrow.binary()),
            arrow.field("data", arrow.binary()),
            arrow.field("attributes", arrow.map_(arrow.string(), arrow.string()), nullable=False),
            arrow.field("publish_time", time),
            arrow.field("broker_time", time),
        )
    }
    check_columns(columns, COLUMNS)
    return arrow.schema([fields[name] for name in columns or fields])


def check_columns(names: Iterable[str], known: Collection[str]) -> None:
    """:raises ConfigurationError: one of them is not known."""
    for name in names:
        if name not in known:
            raise ConfigurationError(f"Records have no column {name!r}", advice=f"They have {', '.join(known)}")


class Row(Envelope, Protocol):
    """What a record is to this module."""

    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def id(self) -> str: ...
    @property
    def raw(self) -> Any: ...


def _times(name: str) -> Callable[[Sequence[Row]], list[Any]]:
    """A column of times; a view that has a method of the plural name tells them as microseconds since 1970."""

    def column(rows: Sequence[Row]) -> list[Any]:
        quick = getattr(getattr(rows[0], "view", None), f"{name}s", None) if rows else None
        return [getattr(row, name) for row in rows] if quick is None else quick([row.raw for row in rows])

    return column


_COLUMNS: Final[Mapping[str, Callable[[Sequence[Row]], list[Any]]]] = {
    "topic": lambda rows: [row.topic for row in rows],
    "partition": lambda rows: [row.partition for row in rows],
    "offset": lambda rows: [row.offset for row in rows],
    "id": lambda rows: [row.id for row in rows],
    "key": lambda rows: [row.key for row in rows],
    "data": lambda rows: [row.data for row in rows],
    "attributes": lambda rows: [row.attributes for row in rows],
    "publish_time": _times("publish_time"),
    "broker_time": _times("broker_time"),
}

COLUMNS: Final = tuple(_COLUMNS)

_MOSTLY_EQUAL: Final = frozenset({"topic", "partition"})


def records_to_arrow(records: Sequence[Row], columns: Sequence[str] | None = None) -> Any:
    """The records as a `pyarrow.Table` of `record_schema()`, one row each, in their order.

    :param columns: only these, in this order; what is not asked for is not read of the records either.
    :raises ConfigurationError: there is no such column.
    :raises MissingClient: pyarrow is not installed.
    """
    arrow = _pyarrow()
    schema = record_schema(*(columns or ()))
    return arrow.Table.from_arrays([_array(arrow, field, records) for field in schema], schema=schema)


def _array(arrow: Any, field: Any, records: Sequence[Row]) -> Any:
    # What has its columns tells them without making its rows.
    column = getattr(records, "column", None)
    values = None if column is None else column(field.name)
    if values is None:
        values = _COLUMNS[field.name](records)
    if field.name == "attributes":
        return _maps(arrow, values)
    if field.name in _MOSTLY_EQUAL and values and values.count(values[0]) == len(values):
        # Most batches are of one partition, and to convert a value costs more than to compare it.
        return arrow.repeat(arrow.scalar(values[0], field.type), len(values))
    return arrow.array(values, type=field.type)


def _maps(arrow: Any, mappings: Sequence[Mapping[str, str]]) -> Any:
    # Arrow converts texts several times as quickly as pairs of texts.
    names: list[str] = []
    values: list[str] = []
    ends = [0]
    for mapping in mappings:
        if mapping:
            names += mapping
            values += mapping.values()
        ends.append(len(names))
    text = arrow.string()
    return arrow.MapArray.from_arrays(
        arrow.array(ends, arrow.int32()), arrow.array(names, text), arrow.array(values, text)
    )


def _pyarrow() -> Any:
    try:
        return import_module("pyarrow")
    except ImportError as error:
        raise MissingClient(
            "Arrow tables need pyarrow, which is not installed",
            native=error,
            advice="Run: pip install 'anybroker[arrow]'",
        ) from None
