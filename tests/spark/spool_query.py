"""A query over a spool, called as Spark calls its reader but without Spark."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.datasource import ReadLimit

from broker.blocking import Bus
from broker_spark.common.options import SourceOptions
from broker_spark.spool.source import SpoolPart, SpoolStreamReader

__all__ = ["SECONDS", "MakeQuery", "Position", "Query", "segments", "settled"]

Position = dict[str, Any]
SECONDS = 20.0


class Query:
    """Calls a reader in Spark's order; a new reader for each run, as after a restart."""

    def __init__(self, url: str, topic: str, spool: Path | str, **options: Any) -> None:
        given = {"url": url, "topic": topic, "subscription": "spark", "spool": str(spool), **options}
        self.options = SourceOptions.parse({name: str(value) for name, value in given.items()}).for_stream()
        self.reader = SpoolStreamReader(self.options)
        self.at: Position = {}

    def begin(self, *, drain: bool = False) -> Query:
        """Start a run, from the checkpoint if there is one."""
        self.reader = SpoolStreamReader(self.options)
        if drain:
            self.reader.prepareForTriggerAvailableNow()
        self.at = self.at or self.reader.initialOffset()
        return self

    def batch(self, limit: ReadLimit | None = None) -> list[bytes] | None:
        """The next batch; None if there is none."""
        # Spark stores offsets as JSON text.
        end = json.loads(json.dumps(self.reader.latestOffset(self.at, limit or self.reader.getDefaultReadLimit())))
        if end == self.at:
            return None
        self.reader.commit(self.at)
        found = self.rows(self.at, end)
        self.at = end
        return found

    def batches(self) -> Iterator[list[bytes]]:
        while (found := self.batch()) is not None:
            yield found

    def rows(self, start: Position, end: Position) -> list[bytes]:
        return [value for table in self.tables(start, end) for value in table["value"]]

    def tables(self, start: Position, end: Position) -> list[dict[str, list[Any]]]:
        found: list[dict[str, list[Any]]] = []
        for part in self.reader.partitions(start, end):
            assert isinstance(part, SpoolPart)
            found += [batch.to_pydict() for batch in self.reader.read(part)]
        return found

    def until(self, count: int) -> list[bytes]:
        """Batches until this many rows are read."""
        found: list[bytes] = []
        deadline = time.monotonic() + SECONDS
        while len(found) < count:
            assert time.monotonic() < deadline, len(found)
            found += self.batch() or []
        return found


MakeQuery = Callable[..., Query]


def segments(spool: Path) -> list[str]:
    return sorted(path.name for path in (spool / "segments").iterdir())


def settled(bus: Bus, topic: str) -> bool:
    """Whether the broker has nothing left."""
    deadline = time.monotonic() + SECONDS
    while (lag := bus.admin.lag(topic, "spark")).waiting or lag.unsettled:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
