"""Sends a codec with its class to Spark's workers, also one of a script or a notebook, which they cannot import."""

from __future__ import annotations

import dataclasses
import io
import pickle
from typing import Any, Final, cast, get_type_hints

import msgspec
from pyspark.cloudpickle import CloudPickler

from broker.checks import mentions_pydantic
from broker.codecs import is_protobuf
from broker.errors import ConfigurationError

__all__ = ["packed"]

_CACHE: Final = "__msgspec_cache__"
_HOOKS: Final = ("__post_init__", "__attrs_pre_init__", "__attrs_post_init__")
_KEPT: Final = ("tag", "tag_field", "array_like", "forbid_unknown_fields")
"""What a struct of the same fields has of a struct's own settings."""
_BOUNDS: Final = ("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length", "tz")


def packed(codec: Any) -> bytes:
    """The codec pickled; a class that msgspec decodes becomes a struct of the same fields.

    A struct decodes in half the time of a dataclass, and pickle can send it. A class that runs code of its own when it
    is decoded stays as it is. A class that protoc generated is made again from its descriptor.

    :raises ConfigurationError: workers cannot import a class that has to stay as it is.
    """
    return _dumps(codec, _AsStructs)


def _dumps(value: object, pickler: type[_AsItIs]) -> bytes:
    file = io.BytesIO()
    made = pickler(file)
    made.dump(value)  # pyright: ignore[reportUnknownMemberType]
    for each in made.seen:
        _forget(each)
    return file.getvalue()


def _forget(kind: Any) -> None:
    """Take from a class what msgspec keeps in it: no pickle takes it, nor one of the user's own functions."""
    if _CACHE in vars(kind):
        delattr(kind, _CACHE)


class _AsItIs(CloudPickler):
    def __init__(self, file: io.BytesIO) -> None:
        CloudPickler.__init__(self, file)  # pyright: ignore[reportUnknownMemberType]
        self.seen: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            _forget(obj)
            self.seen.append(obj)
        return CloudPickler.reducer_override(self, obj)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


class _AsStructs(_AsItIs):
    def reducer_override(self, obj: Any) -> Any:
        kind: Any = obj if isinstance(obj, type) else type(obj)
        if mentions_pydantic(kind):
            return _as_it_is(obj)
        if is_protobuf(obj):
            descriptor = cast("Any", obj).DESCRIPTOR
            return _message_class, (_files_of(descriptor.file), descriptor.full_name)
        if kind is msgspec.Meta:
            return _meta, ({name: getattr(obj, name) for name in _BOUNDS},)
        if not _is_msgspecs(kind) or (_runs_code(kind) and _is_importable(kind)):
            return super().reducer_override(obj)
        if _runs_code(kind):
            raise ConfigurationError(
                f"Spark's workers cannot import {kind.__qualname__} of {kind.__module__}, which runs code when it is "
                "decoded",
                advice="Define it in a module",
            )
        if kind is obj:
            return _struct, _parts(kind)
        # The default of a field.
        return _made, (kind, {each.name: getattr(obj, each.name) for each in _fields(kind)})


class _Kept:
    """Its value, once it is unpickled."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __reduce__(self) -> Any:
        return _as_it_is(self._value)


def _as_it_is(value: object) -> Any:
    return pickle.loads, (_dumps(value, _AsItIs),)


def _is_msgspecs(kind: Any) -> bool:
    """Whether msgspec decodes it into a class of fields."""
    if kind is msgspec.Struct:
        return False
    return issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind) or hasattr(kind, "__attrs_attrs__")


def _runs_code(kind: Any) -> bool:
    return any(hasattr(kind, name) for name in _HOOKS) or any(
        each.validator is not None for each in getattr(kind, "__attrs_attrs__", ())
    )


def _is_importable(kind: Any) -> bool:
    return kind.__module__ != "__main__" and "<locals>" not in kind.__qualname__


def _fields(kind: Any) -> Any:
    return cast("Any", msgspec.inspect.type_info(kind)).fields


def _parts(kind: Any) -> tuple[Any, ...]:
    """The arguments of `_struct`."""
    hints = get_type_hints(kind, include_extras=True)
    # A default may be made by methods of the class.
    is_kept = _is_importable(kind)
    fields: list[tuple[str, Any, dict[str, Any]]] = []
    for each in _fields(kind):
        given: dict[str, Any] = {"name": each.encode_name}
        for name in ("default", "default_factory"):
            if (value := getattr(each, name)) is not msgspec.NODEFAULT:
                given[name] = _Kept(value) if is_kept else value
        fields.append((each.name, hints[each.name], given))
    config = getattr(kind, "__struct_config__", None)
    return kind.__name__, fields, {} if config is None else {name: getattr(config, name) for name in _KEPT}


def _struct(name: str, fields: list[tuple[str, Any, dict[str, Any]]], settings: dict[str, Any]) -> Any:
    made = [(field, hint, msgspec.field(**given)) for field, hint, given in fields]
    # Only by keyword can a field without a default follow one with a default.
    is_given = [len(given) > 1 for _, _, given in fields]
    late = is_given != sorted(is_given)
    return cast("Any", msgspec.defstruct)(name, made, gc=False, frozen=True, kw_only=late, **settings)


def _made(kind: Any, values: dict[str, Any]) -> Any:
    return kind(**values)


def _files_of(file: Any) -> list[bytes]:
    """The descriptors of a file and of all that it imports, those that others need first."""
    found: dict[str, bytes] = {}

    def add(each: Any) -> None:
        if each.name not in found:
            for other in each.dependencies:
                add(other)
            found[each.name] = each.serialized_pb

    add(file)
    return list(found.values())


def _message_class(files: list[bytes], name: str) -> Any:
    from google.protobuf import descriptor_pool, message_factory

    pool: Any = descriptor_pool.DescriptorPool()
    for each in files:
        pool.AddSerializedFile(each)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def _meta(bounds: dict[str, Any]) -> Any:
    return msgspec.Meta(**bounds)
