"""The columns of messages, as Spark's types and as Arrow's. Pure; safe anywhere.

`value` is the `data` of a message, as in Spark's own sources. All columns are nullable, so that a user's rows fit; a
source leaves a column null only if the broker does not provide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from typing import Final

import pyarrow
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from broker.errors import ConfigurationError

__all__ = [
    "COLUMNS",
    "RECORD_COLUMNS",
    "arrow_schema",
    "check_columns",
    "is_case_sensitive",
    "nearest",
    "spark_schema",
]

_TIME: Final = pyarrow.timestamp("us", tz="UTC")

_TYPES: Final[dict[str, tuple[DataType, pyarrow.DataType]]] = {
    "topic": (StringType(), pyarrow.string()),
    "partition": (IntegerType(), pyarrow.int32()),
    "offset": (LongType(), pyarrow.int64()),
    "id": (StringType(), pyarrow.string()),
    "key": (BinaryType(), pyarrow.binary()),
    "value": (BinaryType(), pyarrow.binary()),
    "attributes": (MapType(StringType(), StringType()), pyarrow.map_(pyarrow.string(), pyarrow.string())),
    "publish_time": (TimestampType(), _TIME),
    "broker_time": (TimestampType(), _TIME),
    "delivery_attempt": (IntegerType(), pyarrow.int32()),
}

COLUMNS: Final = tuple(_TYPES)
"""Every column of a source, in order."""

RECORD_COLUMNS: Final = {name: "data" if name == "value" else name for name in COLUMNS if name != "delivery_attempt"}
"""The columns of a record of a log, and their names in `RecordBatch.to_arrow`."""


def spark_schema(columns: Sequence[str] = COLUMNS) -> StructType:
    """The schema of a source as Spark's types.

    :param columns: only these, in this order.
    :raises ConfigurationError: there is no such column.
    """
    return StructType([StructField(name, _TYPES[name][0]) for name in check_columns(columns)])


def arrow_schema(columns: Sequence[str] = COLUMNS) -> pyarrow.Schema:
    """The schema of a source as Arrow's types, which is what Spark makes of its own.

    :param columns: only these, in this order.
    :raises ConfigurationError: there is no such column.
    """
    return _arrow_schema(tuple(columns))


@cache
def _arrow_schema(columns: tuple[str, ...]) -> pyarrow.Schema:
    return pyarrow.schema([pyarrow.field(name, _TYPES[name][1]) for name in check_columns(columns)])


def check_columns(columns: Sequence[str]) -> Sequence[str]:
    """The columns, if all are known and distinct.

    :raises ConfigurationError: names the wrong one.
    """
    if not columns:
        raise ConfigurationError("Option columns is empty", advice=f"There are {', '.join(COLUMNS)}")
    for number, name in enumerate(columns):
        if name not in _TYPES:
            raise ConfigurationError(f"There is no column {name!r}", advice=nearest(name, COLUMNS))
        if name in columns[:number]:
            raise ConfigurationError(f"Option columns names {name!r} twice", advice="Name each column once")
    return columns


def nearest(name: str, known: Sequence[str]) -> str:
    """Advice for an unknown name."""
    found = get_close_matches(name, known, 1, 0.6)
    return f"Did you mean {found[0]!r}?" if found else f"There are {', '.join(known)}"


def is_case_sensitive(spark: SparkSession) -> bool:
    """Whether `a` and `A` are two columns in this session."""
    return spark.conf.get("spark.sql.caseSensitive", "false") == "true"
