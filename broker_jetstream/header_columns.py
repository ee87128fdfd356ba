"""What the headers of many messages tell, as columns: each block is read once. Pure; safe from any thread.

A block as our publishers write it is read here; one that has anything else is shown by the view, whose words count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from broker.driver import NO_ATTRIBUTES
from broker_jetstream.header_values import ENCODED_ID
from broker_jetstream.times import microseconds

__all__ = ["HeaderColumns", "header_columns"]

_KEY: Final = b"anybroker-key"
_ID: Final = b"Nats-Msg-Id"
_TIME: Final = b"anybroker-time"
_OURS: Final = b"anybroker-"
_SERVERS: Final = b"nats-"


class HeaderColumns(NamedTuple):
    """One of each for each message.

    :ivar publish_times: microseconds since 1970, or None.
    """

    ids: list[str]
    keys: list[bytes | None]
    attributes: list[Mapping[str, str]]
    publish_times: list[int | None]


class _View(Protocol):
    def id(self, raw: Any, /) -> str: ...
    def key(self, raw: Any, /) -> bytes | None: ...
    def attributes(self, raw: Any, /) -> Mapping[str, str]: ...
    def publish_times(self, raws: Sequence[Any], /) -> list[int | None]: ...


def header_columns(raws: Sequence[Any], view: _View) -> HeaderColumns:
    """Read the headers of messages.

    :param view: shows those whose headers are not as our publishers write them.
    """
    ids: list[str] = []
    keys: list[bytes | None] = []
    shown: list[Mapping[str, str]] = []
    times: list[int | None] = []
    for raw in raws:
        read = _read(raw.block)
        if read is None:
            ids.append(view.id(raw))
            keys.append(view.key(raw))
            shown.append(view.attributes(raw))
            times += view.publish_times((raw,))
            continue
        identity, key, attributes, time = read
        ids.append(view.id(raw) if identity is None else identity)
        keys.append(key)
        shown.append(MappingProxyType(attributes) if attributes else NO_ATTRIBUTES)
        times.append(None if time is None else microseconds(time))
    return HeaderColumns(ids, keys, shown, times)


def _read(block: bytes) -> tuple[str | None, bytes | None, dict[str, str] | None, bytes | None] | None:
    """The id if it has one, the key, the attributes and the time; None if it has to be read with more care."""
    identity: str | None = None
    key: bytes | None = None
    time: bytes | None = None
    attributes: dict[str, str] | None = None
    for line in block.split(b"\r\n")[1:-2]:
        name, colon, value = line.partition(b": ")
        if name == _KEY and key is None:
            key = value
        elif name == _ID and identity is None and value and not value.startswith(ENCODED_ID):
            identity = value.decode("utf-8", "replace")
        elif name == _TIME and time is None:
            time = value
        elif name[:10] == _OURS or name[:5].lower() == _SERVERS or not _is_attribute(name, colon, value):
            return None
        else:
            if attributes is None:
                attributes = {}
            try:
                # The first of several values is shown, as the view does.
                attributes.setdefault(name.decode(), value.decode())
            except UnicodeDecodeError:
                return None
    return identity, key, attributes, time


def _is_attribute(name: bytes, colon: bytes, value: bytes) -> bool:
    """Whether a line is an attribute to the letter."""
    return bool(colon and name) and b":" not in name and value == value.strip(b" \t")
