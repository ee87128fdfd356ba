"""The offset map: the finished offsets above a committed position, as the metadata that is committed with it.

Pure functions. The text is `abm1.<position>.<kind><base64>`. Kind `b` is a bit set, one bit for each offset from the
position on. Kind `r` is the lengths of runs, unfinished and finished in turn, as base-128 numbers. The shorter one is
used. Any other text, or one of another position, decodes to nothing finished: records may be repeated, never skipped.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

__all__ = ["LIMIT", "Encoded", "decode", "encode"]

LIMIT: Final = 4095
"""The longest text that a broker takes by default; it rejects one of `offset.metadata.max.bytes`, 4096."""
_MAGIC: Final = "abm1"
_LARGEST: Final = 2**63 - 1

Ranges = Sequence[tuple[int, int]]
"""Half-open, rising, not adjacent."""


class Encoded(NamedTuple):
    """:ivar text: empty if nothing above the position is finished, or nothing fits.
    :ivar fullness: the length of the whole text, as a part of the limit; above 1, the highest offsets are left out.
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
    """The finished ranges above a position; none if the text is not an offset map of it."""
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
    """The lowest ranges whose encoded runs fit."""
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
    """:raises ValueError: the data is truncated, or has invalid offsets."""
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
        raise ValueError("truncated")
    at = position
    for gap, length in zip(numbers[::2], numbers[1::2], strict=True):
        start, at = at + gap, at + gap + length
        if not length or at > _LARGEST:
            raise ValueError("an empty run, or an offset above 2**63")
        yield start, at


def _cut(finished: Ranges, stop: int) -> Ranges:
    """The part of the ranges below an offset."""
    return [(start, min(end, stop)) for start, end in finished if start < stop]


def _count(ranges: Ranges) -> int:
    return sum([stop - start for start, stop in ranges])
