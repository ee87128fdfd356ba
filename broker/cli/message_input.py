"""Parses arguments and lines of input into messages.

An invalid line yields a `BadLine`, which names the line, the field and what to do. Reading then continues.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, cast

from broker.cli.errors import Exit, Failure, advice_of
from broker.cli.streams import Source
from broker.errors import InvalidMessage
from broker.outbound import OutboundMessage

__all__ = [
    "BadLine",
    "Common",
    "Item",
    "from_arguments",
    "from_json_lines",
    "from_lines",
    "from_whole",
    "parse_attributes",
    "parse_json",
]

FIELDS: Final = (
    "data",
    "data_base64",
    "payload",
    "key",
    "key_base64",
    "attributes",
    "id",
    "given_id",
    "publish_time",
    "deliver_at",
    "ttl",
)
IGNORED: Final = ("topic", "partition", "offset", "broker_time", "delivery_attempt")
"""Fields of `consume --json` that do not apply to a new message."""


class BadLine(Failure):
    """A line of input is not a valid message."""

    def __init__(self, line: int, field: str | None, problem: str, advice: str) -> None:
        where = f"Line {line}" if field is None else f"Line {line}, field {field!r}"
        super().__init__(f"{where}: {problem}", advice=advice, code=Exit.NOT_PUBLISHED)
        self.line = line
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """The fields that options set for every message; the fields of a JSON line win."""

    key: str | None = None
    attributes: Mapping[str, str] | None = None
    id: str | None = None
    ttl: float | None = None
    delay: float | None = None
    partition: int | None = None

    def message(self, data: bytes | None, **own: Any) -> OutboundMessage:
        """:raises InvalidMessage: a field is invalid."""
        fields: dict[str, Any] = {
            "key": self.key,
            "id": self.id,
            "ttl": self.ttl,
            "partition": self.partition,
            "deliver_at": None if self.delay is None else datetime.now(UTC) + timedelta(seconds=self.delay),
        }
        fields |= own
        fields["attributes"] = {**(self.attributes or {}), **own.get("attributes", {})}
        return OutboundMessage(data, **fields)


class Item(NamedTuple):
    """A message, or the error of its line, with the number of the line or argument."""

    line: int
    message: OutboundMessage | BadLine


def parse_attributes(pairs: Sequence[str]) -> dict[str, str]:
    """Parse the values of --attribute, `name=value`.

    :raises Failure: a value has no `=` or no name.
    """
    attributes: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise Failure(
                f"--attribute {pair!r} is not name=value",
                advice="Write it as --attribute type=created",
                code=Exit.USAGE,
            )
        attributes[name] = value
    return attributes


async def from_arguments(arguments: Sequence[str], common: Common) -> AsyncIterator[Item]:
    """Each argument is the body of a message; bytes that are not UTF-8 stay unchanged."""
    for number, argument in enumerate(arguments, 1):
        yield Item(number, common.message(argument.encode("utf-8", "surrogateescape")))


async def from_lines(source: Source, common: Common) -> AsyncIterator[Item]:
    """Each line is the body of a message; an empty line is an empty body."""
    number = 0
    async for line in source.lines():
        number += 1
        yield Item(number, common.message(line))


async def from_whole(source: Source, common: Common) -> AsyncIterator[Item]:
    """The whole input is the body of one message."""
    yield Item(1, common.message(await source.read_all()))


async def from_json_lines(source: Source, common: Common) -> AsyncIterator[Item]:
    """Each line is a message as a JSON object; blank lines are skipped."""
    number = 0
    async for line in source.lines():
        number += 1
        if not line.strip():
            continue
        try:
            yield Item(number, parse_json(line, number, common))
        except BadLine as error:
            yield Item(number, error)


def parse_json(line: bytes, number: int, common: Common) -> OutboundMessage:
    """Parse a message from a line of JSON.

    :raises BadLine: the line is not a JSON object, or a field is invalid.
    """
    try:
        return _parse(line, number, common)
    except RecursionError:
        raise BadLine(number, None, "nested too deeply", "Publish such a body with --whole, or as data") from None


def _parse(line: bytes, number: int, common: Common) -> OutboundMessage:
    try:
        parsed: object = json.loads(line, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise BadLine(
            number,
            None,
            f"byte {error.start + 1} is not UTF-8",
            "Encode the line as UTF-8; put binary bodies into data_base64",
        ) from None
    except json.JSONDecodeError as error:
        raise BadLine(
            number,
            None,
            f"not JSON: {error.msg} at column {error.colno}",
            'Write one object per line, such as {"data": "hello"}',
        ) from None
    except ValueError as error:
        raise BadLine(
            number, None, f"not JSON: {error}", "Write shorter numbers, or the body as data, which is text"
        ) from None
    if not isinstance(parsed, dict):
        raise BadLine(number, None, f"{_kind(parsed)}, not an object", 'Write {"payload": VALUE}')
    return _Reader(parsed, number).message(common)  # pyright: ignore[reportUnknownArgumentType]


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


class _Reader:
    """Reads the fields of one JSON object."""

    def __init__(self, fields: dict[str, Any], number: int) -> None:
        self._fields = fields
        self._number = number

    def message(self, common: Common) -> OutboundMessage:
        fields = self._fields
        for name in fields:
            if name not in FIELDS and name not in IGNORED:
                near = difflib.get_close_matches(name, FIELDS, 1)
                advice = f"Did you mean {near[0]!r}?" if near else f"The fields are {', '.join(FIELDS)}"
                raise self._bad(name, "unknown", advice)
        if "given_id" in fields:
            fields["id"] = fields.pop("given_id")
        data = self._one_of("data", "data_base64", "payload", required=True)
        own: dict[str, Any] = {}
        if "key" in fields or "key_base64" in fields:
            own["key"] = self._one_of("key", "key_base64")
        readers: dict[str, Callable[[str], Any]] = {
            "attributes": self._attributes,
            "id": self._text,
            "publish_time": self._time,
            "deliver_at": self._time,
            "ttl": self._seconds,
        }
        own |= {name: read(name) for name, read in readers.items() if fields.get(name) is not None}
        try:
            return common.message(data, **own)
        except InvalidMessage as error:
            raise BadLine(self._number, None, error.message, advice_of(error)) from None

    def _bad(self, field: str, problem: str, advice: str) -> BadLine:
        return BadLine(self._number, field, problem, advice)

    def _one_of(self, *names: str, required: bool = False) -> bytes | None:
        there = [name for name in names if name in self._fields]
        if len(there) > 1:
            raise self._bad(there[1], f"given together with {there[0]!r}", "Keep one of them")
        if not there:
            if required:
                raise self._bad(
                    names[0],
                    "missing",
                    'Add "data" (text), "payload" (any JSON value) or "data_base64"; null is a tombstone',
                )
            return None
        name = there[0]
        value = self._fields[name]
        if name == "payload":
            try:
                text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            except ValueError:
                raise self._bad(name, "contains a number beyond the range", "Write numbers below 1e308") from None
            return text.encode("utf-8", "surrogatepass")
        if value is None:
            return None
        text = self._text(name)
        try:
            return base64.b64decode(text, validate=True) if name.endswith("_base64") else text.encode()
        except binascii.Error as error:
            raise self._bad(name, f"not base64 ({error})", "Encode the bytes as standard base64 with padding") from None
        except UnicodeEncodeError:
            raise self._bad(name, "contains a lone surrogate", "Use data_base64 for bytes that are not UTF-8") from None

    def _text(self, name: str) -> str:
        value = self._fields[name]
        if isinstance(value, str):
            return value
        quoted = json.dumps(json.dumps(value, ensure_ascii=False), ensure_ascii=False)
        advice = f"Write it as text: {quoted}"
        if name == "data":
            advice = 'Write text, or use "payload" for other JSON values'
        raise self._bad(name, f"{_kind(value)}, not text", advice)

    def _attributes(self, name: str) -> dict[str, str]:
        value = self._fields[name]
        if not isinstance(value, dict):
            raise self._bad(name, f"{_kind(value)}, not an object", 'Write {"name": "value"}')
        attributes = cast("dict[str, Any]", value)
        for key, entry in attributes.items():
            if not isinstance(entry, str):
                quoted = json.dumps(json.dumps(entry, ensure_ascii=False), ensure_ascii=False)
                raise self._bad(f"{name}.{key}", f"{_kind(entry)}, not text", f"Write it as text: {quoted}")
        return attributes

    def _time(self, name: str) -> datetime:
        text = self._text(name)
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise self._bad(name, f"{text!r} is not a time", "Write it like 2030-01-31T12:00:00Z") from None
        if moment.tzinfo is None:
            raise self._bad(name, f"{text!r} has no timezone", f"Write {text}Z for UTC")
        return moment

    def _seconds(self, name: str) -> float:
        value = self._fields[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            shown = json.dumps(value, ensure_ascii=False)
            raise self._bad(name, f"{shown} is not a number of seconds above 0", "Write it like 60 or 1.5")
        try:
            return float(value)
        except OverflowError:
            raise self._bad(name, "has too many digits", "Write it like 60 or 1.5") from None


def _kind(value: object) -> str:
    shown = json.dumps(value, ensure_ascii=False)
    names: dict[type, str] = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    name = names.get(type(value), "a number")
    return name if len(shown) > 40 or value is None else f"{shown} is {name}"
