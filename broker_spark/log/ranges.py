"""Cuts the offsets of a batch into tasks. Pure; a `Range` is pickled and sent to executors.

In a log whose offsets do not count records, records lie in spans (`bus.log.spans`) and tasks are cut between their
batches. A span that begins inside a batch counts this batch only if it has no other: nothing may be left to read of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition

from broker.driver.optional import Span

__all__ = ["Range", "after", "batches_in", "below", "cut", "ranges"]


@dataclass(frozen=True)
class Range(InputPartition):
    """The task that reads start <= offset < stop of one partition.

    :ivar identity: the broker's id of the topic; None if the broker has none.
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
    """The tasks for one topic: up to `tasks` of about equal length for each partition with something to read.

    Offsets may have gaps, so a task has at most as many rows as its length. Rows of a task are in order.

    :param spans: where records lie, if offsets do not count them; the tasks together still cover the whole range.
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


def cut(spans: Sequence[Span], start: int, stop: int, pieces: int) -> list[int]:
    """Where up to `pieces` parts with about as many batches each begin; the first one begins at `start`."""
    batches = batches_in(spans)
    pieces = min(pieces, batches)
    found = [start]
    for piece in range(1, pieces):
        place = after(spans, batches * piece // pieces, stop)
        if found[-1] < place < stop:
            found.append(place)
    return found


def batches_in(spans: Sequence[Span]) -> int:
    """The number of batches."""
    return sum(max(1, -(-span.stop // span.step) + -span.start // span.step) for span in spans)


def below(spans: Sequence[Span], stop: int) -> list[Span]:
    """The parts of the spans below a position."""
    return [span._replace(stop=min(span.stop, stop)) for span in spans if span.start < stop]


def after(spans: Sequence[Span], batches: int, stop: int) -> int:
    """The position behind this many batches."""
    for span in spans:
        here = batches_in([span])
        if batches < here:
            return min(stop, (-(-span.start // span.step) + batches) * span.step)
        if batches == here:
            return min(stop, span.stop)
        batches -= here
    return stop
