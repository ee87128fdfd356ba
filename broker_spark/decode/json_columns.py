"""The schema of `from_json` for a Python class, and the columns that are made of its result. Pure expressions.

Strings are read twice, as strings and as variants: a variant knows whether the value was a string in JSON, but to
convert it to a string costs several times as much as to parse the JSON again.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VariantType,
)

from broker_spark.decode.schema_tree import Field, Leaf, Listed, Mapped, Node, Structure

__all__ = [
    "changes",
    "completed",
    "converted",
    "has_two_names",
    "is_variant",
    "read_type",
    "texts_type",
    "texts_under_one_name",
    "under_one_name",
]

_PATTERNS: Final[dict[type[DataType], str]] = {
    # Spark's own would take "2026" for both, and Python has no year 0.
    TimestampType: r"^(?!0000)\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(?:.*\S)?\z",
    DateType: r"^(?!0000)\d{4}-\d{2}-\d{2}\z",
    # Spark's own would skip what is none of it.
    BinaryType: r"^(?:[A-Za-z0-9+/]*|[A-Za-z0-9+/]*[AQgw]==|[A-Za-z0-9+/]*[AEIMQUYcgkosw048]=)\z",
}
_TIMES: Final = ("0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z")
"""The first and the last that Python has; a zone may put others beyond them."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FLOATS: Final = (DoubleType, FloatType)
_EXPONENT: Final = r"^-?\d+(\.\d+)?[eE][+-]?\d{1,4}$"
_BEFORE_NUMBER: Final = r"[:\[,]\s*-?"
"""What is not in a text, or hardly."""
_LONG_NUMBER: Final = (
    _BEFORE_NUMBER + r"(?:(?:\d{16,}|(?=[\d.]{17,})\d+\.\d+)[eE][+-]?\d+|(?=[\d.]{39,})\d+(?:\.\d+)?)\s*[,\]}]"
)
"""Numbers with more digits than a double has, which is what Spark makes of them: those with an exponent, and those with
more digits than a decimal has."""
_TINY_NUMBER: Final = _BEFORE_NUMBER + r"(?=[0.]*[1-9])[\d.]+[eE]-\d{3}"
"""Numbers that are smaller than every double, of which Spark makes 0."""
_DOUBLE_DIGITS: Final = 15
"""As many digits of a number as a double keeps, whatever they are."""
_UUID: Final = r"^([0-9a-fA-F]{32}|[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})\z"


def read_type(node: Node) -> DataType:
    """The schema of `from_json`: fields by their JSON names, and variants for values that have to be checked."""
    match node:
        case Structure(fields):
            return StructType([StructField(name, read_type(each.node)) for each in fields for name in each.names])
        case Listed(element):
            return ArrayType(read_type(element))
        case Mapped(value):
            return MapType(StringType(), read_type(value))
        case Leaf():
            return VariantType() if is_variant(node) else node.type


def is_variant(node: Node) -> bool:
    """Whether `read_type` has it as one."""
    kinds = (StringType, BinaryType, TimestampType, DateType, DecimalType)
    return isinstance(node, Leaf) and isinstance(node.type, kinds)


def texts_type(structure: Structure) -> StructType | None:
    """The schema of `from_json` for the strings of a structure, except those in lists and maps; None if it has none."""
    found: list[StructField] = []
    for each in structure.fields:
        if isinstance(each.node, Structure):
            inner = texts_type(each.node)
        else:
            inner = StringType() if _is_text(each.node) else None
        if inner is not None:
            found += [StructField(name, inner) for name in each.names]
    return StructType(found) if found else None


def _is_text(node: Node) -> bool:
    return is_variant(node) and not isinstance(node.type, DecimalType)


def has_two_names(node: Node) -> bool:
    """Whether a field in it has two names in JSON."""
    match node:
        case Structure(fields):
            return any(each.other is not None or has_two_names(each.node) for each in fields)
        case Listed(part) | Mapped(part):
            return has_two_names(part)
        case Leaf():
            return False


def under_one_name(node: Node, raw: Column) -> Column:
    """What `from_json` read, each field under its first name, whichever it had."""
    if not has_two_names(node):
        return raw
    match node:
        case Structure(fields):
            parts = [under_one_name(each.node, _either(each, raw)).alias(each.encoded) for each in fields]
            return F.when(raw.isNotNull(), F.struct(*parts))
        case Listed(element):
            return F.transform(raw, lambda each: under_one_name(element, each))
        case Mapped(value):
            return F.transform_values(raw, lambda _, each: under_one_name(value, each))
        case Leaf():
            return raw


def texts_under_one_name(structure: Structure, texts: Column, raw: Column) -> Column:
    """`under_one_name` of the texts beside it.

    :param raw: the parsed structure.
    """
    parts: list[Column] = []
    for each in structure.fields:
        inner = texts_type(each.node) if isinstance(each.node, Structure) else None
        if inner is None and not _is_text(each.node):
            continue
        text = texts.getField(each.encoded)
        if each.other is not None:
            # A text is null for another reason too.
            text = F.when(raw.getField(each.encoded).isNotNull(), text).otherwise(texts.getField(each.other))
        if isinstance(each.node, Structure):
            text = texts_under_one_name(each.node, text, _either(each, raw))
        parts.append(text.alias(each.encoded))
    return F.struct(*parts)


def _either(field: Field, raw: Column) -> Column:
    first = raw.getField(field.encoded)
    return first if field.other is None else F.coalesce(first, raw.getField(field.other))


def converted(node: Node, raw: Column, texts: Column | None, whole: Column) -> Column:
    """The column of the class, of what `from_json` read; null where that is wrong. Without defaults.

    :param raw: as `read_type` has it.
    :param texts: as `texts_type` has it, where that has it.
    :param whole: the text that all of it was read from.
    """
    match node:
        case Structure(fields):
            there = None if texts is None else texts_type(node)
            parts: list[Column] = []
            for each in fields:
                is_there = there is not None and each.encoded in there.names
                text = texts.getField(each.encoded) if texts is not None and is_there else None
                parts.append(converted(each.node, raw.getField(each.encoded), text, whole).alias(each.name))
            return F.when(raw.isNotNull(), F.struct(*parts))
        case Listed(element):
            return F.transform(raw, lambda each: converted(element, each, None, whole)) if changes(element) else raw
        case Mapped(value):
            if not changes(value):
                return raw
            return F.transform_values(raw, lambda _, each: converted(value, each, None, whole))
        case Leaf():
            return _leaf(node, raw, texts, whole)


def completed(node: Node, made: Column) -> Column:
    """With defaults."""
    if not _has_default(node):
        return made
    match node:
        case Structure(fields):
            parts: list[Column] = []
            for each in fields:
                part = completed(each.node, made.getField(each.name))
                if each.default is not None:
                    part = F.coalesce(part, _constant(each.node, each.default))
                parts.append(part.alias(each.name))
            return F.when(made.isNotNull(), F.struct(*parts))
        case Listed(element):
            return F.transform(made, lambda each: completed(element, each))
        case Mapped(value):
            return F.transform_values(made, lambda _, each: completed(value, each))
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


def changes(node: Node) -> bool:
    """Whether its column is another than what was read."""
    return not isinstance(node, Leaf) or is_variant(node) or isinstance(node.type, _FLOATS) or bool(node.allowed)


def _leaf(node: Leaf, raw: Column, text: Column | None, whole: Column) -> Column:
    """A value without parts.

    :param text: of `raw`, if it was read as one too.
    """
    found = raw
    if isinstance(node.type, DecimalType):
        found = _bound(raw.cast("string"), partial(_decimal, node.type, raw, whole))
    elif is_variant(node):
        text = raw.cast("string") if text is None else text
        right = F.schema_of_variant(raw) == "STRING"
        pattern = _UUID if node.uuid else _PATTERNS.get(type(node.type))
        text = F.when(right if pattern is None else right & text.rlike(pattern), text)
        if isinstance(node.type, StringType):
            found = text
        elif isinstance(node.type, BinaryType):
            found = F.try_to_binary(F.when(F.length(text) % 4 == 0, text), F.lit("base64"))
        else:
            found = text.try_cast(node.type)
        if isinstance(node.type, TimestampType):
            first, last = (F.lit(each).cast("timestamp") for each in _TIMES)
            found = _bound(found, lambda time: F.when(time.between(first, last), time))
    elif isinstance(node.type, _FLOATS):
        # Spark makes this of a number that does not fit.
        found = F.when(F.abs(raw) != float("inf"), raw)
    return F.when(found.isin(*node.allowed), found) if node.allowed else found


def _bound(column: Column, of: Callable[[Column], Column]) -> Column:
    """What is made of a column that is evaluated once for it."""
    return F.get(F.transform(F.array(column), of), 0)


def _decimal(type: DecimalType, raw: Column, whole: Column, text: Column) -> Column:
    """The number that was written, and never one that is near it."""
    before, behind = type.precision - type.scale, type.scale
    digits = text.rlike(rf"^-?(?=\.?\d)0*\d{{0,{before}}}(\.\d{{0,{behind}}}0*)?$")
    # The cast rounds what is behind the scale, and makes null of what is too large.
    written = F.length(F.regexp_extract(text, r"\.(\d*?)0*[eE]", 1))
    exponent = F.regexp_extract(text, r"[eE]([+-]?\d+)$", 1).try_cast("int")
    exact = digits | (text.rlike(_EXPONENT) & (written - exponent <= behind))
    # A number that is none of Spark's decimals was made a double.
    significant = F.length(F.regexp_replace(text, r"^-?[0.]+|[-.]|[eE].*$", ""))
    is_tiny = whole.rlike(_TINY_NUMBER) & ~text.rlike("^[^eE]*[1-9]")
    is_near = (significant > _DOUBLE_DIGITS) | whole.rlike(_LONG_NUMBER) | is_tiny
    return F.when(exact & ((F.schema_of_variant(raw) != "DOUBLE") | ~is_near), text.try_cast(type))


def _constant(node: Node, value: Any) -> Column:
    """A default as a column."""
    if value is None:
        return F.lit(None).cast(node.type)
    match node:
        case Structure(fields):
            # What a struct leaves out is its own field's default.
            parts = [(each, value.get(each.encoded, each.default)) for each in fields]
            return F.struct(*(_constant(each.node, part).alias(each.name) for each, part in parts))
        case Listed(element):
            return F.array(*(_constant(element, each) for each in value)).cast(node.type)
        case Mapped(part):
            pairs = [column for key, each in value.items() for column in (F.lit(key), _constant(part, each))]
            return F.create_map(*pairs).cast(node.type)
        case Leaf():
            if isinstance(value, datetime) and value.tzinfo is None:
                # As text it has the session's zone, as those that are read; and what is behind it, it never is.
                return F.coalesce(F.lit(value.isoformat()).cast(node.type), F.lit(_EPOCH))
            return F.lit(value).cast(node.type)
