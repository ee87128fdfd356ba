"""Counts rows between positions. Blocking: asks the log if offsets do not count rows.

Most logs number their records, so a distance is a number of rows. Others have batches at scattered positions
(`bus.log.spans`): their batches are counted, and the rows per batch estimated from the next ones. There the numbers are
approximate and cuts lie between batches; the rows read between two positions are exact everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from broker.blocking import Bus
from broker.driver.optional import Span
from broker.errors import BrokerError
from broker_spark.common.admission import Places
from broker_spark.log.ranges import after, batches_in, below

__all__ = ["Counted", "count_rows", "offsets_count_rows", "spans_between"]

_LOOKED_AT: Final = 100
_PARTITIONS: Final = 8
"""Partitions whose rows are sampled; the others are assumed to be similar."""


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

    start: Places
    end: Places
    _begins: Places
    _scales: Mapping[str, Mapping[int, _Scale]] | None

    def places(self, reached: Places) -> dict[str, dict[int, int]]:
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

    def left(self, reached: Places) -> dict[str, dict[int, int]]:
        """The rows behind `reached`, if offsets do not count rows."""
        if self._scales is None:
            return {}
        return {
            topic: {each: self.end[topic][each] - place for each, place in places.items()}
            for topic, places in reached.items()
        }


def count_rows(bus: Bus, begins: Places, ends: Places) -> Counted:
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


def _rows_each(bus: Bus, ends: Places, spans: Mapping[str, Mapping[int, Sequence[Span]]]) -> float:
    """The mean rows of a batch. Ignores errors: the task that reads a partition raises them."""
    waiting = sorted(
        ((batches_in(found), topic, each) for topic, parts in spans.items() for each, found in parts.items() if found),
        reverse=True,
    )
    rows = batches = 0
    for _, topic, each in waiting[:_PARTITIONS]:
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
    for records in bus.log.read(topic, partition, first, stop, max_records=_LOOKED_AT):
        offsets += [record.offset for record in records]
        if (seen := batches_in(below(spans, offsets[-1] + 1))) > 1:
            # The last batch may be incomplete.
            return sum(offset // step < offsets[-1] // step for offset in offsets), seen - 1
    return len(offsets), 1
