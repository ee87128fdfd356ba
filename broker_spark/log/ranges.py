"""Offsets cut into the tasks of a read. Pure; what is here is pickled and sent to executors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition

from broker.driver.contract import Span
from broker_spark.log.spans import cut

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
    topic: str,
    identity: str | None,
    start: Mapping[int, int],
    end: Mapping[int, int],
    tasks: int,
    spans: Mapping[int, Sequence[Span]] | None = None,
) -> list[Range]:
    """The tasks for one topic: up to `tasks` for each partition that has something to read, of about equal length.

    Offsets may have gaps, so the rows of a task are at most its length. Within a task rows are in order.

    :param spans: where records lie, if offsets do not count them: tasks are cut there, and together cover all.
    """
    found: list[Range] = []
    for partition, stop in sorted(end.items()):
        first = start[partition]
        if stop <= first:
            continue
        if spans is None:
            pieces = min(tasks, stop - first)
            cuts = [first + (stop - first) * piece // pieces for piece in range(pieces)]
        else:
            cuts = cut(spans[partition], first, stop, tasks)
        found += [
            Range(topic, identity, partition, low, high)
            for low, high in zip(cuts, [*cuts[1:], stop], strict=True)
            if low < high
        ]
    return found
