"""`decode(frame, Order)`: values by a class of Python or a codec, and the rows that do not decode, with the reason.

A function of Arrow columns in Spark's Python workers: it receives nothing but the values.
*Failure.* A row is never an error: it is among the dead.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from functools import cached_property
from typing import Any, Final, NamedTuple, cast
from zoneinfo import ZoneInfo

import pyarrow
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark
from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from broker.codecs import Json, Protobuf, is_protobuf, json_decoder, reason_of
from broker.codecs.envelopes import decoder_of, preparation_of
from broker.errors import ConfigurationError, DecodeError
from broker.protocols import EnvelopeCodec
from broker_spark.common.schema import is_case_sensitive
from broker_spark.decode.columns import column_of
from broker_spark.decode.fields import same_but_for_case, structure_of
from broker_spark.decode.messages import structure_of_message
from broker_spark.decode.schema_tree import Structure
from broker_spark.decode.shipping import packed
from broker_spark.runtime.workers import collect_less_often, leave_out_broken_pipes

__all__ = ["PAYLOAD", "REASON", "Decoded", "NoteDead", "PayloadColumn", "codec_of", "decode", "judge", "payload_schema"]

PAYLOAD: Final = "payload"
REASON: Final = "reason"

_JUDGED: Final = "__judged"
_OURS: Final = (PAYLOAD, REASON, _JUDGED)
_ENVELOPE: Final = ("topic", "key", "attributes", "publish_time", "broker_time")
"""The columns that an envelope codec reads beside the value."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """The two halves of a frame; each row is in one of them.

    :ivar rows: those that decoded: column `payload` in the place of the one that was decoded, all others as they were.
    :ivar dead: those that did not: all columns as they were, and `reason`, a sentence.
    """

    rows: DataFrame
    dead: DataFrame


def codec_of(type: Any) -> Any:
    """The codec of what `decode` takes: itself, or `Protobuf` or `Json` of a class."""
    if not isinstance(type, builtin_type) and hasattr(type, "type") and (hasattr(type, "decode") or _packs(type)):
        return type
    if is_protobuf(type):
        return cast("Any", Protobuf)(type)
    # First, since its errors name the field.
    structure_of(type)
    return cast("Any", Json)(type)


def _packs(codec: Any) -> bool:
    return isinstance(codec, EnvelopeCodec)


def _structure(codec: Any) -> Structure:
    return structure_of_message(codec.type) if is_protobuf(codec.type) else structure_of(codec.type)


builtin_type: Final = type


def payload_schema(type: Any) -> StructType:
    """The columns of what `decode` takes.

    :raises ConfigurationError: it is none of that, or names the field that cannot be read into a column.
    """
    return _structure(codec_of(type)).type


def decode(frame: DataFrame, type: Any, *, column: str = "value") -> Decoded:
    """Read values by a class or a codec, as a consumer with it does; batch or streaming. Nothing runs yet.

    Spark's workers need anybroker, and import a class that runs code of its own, such as `__post_init__`.

    :param type: a dataclass, an attrs class, a pydantic model or a msgspec struct: JSON. A class that protoc generated:
        Protobuf. A codec: `Avro(Order, schema)`, `Debezium(Order)`, or one of your own whose `type` is a class. An
        `EnvelopeCodec` also reads the columns `topic`, `key`, `attributes`, `publish_time` and `broker_time`; if its
        `prepare` raises, the task fails, and Spark repeats it.
    :param column: binary, or string (UTF-8).
    :raises ConfigurationError: the class cannot be read, or the frame has no such column, two of one name, or one that
        is named `payload` or `reason`. Over Spark Connect, Spark raises for the frame when it runs.
    """
    judged = _judged(frame, type, column)
    is_dead = F.col(f"{_JUDGED}.{REASON}").isNotNull()
    rows = judged.where(~is_dead).drop(column).withColumn(PAYLOAD, F.col(f"{_JUDGED}.{PAYLOAD}"))
    dead = judged.where(is_dead).withColumn(REASON, F.col(f"{_JUDGED}.{REASON}"))
    return Decoded(rows.drop(_JUDGED), dead.drop(_JUDGED))


def judge(frame: DataFrame, type: Any, origin: Sequence[str] = (), note: NoteDead | None = None) -> DataFrame:
    """Both halves of `decode` in one frame, to be read once: column `payload` or column `reason` is null.

    :param note: called in the tasks for each Arrow batch with dead rows: with which these are, and the columns of
        `origin`.
    """
    judged = _judged(frame, type, "value", origin, note)
    return judged.select("*", f"{_JUDGED}.{PAYLOAD}", f"{_JUDGED}.{REASON}").drop(_JUDGED)


NoteDead = Callable[[Any, Sequence[Any]], object]
"""Takes which rows of an Arrow batch are dead, and the columns that tell their places."""


def _judged(
    frame: DataFrame, type: Any, column: str, origin: Sequence[str] = (), note: NoteDead | None = None
) -> DataFrame:
    """The frame and a struct of payload and reason; one of them is null."""
    codec = codec_of(type)
    _check(frame, codec, column)
    made = PayloadColumn(codec, _zone(str(frame.sparkSession.conf.get("spark.sql.session.timeZone"))))

    def decoded(values: Any, *origin: Any) -> Any:
        found: Any = made(values)
        if note is not None and (dead := found.field(REASON).is_valid()).true_count:
            note(dead, origin)
        return found

    # Without hints, since Spark would evaluate them.
    decoded.__annotations__.clear()
    functions: Any = F
    # Spark evaluates a nondeterministic expression once, whatever reads it.
    column_of = functions.arrow_udf(decoded, made.type).asNondeterministic()
    value = _named(column).cast("binary")
    if _packs(codec):
        value = F.struct(value.alias("value"), *_ENVELOPE)
    return frame.select("*", column_of(value, *map(_named, origin)).alias(_JUDGED))


class _Row(NamedTuple):
    """A row as the `Envelope` that a codec unpacks."""

    topic: str
    key: bytes | None
    data: bytes | None
    attributes: Mapping[str, str]
    publish_time: datetime | None
    broker_time: datetime | None
    native: Any = None


def _rows(messages: Any) -> list[_Row]:
    """The rows of a struct column."""
    return [
        _Row(
            each["topic"],
            each["key"],
            each["value"],
            dict(each["attributes"] or ()),
            each["publish_time"],
            each["broker_time"],
        )
        for each in messages.to_pylist()
    ]


class PayloadColumn:
    """Makes an Arrow column of payloads and reasons of a column of values. Pickle it before the first call.

    For an envelope codec the values are structs of the value and of the columns that `decode` names.

    :param type: a class or a codec.
    :param zone: of times without one.
    :raises ConfigurationError: the class cannot be read into columns, or not be sent to workers.
    """

    def __init__(self, type: Any, zone: tzinfo = UTC) -> None:
        codec = codec_of(type)
        self._structure = _structure(codec)
        self._zone = zone
        self._packed = packed(codec)

    @property
    def type(self) -> StructType:
        """Spark's type of the column."""
        return StructType([StructField(PAYLOAD, self._structure.type), StructField(REASON, StringType())])

    def __call__(self, values: pyarrow.Array[Any]) -> pyarrow.Array[Any]:
        collect_less_often()
        leave_out_broken_pipes()
        codec, decode = self._codec, self._decode
        rows: list[Any] = []
        reasons: list[str | None] = []
        if _packs(codec):
            found_values: list[Any] = _rows(values)
            if (prepare := preparation_of(codec)) is not None:
                asyncio.run(prepare(found_values))
        else:
            found_values = values.to_numpy(zero_copy_only=False).tolist()
        for value in found_values:
            try:
                rows.append(decode(value))
                reasons.append(None)
            except Exception as error:
                rows.append(None)
                reasons.append(_said(value, error))
        payloads = self._columns(rows, reasons, 0)
        kind: Any = to_arrow_type(self.type, timezone="UTC")
        found = [pyarrow.concat_arrays(payloads), pyarrow.array(reasons, pyarrow.string())]
        return cast("Any", pyarrow.StructArray).from_arrays(found, fields=list(kind))

    def _columns(self, rows: list[Any], reasons: list[str | None], start: int) -> list[pyarrow.Array[Any]]:
        """The column in pieces. A row that does not fit is null, and has a reason."""
        try:
            return [self._column(rows)]
        except Exception as error:
            # Hooks and validators may make anything of a field.
            if len(rows) == 1:
                reasons[start] = _said(b"", error)
                return [self._column([None])]
        half = len(rows) // 2
        return self._columns(rows[:half], reasons, start) + self._columns(rows[half:], reasons, start + half)

    @cached_property
    def _codec(self) -> Any:
        return pickle.loads(self._packed)  # noqa: S301 - made by `packed`

    @cached_property
    def _decode(self) -> Any:
        # Without the words that a consumer's error has around the reason.
        codec = self._codec
        return json_decoder(codec.type) if isinstance(codec, Json) else decoder_of(codec)[0]

    @cached_property
    def _column(self) -> Any:
        return column_of(self._structure, self._zone)


def _said(value: object, error: Exception) -> str:
    if value is None:
        return "The value is null"
    text = reason_of(error.native or error) if isinstance(error, DecodeError) else reason_of(error)
    if not isinstance(error, (ValueError, RecursionError, DecodeError)):
        text = f"{type(error).__name__}: {text}"
    return text.encode(errors="replace").decode()


def _zone(name: str) -> tzinfo:
    """A time zone by the name that Spark has for it, which may be an offset."""
    if name in ("UTC", "Z", "Etc/UTC"):
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError):
        offset = datetime.strptime(name.removeprefix("UTC").removeprefix("GMT"), "%z").tzinfo
        assert offset is not None  # it was parsed
        return offset


def _named(name: str) -> Column:
    """A column of a frame, whatever is in its name."""
    return F.col(f"`{name.replace('`', '``')}`")


def _check(frame: DataFrame, codec: Any, column: str) -> None:
    """Make sure that the frame can be decoded by the codec.

    :raises ConfigurationError: it cannot.
    """
    exact = is_case_sensitive(frame.sparkSession)
    if not exact and (same := same_but_for_case(_structure(codec))):
        raise ConfigurationError(
            f"Fields {' and '.join(map(repr, same))} of {codec.type.__name__} have the same name for Spark",
            advice="Rename one of them, or set spark.sql.caseSensitive to true",
        )
    if not isinstance(frame, ClassicDataFrame):
        # A frame of Spark Connect would ask the server, which a declarative pipeline forbids.
        return
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
    if _packs(codec) and (missing := [name for name in _ENVELOPE if name not in frame.columns]):
        raise ConfigurationError(
            f"There is no column {missing[0]!r}, which an envelope codec reads", advice=f"Select {', '.join(_ENVELOPE)}"
        )
    if not isinstance(kind := frame.schema[column].dataType, BinaryType | StringType):
        raise ConfigurationError(
            f"Column {column!r} is {kind.simpleString()}, expected binary or string",
            advice="Cast it, if it is JSON",
        )
