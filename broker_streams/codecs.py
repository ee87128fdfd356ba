"""Codecs of tables beside those of `broker.codecs`, whose conventions they follow: `Int64` and `MsgPack`.

`Int64` reads and writes what goka's `codec.Int64` does, so that both can use a table. `MsgPack(T)` is as `Json(T)`, and
its rows are smaller.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, cast, overload

import msgspec
from typing_extensions import TypeForm, TypeVar

from broker import ConfigurationError, DecodeError, InvalidMessage
from broker.checks import admits_none, mentions_pydantic

if TYPE_CHECKING:
    from broker import Codec

__all__ = ["Int64", "MsgPack"]

T = TypeVar("T", default=Any)

_DECIMAL: Final = re.compile(rb"[+-]?[0-9]+")
_LONGEST: Final = 100
"""Digits, with leading zeros. Python takes long over very long numbers, and refuses the longest."""


class Int64:
    """A whole number of 64 bits, as decimal text in ASCII."""

    __slots__ = ()

    def encode(self, payload: int) -> bytes:
        """:raises InvalidMessage: the payload is no int, or is beyond 64 bits."""
        if not isinstance(payload, int) or isinstance(payload, bool):
            raise _not_encodable("Int64()", payload)
        if not -(1 << 63) <= payload < 1 << 63:
            raise _not_encodable("Int64()", payload, OverflowError("it is beyond 64 bits"))
        return b"%d" % payload

    def decode(self, data: bytes | None) -> int:
        """:raises DecodeError: the bytes are no decimal number of 64 bits, or the message is a tombstone."""
        data = _present("Int64()", data)
        if len(data) <= _LONGEST and _DECIMAL.fullmatch(data):
            number = int(data)
            if -(1 << 63) <= number < 1 << 63:
                return number
        shown = repr(data[:_LONGEST]) + ("…" if len(data) > _LONGEST else "")
        raise DecodeError(f"Int64() cannot decode {shown}", advice="It takes a whole number of 64 bits in ASCII digits")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Int64)

    def __hash__(self) -> int:
        return hash(Int64)

    def __repr__(self) -> str:
        return "Int64()"


class MsgPack(Generic[T]):
    """MessagePack of type `T`: a msgspec Struct, dataclass, TypedDict, builtin, or a union of these; no pydantic model.

    Decoding validates; encoding trusts the type checker. If `T` includes None, a tombstone is None. Without a type, any
    value that MessagePack has.

    :raises ConfigurationError: msgspec does not support the type.
    """

    __slots__ = ("_admits_none", "_decode", "_encode", "type")

    @overload
    def __init__(self: MsgPack[Any]) -> None: ...
    @overload
    def __init__(self, type: type[T]) -> None: ...
    @overload
    def __init__(self, type: TypeForm[T]) -> None: ...
    def __init__(self, type: Any = Any) -> None:
        self.type: Any = type
        self._admits_none = admits_none(type)
        if mentions_pydantic(type):
            raise ConfigurationError(f"MsgPack does not support pydantic models: {type!r}", advice="Use Json")
        try:
            self._decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder(type).decode
        except Exception as error:
            raise ConfigurationError(
                f"MsgPack does not support the type {type!r}: {error}",
                native=error,
                advice="Tag the Structs of a union: `class A(msgspec.Struct, tag=True)`",
            ) from error
        self._encode: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode

    def encode(self, payload: T) -> bytes | None:
        """:raises InvalidMessage: the payload has what MessagePack cannot carry, such as an integer beyond 64 bits."""
        if payload is None and self._admits_none:
            return None
        try:
            return self._encode(payload)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise _not_encodable(repr(self), payload, error) from error

    def decode(self, data: bytes | None) -> T:
        """:raises DecodeError: the bytes are not MessagePack of type `T`, or the message is a tombstone that `T`
        excludes."""
        if data is None:
            if self._admits_none:
                return cast("T", None)
            data = _present(repr(self), data)
        try:
            return self._decode(data)
        except (ValueError, RecursionError) as error:
            raise DecodeError(f"{self!r} cannot decode the payload: {_reason(error)}", native=error) from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MsgPack) and bool(self.type == cast("MsgPack[Any]", other).type)

    def __hash__(self) -> int:
        return hash((MsgPack, self.type))

    def __repr__(self) -> str:
        return f"MsgPack({getattr(self.type, '__name__', None) or self.type})"


def _present(codec: str, data: bytes | None) -> bytes:
    if data is None:
        raise DecodeError(
            f"{codec} cannot decode a tombstone (a message without data)",
            advice='Skip tombstones, or pass them as None (tombstones="pass")',
        )
    return data


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())


def _not_encodable(codec: str, payload: object, error: BaseException | None = None) -> InvalidMessage:
    detail = f": {_reason(error)}" if error is not None else ""
    return InvalidMessage(
        f"{codec} cannot encode a payload of type {type(payload).__name__}{detail}",
        native=error,
        advice="Set or send a value of the codec's type",
    )


if TYPE_CHECKING:
    _codecs: tuple[Codec[int], Codec[str]] = (Int64(), MsgPack(str))
