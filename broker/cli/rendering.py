"""Formats messages and records, for people and for programs. Pure functions.

Bodies and keys that are not UTF-8 are base64: in `data_base64` or `key_base64` in JSON, with the prefix `base64:` for
people.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, cast

from broker.cli.output import escaped
from broker.messages import Message
from broker.records import Record

__all__ = [
    "attribute_pairs",
    "bytes_field",
    "cut",
    "envelope_json",
    "envelope_line",
    "envelope_row",
    "native_rows",
    "printable",
    "timestamp",
]


def bytes_field(name: str, value: bytes | None) -> dict[str, str | None]:
    """The value as `name`, or as `name_base64` if it is not UTF-8."""
    if value is None:
        return {name: None}
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}


def timestamp(moment: datetime | None) -> str | None:
    """RFC 3339 in UTC; None for a time that UTC does not have."""
    utc = _utc(moment)
    return None if utc is None else utc.isoformat().replace("+00:00", "Z")


def _utc(moment: datetime | None) -> datetime | None:
    try:
        return None if moment is None else moment.astimezone(UTC)
    except OverflowError:
        return None


def envelope_json(envelope: Message[Any] | Record[Any]) -> dict[str, Any]:
    """A message or record, with the field names that `publish --jsonl` reads."""
    fields: dict[str, Any] = {"topic": envelope.topic}
    if isinstance(envelope, Record):
        fields |= {"partition": envelope.partition, "offset": envelope.offset}
    # A copy of the message must not have an id that the SDK or the broker made.
    fields |= {"id": envelope.id, "given_id": envelope.given_id}
    fields |= {**bytes_field("key", envelope.key), **bytes_field("data", envelope.data)}
    fields |= {
        "attributes": dict(envelope.attributes),
        "publish_time": timestamp(envelope.publish_time),
        "broker_time": timestamp(envelope.broker_time),
    }
    if isinstance(envelope, Message):
        fields["delivery_attempt"] = envelope.delivery_attempt
    return fields


def printable(value: bytes | None, limit: int | None = None) -> str:
    """Bytes for people: escaped text, `base64:…` if they are not UTF-8, `-` for None."""
    if value is None:
        return "-"
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = "base64:" + base64.b64encode(value).decode()
    else:
        text = escaped(text)
    return cut(text, limit)


def cut(text: str, limit: int | None) -> str:
    """The text, shortened to `limit` characters; None is no limit."""
    return text if limit is None or len(text) <= limit else text[: limit - 1] + "…"


def attribute_pairs(attributes: Mapping[str, str]) -> str:
    """Attributes on one line, for people."""
    return " ".join(f"{escaped(name)}={escaped(value)}" for name, value in attributes.items())


def envelope_line(envelope: Message[Any] | Record[Any]) -> bytes:
    """A message or record as one line for people: id or position, key, body, attributes."""
    place = f"{envelope.partition}:{envelope.offset}" if isinstance(envelope, Record) else escaped(envelope.id)
    parts = [place, printable(envelope.key), printable(envelope.data)]
    if envelope.attributes:
        parts.append(attribute_pairs(envelope.attributes))
    attempt = envelope.delivery_attempt if isinstance(envelope, Message) else None
    if attempt is not None and attempt > 1:
        parts.append(f"(delivery {attempt})")
    return "  ".join(parts).encode("utf-8", "backslashreplace") + b"\n"


def envelope_row(envelope: Message[Any] | Record[Any], limit: int | None) -> list[str]:
    """A message or record as a row of a table: id or position, time, key, body, attributes, each up to `limit`."""
    place = f"{envelope.partition}:{envelope.offset}" if isinstance(envelope, Record) else escaped(envelope.id)
    moment = _utc(envelope.broker_time or envelope.publish_time)
    return [
        place,
        "-" if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S"),
        printable(envelope.key, limit),
        printable(envelope.data, limit),
        cut(attribute_pairs(envelope.attributes), limit),
    ]


def native_rows(native: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Broker-specific fields as rows of a table, with dotted names."""
    return list(_entries("native", native))


def _entries(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        entries = cast("Mapping[Any, Any]", value)
        for key in sorted(entries, key=str):
            yield from _entries(f"{name}.{key}", entries[key])
    elif name != "native":
        yield name, value
