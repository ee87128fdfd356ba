"""Start and end positions of a read, parsed from the text of an option. Pure.

    earliest | latest | 2026-01-31T12:00:00+00:00 | {"0": 17, "1": "latest"} | {"orders": {"0": 17}, "refunds": {…}}

A time means the first message with a broker time at or after it. An offset is the next one to read, so an end offset is
exclusive. A partition or topic that the object does not name is read from its earliest to its latest message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, cast

from broker.errors import ConfigurationError
from broker_spark.common.json_state import parse_object, shown

__all__ = ["Bound", "Position", "parse_position"]

Bound = Literal["earliest", "latest"]

_DIGITS: Final = 9
"""Most digits of a partition number."""
_TAKES: Final = (
    'It takes "earliest", "latest", a time such as 2026-01-31T12:00:00+00:00, or offsets as {"0": 17} '
    'or {"topic": {"0": 17}}'
)


@dataclass(frozen=True, slots=True)
class Position:
    """A start or an end.

    :ivar default: the position of all partitions that `offsets` does not name.
    :ivar offsets: by topic, or "" for the only topic, and by partition.
    """

    default: Bound | datetime
    offsets: Mapping[str, Mapping[int, int | Bound]] = field(default_factory=dict[str, Mapping[int, "int | Bound"]])

    def of(self, topic: str) -> Mapping[int, int | Bound]:
        """The positions of the topic's partitions."""
        return self.offsets.get(topic, self.offsets.get("", {}))

    @property
    def moves(self) -> bool:
        """Whether the position changes with each new message."""
        return self.default == "latest" or any("latest" in places.values() for places in self.offsets.values())


def parse_position(name: str, text: str, default: Bound) -> Position:
    """Parse a start or end position.

    :param name: the name of the option, for the error.
    :raises ConfigurationError: the text is not a position.
    """
    text = text.strip()
    if text in {"earliest", "latest"}:
        return Position(cast("Bound", text))
    if text.startswith("{"):
        return Position(default, _offsets(name, text))
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(f"Option {name} is {shown(text)}", advice=_TAKES) from None
    if time.tzinfo is None:
        raise ConfigurationError(
            f"Option {name} is {text!r}, which has no timezone",
            advice=f"Add the offset, for instance {time.isoformat()}+00:00 for UTC",
        )
    return Position(time)


def _offsets(name: str, text: str) -> dict[str, Mapping[int, int | Bound]]:
    found = parse_object(text, f"Option {name}", _TAKES)
    if not found:
        raise ConfigurationError(f"Option {name} names no partition", advice=_TAKES)
    if all(map(_is_number, found)):
        return {"": _partitions(name, found)}
    for topic, partitions in found.items():
        if not isinstance(partitions, dict):
            raise ConfigurationError(f"Option {name} has {shown(partitions)} for {shown(topic)}", advice=_TAKES)
    return {topic: _partitions(name, partitions) for topic, partitions in found.items()}


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _DIGITS


def _partitions(name: str, given: Mapping[str, Any]) -> dict[int, int | Bound]:
    found: dict[int, int | Bound] = {}
    for key, value in given.items():
        fits = value in {"earliest", "latest"} if isinstance(value, str) else type(value) is int and value >= 0
        if not _is_number(key) or not fits:
            raise ConfigurationError(
                f"Option {name} has {shown(value)} for partition {shown(key)}",
                advice='Partitions are numbers, and each has an offset of 0 or more, "earliest" or "latest"',
            )
        found[int(key)] = cast("int | Bound", value)
    return found
