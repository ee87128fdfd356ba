"""What a spool says of itself in its own file: which one it is, and which messages it is for. Blocking; any thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from broker.errors import ConfigurationError
from broker_spark.common.files import Files
from broker_spark.common.json_state import object_of

__all__ = ["VERSION", "WHAT", "check_what", "said"]

WHAT: Final = "spool.json"
"""The file that says which messages a spool is for."""
VERSION: Final = 1
_MEND: Final = (
    "Bring the file back from a copy. Without it nothing tells whose messages these are: a new spool does not have "
    "what this one still holds, which is acked"
)


def check_what(files: Files, place: str, what: Mapping[str, Any]) -> str | None:
    """The spool's id; None if it is new.

    :param what: which messages it has to be for.
    :raises ConfigurationError: it is of other messages, by another version, or not whole.
    """
    try:
        found = said(files, place)
    except FileNotFoundError:
        return None
    if found.get("version") != VERSION:
        raise ConfigurationError(
            f"The spool {place} was written by another version of broker_spark: {found.get('version')!r}",
            advice="Give this query a spool of its own",
        )
    for name, value in what.items():
        if found.get(name) != value:
            raise ConfigurationError(
                f"The spool {place} is for {name} {_shown(found.get(name))}, and this query is for {_shown(value)}",
                advice="Give this query a spool of its own",
            )
    return str(found["spool"])


def said(files: Files, place: str) -> dict[str, Any]:
    """What the spool says of itself.

    :raises FileNotFoundError: there is none.
    :raises ConfigurationError: it is not whole.
    """
    found = object_of(files.read(WHAT), f"{WHAT} of the spool {place}", _MEND)
    if found.get("version") == VERSION and not isinstance(found.get("spool"), str):
        raise ConfigurationError(f"{WHAT} of the spool {place} is not whole: it has no 'spool'", advice=_MEND)
    return found


def _shown(value: Any) -> str:
    return ", ".join(cast("list[str]", value)) if isinstance(value, list) else "none" if value is None else str(value)
