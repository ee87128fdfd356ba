"""A reader of markers that knows V1 and nothing else, written from the description of kafka-mq-go's protocol.

It shares no code with the SDK. As any reader of protobuf it skips fields that it does not know; it looks at no version,
as kafka-mq-go's does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["END", "FIELDS", "KEEPALIVE", "START", "V1Reader", "fields_of"]

START, END, KEEPALIVE = range(3)
FIELDS = {"version": 1, "type": 2, "message_id": 3, "redeliver_after_ms": 4, "key": 5, "value": 6}
_VARINT, _BYTES = 0, 2

Place = tuple[int, int]
"""Partition and offset of a message."""


def fields_of(data: bytes) -> dict[int, int | bytes]:
    """The fields of a protobuf message by their numbers; of several of one number the last."""
    found: dict[int, int | bytes] = {}
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        value, at = _varint(data, at)
        if tag & 7 == _BYTES:
            found[tag >> 3], at = data[at : at + value], at + value
        else:
            assert tag & 7 == _VARINT
            found[tag >> 3] = value
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


@dataclass
class V1Reader:
    """:ivar open: the messages that were started and have not ended, with key and value.
    :ivar kinds: of the markers, in their order.
    """

    open: dict[Place, tuple[bytes, bytes]] = field(default_factory=dict[Place, tuple[bytes, bytes]])
    kinds: list[int] = field(default_factory=list[int])

    def read(self, markers: Iterable[bytes]) -> V1Reader:
        for data in markers:
            marker = fields_of(data)
            kind, key, value = marker.get(2, START), marker.get(5, b""), marker.get(6, b"")
            place = marker[3]
            assert isinstance(kind, int)
            assert isinstance(place, bytes)
            assert isinstance(key, bytes)
            assert isinstance(value, bytes)
            where = fields_of(place)
            partition, offset = where.get(1, 0), where.get(2, 0)
            assert isinstance(partition, int)
            assert isinstance(offset, int)
            self.kinds.append(kind)
            if kind == START:
                self.open[partition, offset] = key, value
            elif kind == END:
                self.open.pop((partition, offset), None)
        return self
