"""The double's state over restarts: every change is appended to a file before it is confirmed.

A kill of the process loses nothing that was written; power loss is not tested. Used under the
namespace's lock.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Journal"]


class Journal:
    """Changes as tuples, in one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1

    def changes(self) -> Iterator[tuple[Any, ...]]:
        """All complete changes; one that a kill cut off is dropped."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            while True:
                try:
                    yield pickle.load(file)  # noqa: S301 - the double's own file
                except (EOFError, pickle.UnpicklingError):
                    return

    def begin(self, changes: list[tuple[Any, ...]]) -> None:
        """Replace all changes by these."""
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(b"".join(pickle.dumps(change, 5) for change in changes))
        fresh.replace(self._path)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)

    def add(self, *change: Any) -> None:
        """Append a change; ignored while the journal is read."""
        if self._file < 0:
            return
        os.write(self._file, pickle.dumps(change, 5))
