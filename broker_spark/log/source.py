"""Spark's readers over a log: batch and streaming.

Spark pickles the readers into several processes, so they hold only options and what can be looked up again. Planning
asks the broker for the ends of the logs; a task reads exactly its range. `commit` only reports the position.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import pyarrow
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from broker.blocking import Bus
from broker.errors import BrokerError, OffsetOutOfRange, TopicNotFound
from broker.hooks import logger
from broker_spark.common.admission import PartitionOffsets, admit, backlog, covers
from broker_spark.common.connections import bus_of
from broker_spark.common.offsets import GONE, Offsets, TopicOffsets
from broker_spark.common.options import SourceOptions
from broker_spark.common.topics import (
    TopicLog,
    advise_if_missing,
    check_found,
    check_log,
    check_order,
    chosen_topics,
    mean_size,
    read_topic_log,
    resolve,
    skip_deleted,
)
from broker_spark.log.ranges import Counted, Range, count_rows, offsets_count_rows, ranges, spans_between
from broker_spark.log.reading import read_range
from broker_spark.runtime.workers import end_quietly

__all__ = ["LogBatchReader", "LogStreamReader"]

_FRESH: Final = 1.0
"""Seconds for which the last known ends of the logs may be used."""


class LogBatchReader(DataSourceReader):
    """Reads from a start to an end; both are offsets from the moment of planning on."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        """The tasks.

        :raises ConfigurationError: the start lies behind the end, or is none of these topics.
        :raises TopicNotFound: there is no such topic.
        """
        options = self._options
        bus = bus_of(options.url)
        shared = check_log(bus)
        logs = _logs(bus, options, shared)
        names = [log.name for log in logs]
        check_found("start", options.start, names)
        check_found("end", options.end, names)
        found: list[Range] = []
        for log in logs:
            name = log.name
            start = resolve(bus, "start", options.start, log)
            end = resolve(bus, "end", options.end, log)
            if "end" in options.given:
                check_order(name, start, end)
            tasks = options.tasks_per_partition
            found += ranges(name, log.identity, start, end, tasks, spans_between(bus, name, start, end, tasks))
        return found

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """One task's rows."""
        return _read(self._options, partition)


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads on from the checkpoint's offsets, a batch at a time."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._draining = False
        """Whether this is a query with Trigger.AvailableNow."""
        self._target: dict[str, Any] | None = None
        """The end of such a query."""
        self._heads: dict[str, Any] | None = None
        self._waiting_since: float | None = None
        """Since when there are fewer rows than minRows."""
        self._ends_seen: Offsets | None = None
        """The ends of the logs when they were last fetched, at `_ends_time`."""
        self._ends_time = 0.0
        self._last_reset: dict[tuple[str, int], int] = {}
        """The position last set in the group of the options, by topic and partition."""
        self._warned_no_groups = False
        """Whether the missing support for groups is logged."""

    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint begins. Spark calls this again until the first batch is committed.

        :raises ConfigurationError: the start names other topics.
        """
        bus, shared = self._bus()
        start, logs = self._options.start, _logs(bus, self._options, shared)
        check_found("start", start, [log.name for log in logs])
        topics = {log.name: TopicOffsets(log.identity, resolve(bus, "start", start, log)) for log in logs}
        return Offsets(bus.capabilities.backend, topics, initial=True, shared=shared).to_json()

    def prepareForTriggerAvailableNow(self) -> None:
        """Freeze the end that this run reads to."""
        self._draining = True
        # latestOffset knows the checkpoint, and gives better advice about a missing topic.
        with suppress(TopicNotFound):
            self._target = self._fetch_ends().to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limit for `latestOffset`, which also applies `minRows` and `maxBytes`."""
        return ReadMaxRows(self._options.max_rows)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next batch; `start` itself if there is none.

        If option `start` is the latest message, the first batch may be empty: it stores the start in the checkpoint.

        :raises ConfigurationError: the checkpoint is of other topics.
        :raises OffsetOutOfRange: a log ends before the position of the checkpoint.
        """
        bus, shared = self._bus()
        known = Offsets.from_json(start)
        heads = self._recent_ends(bus, known, limit) or self._fetch_ends(known)
        if self._draining and self._target is None:
            self._target = heads.to_json()
        known.check(
            heads.backend,
            {name: topic.identity for name, topic in heads.topics.items()},
            named=self._options.pattern is None,
        )
        ends = heads.topics if self._target is None else _capped(heads.topics, Offsets.from_json(self._target).topics)
        begins, began = _begins(known, ends, heads)
        places = _ends(bus, begins, ends, shared=shared)
        counted = count_rows(bus, begins, places)
        waiting = sum(backlog(counted.start, counted.end, shared=shared).values())
        if waiting == 0 or self._should_wait(waiting, limit):
            self._heads = _ends_json(heads, counted, counted.start)
            return start if not (known.initial and self._options.start.moves) else _empty_batch(known).to_json()
        most = self._max_batch_rows(bus, begins, places, limit)
        admitted = admit(counted.start, counted.end, most, shared=shared)
        reached = counted.places(admitted)
        self._heads = _ends_json(heads, counted, admitted)
        return self._offsets(
            bus,
            {
                name: TopicOffsets(ends[name].identity or _identity(known, name), positions, began.get(name, {}))
                for name, positions in reached.items()
            },
        ).to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The ends of the logs as last seen, for the query's progress."""
        return self._heads

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a batch; the same for the same offsets."""
        known, reached = Offsets.from_json(start), Offsets.from_json(end)
        found: list[Range] = []
        for name, topic in reached.topics.items():
            before: Mapping[int, int] = known.topics[name].next if name in known.topics else {}
            # Those of the batch take precedence: initialOffset may have returned another position before.
            begins = {**before, **topic.began}
            tasks = self._options.tasks_per_partition
            with advise_if_missing(GONE):
                spans = spans_between(bus_of(self._options.url), name, begins, topic.next, tasks)
            found += ranges(name, topic.identity, begins, topic.next, tasks, spans)
        return found

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """One task's rows."""
        return _read(self._options, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Set the query's position in the group of the options, for tools that show lag. Never raises."""
        group = self._options.group
        if group is None:
            return
        try:
            bus = bus_of(self._options.url)
            records = bus.capabilities.records
            if records is None or not records.group_admin:
                if not self._warned_no_groups:
                    backend = bus.capabilities.backend
                    logger.warning("Option group %r does nothing: %s has no groups that keep positions", group, backend)
                self._warned_no_groups = True
                return
            admin = bus.admin
            for name, topic in Offsets.from_json(end).topics.items():
                for partition, position in topic.next.items():
                    if self._last_reset.get((name, partition)) != position:
                        admin.reset_group(group, to=position, topics=[name], partitions=[partition])
                        self._last_reset[name, partition] = position
        except BrokerError as error:
            logger.warning("The position of the query was not reported to group %s: %s", group, error)

    def stop(self) -> None:
        end_quietly()

    def _bus(self) -> tuple[Bus, bool]:
        bus = bus_of(self._options.url)
        return bus, check_log(bus)

    def _fetch_ends(self, known: Offsets | None = None) -> Offsets:
        """Fetch the ends of the logs.

        :param known: offsets of the checkpoint, for the error about a missing topic.
        """
        bus, shared = self._bus()
        logs = _logs(bus, self._options, shared, known.topics if known is not None else ())
        # Where each begins rides along, for partitions that are new.
        self._ends_seen = self._offsets(
            bus, {log.name: TopicOffsets(log.identity, log.next, log.first) for log in logs}
        )
        self._ends_time = time.monotonic()
        return self._ends_seen

    def _recent_ends(self, bus: Bus, known: Offsets, limit: ReadLimit) -> Offsets | None:
        """The ends fetched a moment ago, if the next batch cannot reach them: a query that catches up need not ask."""
        seen = self._ends_seen
        if seen is None or time.monotonic() - self._ends_time > _FRESH or not offsets_count_rows(bus):
            return None
        begins = {name: topic.next for name, topic in known.topics.items()}
        ends = {name: topic.next for name, topic in seen.topics.items()}
        if not isinstance(limit, ReadMaxRows) or not begins or not covers(begins, ends):
            return None
        waiting = sum(backlog(begins, ends, shared=seen.shared).values())
        return seen if waiting > limit.max_rows else None

    def _offsets(self, bus: Bus, topics: Mapping[str, TopicOffsets]) -> Offsets:
        return Offsets(bus.capabilities.backend, topics, shared=check_log(bus))

    def _should_wait(self, waiting: int, limit: ReadLimit) -> bool:
        """Whether to wait for more rows."""
        least = self._options.min_rows
        # With a frozen end no more rows would come.
        if least is None or waiting >= least or self._target is not None or isinstance(limit, ReadAllAvailable):
            self._waiting_since = None
            return False
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since < self._options.max_delay:
            return True
        self._waiting_since = None
        return False

    def _max_batch_rows(
        self,
        bus: Bus,
        begins: Mapping[str, Mapping[int, int]],
        ends: Mapping[str, Mapping[int, int]],
        limit: ReadLimit,
    ) -> int | None:
        if isinstance(limit, ReadAllAvailable):
            return None
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.max_rows
        if self._options.max_bytes is not None:
            size = mean_size(bus, begins, ends)
            most = min(most, max(1, int(self._options.max_bytes / size)))
        return most


def _logs(bus: Bus, options: SourceOptions, shared: bool, known: Collection[str] = ()) -> list[TopicLog]:
    """The logs of the topics now.

    :param known: topics that were read before.
    :raises TopicNotFound: one of these was deleted, or a named one does not exist.
    """
    found: list[TopicLog] = []
    for name in chosen_topics(bus, options):
        with skip_deleted(options, known=name in known), advise_if_missing(GONE, when=name in known):
            found.append(read_topic_log(bus, name, shared=shared))
    return found


def _read(options: SourceOptions, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
    """One task's rows. Without tasks Spark makes an empty partition of its own."""
    return read_range(options, partition) if isinstance(partition, Range) else iter(())


def _begins(
    known: Offsets, ends: Mapping[str, TopicOffsets], heads: Offsets
) -> tuple[dict[str, Mapping[int, int]], dict[str, Mapping[int, int]]]:
    """Where the next batch begins, and the part of this that the checkpoint does not have."""
    begins: dict[str, Mapping[int, int]] = {}
    began: dict[str, Mapping[int, int]] = {}
    for name, topic in ends.items():
        before: Mapping[int, int] = known.topics[name].next if name in known.topics else {}
        new = {each: heads.topics[name].began[each] for each in topic.next if each not in before}
        begins[name] = {**before, **new}
        if new or known.initial:
            began[name] = begins[name] if known.initial else new
    return begins, began


def _ends_json(heads: Offsets, counted: Counted, reached: PartitionOffsets) -> dict[str, Any]:
    """The ends of the logs for the query's progress, with the unread rows where offsets do not count them."""
    left = counted.left(reached)
    topics = {name: replace(topic, behind=left.get(name, {})) for name, topic in heads.topics.items()}
    return replace(heads, topics=topics).to_json()


def _empty_batch(initial: Offsets) -> Offsets:
    """A first batch without rows."""
    return Offsets(
        initial.backend,
        {name: TopicOffsets(topic.identity, topic.next, topic.next) for name, topic in initial.topics.items()},
        shared=initial.shared,
    )


def _ends(
    bus: Bus, begins: Mapping[str, Mapping[int, int]], ends: Mapping[str, TopicOffsets], *, shared: bool
) -> dict[str, dict[int, int]]:
    """The ends, at least the begin of the next batch.

    :raises OffsetOutOfRange: a log ends before the begin.
    """
    found: dict[str, dict[int, int]] = {}
    for name, topic in ends.items():
        for partition, place in topic.next.items():
            first = begins[name][partition]
            # With shared offsets the end follows the last existing message; later ones may be deleted.
            if place < first and not (shared and _reaches(bus, name, partition, first)):
                raise OffsetOutOfRange(
                    f"The log of {name!r}[{partition}] ends at {place}, and the checkpoint is at {first}",
                    advice="The end of this log was lost: begin a new checkpoint",
                )
            found.setdefault(name, {})[partition] = max(place, first)
    return found


def _reaches(bus: Bus, topic: str, partition: int, position: int) -> bool:
    """Whether a log ever reached a position: an empty read beyond that is refused."""
    try:
        for _ in bus.log.read(topic, partition, position, position):
            pass
    except OffsetOutOfRange:
        return False
    return True


def _capped(heads: Mapping[str, TopicOffsets], target: Mapping[str, TopicOffsets]) -> dict[str, TopicOffsets]:
    """The heads, up to the target; newer topics and partitions are left for the next run."""
    return {
        name: TopicOffsets(
            topic.identity,
            {
                each: min(place, target[name].next[each])
                for each, place in topic.next.items()
                if each in target[name].next
            },
        )
        for name, topic in heads.items()
        if name in target
    }


def _identity(known: Offsets, name: str) -> str | None:
    return known.topics[name].identity if name in known.topics else None
