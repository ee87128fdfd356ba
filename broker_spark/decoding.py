"""`decode(frame, Order)`: JSON values by a class of Python, and the rows that do not decode, with the reason.

Everything runs as expressions of Spark, in the JVM. `from_json` alone is not enough: it makes null of what it cannot
read, text of what is no text, rounds decimals, and takes an empty value and what follows a value for nothing. What
it is too easy with is read as a variant here, and looked at. *Failure.* A row is never an error: it is among the dead.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VariantType,
)

from broker.errors import ConfigurationError
from broker_spark.configured import is_exact
from broker_spark.fields import Leaf, Listed, Mapped, Node, Structure, same_but_for_case, structure_of
from broker_spark.schema import unused

__all__ = ["PAYLOAD", "REASON", "Decoded", "decode", "judge", "payload_schema"]

PAYLOAD: Final = "payload"
REASON: Final = "reason"

_READ: Final = "__read"
_LONG: Final = "__long"
_TINY: Final = "__tiny"
_MADE: Final = "__made"
_OURS: Final = (PAYLOAD, REASON, _READ, _LONG, _TINY, _MADE)
_CORRUPT: Final = "corrupt"
_OPTIONS: Final = {
    "mode": "PERMISSIVE",
    "columnNameOfCorruptRecord": _CORRUPT,
    "allowNonNumericNumbers": "false",
    "allowSingleQuotes": "false",
}
_SHOWN: Final = 60
"""Characters of a wrong value that a reason shows."""
_PATTERNS: Final[dict[type[DataType], str]] = {
    # Spark's own would take "2026" for both, and Python has no year 0.
    TimestampType: r"^(?!0000)\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}",
    DateType: r"^(?!0000)\d{4}-\d{2}-\d{2}$",
}
_TIMES: Final = ("0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z")
"""The first and the last that Python has; a zone may put others beyond them."""
_FLOATS: Final = (DoubleType, FloatType)
_EXPONENT: Final = r"^-?\d+(\.\d+)?[eE][+-]?\d{1,4}$"
_LONG_NUMBER: Final = r"(?:\d{16,}|(?=[\d.]{17,})\d+\.\d+)[eE]|[\d.]{39,}"
"""Of all that could be a number with more digits than a double has, which is what Spark makes of it: those with an
exponent, and those with more digits than a decimal has."""
_TINY_NUMBER: Final = r"[1-9][\d.]*[eE]-\d{3}"
"""Of all that could be a number, though Spark's double of it is 0: those that are smaller than every double."""
_DOUBLE_DIGITS: Final = 15
"""As many digits of a number as a double keeps, whatever they are."""
_UUID: Final = r"^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"


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
    :raises ConfigurationError: the class cannot be read, or the frame has no such column or one named `payload` or
        `reason`.
    """
    judged, payload = _judged(frame, type, column)
    kept = [F.col(name) for name in frame.columns if name != column]
    return Decoded(
        judged.where(F.col(REASON).isNull()).select(*kept, payload.alias(PAYLOAD)),
        judged.where(F.col(REASON).isNotNull()).select(*frame.columns, REASON),
    )


def judge(frame: DataFrame, type: Any) -> DataFrame:
    """Both halves of `decode` in one frame, to be read once: column `payload` or column `reason` is null."""
    judged, payload = _judged(frame, type, "value")
    return judged.select(*frame.columns, F.when(F.col(REASON).isNull(), payload).alias(PAYLOAD), REASON)


def _judged(frame: DataFrame, type: Any, column: str) -> tuple[DataFrame, Column]:
    """The rows with a reason, which is null where they decode, and what the payload then is."""
    structure = structure_of(type)
    exact = is_exact(frame.sparkSession)
    if not exact and (same := same_but_for_case(structure)):
        raise ConfigurationError(
            f"Fields {' and '.join(map(repr, same))} of {type.__name__} are one to Spark",
            advice="Rename one of them, or set spark.sql.caseSensitive to true",
        )
    for name in frame.columns:
        if (name if exact else name.lower()) in _OURS and name != column:
            raise ConfigurationError(
                f"The frame has a column {name!r} already, and decode makes one", advice="Rename it before"
            )
    if column not in frame.columns:
        raise ConfigurationError(
            f"There is no column {column!r} to decode", advice=f"There are {', '.join(frame.columns)}"
        )
    text = F.col(column).cast("string")
    # Spark reads one value and ignores what follows, so a text could close what is around it. Between two marks that it
    # cannot hold, since they are made of it, nothing but one value fits.
    name = unused("mark", {each.encoded for each in structure.fields})
    mark = F.concat(F.lit(f'{{"{name}":'), F.xxhash64(text), F.lit("}"))
    wrapped = F.concat(F.lit('{"v":['), mark, F.lit(","), text, F.lit(","), mark, F.lit("]}"))
    one = StructType([*cast("StructType", _read_type(structure)), StructField(name, LongType())])
    schema = StructType([StructField("v", ArrayType(one)), StructField(_CORRUPT, StringType())])
    # Behind a generator each is evaluated once, not once for each field that looks at it.
    read = frame.select(
        "*",
        F.explode(F.array(F.from_json(wrapped, schema, _OPTIONS))).alias(_READ),
        text.rlike(_LONG_NUMBER).alias(_LONG),
        text.rlike(_TINY_NUMBER).alias(_TINY),
    )
    values = F.col(f"{_READ}.v")
    value = F.get(values, F.lit(1))
    marked = [F.get(values, F.lit(place)).getField(name).eqNullSafe(F.xxhash64(text)) for place in (0, 2)]
    read = read.select("*", F.explode(F.array(_converted(structure, value))).alias(_MADE))
    made = F.col(_MADE)
    reason = F.coalesce(
        F.when(F.col(column).isNull(), F.lit("The value is null")),
        F.when(~F.is_valid_utf8(text), F.lit("The value is no text in UTF-8")),
        F.when(
            F.col(f"{_READ}.{_CORRUPT}").isNotNull() | (F.size(values) != 3) | ~marked[0] | ~marked[1] | value.isNull(),
            _why(structure, text, F.when(marked[0], value)),
        ),
        *_some(_problem(structure, value, made, False, "")),
    )
    return read.withColumn(REASON, reason), _completed(structure, made)


def _read_type(node: Node) -> DataType:
    """What `from_json` is told: by the names of JSON, and as a variant what has to be looked at."""
    match node:
        case Structure(fields):
            return StructType([StructField(each.encoded, _read_type(each.node)) for each in fields])
        case Listed(element):
            return ArrayType(_read_type(element))
        case Mapped(value):
            return MapType(StringType(), _read_type(value))
        case Leaf():
            return VariantType() if _is_variant(node) else node.type


def _is_variant(node: Node) -> bool:
    kinds = (StringType, BinaryType, TimestampType, DateType, DecimalType)
    return isinstance(node, Leaf) and isinstance(node.type, kinds)


def _converted(node: Node, raw: Column) -> Column:
    """The column of the class, of what `from_json` read; null where that is wrong. Without defaults."""
    match node:
        case Structure(fields):
            parts = [_converted(each.node, raw.getField(each.encoded)).alias(each.name) for each in fields]
            return F.when(raw.isNotNull(), F.struct(*parts))
        case Listed(element):
            return F.transform(raw, lambda each: _converted(element, each)) if _changes(element) else raw
        case Mapped(value):
            return F.transform_values(raw, lambda _, each: _converted(value, each)) if _changes(value) else raw
        case Leaf():
            return _leaf(node, raw)


def _completed(node: Node, made: Column) -> Column:
    """With defaults."""
    if not _has_default(node):
        return made
    match node:
        case Structure(fields):
            parts: list[Column] = []
            for each in fields:
                part = _completed(each.node, made.getField(each.name))
                if each.default is not None:
                    part = F.coalesce(part, _constant(each.node, each.default))
                parts.append(part.alias(each.name))
            return F.when(made.isNotNull(), F.struct(*parts))
        case Listed(element):
            return F.transform(made, lambda each: _completed(element, each))
        case Mapped(value):
            return F.transform_values(made, lambda _, each: _completed(value, each))
        case Leaf():
            return made


def _has_default(node: Node) -> bool:
    match node:
        case Structure(fields):
            return any(each.default is not None or _has_default(each.node) for each in fields)
        case Listed(part) | Mapped(part):
            return _has_default(part)
        case Leaf():
            return False


def _changes(node: Node) -> bool:
    return not isinstance(node, Leaf) or _is_variant(node) or isinstance(node.type, _FLOATS) or bool(node.allowed)


def _leaf(node: Leaf, raw: Column) -> Column:
    found = raw
    if isinstance(node.type, DecimalType):
        found = _decimal(node.type, raw)
    elif _is_variant(node):
        text = F.when(F.schema_of_variant(raw) == "STRING", raw.cast("string"))
        pattern = _UUID if node.uuid else _PATTERNS.get(type(node.type))
        if pattern is not None:
            text = F.when(text.rlike(pattern), text)
        if isinstance(node.type, StringType):
            found = text
        elif isinstance(node.type, BinaryType):
            found = F.try_to_binary(text, F.lit("base64"))
        else:
            found = text.try_cast(node.type)
        if isinstance(node.type, TimestampType):
            first, last = (F.lit(each).cast("timestamp") for each in _TIMES)
            found = F.when(found.between(first, last), found)
    elif isinstance(node.type, _FLOATS):
        # Spark makes this of a number that does not fit.
        found = F.when(F.abs(raw) != float("inf"), raw)
    return F.when(found.isin(*node.allowed), found) if node.allowed else found


def _decimal(type: DecimalType, raw: Column) -> Column:
    """The number that was written, and never one that is near it."""
    text = raw.cast("string")
    whole, fraction = type.precision - type.scale, type.scale
    digits = text.rlike(rf"^-?0*\d{{0,{whole}}}(\.\d{{0,{fraction}}}0*)?$") & text.rlike(r"\d")
    # The cast rounds what is behind the scale, and makes null of what is too large.
    behind = F.length(F.regexp_extract(text, r"\.(\d*?)0*[eE]", 1))
    exponent = F.regexp_extract(text, r"[eE]([+-]?\d+)$", 1).try_cast("int")
    exact = digits | (text.rlike(_EXPONENT) & (behind - exponent <= fraction))
    # A number that is none of Spark's decimals was made a double.
    significant = F.length(F.regexp_replace(text, r"^-?[0.]+|[-.]|[eE].*$", ""))
    is_near = F.col(_LONG) | (significant > _DOUBLE_DIGITS) | (F.col(_TINY) & ~text.rlike("^[^eE]*[1-9]"))
    whole_number = (F.schema_of_variant(raw) != "DOUBLE") | ~is_near
    return F.when(exact & whole_number, text.try_cast(type))


def _problem(node: Node, raw: Column, made: Column, required: bool, path: str) -> Column | None:
    """Why what was read is wrong, null if it is not; None if it cannot be.

    What was made of it is looked at first: where that is there, a leaf is right.
    """
    absent = raw.isNull() | F.is_variant_null(raw) if _is_variant(node) else raw.isNull()
    missing = F.when(absent, F.lit(f"{path} is missing or null"))
    match node:
        case Leaf():
            if not _changes(node):
                return F.when(made.isNull(), F.lit(f"{path} is missing or null")) if required else None
            text = F.to_json(raw) if _is_variant(node) else raw.cast("string")
            wrong = _told(path, text, _due(node))
            return F.when(made.isNull(), missing.otherwise(wrong) if required else F.when(~absent, wrong))
        case Structure(fields):
            problems = _some(
                *(
                    _problem(
                        each.node,
                        raw.getField(each.encoded),
                        made.getField(each.name),
                        each.required,
                        f"{path}.{each.encoded}".lstrip("."),
                    )
                    for each in fields
                )
            )
            inside = F.coalesce(*problems) if problems else None
        case Listed(element, nullable):
            inside = _each(raw, made, element, nullable, f"{path}[]")
        case Mapped(value, nullable):
            inside = _each(F.map_values(raw), F.map_values(made), value, nullable, f"{path}[]")
    if required:
        return missing if inside is None else missing.otherwise(inside)
    return None if inside is None else F.when(~absent, inside)


def _each(raw: Column, made: Column, node: Node, nullable: bool, path: str) -> Column | None:
    """The first problem of the parts of a list or map."""
    if _problem(node, F.lit(None), F.lit(None), not nullable, path) is None:
        return None
    problems = F.zip_with(raw, made, lambda one, two: cast("Column", _problem(node, one, two, not nullable, path)))
    return F.get(F.filter(problems, lambda each: each.isNotNull()), F.lit(0))


def _some(*problems: Column | None) -> list[Column]:
    return [each for each in problems if each is not None]


def _told(path: str, text: Column, due: str) -> Column:
    shown = F.when(F.length(text) > _SHOWN, F.concat(F.substring(text, 1, _SHOWN), F.lit("…"))).otherwise(text)
    return F.concat(F.lit(f"{path} is "), shown, F.lit(f", and {due} is due"))


def _due(node: Leaf) -> str:
    if node.allowed:
        return f"one of {', '.join(json.dumps(each) for each in node.allowed)}"
    return "uuid" if node.uuid else node.type.simpleString()


def _why(structure: Structure, text: Column, value: Column) -> Column:
    """Why `from_json` could not read it."""
    causes = [
        # What follows a value spoils all of it, and then no field is to blame.
        F.when(value.isNotNull() & found.isNotNull() & raw.isNull(), _told(path, found, kind))
        for path, raw, found, kind in _causes(structure, text, value, (), "")
    ]
    return F.when(F.try_parse_json(text).isNull(), F.lit("The value is not JSON")).otherwise(
        F.coalesce(*causes, F.lit("The value is another JSON than the class has"))
    )


def _causes(
    structure: Structure, text: Column, value: Column, above: Sequence[str], path: str
) -> list[tuple[str, Column, Column, str]]:
    found: list[tuple[str, Column, Column, str]] = []
    for each in structure.fields:
        names = (*above, each.encoded)
        raw = value.getField(each.encoded)
        if isinstance(each.node, Structure):
            found += _causes(each.node, text, raw, names, f"{path}{each.encoded}.")
        if not _is_variant(each.node) and not any("'" in name for name in names):
            there = F.get_json_object(text, "$" + "".join(f"['{name}']" for name in names))
            found.append((f"{path}{each.encoded}", raw, there, each.node.type.simpleString()))
    return found


def _constant(node: Node, value: Any) -> Column:
    """A default as a column."""
    match node:
        case Structure(fields):
            return F.struct(*(_constant(each.node, value.get(each.encoded)).alias(each.name) for each in fields))
        case Listed(element):
            return F.array(*(_constant(element, each) for each in value)).cast(node.type)
        case Mapped(part):
            pairs = [column for key, each in value.items() for column in (F.lit(key), _constant(part, each))]
            return F.create_map(*pairs).cast(node.type)
        case Leaf():
            return F.lit(value).cast(node.type)
