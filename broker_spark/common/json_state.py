"""Parses state that was stored as JSON. Errors say what is wrong without quoting the contents. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from reprlib import Repr
from typing import Any, Final, cast

from broker.errors import ConfigurationError

__all__ = ["check_source", "parse_object", "shown"]

_LONGEST: Final = 60
"""Characters of a value that an error shows."""
_repr: Final = Repr()
_repr.maxstring = _repr.maxother = _LONGEST


def shown(value: object) -> str:
    """A value for an error, shortened in the middle."""
    return _repr.repr(value)


def parse_object(text: bytes | str, what: str, advice: str) -> dict[str, Any]:
    """Parse a JSON object.

    :param what: its name in errors, such as "The file spool.json".
    :param advice: the fix.
    :raises ConfigurationError: it is not an object; the error says what is wrong and where.
    """
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{what} is incomplete: {_reason(text, error)}", advice=advice) from None
    if not isinstance(found, dict):
        raise ConfigurationError(f"{what} is incomplete: it holds {_kind(found)} instead of an object", advice=advice)
    return cast("dict[str, Any]", found)


def check_source(given: object, source: str, version: int, advice: str) -> None:
    """:raises ConfigurationError: another kind of source wrote these positions, or another version of this one."""
    # Some sources keep a number.
    positions = cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else None
    if positions is None or positions.get("source") != source:
        whose = _kind(cast("object", given)) if positions is None else _describe_owner(positions)
        raise ConfigurationError(
            f"The checkpoint holds the positions of another kind of source: {whose}", advice=advice
        )
    if (found := positions.get("version")) != version:
        raise ConfigurationError(
            f"The checkpoint was written by another version of broker_spark: {found!r}", advice=advice
        )


def _describe_owner(positions: Mapping[str, Any]) -> str:
    """The owner of foreign positions."""
    if isinstance(positions.get("source"), str):
        return f"of source {shown(positions['source'])}"
    if positions and all(isinstance(each, Mapping) for each in positions.values()):
        return f"Spark's own of Kafka, of {shown(', '.join(positions))}"
    return f"with {shown(', '.join(positions))}" if positions else "empty"


def _kind(found: object) -> str:
    if isinstance(found, bool) or found is None:
        return "null" if found is None else "a truth value"
    if isinstance(found, int | float):
        return "a number"
    return "text" if isinstance(found, str) else "a list"


def _reason(text: bytes | str, error: Exception) -> str:
    if not text.strip():
        return "it is empty"
    if isinstance(error, json.JSONDecodeError):
        if error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated"):
            return f"it ends after {len(error.doc)} characters, in the middle of its JSON"
        return f"it is not JSON at line {error.lineno}, character {error.colno} ({error.msg})"
    return "it is not UTF-8 text" if isinstance(error, UnicodeError) else "it nests too deeply"
