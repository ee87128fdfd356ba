"""Corrupted copies of flights: truncated, without a field, and so on. Pure; the same copies every time.

They are published in addition to the flights, so the correct data stays complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from examples.flights.data import Flight
from examples.flights.topics import FLIGHT_JSON

__all__ = ["KINDS", "Corrupted", "corrupted"]

_EVERY: Final = 997
_AT_LEAST: Final = 40

Spoil = Callable[[bytes], bytes | None]


@dataclass(frozen=True, slots=True)
class Corrupted:
    """A message that does not decode as a flight.

    :ivar after: the number of the flight that it copies and follows.
    :ivar kind: of corruption.
    :ivar data: None is a message without a value.
    :ivar reason: the expected reason of its dead letter.
    """

    after: int
    key: str | None
    kind: str
    data: bytes | None
    reason: str

    @property
    def id(self) -> str:
        return f"corrupted-{self.after}"


def _with(**changes: Any) -> Spoil:
    return lambda data: json.dumps(json.loads(data) | changes).encode()


def _without(name: str) -> Spoil:
    return lambda data: json.dumps({key: value for key, value in json.loads(data).items() if key != name}).encode()


KINDS: Final[dict[str, tuple[Spoil, str]]] = {
    "truncated": (lambda data: data[: len(data) // 2], "Input data was truncated"),
    "wrong type": (_with(departure_delay="late"), "Expected `int | null`, got `str` - at `$.departure_delay`"),
    "missing field": (_without("carrier"), "Object missing required field `carrier`"),
    "null field": (_with(leg=None), "Expected `int`, got `null` - at `$.leg`"),
    "unknown airport": (_with(origin="BOS"), "Invalid enum value 'BOS' - at `$.origin`"),
    "no time": (_with(scheduled="at noon"), "Invalid RFC3339 encoded datetime - at `$.scheduled`"),
    "too large": (_with(number=10**30), f"A column of bigint cannot hold {10**30} - at `$.number`"),
    "not UTF-8": (
        lambda data: data.replace(b'"carrier":"', b'"carrier":"\xff'),
        "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
    ),
    "two in one": (lambda data: data + data, "JSON is malformed: trailing characters (byte {behind})"),
    "a list": (lambda data: b"[" + data + b"]", "Expected `object`, got `array`"),
    "empty": (lambda _: b"", "Input data was truncated"),
    "no value": (lambda _: None, "The value is null"),
}
"""How to corrupt a flight's JSON, and the expected reason of the dead letter, by kind."""


def corrupted(flights: Sequence[Flight]) -> Iterator[Corrupted]:
    """The corrupted copies in order: all kinds in turn, spread over all flights."""
    every = max(1, min(_EVERY, len(flights) // _AT_LEAST))
    kinds = list(KINDS.items())
    for turn, index in enumerate(range(every - 1, len(flights), every)):
        kind, (spoil, reason) = kinds[turn % len(kinds)]
        flight = flights[index]
        data = FLIGHT_JSON.encode(flight) or b""
        reason = reason.format(behind=len(data) + 1)
        yield Corrupted(flight.number, flight.aircraft, kind, spoil(data), reason)
