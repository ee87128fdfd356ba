"""What messages and records share: `Envelope`, `Batch`, and `View`, through which a backend reads its raw messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar, overload, runtime_checkable

__all__ = [
    "DEAD_LETTER_PREFIX",
    "NO_ATTRIBUTES",
    "REDRIVEN_SUFFIX",
    "RESERVED_PREFIX",
    "RESERVED_PREFIXES",
    "RETRY_LETTER_PREFIX",
    "UNSET",
    "Batch",
    "Envelope",
    "HasGivenId",
    "HasPlace",
    "Place",
    "TopicPartition",
    "View",
    "brief",
    "given_id",
    "is_letter",
    "reserved_prefixes",
    "shown_attributes",
]


RESERVED_PREFIX: Final = "anybroker-"
"""Prefix of attributes for fields that a broker lacks (key, times). Applications never see or set them."""
DEAD_LETTER_PREFIX: Final = "dead-letter-"
"""Prefix of the attributes of a dead letter: its reason and origin. `redrive` removes them. Reserved."""
RETRY_LETTER_PREFIX: Final = "retry-letter-"
"""Prefix of the attributes of a message on a retry topic: its due time and origin. Reserved."""

RESERVED_PREFIXES: Final = (RESERVED_PREFIX, DEAD_LETTER_PREFIX, RETRY_LETTER_PREFIX)

_OF_DEAD_LETTERS: Final = f"{DEAD_LETTER_PREFIX}topic"
_OF_RETRY_LETTERS: Final = f"{RETRY_LETTER_PREFIX}topic"
_OF_LETTERS: Final = {DEAD_LETTER_PREFIX: _OF_DEAD_LETTERS, RETRY_LETTER_PREFIX: _OF_RETRY_LETTERS}

NO_ATTRIBUTES: Final[Mapping[str, str]] = MappingProxyType({})

REDRIVEN_SUFFIX: Final = re.compile(r"-r[0-9a-f]{16}$")
"""The end of the id that a redrive gives to a message."""


class _Unset:
    __slots__ = ()


UNSET: Final = _Unset()


class Envelope(Protocol):
    """The attributes that `Message` and `Record` share."""

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
    """Reads the attributes of a backend's raw messages on demand. One stateless object serves all messages."""

    def id(self, raw: Any, /) -> str: ...
    def key(self, raw: Any, /) -> bytes | None: ...
    def attributes(self, raw: Any, /) -> Mapping[str, str]: ...
    def publish_time(self, raw: Any, /) -> datetime | None: ...
    def broker_time(self, raw: Any, /) -> datetime | None: ...
    def delivery_attempt(self, raw: Any, /) -> int | None: ...
    def native(self, raw: Any, /) -> Any: ...


class TopicPartition(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int


class Place(NamedTuple):
    """The original position of a message in the log of its topic.

    :ivar partition: None if the broker has no partitions, or does not report them with a message.
    """

    partition: int | None
    offset: int


@runtime_checkable
class HasPlace(Protocol):
    """A `View` that knows the original positions of its messages; optional."""

    def place(self, raw: Any, /) -> Place | None: ...


@runtime_checkable
class HasGivenId(Protocol):
    """A `View` that tells the ids that publishers gave from those that the backend or its broker made. Without it, all
    ids pass for given ones."""

    def given_id(self, raw: Any, /) -> str | None: ...


def given_id(view: View, raw: Any) -> str | None:
    """The id that the publisher gave; None if the SDK or the broker made it. A copy may have no other id: a broker
    that deduplicates would drop it."""
    found = view.given_id(raw) if isinstance(view, HasGivenId) else view.id(raw)
    if not found or REDRIVEN_SUFFIX.search(found) or is_letter(view.attributes(raw)):
        return None
    return found


def is_letter(attributes: Mapping[str, str]) -> bool:
    """Whether the attributes are those of a dead letter or of a message on a retry topic."""
    return _OF_DEAD_LETTERS in attributes or _OF_RETRY_LETTERS in attributes


def reserved_prefixes(attributes: Mapping[str, str]) -> tuple[str, ...]:
    """The prefixes that no name among these attributes may have: a letter has its own, and keeps it when forwarded."""
    return tuple([prefix for prefix in RESERVED_PREFIXES if _OF_LETTERS.get(prefix) not in attributes])


def shown_attributes(found: dict[str, str]) -> Mapping[str, str]:
    """The attributes that consumers see: without empty and reserved names, which any foreign producer may write.

    `OutboundMessage` takes the result, so that every message can be forwarded and dead-lettered.
    """
    for name in found:
        if not name or name.startswith(RESERVED_PREFIXES):
            reserved = reserved_prefixes(found)
            found = {name: text for name, text in found.items() if name and not name.startswith(reserved)}
            break
    return MappingProxyType(found) if found else NO_ATTRIBUTES


def brief(data: bytes | None) -> str:
    """A body, shortened for people."""
    return repr(data) if data is None or len(data) <= 32 else f"{data[:32]!r}… ({len(data)} bytes)"


S = TypeVar("S")


class Batch(Sequence[S], Generic[S]):
    """An immutable sequence of messages or records. A slice is a plain sequence. Any thread may read a batch."""

    __slots__ = ("_items",)

    def __init__(self, items: Sequence[S]) -> None:
        self._items = items

    @overload
    def __getitem__(self, index: int) -> S: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[S]: ...
    def __getitem__(self, index: int | slice) -> S | Sequence[S]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[S]:
        return iter(self._items)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._items)}>"
