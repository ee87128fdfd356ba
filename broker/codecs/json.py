"""JSON of a type: decoded by msgspec strictly, or by pydantic where a model is in it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, Generic, Protocol, cast, get_origin, overload

import msgspec
from typing_extensions import TypeForm, TypeVar

from broker.checks import admits_none, mentions_pydantic
from broker.codecs.errors import not_encodable, present, reason_of
from broker.errors import ConfigurationError, DecodeError

if TYPE_CHECKING:
    from broker.protocols import Codec

__all__ = ["Json", "json_decoder"]

T = TypeVar("T", default=Any)


class Json(Generic[T]):
    """JSON of type `T`: a msgspec Struct, dataclass, TypedDict, builtin, pydantic model, or a union of these.

    Decoding validates; encoding trusts the type checker, unless `validate` is true. Fields with an alias use the alias.
    Without a type, any JSON value.

    :param validate: encode reads back what it wrote, and refuses a payload that consumers could not decode as `T`.
    :raises ConfigurationError: JSON cannot represent the type, for instance a union of two untagged Structs.
    """

    __slots__ = ("_admits_none", "_decode", "_encode", "_engine", "_reads_back", "type", "validate")

    @overload
    def __init__(self: Json[Any], *, validate: bool = False) -> None: ...
    @overload
    def __init__(self, type: type[T], *, validate: bool = False) -> None: ...
    @overload
    def __init__(self, type: TypeForm[T], *, validate: bool = False) -> None: ...
    def __init__(self, type: Any = Any, *, validate: bool = False) -> None:
        self.type: Any = type
        self.validate = validate
        self._admits_none = admits_none(type)
        try:
            self._engine = _engine_of(type)
        except Exception as error:
            raise ConfigurationError(
                f"Json does not support the type {type!r}: {error}",
                native=error,
                advice="Tag the Structs of a union (`class A(msgspec.Struct, tag=True)`), or use pydantic models",
            ) from error
        self._encode = self._engine.encode
        self._decode = self._engine.decode
        self._reads_back = self._engine.reads_back

    def encode(self, payload: T) -> bytes | None:
        """:raises InvalidMessage: the payload cannot be encoded as JSON that every reader decodes to the same value: it
        has NaN, an infinity, an integer beyond 64 bits, a lone surrogate or a name twice, or is nested too deeply. With
        `validate`, also if the payload is no `T`.
        """
        if payload is None and self._admits_none:
            return None
        try:
            data = self._encode(payload)
            if not self._reads_back(payload, data):
                _refuse_unreadable(self._engine, payload, data)
                if self.validate:
                    self._decode(data)
            return data
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise not_encodable(repr(self), payload, error) from error

    def decode(self, data: bytes | None) -> T:
        """:raises DecodeError: the bytes are not JSON of type `T`, or the message is a tombstone that `T` excludes."""
        if data is None:
            if self._admits_none:
                return cast("T", None)
            data = present(self, data)
        try:
            return self._decode(data)
        except (ValueError, RecursionError) as error:
            if isinstance(error, DecodeError):
                raise
            raise DecodeError(f"{self!r} cannot decode the payload: {reason_of(error)}", native=error) from error

    def __eq__(self, other: object) -> bool:
        """`bus.topic` returns the same topic for equal codecs."""
        if not isinstance(other, Json):
            return False
        codec = cast("Json[Any]", other)
        return bool(self.type == codec.type) and self.validate == codec.validate

    def __hash__(self) -> int:
        return hash((self.type, self.validate))

    def __repr__(self) -> str:
        name = getattr(self.type, "__name__", None) or self.type
        return f"Json({name}, validate=True)" if self.validate else f"Json({name})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.type, self.validate)


def _made(type: Any, validate: bool) -> Json[Any]:
    return Json(type, validate=validate)


def json_decoder(type: Any) -> Callable[[bytes], Any]:
    """What `Json(type)` decodes with, for callers that handle its errors. A pydantic model is validated by pydantic, so
    that its bounds, patterns and validators count; everything else is decoded by msgspec, strictly.
    """
    return _engine_of(type).decode


def _engine_of(type: Any) -> _Engine:
    return _PydanticEngine(type) if mentions_pydantic(type) else _MsgspecEngine(type)


class _Engine(Protocol):
    """`encode` and `decode` are of the codec's type, `read` and `write` of any JSON."""

    def encode(self, payload: Any, /) -> bytes: ...
    def decode(self, data: bytes, /) -> Any: ...
    def read(self, data: bytes, /) -> Any: ...
    def write(self, value: Any, /) -> bytes: ...
    def values(self, payload: Any, /) -> Any:
        """The payload as dicts, lists and scalars, in which NaN is still NaN."""
        ...

    def reads_back(self, payload: Any, data: bytes, /) -> bool:
        """Whether the data surely is of the codec's type, and what the payload was; a quick test, which most pass."""
        ...


class _MsgspecEngine:
    __slots__ = ("_compares", "decode", "encode", "read", "values", "write")

    def __init__(self, type: Any) -> None:
        self.encode = self.write = msgspec.json.Encoder(enc_hook=_model_out).encode
        self.decode = msgspec.json.Decoder(type, dec_hook=_model_in).decode
        self.read = msgspec.json.Decoder().decode
        self.values = partial(msgspec.to_builtins, builtin_types=(msgspec.Raw,), enc_hook=_model_out)
        self._compares = _compares_exactly(type)

    def reads_back(self, payload: Any, data: bytes, /) -> bool:
        try:
            if not self._compares or self.decode(data) != payload:
                return False
            # Integers beyond 64 bits are equal, but MessagePack has none.
            _pack(payload)
            return True
        except (TypeError, ValueError, OverflowError, RecursionError):
            return False


class _PydanticEngine:
    __slots__ = ("_adapter", "_from_json", "_to_json")

    def __init__(self, type: Any) -> None:
        from pydantic import TypeAdapter
        from pydantic_core import from_json, to_json

        self._adapter: TypeAdapter[Any] = TypeAdapter(type)
        self._from_json = from_json
        self._to_json = to_json

    def encode(self, payload: Any, /) -> bytes:
        return self._adapter.dump_json(payload, by_alias=True, warnings="error")

    def decode(self, data: bytes, /) -> Any:
        return self._adapter.validate_json(data)

    def read(self, data: bytes, /) -> Any:
        return self._from_json(data, allow_inf_nan=False)

    def write(self, value: Any, /) -> bytes:
        return self._to_json(value)

    def values(self, payload: Any, /) -> Any:
        return self._adapter.dump_python(payload, by_alias=True, warnings=False)

    def reads_back(self, payload: Any, data: bytes, /) -> bool:
        return False


def _model_in(type: Any, value: Any) -> Any:
    """A pydantic model within what msgspec decodes."""
    if not mentions_pydantic(type):
        return value
    try:
        return type.model_validate_json(msgspec.json.encode(value))
    except ValueError as error:
        raise ValueError(reason_of(error)) from error


def _model_out(value: Any) -> Any:
    if not mentions_pydantic(type(value)):
        raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")
    return value.model_dump(mode="json", by_alias=True)


_pack = msgspec.msgpack.Encoder().encode

_INEXACT = (
    # Their equality may leave something out.
    msgspec.inspect.DataclassType,
    msgspec.inspect.NamedTupleType,
    msgspec.inspect.CustomType,
    # JSON in which a name may be given twice.
    msgspec.inspect.RawType,
)


def _refuse_unreadable(engine: _Engine, payload: object, data: bytes) -> None:
    """Refuse what JSON cannot carry, though the writer wrote something: readers fail on it, or get another value.

    :raises ValueError, OverflowError, RecursionError: the data cannot be read back, or not as what the payload was.
    """
    plain = engine.read(data)
    # The reader keeps one value of each name, so the same writer then writes less. A `msgspec.Raw` may differ, too.
    if len(engine.write(plain)) != len(data):
        json.loads(data, object_pairs_hook=_refuse_repeated)
    try:
        _pack(plain)
    except OverflowError:
        raise ValueError("an integer is beyond 64 bits, which many readers cannot take; make it a str") from None
    # Both writers make null of NaN.
    if b"null" in data:
        values = engine.values(payload)
        wrong = next((each for each in _scalars(values) if isinstance(each, float) and not isfinite(each)), None)
        if wrong is not None and _nulls(plain) > _nulls(values):
            raise ValueError(f"{wrong} is no JSON number; use None")


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise ValueError(f"the name {name!r} is given twice")
        seen.add(name)


def _nulls(value: Any) -> int:
    return sum(each is None for each in _scalars(value))


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = cast("Mapping[Any, Any]", value).values()
    elif not isinstance(value, (list, tuple, set, frozenset, deque)):
        yield value
        return
    for each in cast("Iterable[Any]", value):
        yield from _scalars(each)


def _compares_exactly(type: Any) -> bool:
    """Whether values of the type are equal only if everything in them is, and no name is in them twice."""
    todo: list[object] = [msgspec.inspect.type_info(type)]
    seen = set[int]()
    while todo:
        each = todo.pop()
        if isinstance(each, tuple):
            todo += cast("tuple[object, ...]", each)
        elif isinstance(each, (msgspec.inspect.Type, msgspec.inspect.Field)) and id(each) not in seen:
            seen.add(id(each))
            if isinstance(each, _INEXACT):
                return False
            if isinstance(each, msgspec.inspect.StructType):
                cls = get_origin(each.cls) or each.cls
                if cls.__eq__ is not msgspec.Struct.__eq__:
                    return False
            todo += [getattr(each, name) for name in each.__struct_fields__]
    return True


if TYPE_CHECKING:
    _codec: Codec[int] = Json(int)
