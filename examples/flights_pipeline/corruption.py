"""What is spoilt: copies of flights that were truncated, lost a field, and worse. Pure; the same ones every time.

They come beside the flights, not instead of them, so that what is right stays complete.
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
    """A message that no flight can be read from.

    :ivar after: the number of the flight that it is a copy of, and follows.
    :ivar kind: what was done to it.
    :ivar data: None is a message without a value.
    :ivar reason: what its dead letter has to say.
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
"""What is done to a flight's JSON, and what its dead letter has to say."""


def corrupted(flights: Sequence[Flight]) -> Iterator[Corrupted]:
    """The corrupted copies, by the flights that they follow: all kinds in turn, spread over all flights."""
    every = max(1, min(_EVERY, len(flights) // _AT_LEAST))
    kinds = list(KINDS.items())
    for turn, index in enumerate(range(every - 1, len(flights), every)):
        kind, (spoil, reason) = kinds[turn % len(kinds)]
        flight = flights[index]
        yield Corrupted(flight.number, flight.aircraft, kind, spoil(FLIGHT_JSON.encode(flight) or b""), reason)
