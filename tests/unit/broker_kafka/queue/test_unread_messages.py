"""Due messages that their readers have not passed: they are looked at again soon, however long the lease is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from broker import TopicPartition
from broker_kafka.fenced_writer import OutgoingRecord
from broker_kafka.queue.markers.wire import TIME_MARKER, Content, Kind, Marker, MessageId, write_marker
from broker_kafka.queue.tracker.partition_state import PartitionState
from broker_kafka.queue.tracker.redeliverer import Redeliverer, RedeliveryRate
from broker_kafka.queue.tracker.redelivery_checks import ALWAYS
from broker_kafka.queue.tracker.tracker_state import TrackerCounts, TrackerOptions
from tests.unit.broker_kafka.queue.simulation import FAR, TOPIC

LEASE = 30_000
BEGIN = 1_000_000


class Positions:
    """Of readers that pass all messages, once they do."""

    unchecked: frozenset[MessageId] = frozenset()

    def __init__(self) -> None:
        self.have_passed = False

    async def passed(self, messages: Iterable[MessageId]) -> dict[MessageId, int]:
        return dict.fromkeys(messages, ALWAYS) if self.have_passed else {}


class Writable:
    """Topics that all take writes."""

    unchecked: frozenset[str] = frozenset()

    async def unwritable(self, topics: Iterable[str]) -> dict[str, Exception]:
        return {}


class Writer:
    def __init__(self) -> None:
        self.records: list[OutgoingRecord] = []

    async def write(self, records: Sequence[OutgoingRecord]) -> None:
        self.records += records


class Log:
    """A marker partition with one START, read as it grows."""

    def __init__(self) -> None:
        self.partition = PartitionState(0, 1, at=0, options=FAR)
        start = Marker(kind=Kind.START, id=MessageId(TOPIC, 0, 0, "q"), after_ms=LEASE, attempt=1)
        self._end = 0
        self.append(0, write_marker(start, Content(value=b"m0")))
        self.partition.log_end_known(1, at=0)

    def append(self, at: int, data: bytes | None = None) -> None:
        """Append a marker, of time by default, so many milliseconds after the START."""
        self.partition.read(self._end, BEGIN + at, data or write_marker(TIME_MARKER), at=at)
        self._end += 1


async def test_a_message_that_a_dead_reader_started_comes_soon_after_the_next_reader_has_passed_it() -> None:
    log, positions, counts, writer = Log(), Positions(), TrackerCounts(), Writer()
    redeliverer = Redeliverer(
        TopicPartition("q.markers", 0),
        cast("Any", positions),
        cast("Any", Writable()),
        TrackerOptions(partition=FAR),
        counts,
        RedeliveryRate(1000.0),
    )

    async def turn_at(at: int) -> None:
        log.append(at)
        await redeliverer.turn(log.partition, cast("Any", writer), at)

    for at in range(1000, LEASE + 1000, 1000):
        await turn_at(at)
    assert counts.waiting_for_readers == 1
    assert counts.redelivered == 0
    positions.have_passed = True
    for at in range(LEASE + 1000, LEASE + 6000, 1000):
        await turn_at(at)
    assert counts.redelivered == 1
    assert b"m0" in [record.value for record in writer.records]


async def test_a_message_that_no_reader_passes_is_looked_at_every_few_seconds() -> None:
    log, counts = Log(), TrackerCounts()
    redeliverer = Redeliverer(
        TopicPartition("q.markers", 0),
        cast("Any", Positions()),
        cast("Any", Writable()),
        TrackerOptions(partition=FAR),
        counts,
        RedeliveryRate(1000.0),
    )
    for at in range(1000, 2 * LEASE, 1000):
        log.append(at)
        await redeliverer.turn(log.partition, cast("Any", Writer()), at)
    assert 5 <= counts.waiting_for_readers <= 7
