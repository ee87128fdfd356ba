"""Offsets cut into the tasks of a read. Pure; what is here is pickled and sent to executors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition

__all__ = ["Range", "ranges"]


@dataclass(frozen=True)
class Range(InputPartition):
    """What one task reads: start <= offset < stop of one partition.

    :ivar identity: of the topic that is meant.
    """

    topic: str
    identity: str | None
    partition: int
    start: int
    stop: int


def ranges(
    topic: str, identity: str | None, start: Mapping[int, int], end: Mapping[int, int], tasks: int
) -> list[Range]:
    """The tasks for one topic: up to `tasks` for each partition that has something to read, of about equal length.

    Offsets may have gaps, so the rows of a task are at most its length. Within a task rows are in order.
    """
    found: list[Range] = []
    for partition, stop in sorted(end.items()):
        first = start[partition]
        if stop <= first:
            continue
        pieces = min(tasks, stop - first)
        cuts = [first + (stop - first) * piece // pieces for piece in range(pieces)]
        found += [
            Range(topic, identity, partition, low, high)
            for low, high in zip(cuts, [*cuts[1:], stop], strict=True)
            if low < high
        ]
    return found
