"""Avro of a type: one value without a container file, by fastavro.

Source: Apache Avro 1.12, "Binary encoding".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from functools import partial
from io import BytesIO
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar
from uuid import UUID

import msgspec

from broker.checks import mentions_pydantic
from broker.codecs.errors import not_encodable, present, reason_of
from broker.errors import ConfigurationError, DecodeError, MissingClient

if TYPE_CHECKING:
    from broker.protocols import Codec

__all__ = ["Avro"]

T = TypeVar("T")

_MAGIC: Final = 0
_HEAD: Final = Struct(">bI")
"""Confluent's wire format: a zero, and the id of the schema."""
_KEPT: Final = (bytes, date, datetime, time, Decimal, UUID)
"""Values that fastavro and msgspec both have as objects."""
Schema: TypeAlias = str | Mapping[str, Any] | Sequence[Any]
"""JSON text, or the value of it."""


class Avro(Generic[T]):
    """Avro of type `T`: a msgspec Struct, dataclass, attrs class, TypedDict or pydantic model.

    The schema says how the bytes are read, and the class, as strictly as with `Json`, what they may hold. Fields go by
    name; those that the class lacks are left out.

    :param schema: what the messages were written with. They are bare values.
    :param registered: instead of `schema`: schemas by their id in a registry. The messages begin with an id, as those
        of Confluent's serializers do; `encode` writes the first of these.
    :raises ConfigurationError: a schema is none, or Avro cannot be decoded as `T`.
    :raises MissingClient: fastavro is not installed.
    """

    __slots__ = ("_convert", "_given", "_key", "_read", "_schemas", "_values", "_write", "_written", "type")

    def __init__(
        self, type: type[T], schema: Schema | None = None, *, registered: Mapping[int, Schema] | None = None
    ) -> None:
        if (schema is None) is (registered is None) or registered == {}:
            raise ConfigurationError("Avro needs a schema, or registered schemas", advice="Give one of the two")
        self.type = type
        self._given = schema, registered
        given = {None: schema} if registered is None else registered
        self._key = type, json.dumps(list(given.items()), sort_keys=True)
        fastavro = _fastavro()
        self._read, self._write = fastavro.schemaless_reader, fastavro.schemaless_writer
        self._schemas = {number: _parsed(each, fastavro.parse_schema) for number, each in given.items()}
        self._written = next(iter(self._schemas))
        self._convert, self._values = _converters(type)

    def encode(self, payload: T) -> bytes:
        """Trusts the type checker, and is not told that an `int` of the schema has 32 bits.

        :raises InvalidMessage: the payload does not fit the schema.
        """
        file = BytesIO()
        if self._written is not None:
            file.write(_HEAD.pack(_MAGIC, self._written))
        try:
            self._write(file, self._schemas[self._written], self._values(payload), strict=True)
        except Exception as error:
            raise not_encodable(repr(self), payload, error) from error
        return file.getvalue()

    def decode(self, data: bytes | None) -> T:
        """:raises DecodeError: the bytes are no value of the schema or of the type, or the message is a tombstone."""
        data = present(self, data)
        try:
            return self._decode(data)
        except Exception as error:
            # What fastavro raises for bytes of another schema is anything.
            reason = reason_of(error) or type(error).__name__
            raise DecodeError(f"{self!r} cannot decode the payload: {reason}", native=error) from error

    def _decode(self, data: bytes) -> T:
        schema, start = self._schemas.get(None), 0
        if schema is None:
            if len(data) < _HEAD.size or data[0] != _MAGIC:
                raise ValueError("The value does not begin with the id of a registered schema")
            number = _HEAD.unpack_from(data)[1]
            schema, start = self._schemas.get(number), _HEAD.size
            if schema is None:
                raise ValueError(f"The value was written with schema {number}, which is not among those registered")
        file = BytesIO(data)
        file.seek(start)
        try:
            value = self._read(file, schema)
        except Exception as error:
            raise ValueError(f"The value is not of the schema: {str(error) or type(error).__name__}") from error
        if rest := len(data) - file.tell():
            raise ValueError(f"The value has {rest} bytes behind its end")
        return self._convert(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Avro) and self._key == other._key  # pyright: ignore[reportUnknownMemberType]

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Avro({self.type.__name__})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.type, *self._given)


def _made(type: Any, schema: Schema | None, registered: Mapping[int, Schema] | None) -> Avro[Any]:
    return Avro(type, schema, registered=registered)


def _fastavro() -> Any:
    try:
        import fastavro
    except ImportError as error:
        raise MissingClient(
            "Avro needs fastavro, which is not installed", native=error, advice="Run: pip install 'anybroker[avro]'"
        ) from None
    return fastavro


def _parsed(schema: Any, parse: Callable[[Any], Any]) -> Any:
    try:
        return parse(json.loads(schema) if isinstance(schema, str) else schema)
    except Exception as error:
        raise ConfigurationError(
            f"This is no Avro schema: {reason_of(error)}", native=error, advice="Give the JSON of a .avsc file"
        ) from error


def _converters(type: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """What makes a payload of values, and values of a payload."""
    if mentions_pydantic(type):
        from pydantic import TypeAdapter

        adapter = TypeAdapter[Any](type)
        return adapter.validate_python, partial(adapter.dump_python, by_alias=True)
    try:
        msgspec.convert(None, type | None)
    except TypeError as error:
        raise ConfigurationError(f"Avro does not support the type {type!r}: {error}", native=error) from error
    return (
        partial(msgspec.convert, type=type, builtin_types=_KEPT),
        partial(msgspec.to_builtins, builtin_types=_KEPT),
    )


if TYPE_CHECKING:
    _codec: Codec[int] = Avro(int, "int")
