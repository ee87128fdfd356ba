"""Counts the rows between two positions of a log, and cuts offset ranges into tasks.

Most logs number their records, so a distance is a number of rows. Others have batches at scattered positions
(`bus.log.spans`): their batches are counted, and the rows per batch estimated from the next ones. There the numbers are
approximate and cuts lie between batches; the rows read between two positions are exact everywhere. A span that begins
inside a batch counts this batch only if it has no other: nothing may be left to read of it.

Counting and finding spans block; the rest is pure. A `Range` is pickled and sent to executors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition

from broker.blocking import Bus
from broker.driver.optional import Span
from broker.errors import BrokerError
from broker_spark.common.admission import PartitionOffsets
from broker_spark.common.topics import SAMPLED_PARTITIONS, SAMPLED_ROWS

__all__ = [
    "Counted",
    "Range",
    "after",
    "batches_in",
    "below",
    "count_rows",
    "cut",
    "offsets_count_rows",
    "ranges",
    "spans_between",
]


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


@dataclass(frozen=True, slots=True)
class _Scale:
    """The backlog of one partition: its batches, and rows in each."""

    stop: int
    spans: Sequence[Span]
    rows_each: float

    @property
    def rows(self) -> int:
        return max(1, round(self.rows_each * batches_in(self.spans))) if self.spans else 0

    def position(self, start: int, rows: int) -> int:
        """The position that this many rows reach; past `start` if there are any."""
        if rows <= 0:
            return start
        if rows >= self.rows:
            return self.stop
        return after(self.spans, max(1, int(rows / self.rows_each)), self.stop)


@dataclass(frozen=True, slots=True)
class Counted:
    """A backlog in rows.

    :ivar start, end: positions where offsets count rows; else 0 and how many rows there are, of each partition.
    """

    start: PartitionOffsets
    end: PartitionOffsets
    _begins: PartitionOffsets
    _scales: Mapping[str, Mapping[int, _Scale]] | None

    def places(self, reached: PartitionOffsets) -> dict[str, dict[int, int]]:
        """The positions of a result of `admit` between `start` and `end`."""
        if self._scales is None:
            return {topic: dict(places) for topic, places in reached.items()}
        return {
            topic: {
                each: self._scales[topic][each].position(self._begins[topic][each], rows)
                for each, rows in places.items()
            }
            for topic, places in reached.items()
        }

    def left(self, reached: PartitionOffsets) -> dict[str, dict[int, int]]:
        """The rows behind `reached`, if offsets do not count rows."""
        if self._scales is None:
            return {}
        return {
            topic: {each: self.end[topic][each] - place for each, place in places.items()}
            for topic, places in reached.items()
        }


def count_rows(bus: Bus, begins: PartitionOffsets, ends: PartitionOffsets) -> Counted:
    """The backlog between these positions in rows."""
    if offsets_count_rows(bus):
        return Counted(begins, ends, begins, None)
    spans = {
        topic: {each: bus.log.spans(topic, each, begins[topic][each], place) for each, place in places.items()}
        for topic, places in ends.items()
    }
    each_has = _rows_each(bus, ends, spans)
    scales = {
        topic: {each: _Scale(place, spans[topic][each], each_has) for each, place in places.items()}
        for topic, places in ends.items()
    }
    zeros = {topic: dict.fromkeys(places, 0) for topic, places in ends.items()}
    rows = {topic: {each: scale.rows for each, scale in found.items()} for topic, found in scales.items()}
    return Counted(zeros, rows, begins, scales)


def spans_between(
    bus: Bus, topic: str, start: Mapping[int, int], end: Mapping[int, int], tasks: int
) -> Mapping[int, Sequence[Span]] | None:
    """Where records lie in a topic that is cut into tasks; None if not needed."""
    if tasks == 1 or offsets_count_rows(bus):
        return None
    return {each: bus.log.spans(topic, each, start[each], stop) for each, stop in end.items() if start[each] < stop}


def offsets_count_rows(bus: Bus) -> bool:
    """Whether the distance of two positions is at least their number of rows."""
    records = bus.capabilities.records
    return records is not None and records.counting_offsets


def _rows_each(bus: Bus, ends: PartitionOffsets, spans: Mapping[str, Mapping[int, Sequence[Span]]]) -> float:
    """The mean rows of a batch. Ignores errors: the task that reads a partition raises them."""
    waiting = sorted(
        ((batches_in(found), topic, each) for topic, parts in spans.items() for each, found in parts.items() if found),
        reverse=True,
    )
    rows = batches = 0
    for _, topic, each in waiting[:SAMPLED_PARTITIONS]:
        try:
            here, whole = _first_rows(bus, topic, each, spans[topic][each], ends[topic][each])
        except BrokerError:
            continue
        rows, batches = rows + here, batches + whole
    return max(1.0, rows / batches) if batches else 1.0


def _first_rows(bus: Bus, topic: str, partition: int, spans: Sequence[Span], stop: int) -> tuple[int, int]:
    """The rows of the first batches, and how many batches that are; at least one whole, if there is any."""
    first, step = spans[0].start, spans[0].step
    offsets: list[int] = []
    for records in bus.log.read(topic, partition, first, stop, max_records=SAMPLED_ROWS):
        offsets += [record.offset for record in records]
        if (seen := batches_in(below(spans, offsets[-1] + 1))) > 1:
            # The last batch may be incomplete.
            return sum(offset // step < offsets[-1] // step for offset in offsets), seen - 1
    return len(offsets), 1


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
