"""`Changes`: what a partition has changed since its store was last written, read through to the store. Pure.

Rows and the index by time are collected here until a checkpoint takes them. While the checkpoint is written, they are
still read from here; once the store has them, they are dropped. So the store never sees a part of a checkpoint, and to
undo everything since the last one is to forget what is here.

Whatever was read is kept until the next settled checkpoint, and what a checkpoint wrote until the one after it, since
keys come in bursts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush, merge
from itertools import islice
from typing import Final, Protocol

from broker_streams.agenda import PARTS
from broker_streams.keys import DUE, ROWS, due_range

__all__ = ["UNREAD", "ChangedRows", "Changes", "StateReader"]

_PAGE: Final = 256
UNREAD: Final = b"unread"
"""Stands for a row that was not read yet. A bytes object of its own, known by identity."""

ChangedRows = dict[bytes, bytes | None]
"""Values by key; None deletes."""


class StateReader(Protocol):
    """The reading half of a `Store`."""

    def get(self, namespace: str, key: bytes) -> bytes | None: ...
    def get_many(self, namespace: str, keys: Sequence[bytes]) -> list[bytes | None]: ...
    def items(
        self, namespace: str, *, start: bytes | None = None, stop: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]: ...


class Changes:
    """See the module.

    :ivar rows: what changed since the last `take`.
    :ivar due: likewise of the index by time.
    """

    __slots__ = ("_cache", "_index", "_state", "_taken", "due", "rows")

    def __init__(self, state: StateReader) -> None:
        self._state = state
        self._cache: ChangedRows = {}
        self._taken: deque[tuple[ChangedRows, ChangedRows]] = deque()
        self.rows: ChangedRows = {}
        self.due: ChangedRows = {}
        self._index = {part: _Part(state, part) for part in PARTS}

    def prefetch(self, keys: Iterable[bytes]) -> None:
        """Read rows that are not here yet in one call."""
        cache = self._cache
        missing = [key for key in keys if key not in cache]
        if missing:
            # A store with a tree reads faster in order.
            missing.sort()
            cache.update(zip(missing, self._state.get_many(ROWS, missing), strict=True))

    def get(self, key: bytes) -> bytes | None:
        """A row as of now."""
        found = self._cache.get(key, UNREAD)
        if found is UNREAD:
            found = self._cache[key] = self._state.get(ROWS, key)
        return found

    def put(self, key: bytes, data: bytes | None) -> None:
        """Write a row; None deletes it."""
        self._cache[key] = self.rows[key] = data

    def put_due(self, part: bytes, entry: bytes, data: bytes | None) -> None:
        """Write an entry of the index by time; None deletes it."""
        self.due[entry] = data
        self._index[part].put(entry, data)

    def first_due(self, part: bytes) -> bytes | None:
        """The earliest entry of a part of the index."""
        return self._index[part].first()

    def all_due(self, part: bytes) -> Iterator[bytes]:
        """The entries of a part of the index, the earliest first. Nothing may change meanwhile."""
        return self._index[part].entries()

    def take(self) -> tuple[ChangedRows, ChangedRows]:
        """What changed since the last `take`: rows, and entries of the index."""
        taken = self.rows, self.due
        self._taken.append(taken)
        self.rows, self.due = {}, {}
        return taken

    def settle(self) -> None:
        """The store has what the earliest `take` returned that was not settled yet."""
        written, _ = self._taken.popleft()
        self._renew(written)

    def forget(self) -> None:
        """Forget everything that the store does not have."""
        self._taken.clear()
        self.rows, self.due = {}, {}
        self._renew({})

    def _renew(self, stored: ChangedRows) -> None:
        self._cache = dict(stored)
        index: ChangedRows = {}
        for rows, due in (*self._taken, (self.rows, self.due)):
            self._cache.update(rows)
            index.update(due)
        for part in self._index.values():
            part.renew(index)


class _Part:
    """One part of the index: entries of the store, under the changes since."""

    __slots__ = ("_after", "_changed", "_heap", "_page", "_part", "_state", "_stop")

    def __init__(self, state: StateReader, part: bytes) -> None:
        self._state = state
        self._part = part
        self.renew({})

    def renew(self, changed: Mapping[bytes, bytes | None]) -> None:
        """Start again from the store as it is now, under these changes."""
        self._changed = {entry: data for entry, data in changed.items() if entry.startswith(self._part)}
        self._heap = [entry for entry, data in self._changed.items() if data is not None]
        heapify(self._heap)
        self._page: deque[bytes] = deque()
        self._after, self._stop = due_range(self._part)

    def put(self, entry: bytes, data: bytes | None) -> None:
        self._changed[entry] = data
        if data is not None:
            heappush(self._heap, entry)

    def first(self) -> bytes | None:
        heap, changed = self._heap, self._changed
        while heap and changed[heap[0]] is None:
            heappop(heap)
        stored = self._first_stored()
        if not heap or (stored is not None and stored < heap[0]):
            return stored
        return heap[0]

    def _first_stored(self) -> bytes | None:
        """The earliest entry of the store that has not changed since."""
        page = self._page
        while True:
            while page and page[0] in self._changed:
                page.popleft()
            if page or self._after >= self._stop:
                return page[0] if page else None
            entries = [entry for entry, _ in islice(self._stored(self._after), _PAGE)]
            page.extend(entries)
            self._after = entries[-1] + b"\x00" if len(entries) == _PAGE else self._stop

    def entries(self) -> Iterator[bytes]:
        changed = self._changed
        stored = (entry for entry, _ in self._stored(self._part) if entry not in changed)
        return merge(stored, sorted(entry for entry, data in changed.items() if data is not None))

    def _stored(self, start: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._state.items(DUE, start=start, stop=due_range(self._part)[1])
