"""What messages and records share, and how a backend shows the lazy part of either. No state, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

__all__ = [
    "DEAD_LETTER_PREFIX",
    "NO_ATTRIBUTES",
    "RESERVED_PREFIX",
    "RETRY_LETTER_PREFIX",
    "UNSET",
    "Envelope",
    "Place",
    "TellsPlace",
    "View",
    "brief",
    "is_letter",
]

RESERVED_PREFIX: Final = "anybroker-"
"""Attributes under this prefix carry what a broker has no place for (key, times); users never see or set them."""
DEAD_LETTER_PREFIX: Final = "dead-letter-"
"""Attributes under this prefix tell why and whence a dead letter came; `redrive` removes them. Users set none."""
RETRY_LETTER_PREFIX: Final = "retry-letter-"
"""Attributes under this prefix tell when a message on a retry topic is due, and whence it came. Users set none."""

_OF_DEAD_LETTERS: Final = f"{DEAD_LETTER_PREFIX}topic"
_OF_RETRY_LETTERS: Final = f"{RETRY_LETTER_PREFIX}topic"

NO_ATTRIBUTES: Final[Mapping[str, str]] = MappingProxyType({})


class _Unset:
    __slots__ = ()


UNSET: Final = _Unset()


class Envelope(Protocol):
    """What a Message and a Record have in common."""

    @property
    def topic(self) -> str: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def data(self) -> bytes | None: ...
    @property
    def attributes(self) -> Mapping[str, str]: ...
    @property
    def publish_time(self) -> datetime | None: ...
    @property
    def broker_time(self) -> datetime | None: ...
    @property
    def native(self) -> Any: ...


class View(Protocol):
    """How a backend shows the lazy part of its own raw messages; one stateless object for all of them."""

    def id(self, raw: Any, /) -> str: ...
    def key(self, raw: Any, /) -> bytes | None: ...
    def attributes(self, raw: Any, /) -> Mapping[str, str]: ...
    def publish_time(self, raw: Any, /) -> datetime | None: ...
    def broker_time(self, raw: Any, /) -> datetime | None: ...
    def delivery_attempt(self, raw: Any, /) -> int | None: ...
    def native(self, raw: Any, /) -> Any: ...


class Place(NamedTuple):
    """Where a message lay first in the log of its topic.

    :ivar partition: None where the broker has none, or does not tell it with a message.
    """

    partition: int | None
    offset: int


@runtime_checkable
class TellsPlace(Protocol):
    """A view that knows where its messages lay first; optional."""

    def place(self, raw: Any, /) -> Place | None: ...


def is_letter(attributes: Mapping[str, str]) -> bool:
    """Whether they are those of a dead letter or of a message on a retry topic: every one of these tells its topic."""
    return _OF_DEAD_LETTERS in attributes or _OF_RETRY_LETTERS in attributes


def brief(data: bytes | None) -> str:
    """A body as it is shown to people."""
    return repr(data) if data is None or len(data) <= 32 else f"{data[:32]!r}… ({len(data)} bytes)"
