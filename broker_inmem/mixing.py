"""Draws the order between messages of different keys, so that tests find what relies on an order nobody promised.

The order within a key is kept. The same seed and the same calls give the same order. Not locked: the server's
lock is held around every call.
"""

from __future__ import annotations

import random
from operator import itemgetter
from typing import Any, Final

from broker_inmem.entries import Entry

__all__ = ["Mixer"]

_PATTERNS: Final = 32


class Mixer:
    """Mixes windows of up to `window` entries; 0 or 1 mixes nothing.

    :param seed: what the order is drawn from; None draws one.
    """

    def __init__(self, window: int, seed: int | None) -> None:
        self.window: Final = window if window > 1 else 0
        self.seed: Final = random.SystemRandom().getrandbits(32) if seed is None else seed
        self._random = random.Random(self.seed)
        self._patterns: dict[int, list[Any]] = {}

    def mix(self, entries: list[Entry]) -> list[Entry]:
        """Two entries or more in another order."""
        length = len(entries)
        patterns = self._patterns.get(length)
        if patterns is None:
            # Ready-made permutations, since drawing one per window would cost more than a delivery.
            draw = self._random
            patterns = [itemgetter(*draw.sample(range(length), length)) for _ in range(_PATTERNS)]
            self._patterns[length] = patterns
        mixed: list[Entry] = list(patterns[self._random.getrandbits(5)](entries))
        keys = [entry.key for entry in entries if entry.key is not None]
        if len(set(keys)) < len(keys):
            _restore_order(mixed)
        return mixed


def _restore_order(mixed: list[Entry]) -> None:
    """Give the places of each key to that key's entries in the order of publishing."""
    places: dict[bytes, list[int]] = {}
    for index, entry in enumerate(mixed):
        if entry.key is not None:
            places.setdefault(entry.key, []).append(index)
    for indexes in places.values():
        if len(indexes) > 1:
            entries = sorted((mixed[index] for index in indexes), key=_seq)
            for index, entry in zip(indexes, entries, strict=True):
                mixed[index] = entry


def _seq(entry: Entry) -> int:
    return entry.seq
