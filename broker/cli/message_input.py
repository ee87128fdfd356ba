"""Parses arguments and lines of input into messages.

An invalid line yields a `BadLine`, which names the line, the field and what to do. Reading then continues. Input in
UTF-16 raises before its first line: split at newline bytes, its lines are no text.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import json
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import isfinite
from typing import Any, Final, NamedTuple

import msgspec

from broker.cli.errors import Exit, Failure, advice_of
from broker.cli.rendering import timestamp
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
    publish_time_as: str | None = None
    """The attribute that keeps a given publish time, in place of the field."""

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
        kept = dict[str, str]()
        if self.publish_time_as is not None and (moment := fields.pop("publish_time", None)) is not None:
            kept[self.publish_time_as] = timestamp(moment) or moment.isoformat()
        fields["attributes"] = {**(self.attributes or {}), **kept, **own.get("attributes", {})}
        return OutboundMessage(data, **fields)


class Item(NamedTuple):
    """A message, or the error of its line, with the number of the line or argument."""

    line: int
    message: OutboundMessage | BadLine


def parse_attributes(pairs: Sequence[str]) -> dict[str, str]:
    """Parse the values of --attribute, `name=value`.

    :raises Failure: a value has no `=` or no name, or a name is given twice.
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
        if name in attributes:
            raise Failure(
                f"--attribute {name!r} is given twice", advice="A message has one value of each name", code=Exit.USAGE
            )
        attributes[name] = value
    return attributes


async def from_arguments(arguments: Sequence[str], common: Common) -> AsyncIterator[Item]:
    """Each argument is the body of a message; bytes that are not UTF-8 stay unchanged."""
    for number, argument in enumerate(arguments, 1):
        yield Item(number, common.message(argument.encode("utf-8", "surrogateescape")))


async def from_lines(source: Source, common: Common) -> AsyncIterator[Item]:
    """Each line is the body of a message; an empty line is an empty body.

    :raises Failure: the input is UTF-16.
    """
    number = 0
    async for line in source.lines():
        number += 1
        if number == 1 and line.startswith(_UTF16):
            raise _not_utf8()
        yield Item(number, common.message(line))


async def from_whole(source: Source, common: Common) -> AsyncIterator[Item]:
    """The whole input is the body of one message."""
    yield Item(1, common.message(await source.read_all()))


async def from_json_lines(source: Source, common: Common) -> AsyncIterator[Item]:
    """Each line is a message as a JSON object; blank lines are skipped.

    :raises Failure: the input is UTF-16.
    """
    number = 0
    async for line in source.lines():
        number += 1
        if number == 1:
            if line.startswith(_UTF16) or b"\0" in line[:2]:
                raise _not_utf8()
            # Some editors write it.
            line = line.removeprefix(BOM_UTF8)
        if not line.strip():
            continue
        try:
            yield Item(number, parse_json(line, number, common))
        except BadLine as error:
            yield Item(number, error)


_UTF16: Final = (BOM_UTF16_LE, BOM_UTF16_BE)


def _not_utf8() -> Failure:
    return Failure(
        "The input is UTF-16, and lines are read as UTF-8",
        advice="Convert it, for instance with `iconv -f UTF-16 -t UTF-8`, or publish it as one message with --whole",
        code=Exit.NOT_PUBLISHED,
    )


def parse_json(line: bytes, number: int, common: Common) -> OutboundMessage:
    """Parse a message from a line of JSON. The text of `payload` is published as it stands.

    :raises BadLine: the line is not a JSON object, or a field is invalid.
    """
    try:
        parsed = _read(line, number)
        if not isinstance(parsed, _Object):
            raise BadLine(number, None, f"{_kind(parsed)}, not an object", 'Write {"payload": VALUE}')
        return _Reader(parsed, line, number).message(common)
    except RecursionError:
        raise BadLine(number, None, "nested too deeply", "Publish such a body with --whole, or as data") from None


class _Object(dict[str, Any]):
    """An object of JSON.

    :ivar twice: a name that it has twice.
    """

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.twice: str | None = None
        if len(self) < len(pairs):
            names = [name for name, _ in pairs]
            self.twice = next(name for name in names if names.count(name) > 1)


class _Body(msgspec.Struct):
    payload: msgspec.Raw


_BODY: Final = msgspec.json.Decoder(_Body)
_DIGITS: Final = 400
"""An integer of more digits is beyond every number that a field takes; as a float it is infinite."""


def _read(line: bytes, number: int) -> object:
    try:
        return json.loads(line.decode(), object_pairs_hook=_Object, parse_int=_number, parse_constant=_refuse_constant)
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
        raise BadLine(number, None, f"not JSON: {error}", "Use null, or write it as text") from None


def _number(digits: str) -> float:
    return int(digits) if len(digits) < _DIGITS else float(digits)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


class _Reader:
    """Reads the fields of one JSON object."""

    def __init__(self, fields: _Object, line: bytes, number: int) -> None:
        self._fields = fields
        self._line = line
        self._number = number

    def message(self, common: Common) -> OutboundMessage:
        fields = self._fields
        if fields.twice is not None:
            raise self._bad(fields.twice, "given twice", "Keep one of them")
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
                return bytes(_BODY.decode(self._line).payload)
            except msgspec.DecodeError:
                # The one thing that the other reader lets pass.
                raise self._bad(name, "contains a lone surrogate", "Use data for text that is not Unicode") from None
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
        advice = 'Write text, or use "payload" for other JSON values' if name == "data" else _as_text(value)
        raise self._bad(name, f"{_kind(value)}, not text", advice)

    def _attributes(self, name: str) -> dict[str, str]:
        value = self._fields[name]
        if not isinstance(value, _Object):
            raise self._bad(name, f"{_kind(value)}, not an object", 'Write {"name": "value"}')
        if value.twice is not None:
            raise self._bad(f"{name}.{value.twice}", "given twice", "Keep one of them")
        for key, entry in value.items():
            if not isinstance(entry, str):
                raise self._bad(f"{name}.{key}", f"{_kind(entry)}, not text", _as_text(entry))
        return value

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
            raise self._bad(name, f"{_shown(value)} is not a number of seconds above 0", "Write it like 60 or 1.5")
        try:
            return float(value)
        except OverflowError:
            raise self._bad(name, "has too many digits", "Write it like 60 or 1.5") from None


_LONGEST: Final = 40
"""A value of more characters is not shown in an error."""


def _shown(value: object) -> str:
    """The value as JSON, `…` for a long one, and for a number that was too large to keep."""
    if isinstance(value, float) and not isfinite(value):
        return "…"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else "…"


def _as_text(value: object) -> str:
    shown = _shown(value)
    return "Write it as text" + ("" if shown == "…" else f": {json.dumps(shown, ensure_ascii=False)}")


def _kind(value: object) -> str:
    names: dict[type, str] = {_Object: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    name = names.get(type(value), "a number")
    shown = _shown(value)
    return name if shown == "…" or value is None else f"{shown} is {name}"
