"""Counts the ids or equal rows of a task in bounded memory, so that a repeated id becomes unique. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

# Pandas, which Spark needs, brings it; and pyarrow has loaded it.
import numpy

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["IdCounter"]

_EXACT: Final = 500_000


@dataclass(frozen=True, slots=True)
class _Block:
    """Hashes of ids, sorted, each once, and how often each id had come."""

    hashes: NDArray[numpy.uint64]
    counts: NDArray[numpy.uint32]


class IdCounter:
    """How often each id of a task occurred. No id is forgotten.

    Half a million and those of a batch are held as they are. Of those before only a hash of 64 bits and the count are
    held: 12 bytes for each, and four times as much for a moment when more are sorted in. An id that has the hash of
    another counts with it, as happens in one of 3,700 tasks of a hundred million ids: it may get a number that it would
    not need, and none that another has. The hash of a row is an id too.
    """

    def __init__(self) -> None:
        self._exact: dict[str, int] = {}
        self._blocks: list[_Block] = []
        """From old to new, each less than half as long as the one before."""

    def expect(self, ids: Iterable[str | None]) -> None:
        """Look up how often these came; until the next call, `times` counts these in and no others.

        :param ids: those of a batch. None and the empty one are no ids.
        """
        if len(self._exact) >= _EXACT:
            self._hash()
        if self._blocks:
            self._recall([each for each in dict.fromkeys(ids) if each and each not in self._exact])

    def times(self, id: str) -> int:
        """Count in one that was expected; how often it came."""
        times = self._exact[id] = self._exact.get(id, 0) + 1
        return times

    def _hash(self) -> None:
        """Hold all that there are by their hashes."""
        counts = numpy.fromiter(self._exact.values(), numpy.uint32, len(self._exact))
        block = _sorted(_hashes_of(self._exact), counts)
        self._exact = {}
        # So there are few blocks to look into, and each id is sorted in as few times.
        while self._blocks and len(self._blocks[-1].hashes) < 2 * len(block.hashes):
            older = self._blocks.pop()
            block = _sorted(
                numpy.concatenate((older.hashes, block.hashes)), numpy.concatenate((older.counts, block.counts))
            )
        self._blocks.append(block)

    def _recall(self, ids: list[str]) -> None:
        """Hold those that came before as they are, with their counts."""
        hashes = _hashes_of(ids)
        # One that came back is in a newer block too, with what it had come in all by then.
        for block in self._blocks:
            places = block.hashes.searchsorted(hashes)
            places[places == len(block.hashes)] = 0
            for found in (block.hashes[places] == hashes).nonzero()[0].tolist():
                self._exact[ids[found]] = int(block.counts[places[found]])


def _hashes_of(ids: Iterable[str]) -> NDArray[numpy.uint64]:
    """The same in every process, so that a task that is run again counts as it did before."""
    whole = b"".join([blake2b(each.encode(), digest_size=8).digest() for each in ids])
    return numpy.frombuffer(whole, numpy.uint64)


def _sorted(hashes: NDArray[numpy.uint64], counts: NDArray[numpy.uint32]) -> _Block:
    """A block of these; of those that are equal with the highest count, after which no number was given yet."""
    order = hashes.argsort(kind="stable")
    hashes = hashes[order]
    first = numpy.append(True, hashes[1:] != hashes[:-1])
    return _Block(hashes[first], numpy.maximum.reduceat(counts[order], first.nonzero()[0]))
