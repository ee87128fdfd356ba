"""The offset map: which records above a committed position are finished, as a text to be stored with the position.

Pure functions. The text is `abm1.<position>.<kind><base64>`: `b` is a set of bits, one for each offset from the
position on; `r` is the lengths of runs, by turns unfinished and finished, as base-128 numbers. The shorter of the two
is taken. What is no such text, or belongs to another position, is somebody else's and reads as nothing finished: to
repeat work is allowed, to leave it out is not.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

__all__ = ["LIMIT", "Encoded", "decode", "encode"]

LIMIT: Final = 4095
"""The longest text that a broker takes by default: one of `offset.metadata.max.bytes`, 4096, is refused."""
_MAGIC: Final = "abm1"
_LARGEST: Final = 2**63 - 1

Ranges = Sequence[tuple[int, int]]
"""Half-open, rising, apart from each other."""


class Encoded(NamedTuple):
    """:ivar text: empty when nothing is finished above the position, or nothing of it fits.
    :ivar fullness: how much of the limit all of it takes or would take; above 1, the highest offsets were left out.
    """

    text: str
    fullness: float


def encode(position: int, finished: Ranges, limit: int = LIMIT) -> Encoded:
    """The finished ranges above a position as a text of at most `limit` characters; the lowest are kept."""
    if not finished:
        return Encoded("", 0.0)
    head = f"{_MAGIC}.{position}."
    room = max(0, (limit - len(head) - 1) // 4 * 3)
    runs, bits = _runs(position, finished), (finished[-1][1] - position + 7) // 8
    needed = min(len(runs), bits)
    fullness = (len(head) + 1 + (needed + 2) // 3 * 4) / limit if limit > 0 else 2.0
    by_bits = _cut(finished, position + 8 * room)
    by_runs = _fitting(position, finished, room)
    if not by_bits and not by_runs:
        return Encoded("", max(fullness, 1.01))
    if needed <= room:
        by_bits = by_runs = finished
    more_bits = _count(by_bits) > _count(by_runs) or (by_bits is by_runs and bits < len(runs))
    body = _bits(position, by_bits) if more_bits else _runs(position, by_runs)
    return Encoded(f"{head}{'b' if more_bits else 'r'}{urlsafe_b64encode(body).decode()}", fullness)


def decode(position: int, text: str) -> list[tuple[int, int]]:
    """The finished ranges above a position; none if the text does not tell."""
    magic, _, rest = text.partition(".")
    base, _, body = rest.partition(".")
    if magic != _MAGIC or base != str(position) or not body or len(text) > 16 * LIMIT:
        return []
    try:
        data = urlsafe_b64decode(body[1:].encode("ascii"))
    except ValueError:
        return []
    try:
        ranges = list(_read_bits(position, data) if body[0] == "b" else _read_runs(position, data))
    except ValueError:
        return []
    return ranges if body[0] in "br" else []


def _bits(position: int, finished: Ranges) -> bytes:
    bits = 0
    for start, stop in finished:
        bits |= ((1 << (stop - start)) - 1) << (start - position)
    return bits.to_bytes((finished[-1][1] - position + 7) // 8, "little")


def _read_bits(position: int, data: bytes) -> Iterator[tuple[int, int]]:
    text = bin(int.from_bytes(data, "little"))[:1:-1]
    start = text.find("1")
    while start >= 0:
        stop = text.find("0", start)
        stop = len(text) if stop < 0 else stop
        yield position + start, position + stop
        start = text.find("1", stop)


def _runs(position: int, finished: Ranges) -> bytes:
    body = bytearray()
    at = position
    for start, stop in finished:
        _append(body, start - at)
        _append(body, stop - start)
        at = stop
    return bytes(body)


def _fitting(position: int, finished: Ranges, room: int) -> Ranges:
    """The lowest ranges whose runs fit."""
    body = bytearray()
    at = position
    for count, (start, stop) in enumerate(finished):
        _append(body, start - at)
        _append(body, stop - start)
        if len(body) > room:
            return finished[:count]
        at = stop
    return finished


def _append(body: bytearray, number: int) -> None:
    while number > 127:
        body.append(number & 127 | 128)
        number >>= 7
    body.append(number)


def _read_runs(position: int, data: bytes) -> Iterator[tuple[int, int]]:
    """:raises ValueError: it is cut off, or tells of offsets that cannot be."""
    numbers: list[int] = []
    number = shift = 0
    for byte in data:
        number |= (byte & 127) << shift
        if byte & 128:
            shift += 7
            continue
        numbers.append(number)
        number = shift = 0
    if shift or len(numbers) % 2:
        raise ValueError("cut off")
    at = position
    for gap, length in zip(numbers[::2], numbers[1::2], strict=True):
        start, at = at + gap, at + gap + length
        if not length or at > _LARGEST:
            raise ValueError("an empty run, or an offset beyond all")
        yield start, at


def _cut(finished: Ranges, stop: int) -> Ranges:
    """The part of the ranges below an offset."""
    return [(start, min(end, stop)) for start, end in finished if start < stop]


def _count(ranges: Ranges) -> int:
    return sum([stop - start for start, stop in ranges])
