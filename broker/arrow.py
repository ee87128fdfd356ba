"""Records as Arrow columns. Pure functions, safe from any thread. The only module of `broker` that imports pyarrow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, Final, Protocol

from broker.envelopes import Envelope
from broker.errors import ConfigurationError, MissingClient

__all__ = ["COLUMNS", "check_columns", "column_of", "record_schema", "records_to_arrow"]


@cache
def record_schema(*columns: str) -> Any:
    """The `pyarrow.Schema` of records: topic, partition, offset, id, key, data, attributes, publish_time, broker_time.

    Times are microseconds in UTC; key, data and times may be null.

    :param columns: only these columns, in this order.
    :raises ConfigurationError: a column does not exist.
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
    """:raises ConfigurationError: one of the names is unknown."""
    for name in names:
        if name not in known:
            raise ConfigurationError(f"Records have no column {name!r}", advice=f"The columns are {', '.join(known)}")


class Row(Envelope, Protocol):
    """The part of `Record` that this module reads."""

    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def id(self) -> str: ...
    @property
    def raw(self) -> Any: ...


class Run(Protocol):
    """The part of `broker.records.RecordRun` that this module reads."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    def __len__(self) -> int: ...
    def column(self, name: str) -> Sequence[Any] | None: ...


def column_of(name: str) -> Callable[[Sequence[Any]], list[Any]]:
    """A function that reads the attribute `name` of many records or messages.

    If their view has a method of the plural name, one call reads all; it returns times as microseconds since 1970.
    """

    def column(rows: Sequence[Any]) -> list[Any]:
        quick = getattr(getattr(rows[0], "view", None), f"{name}s", None) if rows else None
        return [getattr(row, name) for row in rows] if quick is None else quick([row.raw for row in rows])

    return column


_COLUMNS: Final[Mapping[str, Callable[[Sequence[Row]], list[Any]]]] = {
    "topic": lambda rows: [row.topic for row in rows],
    "partition": lambda rows: [row.partition for row in rows],
    "offset": lambda rows: [row.offset for row in rows],
    "id": lambda rows: [row.id for row in rows],
    "key": column_of("key"),
    "data": lambda rows: [row.data for row in rows],
    "attributes": lambda rows: [row.attributes for row in rows],
    "publish_time": column_of("publish_time"),
    "broker_time": column_of("broker_time"),
}

COLUMNS: Final = tuple(_COLUMNS)

_MOSTLY_EQUAL: Final = frozenset({"topic", "partition"})


def records_to_arrow(records: Sequence[Row], columns: Sequence[str] | None = None) -> Any:
    """The records as a `pyarrow.Table` of `record_schema()`, one row each, in order.

    :param columns: only these columns, in this order; other columns cost nothing.
    :raises ConfigurationError: a column does not exist.
    :raises MissingClient: pyarrow is not installed.
    """
    arrow = _pyarrow()
    names = tuple(columns or COLUMNS)
    schema = record_schema(*names)
    return arrow.Table.from_arrays([_array(arrow, name, records) for name in names], schema=schema)


def _array(arrow: Any, name: str, records: Sequence[Row]) -> Any:
    # Runs return columns without creating records.
    runs = getattr(records, "runs", None)
    if runs:
        arrays = [_of_run(arrow, name, run) for run in runs]
        if len(arrays) == 1 and arrays[0] is not None:
            return arrays[0]
        if all(array is not None for array in arrays):
            return arrow.concat_arrays(arrays)
    values = _COLUMNS[name](records)
    if name in _MOSTLY_EQUAL and values and values.count(values[0]) == len(values):
        # Most batches are of one partition, and comparing values is cheaper than converting them.
        return _repeated(name, values[0], len(values))
    return _converted(arrow, name, values)


def _of_run(arrow: Any, name: str, run: Run) -> Any | None:
    if name in _MOSTLY_EQUAL:
        return _repeated(name, getattr(run, name), len(run))
    values = run.column(name)
    return None if values is None else _converted(arrow, name, values)


def _converted(arrow: Any, name: str, values: Sequence[Any]) -> Any:
    if name == "attributes":
        return _maps(arrow, values)
    if isinstance(values, range):
        return arrow.arange(values.start, values.stop)
    return arrow.array(values, type=_type(name))


@cache
def _type(name: str) -> Any:
    return record_schema().field(name).type


@lru_cache(maxsize=16)
def _repeated(name: str, value: object, count: int) -> Any:
    """Cached, because batches have few different lengths and arrays are immutable."""
    arrow = _pyarrow()
    return arrow.repeat(arrow.scalar(value, _type(name)), count)


def _maps(arrow: Any, mappings: Sequence[Mapping[str, str]]) -> Any:
    # Arrow converts strings several times as fast as pairs of strings.
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
