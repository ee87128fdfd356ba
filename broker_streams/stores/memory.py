"""`Memory`: a store in memory, gone when it is closed.

*Durability.* None: a table in memory is recovered from its topic whenever the process starts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import ClassVar

from broker_streams.stores.store import Rows, Store, in_chunks, key_range, store_closed

__all__ = ["Memory"]


@dataclass(frozen=True)
class Memory:
    """Opens stores in memory; nothing is kept."""

    format: ClassVar[str] = "memory"

    def open(self, directory: Path | None, name: str) -> Store:
        return _MemoryStore(name)


class _Space:
    """The rows of one namespace. The order of the keys is brought up to date when somebody asks for it."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self._keys: list[bytes] = []
        self._added: set[bytes] = set()
        self._removed: set[bytes] = set()

    def write(self, changes: Mapping[bytes, bytes | None]) -> int:
        """Apply changes; returns how many bytes more there are."""
        rows = self.rows
        grown = 0
        for key, value in changes.items():
            before = rows.get(key)
            if value is not None:
                rows[key] = value
                if before is None:
                    self._mark(key, self._added, self._removed)
                    grown += len(key) + len(value)
                else:
                    grown += len(value) - len(before)
            elif before is not None:
                del rows[key]
                self._mark(key, self._removed, self._added)
                grown -= len(key) + len(before)
        return grown

    def _mark(self, key: bytes, into: set[bytes], opposite: set[bytes]) -> None:
        if key in opposite:
            opposite.remove(key)
        else:
            into.add(key)

    def keys(self) -> list[bytes]:
        if self._removed:
            self._keys = [key for key in self._keys if key not in self._removed]
            self._removed.clear()
        if self._added:
            # Two sorted runs, which the sort merges.
            self._keys.extend(sorted(self._added))
            self._keys.sort()
            self._added.clear()
        return self._keys


class _MemoryStore:
    quick_count: ClassVar[bool] = True

    def __init__(self, name: str) -> None:
        self._name = name
        self._spaces: dict[str, _Space] = {}
        self._meta: dict[str, bytes] = {}
        self._bytes = 0
        self._lock = Lock()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def get(self, namespace: str, key: bytes) -> bytes | None:
        with self._lock:
            return self._space(namespace).rows.get(key)

    def get_many(self, namespace: str, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._lock:
            get = self._space(namespace).rows.get
            return [get(key) for key in keys]

    def write(
        self,
        changes: Mapping[str, Mapping[bytes, bytes | None]],
        meta: Mapping[str, bytes] | None = None,
        *,
        durable: bool = True,
    ) -> None:
        with self._lock:
            self._check_open()
            for namespace, rows in changes.items():
                self._bytes += self._space(namespace).write(rows)
            self._meta.update(meta or {})

    def items(
        self,
        namespace: str,
        *,
        start: bytes | None = None,
        stop: bytes | None = None,
        prefix: bytes = b"",
        reverse: bool = False,
    ) -> Iterator[tuple[bytes, bytes]]:
        def read(start: bytes | None, stop: bytes | None, limit: int) -> tuple[Rows, bool]:
            with self._lock:
                space = self._space(namespace)
                keys = space.keys()
                first = 0 if start is None else bisect_left(keys, start)
                last = len(keys) if stop is None else bisect_left(keys, stop)
                chosen = (
                    keys[max(first, last - limit) : last][::-1] if reverse else keys[first : min(last, first + limit)]
                )
                return [(key, space.rows[key]) for key in chosen], last - first > limit

        return in_chunks(read, *key_range(start, stop, prefix), reverse)

    def count(self, namespace: str) -> int:
        with self._lock:
            return len(self._space(namespace).rows)

    def meta(self, name: str) -> bytes | None:
        self._check_open()
        return self._meta.get(name)

    def size(self) -> int:
        with self._lock:
            self._check_open()
            return self._bytes + sum(len(name) + len(value) for name, value in self._meta.items())

    def clear(self) -> None:
        with self._lock:
            self._check_open()
            self._forget()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._forget()

    def _forget(self) -> None:
        self._spaces.clear()
        self._meta.clear()
        self._bytes = 0

    def _space(self, namespace: str) -> _Space:
        self._check_open()
        space = self._spaces.get(namespace)
        if space is None:
            space = self._spaces[namespace] = _Space()
        return space

    def _check_open(self) -> None:
        if self._closed:
            raise store_closed(self._name)
