"""Counts the ids or equal rows of a task in bounded memory, so that a repeated id becomes unique. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

# Spark needs pandas, which needs numpy; pyarrow has loaded it already.
import numpy

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["IdCounter"]

_EXACT: Final = 500_000


@dataclass(frozen=True, slots=True)
class _Block:
    """Sorted distinct hashes of ids, and how often each id had occurred."""

    hashes: NDArray[numpy.uint64]
    counts: NDArray[numpy.uint32]


class IdCounter:
    """How often each id of a task occurred. No id is forgotten.

    Half a million ids and those of the current batch are kept as text; of earlier ids only a 64-bit hash and the count:
    12 bytes each, and four times as much while blocks are merged. Two ids with the same hash share a count, which
    happens in one of 3,700 tasks of a hundred million ids: such an id may get a number that it does not need, but never
    the number of another. The hash of a row counts as an id too.
    """

    def __init__(self) -> None:
        self._exact: dict[str, int] = {}
        self._blocks: list[_Block] = []
        """From old to new, each less than half as long as the one before."""

    def expect(self, ids: Iterable[str | None]) -> None:
        """Load the counts of these ids. Until the next call, `times` takes these ids only.

        :param ids: the ids of a batch. None and empty text are no ids.
        """
        if len(self._exact) >= _EXACT:
            self._hash()
        if self._blocks:
            self._recall([each for each in dict.fromkeys(ids) if each and each not in self._exact])

    def times(self, id: str) -> int:
        """Count one expected id. Returns how often it has occurred."""
        times = self._exact[id] = self._exact.get(id, 0) + 1
        return times

    def _hash(self) -> None:
        """Replace the ids kept as text by their hashes."""
        counts = numpy.fromiter(self._exact.values(), numpy.uint32, len(self._exact))
        block = _sorted(_hashes_of(self._exact), counts)
        self._exact = {}
        # Keeps the blocks few, and merges each id only a few times.
        while self._blocks and len(self._blocks[-1].hashes) < 2 * len(block.hashes):
            older = self._blocks.pop()
            block = _sorted(
                numpy.concatenate((older.hashes, block.hashes)), numpy.concatenate((older.counts, block.counts))
            )
        self._blocks.append(block)

    def _recall(self, ids: list[str]) -> None:
        """Load the ids that occurred before as text, with their counts."""
        hashes = _hashes_of(ids)
        # An id that occurred again is in a newer block too, with its total count.
        for block in self._blocks:
            places = block.hashes.searchsorted(hashes)
            places[places == len(block.hashes)] = 0
            for found in (block.hashes[places] == hashes).nonzero()[0].tolist():
                self._exact[ids[found]] = int(block.counts[places[found]])


def _hashes_of(ids: Iterable[str]) -> NDArray[numpy.uint64]:
    """The same in every process, so that a retried task counts the same."""
    whole = b"".join([blake2b(each.encode(), digest_size=8).digest() for each in ids])
    return numpy.frombuffer(whole, numpy.uint64)


def _sorted(hashes: NDArray[numpy.uint64], counts: NDArray[numpy.uint32]) -> _Block:
    """A block of these hashes; each with its highest count, so that no number is given twice."""
    order = hashes.argsort(kind="stable")
    hashes = hashes[order]
    first = numpy.append(True, hashes[1:] != hashes[:-1])
    return _Block(hashes[first], numpy.maximum.reduceat(counts[order], first.nonzero()[0]))
