"""What an option, a field or an argument takes: one wording for every refusal, with name, value and mend. Pure.

The `is_` functions answer for any value and never raise; the `check_` functions raise ConfigurationError and nothing
else, whatever they are given.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, TypeGuard, get_origin

from broker.errors import ConfigurationError

__all__ = [
    "check_callable",
    "check_choice",
    "check_codec",
    "check_count",
    "check_flag",
    "check_patience",
    "check_seconds",
    "check_text",
    "check_time",
    "is_finite",
    "is_whole",
    "refused",
]

_LARGEST: Final = sys.float_info.max
"""The clock of the loop is a float, and an int may be larger than any."""


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is an int; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether it is an int or a float, and neither NaN nor infinite; a bool is none."""
    # Compared, since an int may be too large for the functions that take a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def refused(name: str, value: object, takes: str) -> ConfigurationError:
    """The error that names the option, its value, and what it takes."""
    return ConfigurationError(f"{name} is {value!r}", advice=f"It takes {takes}")


def check_count(name: str, value: object, *, optional: bool = False) -> None:
    """:raises ConfigurationError: it is no int of 1 or more, nor None where that is allowed."""
    if not (is_whole(value) and value >= 1) and not (optional and value is None):
        raise refused(name, value, "an int of 1 or more" + _or_none(optional))


def check_seconds(name: str, value: object, *, zero: bool = False, optional: bool = False) -> None:
    """:raises ConfigurationError: it is no finite time above 0 (or 0, where that is allowed), nor None likewise."""
    enough = is_finite(value) and (0 < value <= _LARGEST or (zero and value == 0))
    if not enough and not (optional and value is None):
        raise refused(name, value, ("seconds, 0 or more" if zero else "seconds above 0") + _or_none(optional))


def check_patience(name: str, value: object) -> None:
    """How long a call waits; what is below 0 is over at once, as in asyncio.

    :raises ConfigurationError: it is neither a number nor None.
    """
    if value is None or (isinstance(value, float) and not math.isnan(value)):
        return
    if not (is_whole(value) and -_LARGEST <= value <= _LARGEST):
        raise refused(name, value, "seconds, or None to wait for ever")


def check_flag(name: str, value: object, *, optional: bool = False) -> None:
    """:raises ConfigurationError: it is neither True nor False, nor None where that is allowed."""
    if not isinstance(value, bool) and not (optional and value is None):
        raise refused(name, value, "True or False" + _or_none(optional))


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """:raises ConfigurationError: it is none of these."""
    if not isinstance(value, str) or value not in choices:
        raise refused(name, value, " or ".join(f'"{choice}"' for choice in choices))


def check_text(name: str, value: object) -> None:
    """:raises ConfigurationError: it is no str."""
    if not isinstance(value, str):
        raise refused(name, value, "a str")


def check_callable(name: str, value: object, *, optional: bool = False) -> None:
    """:raises ConfigurationError: it cannot be called, and is not None where that is allowed."""
    if not callable(value) and not (optional and value is None):
        raise refused(name, value, "a function" + _or_none(optional))


def check_time(name: str, value: object) -> None:
    """:raises ConfigurationError: it is no datetime with a timezone."""
    if not isinstance(value, datetime):
        raise refused(name, value, "a datetime with a timezone")
    if value.tzinfo is None:
        raise ConfigurationError(f"{name} {value.isoformat()} has no timezone", advice="Use datetime(..., tzinfo=UTC)")


def check_codec(value: object) -> None:
    """:raises ConfigurationError: it is neither a codec nor None, or the class of one instead of an object."""
    if value is None:
        return
    made_by: Any = get_origin(value) or value
    if inspect.isclass(made_by):
        # A class whose two methods need no object is a codec as it is.
        methods = [inspect.getattr_static(made_by, name, None) for name in ("encode", "decode")]
        if not all(isinstance(method, staticmethod | classmethod) for method in methods):
            raise ConfigurationError(f"codec is the class {made_by.__name__}", advice=f"Write {_call(made_by, value)}")
    if not (callable(getattr(value, "encode", None)) and callable(getattr(value, "decode", None))):
        raise refused("codec", value, "an object with encode and decode, or None")


def _call(made_by: type, value: Any) -> str:
    """How to make an object of the class that was given, perhaps with types in brackets."""
    types = [getattr(one, "__name__", repr(one)) for one in getattr(value, "__args__", ())]
    return f"{made_by.__name__}({', '.join(types)})"


def _or_none(optional: bool) -> str:
    return ", or None" if optional else ""
