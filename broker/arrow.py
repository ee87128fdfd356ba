"""Records as Arrow columns. Pure; safe from any thread. Needs pyarrow, which nothing else in `broker` imports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, Protocol

from broker.envelopes import Envelope
from broker.errors import MissingClient

__all__ = ["record_schema", "records_to_arrow"]


@cache
def record_schema() -> Any:
    """The one schema of records: topic, partition, offset, id, key, data, attributes, publish_time, broker_time.

    Times are microseconds in UTC; key, data and times may be null. It is a `pyarrow.Schema`.

    :raises MissingClient: pyarrow is not installed.
    """
    arrow = _pyarrow()
    time = arrow.timestamp("us", tz="UTC")
    return arrow.schema(
        [
            arrow.field("topic", arrow.string(), nullable=False),
            arrow.field("partition", arrow.int32(), nullable=False),
            arrow.field("offset", arrow.int64(), nullable=False),
            arrow.field("id", arrow.string(), nullable=False),
            arrow.field("key", arrow.binary()),
            arrow.field("data", arrow.binary()),
            arrow.field("attributes", arrow.map_(arrow.string(), arrow.string()), nullable=False),
            arrow.field("publish_time", time),
            arrow.field("broker_time", time),
        ]
    )


class Row(Envelope, Protocol):
    """What a record is to this module."""

    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def id(self) -> str: ...


def records_to_arrow(records: Sequence[Row]) -> Any:
    """The records as a `pyarrow.Table` of `record_schema()`, one row each, in their order.

    :raises MissingClient: pyarrow is not installed.
    """
    arrow = _pyarrow()
    schema = record_schema()
    columns: Iterable[list[Any]] = (
        [record.topic for record in records],
        [record.partition for record in records],
        [record.offset for record in records],
        [record.id for record in records],
        [record.key for record in records],
        [record.data for record in records],
        [list(record.attributes.items()) for record in records],
        [record.publish_time for record in records],
        [record.broker_time for record in records],
    )
    arrays = [arrow.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)]
    return arrow.Table.from_arrays(arrays, schema=schema)


def _pyarrow() -> Any:
    try:
        return import_module("pyarrow")
    except ImportError as error:
        raise MissingClient(
            "Arrow tables need pyarrow, which is not installed",
            native=error,
            advice="Run: pip install 'anybroker[arrow]'",
        ) from None
