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
    "truncated": (lambda data: data[: len(data) // 2], "The value is not JSON"),
    "wrong type": (_with(departure_delay="late"), 'departure_delay is "late", and bigint is due'),
    "missing field": (_without("carrier"), "carrier is missing or null"),
    "null field": (_with(leg=None), "leg is missing or null"),
    "unknown airport": (_with(origin="BOS"), 'origin is "BOS", and one of "EWR", "JFK", "LGA" is due'),
    "no time": (_with(scheduled="at noon"), 'scheduled is "at noon", and timestamp is due'),
    "too large": (_with(number=10**30), f"number is {10**30}, and bigint is due"),
    "not UTF-8": (lambda data: data.replace(b'"carrier":"', b'"carrier":"\xff'), "The value is no text in UTF-8"),
    "two in one": (lambda data: data + data, "The value is another JSON than the class has"),
    "a list": (lambda data: b"[" + data + b"]", "The value is another JSON than the class has"),
    "empty": (lambda _: b"", "The value is not JSON"),
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
        yield Corrupted(flight.number, flight.aircraft, kind, spoil(FLIGHT_JSON.encode(flight) or b""), reason)
