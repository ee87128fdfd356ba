"""Writes chunks of messages to a log in a given order, which no client supports.

It speaks the needed part of Pulsar's binary protocol: a client's producer publishes the chunks of a message without
interruption, and several producers interleave theirs at random. Here an entry has a few bytes, whatever the broker's
limit.
"""

from __future__ import annotations

import socket
from collections import Counter
from itertools import count
from time import time
from types import TracebackType
from typing import Final, Self

__all__ = ["ChunkWriter"]

_CONNECT: Final = 2
_CONNECTED: Final = 3
_PRODUCER: Final = 5
_SEND: Final = 6
_SEND_RECEIPT: Final = 7
_PRODUCER_SUCCESS: Final = 17
_PING: Final = 18
_PONG: Final = 19
_VERSION: Final = 19
_SECONDS: Final = 20.0


def _number(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))


def _message(fields: dict[int, int | str | bytes]) -> bytes:
    """A protobuf message from field numbers and values."""
    found = b""
    for number, value in fields.items():
        if isinstance(value, int):
            found += _number(number << 3) + _number(value)
        else:
            content = value.encode() if isinstance(value, str) else value
            found += _number(number << 3 | 2) + _number(len(content)) + content
    return found


def _sized(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


class ChunkWriter:
    """One producer of a log that the broker has loaded; used by one thread."""

    def __init__(self, port: int, log: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=_SECONDS)
        self._file = self._socket.makefile("rb")
        self._sequence = count()
        self._ask(_CONNECT, {1: "anybroker-tests", 4: _VERSION}, _CONNECTED)
        self._ask(_PRODUCER, {1: log, 2: 0, 3: 0}, _PRODUCER_SUCCESS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._socket.close()

    def write(self, layout: str, start: int = 0, stop: int | None = None) -> None:
        """Write one entry per character: equal characters are the chunks of one message, in order.

        A dot is a message without chunks; a capital letter is a message whose last chunk is missing.

        :param start: the first entry of the layout to write; those before are written.
        :param stop: the entry before which to end.
        """
        sizes, come = Counter(layout), Counter(layout[:start])
        for each in layout[start:stop]:
            total = sizes[each] + each.isupper()
            self._publish(each, {} if each == "." else {26: each, 27: total, 28: total, 29: come[each]})
            come[each] += 1

    def _publish(self, body: str, chunk: dict[int, int | str | bytes]) -> None:
        sequence = next(self._sequence)
        metadata = _message({1: "chunks", 2: sequence, 3: round(time() * 1000), **chunk})
        self._ask(_SEND, {1: 0, 2: sequence}, _SEND_RECEIPT, _sized(metadata) + body.encode())

    def _ask(self, kind: int, fields: dict[int, int | str | bytes], answer: int, next_position: bytes = b"") -> None:
        self._socket.sendall(_sized(_sized(_message({1: kind, kind: _message(fields)})) + next_position))
        while True:
            size = int.from_bytes(self._file.read(4), "big")
            # The type is the first field of a command, and below 128.
            frame = self._file.read(size)[5:]
            if frame[0] == answer:
                return
            assert frame[0] == _PING, frame
            self._socket.sendall(_sized(_sized(_message({1: _PONG, _PONG: b""}))))
