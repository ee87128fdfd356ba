"""The metadata file of a spool: its id and the messages that it holds. Blocking; any thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from broker.errors import ConfigurationError
from broker_spark.common.files import Files
from broker_spark.common.json_state import parse_object

__all__ = ["METADATA", "VERSION", "check_metadata", "read_metadata"]

METADATA: Final = "spool.json"
VERSION: Final = 1
_ADVICE: Final = (
    "Restore the file from a copy. A new spool would not have the messages that this one still holds: they are acked"
)


def check_metadata(files: Files, place: str, what: Mapping[str, Any]) -> str | None:
    """The id of the spool; None if it is new.

    :param what: the metadata that the spool must have.
    :raises ConfigurationError: it differs, is of another version, or incomplete.
    """
    try:
        found = read_metadata(files, place)
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


def read_metadata(files: Files, place: str) -> dict[str, Any]:
    """The metadata of a spool.

    :raises FileNotFoundError: there is no spool.
    :raises ConfigurationError: the file is incomplete.
    """
    found = parse_object(files.read(METADATA), f"{METADATA} of the spool {place}", _ADVICE)
    if found.get("version") == VERSION and not isinstance(found.get("spool"), str):
        raise ConfigurationError(f"{METADATA} of the spool {place} is incomplete: it has no 'spool'", advice=_ADVICE)
    return found


def _shown(value: Any) -> str:
    return ", ".join(cast("list[str]", value)) if isinstance(value, list) else "none" if value is None else str(value)
