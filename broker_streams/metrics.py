"""`ProcessorMetrics` and `ViewMetrics`: what `broker.metrics.Metrics` of their bus shows of processors and views.

Most numbers are counted anyway, and read when they are asked for. `Gauges` are the others: how far positions are behind
the ends of logs, and the sizes of stores. They are looked up every few seconds, and only while somebody listens to the
bus, as a `Metrics` does.

*Concurrency.* The event loop changes them; any thread reads them. *Failure.* What cannot be looked up is left out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, NoReturn

from broker import Bounds, BrokerError, Bus, TopicPartition
from broker.metrics import Histogram, Series
from broker_streams import keys
from broker_streams.checkpointer import Checkpointer
from broker_streams.partition import PartitionLog, PartitionRunner, PartitionState, PartitionTables
from broker_streams.recovery import CopyState, TableCopy
from broker_streams.stats import ProcessorState
from broker_streams.stores.store import Store

__all__ = ["HELP", "ProcessorMetrics", "ViewMetrics"]

logger: Final = logging.getLogger("broker_streams")

_LOOK_SECONDS: Final = 5.0
_LOOK_SHARE: Final = 20
"""Gauges are looked up in at most this part of the time."""

_OF_GROUP: Final = {
    "streams_processor_state": "1 for the state of the processor, 0 for the others.",
    "streams_checkpoint_seconds": "Duration of writing a checkpoint to the broker.",
    "streams_rollbacks_total": "Checkpoints that were undone, so that their messages are handled again.",
}
_OF_PARTITION: Final = {
    "streams_partition_state": "1 for the state of the partition, 0 for the others.",
    "streams_checkpoints_total": "Checkpoints with something of the partition.",
    "streams_handled_messages_total": "Messages that were handled, by topic.",
    "streams_handled_bytes_total": "Bytes of the messages that were handled, by topic.",
    "streams_published_messages_total": "Messages that were published: outputs, those of the loop, and dead letters.",
    "streams_written_rows_total": "Rows of the table that were set or deleted.",
}
_COUNTS: Final = {
    "failed": ("streams_failures_total", "Callbacks that raised, those of retries included."),
    "retried": ("streams_retries_total", "Messages that were tried again."),
    "skipped": ("streams_skipped_messages_total", "Messages that were passed over because they failed."),
    "dead_lettered": ("streams_dead_lettered_messages_total", "Messages that went to a topic of dead letters."),
    "undecodable": ("streams_undecodable_messages_total", "Messages that could not be decoded, or have no key."),
    "tombstones": ("streams_tombstones_total", "Messages without data that were passed over."),
    "duplicates": ("streams_duplicate_messages_total", "Messages of the loop that were dropped as repetitions."),
    "late": ("streams_late_messages_total", "Messages that came too late for a window, counted once per window."),
    "closed": ("streams_closed_windows_total", "Windows that were closed."),
    "timers": ("streams_fired_timers_total", "Timers that fired."),
    "expired": ("streams_expired_rows_total", "Rows that were deleted by their ttl."),
}
_GAUGES: Final = {
    "streams_lag_messages": "Messages from the position of the partition to the end of a topic; about, if many.",
    "streams_waiting_messages": "Messages that were fetched and wait for the partition.",
    "streams_event_time_seconds": "Event time of the partition, in seconds since 1970.",
    "streams_rows": "Rows in the store, and one more for each key with timers or open windows.",
    "streams_scheduled_keys": "Keys that wait for a timer, the end of a window, or to expire.",
    "streams_store_bytes": "Size of the store.",
}
_OF_TABLE: Final = {
    "streams_read_rows_total": "Rows that were read of a table topic: by recovery, for joins and lookups, on standby.",
    "streams_table_lag_messages": "What is left to read of a table topic that is recovered or followed; at most.",
}
_OF_VIEW: Final = {
    "view_state": "1 for the state of the view, 0 for the others.",
    "view_staleness_seconds": "Time since the view was known to be up to date.",
    "view_rows": "Rows of the view.",
    "view_store_bytes": "Size of the store of the view.",
    "view_read_rows_total": "Rows that were read of the table.",
    "view_lag_messages": "What is left to read of the table; at most.",
}

_PREFIX: Final = "anybroker_"

HELP: Final[Mapping[str, str]] = MappingProxyType(
    {
        _PREFIX + name: text
        for names in (_OF_GROUP, _OF_PARTITION, dict(_COUNTS.values()), _GAUGES, _OF_TABLE, _OF_VIEW)
        for name, text in names.items()
    }
)
"""The name and description of every metric."""

_Metrics = dict[Series, float | Histogram]


class _Size(NamedTuple):
    """Of a store; None is unknown, since counting would take long."""

    rows: int | None
    scheduled: int | None
    bytes: int


class _Gauges:
    """See the module.

    :param positions: tells the next offset to read of each partition; None before the first record.
    :param stores: tells the open stores, by partition.
    """

    def __init__(
        self,
        bus: Bus,
        positions: Callable[[], Mapping[TopicPartition, int | None]],
        stores: Callable[[], Mapping[int, Store]],
    ) -> None:
        self.lags: Mapping[TopicPartition, int] = {}
        self.sizes: Mapping[int, _Size] = {}
        self._bus = bus
        self._positions = positions
        self._stores = stores
        self._seen: dict[TopicPartition, tuple[int, int, int | None]] = {}
        """What was between a position and the end at the last look, and how many records there are if that is known."""

    async def run(self) -> NoReturn:
        """Look again and again, until cancelled."""
        while True:
            took = 0.0
            if self._bus.hooks.listening:
                began = time.monotonic()
                try:
                    await self._look()
                except Exception:
                    logger.exception("Metrics were not looked up")
                took = time.monotonic() - began
            await asyncio.sleep(max(_LOOK_SECONDS, took * _LOOK_SHARE))

    async def _look(self) -> None:
        stores = self._stores()
        self.sizes = await asyncio.to_thread(lambda: {at: size for at, each in stores.items() if (size := _size(each))})
        positions = self._positions()
        lags: dict[TopicPartition, int] = {}
        for topic in {place.topic for place in positions}:
            try:
                bounds = await self._bus.log.bounds(topic)
                for place, position in positions.items():
                    if place.topic == topic and place.partition in bounds:
                        lags[place] = await self._lag(place, position, bounds[place.partition])
            except BrokerError:
                # The broker is away, say: better no number than an old one.
                continue
        self.lags = lags
        self._seen = {place: seen for place, seen in self._seen.items() if place in lags}

    async def _lag(self, place: TopicPartition, position: int | None, bounds: Bounds) -> int:
        start, end = max(position or 0, bounds.first), bounds.next
        if start >= end:
            return 0
        first, stop, known = self._seen.get(place, (0, 0, None))
        if (first, stop) != (start, end):
            # On the move: what is exact now is not in a moment.
            self._seen[place] = start, end, None
            return await self._between(place, start, end)
        if known is None:
            # Where nothing moves, all that is left may be markers of transactions.
            some = await PartitionLog(self._bus, place.partition).has_records(place.topic, start, end)
            known = await self._between(place, start, end) if some else 0
            self._seen[place] = start, end, known
        return known

    async def _between(self, place: TopicPartition, start: int, end: int) -> int:
        records = self._bus.capabilities.records
        if records is None or records.counting_offsets:
            return end - start
        spans = await self._bus.log.spans(place.topic, place.partition, start, end)
        return sum(span.stop - span.start for span in spans)


class ProcessorMetrics:
    """Metrics of a processor; implements `broker.hooks.MetricsSource`. What it is given changes as the processor works.

    :param state: tells the state of the processor.
    :param states: the states of its partitions.
    :param standby: tells the partitions on standby.
    :param checkpoints: tells the checkpointer; None before the start.
    """

    def __init__(
        self,
        bus: Bus,
        group: str,
        *,
        topics: tuple[str, ...],
        state: Callable[[], ProcessorState],
        states: Mapping[int, PartitionState],
        standby: Callable[[], tuple[int, ...]],
        runners: Mapping[int, PartitionRunner],
        tables: Mapping[int, PartitionTables],
        lookups: Callable[[], list[TableCopy]],
        checkpoints: Callable[[], Checkpointer | None],
    ) -> None:
        self._group = group
        self._topics = topics
        self._state = state
        self._states = states
        self._standby = standby
        self._runners = runners
        self._tables = tables
        self._lookups = lookups
        self._checkpoints = checkpoints
        self._before: dict[int, Counter[tuple[str, str]]] = {}
        """By partition the counters of runners that have gone."""
        self._read: Counter[TopicPartition] = Counter()
        """Rows that were read by copies that have gone."""
        self._gauges: Final = _Gauges(bus, self._positions, self._stores)

    @property
    def help(self) -> Mapping[str, str]:
        return HELP

    async def run(self) -> NoReturn:
        """Look up what has to be looked up, until cancelled."""
        await self._gauges.run()

    def runner_gone(self, runner: PartitionRunner) -> None:
        """Keep the counters of a runner that takes no more checkpoints."""
        self._before[runner.partition] = self._counters(runner.partition, runner)

    def copies_gone(self, *copies: TableCopy) -> None:
        """Keep the counters of copies that read no more."""
        self._read = _rows_read(copies, self._read)

    def read(self) -> Mapping[Series, float | Histogram]:
        """All metrics, as of now."""
        found: _Metrics = {}
        group = self._group
        _add_states(found, "streams_processor_state", ProcessorState, self._state(), group=group)
        if (checkpoints := self._checkpoints()) is not None:
            took = checkpoints.durations
            found[_series("streams_checkpoint_seconds", group=group)] = Histogram(
                took.bounds, list(took.counts), took.sum
            )
            found[_series("streams_rollbacks_total", group=group)] = checkpoints.undone
        self._add_partition_states(found)
        runners = dict(self._runners)
        for number in sorted({*self._before, *runners}):
            self._add_counters(found, number, runners.get(number))
        for number, runner in sorted(runners.items()):
            labels = {"group": group, "partition": str(number)}
            found[_series("streams_waiting_messages", **labels)] = runner.backlog
            found[_series("streams_event_time_seconds", **labels)] = runner.engine.stream_time / 1000
        for number, size in self._gauges.sizes.items():
            _add_size(found, "streams_", size, group=group, partition=str(number))
        self._add_logs(found)
        return found

    def _add_partition_states(self, found: _Metrics) -> None:
        states = {**dict.fromkeys(self._standby(), PartitionState.STANDBY), **self._states}
        for number, state in sorted(states.items()):
            labels = {"group": self._group, "partition": str(number)}
            _add_states(found, "streams_partition_state", PartitionState, state, **labels)

    def _add_counters(self, found: _Metrics, number: int, runner: PartitionRunner | None) -> None:
        labels = {"group": self._group, "partition": str(number)}
        counters = self._counters(number, runner)
        for topic in self._topics:
            for name in ("streams_handled_messages_total", "streams_handled_bytes_total"):
                found[_series(name, **labels, topic=topic)] = counters[name, topic]
        others = ("checkpoints", "published_messages", "written_rows")
        for name in (*(f"streams_{each}_total" for each in others), *(name for name, _ in _COUNTS.values())):
            found[_series(name, **labels)] = counters[name, ""]

    def _counters(self, number: int, runner: PartitionRunner | None) -> Counter[tuple[str, str]]:
        """The counters of a partition, by name and topic."""
        counters = Counter(self._before.get(number, {}))
        if runner is None:
            return counters
        counters["streams_checkpoints_total", ""] += runner.checkpoints
        counters["streams_published_messages_total", ""] += runner.published
        counters["streams_written_rows_total", ""] += runner.rows
        for topic, (messages, size) in tuple(runner.handled.items()):
            counters["streams_handled_messages_total", topic] += messages
            counters["streams_handled_bytes_total", topic] += size
        for what, (name, _) in _COUNTS.items():
            counters[name, ""] += runner.counts[what]
        return counters

    def _add_logs(self, found: _Metrics) -> None:
        for (topic, number), rows in sorted(_rows_read(self._copies(), self._read).items()):
            found[_series("streams_read_rows_total", group=self._group, partition=str(number), table=topic)] = rows
        for (topic, number), lag in sorted(self._gauges.lags.items()):
            name, label = ("lag", "topic") if topic in self._topics else ("table_lag", "table")
            labels = {"group": self._group, "partition": str(number), label: topic}
            found[_series(f"streams_{name}_messages", **labels)] = lag

    def _copies(self) -> list[TableCopy]:
        of_partitions = (copy for tables in tuple(self._tables.values()) for copy in tables.copies)
        return [*of_partitions, *self._lookups()]

    def _positions(self) -> dict[TopicPartition, int | None]:
        positions: dict[TopicPartition, int | None] = dict(_followed(self._copies()))
        for number, runner in self._runners.items():
            for topic in self._topics:
                positions[TopicPartition(topic, number)] = runner.engine.positions.get(topic)
        return positions

    def _stores(self) -> dict[int, Store]:
        return {number: tables.store for number, tables in self._tables.items()}


class ViewMetrics:
    """Metrics of a view; implements `broker.hooks.MetricsSource`."""

    def __init__(self, bus: Bus, copy: TableCopy) -> None:
        self._copy = copy
        self._gauges: Final = _Gauges(bus, lambda: dict(_followed([copy])), lambda: {0: copy.store})

    @property
    def help(self) -> Mapping[str, str]:
        return HELP

    async def run(self) -> NoReturn:
        """Look up what has to be looked up, until cancelled."""
        await self._gauges.run()

    def read(self) -> Mapping[Series, float | Histogram]:
        """All metrics, as of now."""
        found: _Metrics = {}
        table = self._copy.topic
        _add_states(found, "view_state", CopyState, self._copy.state, table=table)
        if (staleness := self._copy.staleness) is not None:
            found[_series("view_staleness_seconds", table=table)] = staleness
        for size in self._gauges.sizes.values():
            _add_size(found, "view_", size, table=table)
        for (_, number), rows in sorted(_rows_read([self._copy], {}).items()):
            found[_series("view_read_rows_total", table=table, partition=str(number))] = rows
        for (_, number), lag in sorted(self._gauges.lags.items()):
            found[_series("view_lag_messages", table=table, partition=str(number))] = lag
        return found


def _size(store: Store) -> _Size | None:
    try:
        if not store.quick_count:
            return _Size(None, None, store.size())
        return _Size(store.count(keys.ROWS), store.count(keys.DUE), store.size())
    except BrokerError:
        # It was closed meanwhile.
        return None


def _rows_read(copies: Iterable[TableCopy], before: Mapping[TopicPartition, int]) -> Counter[TopicPartition]:
    rows = Counter(before)
    for copy in copies:
        for number, count in tuple(copy.read.items()):
            rows[TopicPartition(copy.topic, number)] += count
    return rows


def _followed(copies: Iterable[TableCopy]) -> Iterator[tuple[TopicPartition, int | None]]:
    """The positions of copies that are recovered or follow their tables."""
    for copy in copies:
        if copy.state is not CopyState.IDLE:
            for number, position in copy.positions.items():
                yield TopicPartition(copy.topic, number), position


def _add_states(
    found: _Metrics, name: str, states: type[ProcessorState | PartitionState | CopyState], now: str, **labels: str
) -> None:
    for state in states:
        found[_series(name, **labels, state=state.value)] = int(state is now)


def _add_size(found: _Metrics, prefix: str, size: _Size, **labels: str) -> None:
    if size.rows is not None:
        found[_series(f"{prefix}rows", **labels)] = size.rows
    if size.scheduled is not None and prefix == "streams_":
        found[_series("streams_scheduled_keys", **labels)] = size.scheduled
    found[_series(f"{prefix}store_bytes", **labels)] = size.bytes


def _series(name: str, **labels: str) -> Series:
    return Series.of(_PREFIX + name, **labels)
