"""Checks of options and arguments. Every error names the option, its value and the values that it takes. Pure.

The `is_` functions accept any value and never raise; the `check_` functions raise nothing but ConfigurationError.
"""

from __future__ import annotations

import inspect
import math
import sys
import types
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, TypeGuard, Union, get_args, get_origin

from broker.errors import ConfigurationError

__all__ = [
    "admits_none",
    "check_accepts",
    "check_choice",
    "check_codec",
    "check_count",
    "check_flag",
    "check_patience",
    "check_rate",
    "check_seconds",
    "check_text",
    "check_time",
    "is_async",
    "is_finite",
    "is_whole",
    "mentions_pydantic",
    "name_of",
    "refused",
]

_NO_YIELD: Final = "Write it without yield"
_LARGEST: Final = sys.float_info.max
"""The event loop's clock is a float; an int may exceed its range."""


def is_whole(value: object) -> TypeGuard[int]:
    """Whether the value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether the value is an int or a finite float, and not a bool."""
    # math.isfinite raises OverflowError for a large int.
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def refused(name: str, value: object, takes: str) -> ConfigurationError:
    """The error that names an option, its value and the values that it takes."""
    return ConfigurationError(f"{name} is {value!r}", advice=f"It takes {takes}")


def check_count(name: str, value: object, *, optional: bool = False) -> None:
    """:raises ConfigurationError: the value is not an int of 1 or more (or None, if optional)."""
    if not (is_whole(value) and value >= 1) and not (optional and value is None):
        raise refused(name, value, "an int of 1 or more" + _or_none(optional))


def check_seconds(name: str, value: object, *, zero: bool = False, optional: bool = False) -> None:
    """:raises ConfigurationError: the value is not a finite number above 0 (or 0, or None, where allowed)."""
    enough = is_finite(value) and (0 < value <= _LARGEST or (zero and value == 0))
    if not enough and not (optional and value is None):
        raise refused(name, value, ("seconds, 0 or more" if zero else "seconds above 0") + _or_none(optional))


def check_rate(name: str, value: object) -> None:
    """:raises ConfigurationError: the value is neither None nor a finite number above 0."""
    if value is not None and not (is_finite(value) and 0 < value <= _LARGEST):
        raise refused(name, value, "a number per second above 0, or None")


def check_patience(name: str, value: object) -> None:
    """Check a timeout. A negative timeout ends at once, as in asyncio.

    :raises ConfigurationError: the value is neither a number nor None.
    """
    if value is None or (isinstance(value, float) and not math.isnan(value)):
        return
    if not (is_whole(value) and -_LARGEST <= value <= _LARGEST):
        raise refused(name, value, "seconds, or None to wait forever")


def check_flag(name: str, value: object, *, optional: bool = False) -> None:
    """:raises ConfigurationError: the value is not a bool (or None, if optional)."""
    if not isinstance(value, bool) and not (optional and value is None):
        raise refused(name, value, "True or False" + _or_none(optional))


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """:raises ConfigurationError: the value is not one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise refused(name, value, " or ".join(f'"{choice}"' for choice in choices))


def check_text(name: str, value: object) -> None:
    """:raises ConfigurationError: the value is not a str."""
    if not isinstance(value, str):
        raise refused(name, value, "a str")


def check_accepts(name: str, function: object, *arguments: str) -> None:
    """Check that a function can be called with these positional arguments, and that the call runs it.

    :param arguments: what each argument is, for the error.
    :raises ConfigurationError: it is not callable, has another signature, or is a generator function.
    """
    if not callable(function):
        raise refused(name, function, f"a function of {' and '.join(arguments)}")
    called = name_of(function)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(f"{name} {called} is a generator function: calling it runs nothing", advice=_NO_YIELD)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Some functions written in C have none.
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        shown = signature.replace(return_annotation=inspect.Signature.empty)
        raise ConfigurationError(
            f"{name} {called}{shown} cannot be called with {' and '.join(arguments)}: {error}",
            advice=f"It is called with {len(arguments)} positional argument{'s' * (len(arguments) > 1)}",
        ) from None


def name_of(function: object) -> str:
    """The name of a function, for logs and errors."""
    return getattr(function, "__qualname__", None) or repr(function)


def is_async(function: object) -> TypeGuard[Callable[..., Coroutine[Any, Any, Any]]]:
    """Whether calling the function returns a coroutine."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def check_time(name: str, value: object) -> None:
    """:raises ConfigurationError: the value is not a timezone-aware datetime."""
    if not isinstance(value, datetime):
        raise refused(name, value, "a datetime with a timezone")
    if value.tzinfo is None:
        raise ConfigurationError(f"{name} {value.isoformat()} has no timezone", advice="Use datetime(..., tzinfo=UTC)")


_PLAIN_CODEC: Final = ("encode", "decode")
_ENVELOPE_CODEC: Final = ("pack", "unpack")


def check_codec(value: object, *, envelopes: bool = True) -> None:
    """:param envelopes: an `EnvelopeCodec` will do.
    :raises ConfigurationError: the value is neither a codec nor None, or is a class where an instance is needed.
    """
    if value is None:
        return
    codec_class: Any = get_origin(value) or value
    # A class with two static or class methods is itself a codec.
    if inspect.isclass(codec_class) and not (
        _callable_on_class(codec_class, _PLAIN_CODEC) or _callable_on_class(codec_class, _ENVELOPE_CODEC)
    ):
        types = [getattr(one, "__name__", repr(one)) for one in getattr(value, "__args__", ())]
        name = codec_class.__name__
        raise ConfigurationError(f"codec is the class {name}", advice=f"Pass an instance: {name}({', '.join(types)})")
    if _has_methods(value, _PLAIN_CODEC) or (envelopes and _has_methods(value, _ENVELOPE_CODEC)):
        return
    others = ", one with pack and unpack" if envelopes else ""
    raise refused("codec", value, f"an object with encode and decode{others}, or None")


def _callable_on_class(codec_class: Any, names: tuple[str, str]) -> bool:
    methods = [inspect.getattr_static(codec_class, name, None) for name in names]
    return all(isinstance(method, staticmethod | classmethod) for method in methods)


def _has_methods(value: object, names: tuple[str, str]) -> bool:
    return all(callable(getattr(value, name, None)) for name in names)


def _or_none(optional: bool) -> str:
    return ", or None" if optional else ""


def admits_none(type: Any) -> bool:
    """Whether None is a value of the type."""
    if get_origin(type) in (Union, types.UnionType):
        return any(map(admits_none, get_args(type)))
    return type in (None, types.NoneType, Any)


def mentions_pydantic(type: Any) -> bool:
    """Whether the type is a pydantic model, or made of one."""
    return hasattr(type, "__pydantic_core_schema__") or any(map(mentions_pydantic, get_args(type)))
