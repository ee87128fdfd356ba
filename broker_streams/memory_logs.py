"""Topics in memory for the `Tester`, and copies of tables that lag as a test wants it. Pure; one thread.

Times are milliseconds since 1970. An entry keeps its offset when others are compacted away.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from broker import Codec, Partitioner
from broker.partitioners import partition_by
from broker_streams import keys

__all__ = ["Entry", "Lag", "Log", "MemoryTable", "MemoryTopic"]

_NO_ATTRIBUTES: Final[Mapping[str, str]] = MappingProxyType({})


class Entry(NamedTuple):
    """A message in a log.

    :ivar number: in the order of all messages of all topics.
    """

    number: int
    offset: int
    key: bytes | None
    data: bytes | None
    attributes: Mapping[str, str]
    timestamp_ms: int


class Log:
    """One partition of a topic."""

    __slots__ = ("end", "entries")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.end = 0

    def append(
        self,
        number: int,
        key: bytes | None,
        data: bytes | None,
        timestamp_ms: int,
        attributes: Mapping[str, str] = _NO_ATTRIBUTES,
    ) -> Entry:
        entry = Entry(number, self.end, key, data, attributes, timestamp_ms)
        self.entries.append(entry)
        self.end += 1
        return entry

    def since(self, offset: int) -> list[Entry]:
        """The entries from an offset on."""
        return self.entries[bisect_left(self.entries, offset, key=attrgetter("offset")) :] if offset < self.end else []

    def compact(self) -> None:
        """Keep the last entry of each key."""
        last = {entry.key: entry for entry in self.entries}
        self.entries = sorted(last.values(), key=attrgetter("offset"))


class MemoryTopic:
    """A topic; its codecs are those by which groups read it, and write to it."""

    __slots__ = ("logs", "name", "partitioner", "read_by", "written_by")

    def __init__(self, name: str, partitions: int, partitioner: Partitioner) -> None:
        self.name: Final = name
        self.logs: Final = [Log() for _ in range(partitions)]
        # In memory, "broker" is what the broker in memory does.
        self.partitioner: Final[Partitioner] = "crc32" if partitioner == "broker" else partitioner
        self.read_by: Final[list[Codec[Any]]] = []
        self.written_by: Final[list[Codec[Any]]] = []

    def partition_of(self, key: bytes | None) -> int:
        """The partition of a key; 0 without a key."""
        return 0 if key is None else partition_by(self.partitioner, self.name, key, len(self.logs))


class Lag:
    """How many of the last rows readers of a table do not see yet, in each partition."""

    __slots__ = ("records",)

    def __init__(self) -> None:
        self.records = 0


class MemoryTable:
    """Some partitions of a table as a reader has them: the rows of the application, behind by a lag."""

    __slots__ = ("_copies",)

    def __init__(self, logs: list[Log], lag: Lag | None = None) -> None:
        self._copies = [_PartitionCopy(log, lag or Lag()) for log in logs]

    def get(self, key: bytes) -> bytes | None:
        """The row of a key, or None."""
        for copy in self._copies:
            if (found := copy.rows().get(key)) is not None:
                return found
        return None

    def items(self) -> list[tuple[bytes, bytes]]:
        """All rows, in the order of their keys."""
        return sorted([item for copy in self._copies for item in copy.rows().items()])


class _PartitionCopy:
    __slots__ = ("_lag", "_log", "_position", "_rows")

    def __init__(self, log: Log, lag: Lag) -> None:
        self._log = log
        self._lag = lag
        self._position = 0
        self._rows: dict[bytes, bytes] = {}

    def rows(self) -> dict[bytes, bytes]:
        end = self._end()
        if end < self._position:
            # The lag has grown: a reader that fell behind is one that began later.
            self._position, self._rows = 0, {}
        for entry in self._log.since(self._position):
            if entry.offset >= end:
                break
            if (key := _row_key(entry)) is None:
                continue
            if entry.data is None:
                self._rows.pop(key, None)
            else:
                self._rows[key] = entry.data
        self._position = end
        return self._rows

    def _end(self) -> int:
        """The offset up to which the copy has read."""
        left = self._lag.records
        if not left:
            return self._log.end
        for entry in reversed(self._log.entries):
            if _row_key(entry) is not None:
                left -= 1
                if not left:
                    return entry.offset
        return 0


def _row_key(entry: Entry) -> bytes | None:
    """The key of a row of the application; None for checkpoints and agendas."""
    return None if entry.key is None or keys.is_reserved(entry.key) else entry.key
