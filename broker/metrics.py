"""`Metrics`: counters, gauges and histograms of the publishers and consumers of a bus, on every backend.

    metrics = Metrics(bus)
    metrics.text()  # for Prometheus

*Concurrency.* Counts on the event loop of the bus, under a lock; may be read from any thread. *Failure.* Never affects
the bus: its own failures are logged. *Cost.* One call per batch, and two histogram entries per acked message.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol

from broker.checks import check_count
from broker.exposition import CONTENT_TYPE, Histogram, Series, prometheus_text
from broker.hooks import (
    Connected,
    DeadLettered,
    DeadLetterFailed,
    Disconnected,
    Event,
    FetchFailed,
    FlowBlocked,
    HandlerFailed,
    Hooks,
    LeaseExpired,
    LeasesNotRenewed,
    MetricsSource,
    NoDeadLetter,
    PartitionsAssigned,
    PartitionsLost,
    PartitionsRevoked,
    PositionReset,
    PositionsCommitted,
    Published,
    Received,
    RecordsReceived,
    RetryScheduled,
    RetryWriteFailed,
    Settled,
    SettleFailed,
    Warned,
    logger,
)
from broker.messages import Message

__all__ = ["CONTENT_TYPE", "HELP", "OTHER", "Histogram", "Metrics", "Series"]

OTHER: Final = "(other)"
"""The label of all topics beyond the first `max_topics`."""

_PREFIX: Final = "anybroker_"
_BOUNDS: Final = (
    *(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    *(30.0, 100.0, 300.0, 1000.0, 3600.0, 10_000.0, 86_400.0),
)

_PUBLISHING: Final = {
    "published_messages_total": "Messages that the broker stored; a repetition counts again.",
    "duplicate_messages_total": "Messages that the broker dropped, because it already had their ids, and reported.",
    "publish_failures_total": "Messages that failed to be published, or whose outcome is unknown.",
    "publish_seconds": "Duration of a call that published one message or a batch.",
}
_CONSUMING: Final = {
    "received_messages_total": "Messages received, by delivery: first, redelivery, or unknown.",
    "received_bytes_total": "Bytes of the messages received from the broker.",
    "acked_messages_total": "Messages that are not redelivered: acked, dead-lettered, dropped, or on a retry topic.",
    "nacked_messages_total": "Messages to redeliver after a delay, because their handler failed or called nack().",
    "released_messages_total": "Messages that were given back unhandled.",
    "settle_failures_total": "Messages whose settlement was refused, or got no answer.",
    "handler_failures_total": "Handlers and message blocks that raised.",
    "dead_lettered_messages_total": "Messages that were written to a dead-letter topic.",
    "dropped_messages_total": "Messages that were dropped instead of dead-lettered.",
    "no_dead_letter_total": "Times that a message was given up, had no dead letter, and was redelivered.",
    "dead_letter_failures_total": "Failed writes of dead letters, which are repeated.",
    "retries_scheduled_total": "Messages that were written to a retry topic.",
    "retry_write_failures_total": "Failed writes to retry topics, which are repeated.",
    "lost_leases_total": "Messages whose lease was lost before they were settled.",
    "lease_renewal_failures_total": "Leases that could not be renewed, counted per attempt.",
    "flow_blocked_total": "Times that fetching stopped, because too many messages were unsettled.",
    "in_flight_messages": "Messages that are fetched and not settled.",
    "in_flight_bytes": "Bytes of the messages that are fetched and not settled.",
    "end_to_end_seconds": "Time from the publish time of a message, by its producer's clock, to its ack.",
    "received_to_acked_seconds": "Time from the fetch of a message to its ack.",
    "retry_delay_seconds": "Delay until a message is redelivered, after its handler failed.",
}
_RECORDS: Final = {
    "received_records_total": "Records received.",
    "commits_total": "Committed positions of partitions.",
}
_SOURCES: Final = {
    "fetch_failures_total": "Fetches that failed and were repeated.",
    "position_resets_total": "Positions that the log did not hold, so that reading continued elsewhere.",
    "partitions_assigned_total": "Partitions assigned to consumers.",
    "partitions_revoked_total": "Partitions revoked from consumers.",
    "partitions_lost_total": "Partitions lost to another member before they could be released.",
}
_CONNECTIONS: Final = {
    "disconnects_total": "Times that the connection broke.",
    "reconnects_total": "Times that the connection was restored.",
    "warnings_total": "Other warnings (Warned events).",
}
_GAUGES: Final = ("in_flight_messages", "in_flight_bytes")
_BY_DELIVERY: Final = "received_messages_total"

HELP: Final[Mapping[str, str]] = MappingProxyType(
    {
        _PREFIX + name: text
        for table in (_PUBLISHING, _CONSUMING, _RECORDS, _SOURCES, _CONNECTIONS)
        for name, text in table.items()
    }
)
"""The name and description of every metric."""


class Observed(Protocol):
    """A `broker.Bus` or `broker.blocking.Bus`."""

    @property
    def hooks(self) -> Hooks: ...


class Metrics:
    """Counts from its construction until `close`.

    :param observed: buses, or their hooks; several are counted together.
    :param max_topics: the number of topics with a label of their own, for publishers, message consumers and record
        consumers each. Later topics are counted together as `OTHER`.
    :raises ConfigurationError: `max_topics` is not an int of 1 or more.
    """

    def __init__(self, *observed: Observed | Hooks, max_topics: int = 100) -> None:
        check_count("max_topics", max_topics)
        # Reentrant, for reads in a signal handler or a finalizer.
        self._lock = threading.RLock()
        self._publishing = _Table(_PUBLISHING, max_topics)
        self._consuming = _Table(_CONSUMING, max_topics)
        self._records = _Table(_RECORDS, max_topics)
        self._sources = _Table(_SOURCES, max_topics)
        self._connections = _Counts(_CONNECTIONS)
        # One lookup per event.
        self._by_event: dict[type[Event], Callable[[Any], None]] = {
            Published: self._published,
            Received: self._received,
            Settled: self._settled,
            RecordsReceived: self._records_received,
            PositionsCommitted: self._committed,
            HandlerFailed: self._handler_failed,
            DeadLettered: self._dead_lettered,
            SettleFailed: self._counting("settle_failures_total"),
            NoDeadLetter: self._counting("no_dead_letter_total"),
            DeadLetterFailed: self._counting("dead_letter_failures_total"),
            RetryScheduled: self._counting("retries_scheduled_total"),
            RetryWriteFailed: self._counting("retry_write_failures_total"),
            LeaseExpired: self._counting("lost_leases_total"),
            LeasesNotRenewed: self._not_renewed,
            FlowBlocked: self._blocked,
            FetchFailed: self._fetch_failed,
            PositionReset: self._reset,
            PartitionsAssigned: self._moving("partitions_assigned_total"),
            PartitionsRevoked: self._moving("partitions_revoked_total"),
            PartitionsLost: self._moving("partitions_lost_total"),
            Connected: self._connected,
            Disconnected: lambda _: self._connections.add("disconnects_total"),
            Warned: lambda _: self._connections.add("warnings_total"),
        }
        self._hooks = [each if isinstance(each, Hooks) else each.hooks for each in observed]
        self._removers = [hooks.listen(self._count) for hooks in self._hooks]

    def close(self) -> None:
        """Stop counting; the metrics can still be read. May be called twice."""
        while self._removers:
            self._removers.pop()()

    def read(self) -> dict[Series, float | Histogram]:
        """All metrics, as of now: `read()[Series.of("anybroker_acked_messages_total", topic="orders")]`.

        Names that end in `_total` and histograms only grow; the others are gauges. A topic appears, with all its
        metrics, at its first publish or when a consumer of it opens. Histograms are copies. Processors and views of
        `broker_streams` appear while they are open; with equal labels, counters
        are added up, and the largest gauge counts.
        """
        found: dict[Series, float | Histogram] = {}
        with self._lock:
            in_flight = self._in_flight()
            for name in _PUBLISHING:
                _add_all(found, name, self._publishing.topics)
            for name in _CONSUMING:
                if name in _GAUGES:
                    for topic, amounts in in_flight.items():
                        found[Series.of(_PREFIX + name, topic=topic)] = amounts[_GAUGES.index(name)]
                elif name == _BY_DELIVERY:
                    for topic, counts in self._consuming.topics.items():
                        for delivery, count in counts.deliveries.items():
                            found[Series.of(_PREFIX + name, topic=topic, delivery=delivery)] = count
                else:
                    _add_all(found, name, self._consuming.topics)
            for table, names in ((self._records, _RECORDS), (self._sources, _SOURCES)):
                for name in names:
                    _add_all(found, name, table.topics)
            for name, count in self._connections.numbers.items():
                found[Series(_PREFIX + name)] = count
        for source in self._sources_of_others():
            try:
                _add_up(found, source.read())
            except Exception:
                logger.exception("Reading metrics of %s failed", type(source).__name__)
        return found

    def text(self) -> str:
        """All metrics in the text format of Prometheus; serve it with `CONTENT_TYPE`."""
        texts = dict(HELP)
        for source in self._sources_of_others():
            texts.update(source.help)
        return prometheus_text(self.read(), texts)

    # -- counting ----------------------------------------------------------------------------------------

    def _count(self, event: Event) -> None:
        if (count := self._by_event.get(type(event))) is not None:
            with self._lock:
                count(event)

    def _published(self, event: Published) -> None:
        counts = self._publishing.of(event.topic)
        failed = sum(isinstance(outcome, BaseException) for outcome in event.outcomes)
        duplicates = event.duplicates
        counts.add("published_messages_total", len(event.outcomes) - failed - duplicates)
        counts.add("duplicate_messages_total", duplicates)
        counts.add("publish_failures_total", failed)
        counts.histograms["publish_seconds"].add(event.seconds)

    def _received(self, event: Received) -> None:
        counts = self._consuming.of(event.topic)
        first = unknown = 0
        for message in event.messages:
            attempt = message.delivery_attempt
            if attempt is None:
                unknown += 1
            elif attempt <= 1:
                first += 1
        counts.deliveries["first"] += first
        counts.deliveries["redelivery"] += len(event.messages) - first - unknown
        counts.deliveries["unknown"] += unknown
        counts.add("received_bytes_total", event.bytes)

    def _settled(self, event: Settled) -> None:
        counts = self._consuming.of(event.topic)
        counts.add("acked_messages_total", event.acked)
        counts.add("nacked_messages_total", event.nacked)
        counts.add("released_messages_total", event.released)
        end_to_end = counts.histograms["end_to_end_seconds"]
        durations = counts.histograms["received_to_acked_seconds"]
        now, wall_clock = time.monotonic(), time.time()
        for message in event.handled:
            if (received_at := message.received_at) is not None:
                durations.add(now - received_at)
            if (published := message.publish_time) is not None:
                # The clocks of producer and consumer may differ.
                end_to_end.add(max(0.0, wall_clock - published.timestamp()))

    def _records_received(self, event: RecordsReceived) -> None:
        self._records.of(event.topic).add("received_records_total", event.count)

    def _committed(self, event: PositionsCommitted) -> None:
        for topic, _ in event.positions:
            self._records.of(topic).add("commits_total")

    def _handler_failed(self, event: HandlerFailed) -> None:
        counts = self._consuming.of(_topic_of(event.message))
        counts.add("handler_failures_total")
        if event.retry_in is not None:
            counts.histograms["retry_delay_seconds"].add(event.retry_in)

    def _dead_lettered(self, event: DeadLettered) -> None:
        name = "dropped_messages_total" if event.target is None else "dead_lettered_messages_total"
        self._consuming.of(_topic_of(event.message)).add(name)

    def _not_renewed(self, event: LeasesNotRenewed) -> None:
        for message in event.messages:
            self._consuming.of(_topic_of(message)).add("lease_renewal_failures_total")

    def _blocked(self, event: FlowBlocked) -> None:
        # All messages of one event are of one source.
        self._consuming.of(_topic_of(event.oldest[0])).add("flow_blocked_total")

    def _fetch_failed(self, event: FetchFailed) -> None:
        self._sources.of(event.topic).add("fetch_failures_total")

    def _reset(self, event: PositionReset) -> None:
        self._sources.of(event.partition[0]).add("position_resets_total")

    def _connected(self, event: Connected) -> None:
        if event.again:
            self._connections.add("reconnects_total")

    def _counting(self, name: str) -> Callable[[_OfMessage], None]:
        return lambda event: self._consuming.of(_topic_of(event.message)).add(name)

    def _moving(self, name: str) -> Callable[[_OfPartitions], None]:
        def count(event: _OfPartitions) -> None:
            for topic, _ in event.partitions:
                self._sources.of(topic).add(name)

        return count

    def _sources_of_others(self) -> list[MetricsSource]:
        return [source for hooks in self._hooks for source in hooks.metrics_sources]

    def _in_flight(self) -> dict[str, tuple[int, int]]:
        """Messages in flight and their bytes, by topic."""
        sources = [source for hooks in self._hooks for source in hooks.in_flight]
        for source in sources:
            self._consuming.of(source.topic)
        totals: dict[str, tuple[int, int]] = dict.fromkeys(self._consuming.topics, (0, 0))
        for source in sources:
            label = self._consuming.label(source.topic)
            messages, size = totals[label]
            totals[label] = (messages + source.count, size + source.bytes)
        return totals


class _OfMessage(Protocol):
    @property
    def message(self) -> Message[Any]: ...


class _OfPartitions(Protocol):
    @property
    def partitions(self) -> Sequence[tuple[str, int]]: ...


class _Counts:
    """The counters and histograms of one topic."""

    __slots__ = ("deliveries", "histograms", "numbers")

    def __init__(self, names: Mapping[str, str]) -> None:
        counters = [name for name in names if name.endswith("_total") and name != _BY_DELIVERY]
        self.numbers = dict.fromkeys(counters, 0)
        self.histograms = {
            name: Histogram(_BOUNDS, [0] * (len(_BOUNDS) + 1)) for name in names if name.endswith("_seconds")
        }
        self.deliveries = {"first": 0, "redelivery": 0, "unknown": 0}

    def add(self, name: str, count: int = 1) -> None:
        self.numbers[name] += count


class _Table:
    """Counts for at most `most` topics, and for all other topics together."""

    def __init__(self, names: Mapping[str, str], most: int) -> None:
        self._names = names
        self._most = most
        self.topics: dict[str, _Counts] = {}

    def label(self, topic: str) -> str:
        """The label that counts the topic."""
        return topic if topic in self.topics or len(self.topics) < self._most else OTHER

    def of(self, topic: str) -> _Counts:
        label = self.label(topic)
        counts = self.topics.get(label)
        if counts is None:
            counts = self.topics[label] = _Counts(self._names)
        return counts


def _topic_of(message: Message[Any]) -> str:
    """The topic as `Received` and `Settled` name it."""
    return message.topic if message.owner is None else message.owner.topic


def _add_all(found: dict[Series, float | Histogram], name: str, topics: Mapping[str, _Counts]) -> None:
    for topic, counts in topics.items():
        number = counts.numbers.get(name)
        if number is None:
            histogram = counts.histograms[name]
            found[Series.of(_PREFIX + name, topic=topic)] = Histogram(_BOUNDS, list(histogram.counts), histogram.sum)
        else:
            found[Series.of(_PREFIX + name, topic=topic)] = number


def _add_up(found: dict[Series, float | Histogram], more: Mapping[Series, float | Histogram]) -> None:
    """Add metrics of another source: of gauges with equal labels the largest counts."""
    for series, value in more.items():
        before = found.get(series)
        if isinstance(value, Histogram):
            counts, seconds = list(value.counts), value.sum
            if isinstance(before, Histogram):
                counts = [sum(pair) for pair in zip(counts, before.counts, strict=True)]
                seconds += before.sum
            found[series] = Histogram(value.bounds, counts, seconds)
        elif before is None or isinstance(before, Histogram):
            found[series] = value
        else:
            found[series] = before + value if series.name.endswith("_total") else max(before, value)
