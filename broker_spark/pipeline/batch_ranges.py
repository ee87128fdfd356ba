"""What a batch reads, from Spark's checkpoint: offsets of topics, and segments of spools. Blocking; driver only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from broker.urls import mask_within
from broker_spark.checkpoint.checkpoint_log import CheckpointLog
from broker_spark.common.connections import bus_of
from broker_spark.common.files import open_files
from broker_spark.common.offsets import Offsets
from broker_spark.common.topics import bounds_of
from broker_spark.pipeline.backlog import match_positions
from broker_spark.pipeline.definition import Pipeline
from broker_spark.progress import offsets_of
from broker_spark.spool.positions import SPOOL_SOURCE, SpoolPosition
from broker_spark.spool.spool import read_metadata

__all__ = ["BatchRanges", "OffsetRange", "SegmentRange", "ranges_of"]


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """first <= offset < end of one partition, read by one source."""

    source: str
    topic: str
    partition: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class SegmentRange:
    """first <= number < end of the segments of one spool, read by one source."""

    source: str
    subscription: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class BatchRanges:
    """What a batch reads; ranges may be empty."""

    offsets: Sequence[OffsetRange]
    segments: Sequence[SegmentRange]


def ranges_of(pipeline: Pipeline, log: CheckpointLog, batch: int) -> BatchRanges:
    """What a planned batch reads.

    :raises ConfigurationError: the checkpoint is incomplete, or cannot be read.
    """
    ends, before = log.positions(batch), log.positions(batch - 1)
    starts: list[Mapping[str, Any]] = [*before, *({} for _ in ends[len(before) :])]
    reached = [offsets_of(each) for each in ends]
    offsets: dict[str, list[OffsetRange]] = {}
    for index, (name, end) in enumerate(zip(match_positions(pipeline, reached), reached, strict=True)):
        # Spark keeps a line for each branch of its plan, and a source may be in two.
        if name is not None and end is not None and name not in offsets:
            start = offsets_of(starts[index]) or offsets_of(log.initial(index))
            offsets[name] = list(_ranges(name, start, end, pipeline.parsed_options(name).url))
    return BatchRanges(
        [each for found in offsets.values() for each in found],
        list(_segments(pipeline, _spools(starts), _spools(ends))),
    )


def _ranges(source: str, start: Offsets | None, end: Offsets, url: str) -> Iterable[OffsetRange]:
    for name, topic in end.topics.items():
        before: Mapping[int, int] = start.topics[name].next if start is not None and name in start.topics else {}
        begins = {**before, **topic.began}
        if new := [each for each in topic.next if each not in begins]:
            # Spark's Kafka connector reads new partitions from their beginning.
            first = bounds_of(bus_of(url), name, shared=end.shared).first
            begins |= {each: min(first.get(each, topic.next[each]), topic.next[each]) for each in new}
        for partition, place in sorted(topic.next.items()):
            yield OffsetRange(source, str(name), partition, begins[partition], place)


def _spools(positions: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The next segment of each spool."""
    found = (SpoolPosition.from_json(each) for each in positions if each.get("source") == SPOOL_SOURCE)
    return {each.spool: each.next for each in found}


def _segments(pipeline: Pipeline, starts: Mapping[str, int], ends: Mapping[str, int]) -> Iterable[SegmentRange]:
    for name in pipeline.sources if ends else ():
        options = pipeline.parsed_options(name)
        if options.subscription is None:
            continue
        spool = read_metadata(open_files(options.spool), mask_within(options.spool))["spool"]
        if spool in ends:
            yield SegmentRange(name, options.subscription, starts.get(spool, 0), ends[spool])
