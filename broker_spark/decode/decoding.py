"""`decode(frame, Order)`: JSON values by a class of Python, and the rows that do not decode, with the reason.

Everything runs as expressions of Spark, in the JVM. `from_json` alone is not enough: it makes null of what it cannot
read, text of what is no text, rounds decimals, and takes an empty value and what follows a value for nothing. What
it is too easy with is read as a variant here, and looked at. *Failure.* A row is never an error: it is among the dead.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, cast

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark
from pyspark.sql.types import ArrayType, BinaryType, LongType, StringType, StructField, StructType

from broker.errors import ConfigurationError
from broker_spark.common.schema import is_case_sensitive, unused
from broker_spark.decode.fields import same_but_for_case, structure_of
from broker_spark.decode.json_columns import (
    completed,
    converted,
    has_two_names,
    read_type,
    texts_type,
    texts_under_one_name,
    under_one_name,
)
from broker_spark.decode.problems import is_whole, problem, unread
from broker_spark.decode.schema_tree import Structure
from broker_spark.runtime.codegen import evaluated_once, uncompiled

__all__ = ["PAYLOAD", "REASON", "Decoded", "decode", "judge", "payload_schema"]

PAYLOAD: Final = "payload"
REASON: Final = "reason"

_READ: Final = "__read"
_NAMED: Final = "__named"
_MADE: Final = "__made"
_OURS: Final = (PAYLOAD, REASON, _READ, _NAMED, _MADE)
_CORRUPT: Final = "corrupt"
_OPTIONS: Final = {
    "mode": "PERMISSIVE",
    "columnNameOfCorruptRecord": _CORRUPT,
    "allowNonNumericNumbers": "false",
    "allowSingleQuotes": "false",
}


@dataclass(frozen=True, slots=True)
class Decoded:
    """The two halves of a frame; each row is in one of them.

    :ivar rows: those that decoded: column `payload` in the place of the one that was decoded, all others as they were.
    :ivar dead: those that did not: all columns as they were, and `reason`, a sentence.
    """

    rows: DataFrame
    dead: DataFrame


def payload_schema(type: Any) -> StructType:
    """The columns of a dataclass, a pydantic model or a msgspec struct.

    :raises ConfigurationError: it is none, or names the field that Spark cannot read from JSON.
    """
    return structure_of(type).type


def decode(frame: DataFrame, type: Any, *, column: str = "value") -> Decoded:
    """Read JSON by a class; batch or streaming. Nothing runs yet.

    Fields that the class does not know are ignored. A field with a default has it where it is missing or null. Bounds,
    patterns and validators of the class are not looked at: check what you need in the transform.

    :param type: a dataclass, a pydantic model or a msgspec struct.
    :param column: binary (UTF-8) or string.
    :raises ConfigurationError: the class cannot be read, or the frame has no such column, two of one name, or one that
        is named `payload` or `reason`.
    """
    judged, payload = _judged(frame, type, column)
    kept = [_named(name) for name in frame.columns if name != column]
    return Decoded(
        judged.where(F.col(REASON).isNull()).select(*kept, payload.alias(PAYLOAD)),
        judged.where(F.col(REASON).isNotNull()).select(*map(_named, frame.columns), REASON),
    )


def judge(frame: DataFrame, type: Any) -> DataFrame:
    """Both halves of `decode` in one frame, to be read once: column `payload` or column `reason` is null."""
    judged, payload = _judged(frame, type, "value")
    return judged.select(*map(_named, frame.columns), F.when(F.col(REASON).isNull(), payload).alias(PAYLOAD), REASON)


def _judged(frame: DataFrame, type: Any, column: str) -> tuple[DataFrame, Column]:
    """The rows with a reason, which is null where they decode, and what the payload then is."""
    structure = structure_of(type)
    _check(frame, type, structure, column)
    text = _named(column).cast("string")
    # Spark reads one value and ignores what follows, so a text could close what is around it. Between two marks that it
    # cannot hold, since they are made of it, nothing but one value fits.
    name = unused("mark", {name for each in structure.fields for name in each.names})
    mark = F.concat(F.lit(f'{{"{name}":'), F.xxhash64(text), F.lit("}"))
    wrapped = F.concat(F.lit('{"v":['), mark, F.lit(","), text, F.lit(","), mark, F.lit('],"t":'), text, F.lit("}"))
    one = StructType([*cast("StructType", read_type(structure)), StructField(name, LongType())])
    texts = StructField("t", texts_type(structure) or StringType())
    schema = StructType([StructField("v", ArrayType(one)), texts, StructField(_CORRUPT, StringType())])
    read = frame.select("*", evaluated_once(F.from_json(wrapped, schema, _OPTIONS)).alias(_READ))
    values = F.col(f"{_READ}.v")
    value, other_texts = F.get(values, F.lit(1)), F.col(f"{_READ}.t")
    if has_two_names(structure):
        there = texts_under_one_name(structure, other_texts, value) if texts_type(structure) else other_texts
        both = F.struct(under_one_name(structure, value).alias("v"), there.alias("t"))
        read = read.select("*", evaluated_once(both).alias(_NAMED))
        value, other_texts = F.col(f"{_NAMED}.v"), F.col(f"{_NAMED}.t")
    marked = [F.get(values, F.lit(place)).getField(name).eqNullSafe(F.xxhash64(text)) for place in (0, 2)]
    read = read.select("*", evaluated_once(converted(structure, value, other_texts, text)).alias(_MADE))
    made = F.col(_MADE)
    is_text = F.is_valid_utf8(text)
    is_read = F.col(f"{_READ}.{_CORRUPT}").isNull() & (F.size(values) == 3) & marked[0] & marked[1] & value.isNotNull()
    reasons = [
        F.when(_named(column).isNull(), F.lit("The value is null")),
        F.when(~is_text, F.lit("The value is no text in UTF-8")),
        F.when(~is_read, unread(structure, text, F.when(marked[0], value))),
    ]
    wrong = problem(structure, value, made, False, "")
    if wrong is not None:
        reasons.append(wrong)
    is_right = F.coalesce(is_text & is_read & is_whole(structure, value, made, True), F.lit(False))
    reason = F.when(~is_right, uncompiled(F.coalesce(*reasons)))
    return read.withColumn(REASON, reason), completed(structure, made)


def _named(name: str) -> Column:
    """A column of a frame, whatever is in its name."""
    return F.col(f"`{name.replace('`', '``')}`")


def _check(frame: DataFrame, type: Any, structure: Structure, column: str) -> None:
    """Make sure that the frame can be decoded by the class.

    :raises ConfigurationError: it cannot.
    """
    exact = is_case_sensitive(frame.sparkSession)
    if not exact and (same := same_but_for_case(structure)):
        raise ConfigurationError(
            f"Fields {' and '.join(map(repr, same))} of {type.__name__} have the same name for Spark",
            advice="Rename one of them, or set spark.sql.caseSensitive to true",
        )
    for name in frame.columns:
        if (name if exact else name.lower()) in _OURS and name != column:
            raise ConfigurationError(
                f"The frame already has a column {name!r}, which decode adds", advice="Rename it before"
            )
    if column not in frame.columns:
        raise ConfigurationError(
            f"There is no column {column!r} to decode", advice=f"There are {', '.join(frame.columns)}"
        )
    names = Counter(name if exact else name.lower() for name in frame.columns)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigurationError(
            f"The frame has two columns {twice[0]!r}", advice="Rename one of them, as with toDF(...)"
        )
    if not isinstance(kind := frame.schema[column].dataType, BinaryType | StringType):
        raise ConfigurationError(
            f"Column {column!r} is {kind.simpleString()}, expected binary or string",
            advice="Cast it, if it is JSON",
        )
