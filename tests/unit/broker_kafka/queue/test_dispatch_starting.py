"""STARTs of queues that share a reader: each with what its consumer says, and with room or without."""

from __future__ import annotations

from typing import Any

from confluent_kafka import TIMESTAMP_CREATE_TIME

from broker.driver.contract import TopicPartition
from broker_kafka.queue.consumer.starting import Taken
from broker_kafka.queue.dispatch.dispatch_starting import DispatchStarting, queue_of
from broker_kafka.queue.dispatch.dispatch_table import NOBODYS, DispatchTable, Policy
from broker_kafka.queue.markers.held_message import Hold
from broker_kafka.queue.markers.queue_filter import OwnRecords
from broker_kafka.queue.markers.start_writer import read_each
from broker_kafka.queue.markers.wire import FORMATS, MessageId, read_content, read_markers

PLACE = TopicPartition("jobs", 0)
LEASE_MS = 30_000


class Raw:
    """What is read of a record of the client."""

    def __init__(self, key: bytes | None, value: bytes) -> None:
        self._key = key
        self._value = value

    def __len__(self) -> int:
        return len(self._value)

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> bytes:
        return self._value

    def headers(self) -> None:
        return None

    def timestamp(self) -> tuple[int, int]:
        return TIMESTAMP_CREATE_TIME, 1


def taken(offset: int, key: bytes, *, foreign: bool = False, due: int = 0) -> Taken:
    raw: Any = Raw(key, b"body %d" % offset)
    hold = None if foreign else Hold(MessageId(*PLACE, offset, "workers"), 0, 1)
    return Taken(PLACE, 1, raw, offset, (), hold, due)


class Bench:
    def __init__(self, most: int = 100) -> None:
        self.now = 0.0
        self.forsaken: list[bytes] = []
        self.table: DispatchTable[Any] = DispatchTable(most=most, most_bytes=10**6, total_bytes=10**6, now=0.0)
        self.starting = DispatchStarting(
            self.table,
            lambda: self.now,
            self.forsaken.append,
            OwnRecords("workers", frozenset({b"a", b"b"})),
            1,
            lease_ms=LEASE_MS,
            holder="here",
            format=FORMATS["v2"],
            max_deliveries=None,
            dead_letter=None,
        )

    def starts(self, *taken: Taken) -> list[tuple[int, int, bool, int | None, str]]:
        """Offset, period, whether nobody holds it, deliveries that count and dead-letter topic of each message."""
        found: list[tuple[int, int, bool, int | None, str]] = []
        for started in self.starting.starts(taken, 1_000_000):
            ((said, whole),) = read_markers(started.placed.data)
            assert said is not None
            assert [each.offset for each in started.taken] == [each.offset for each in said.ids()]
            for marker, data in read_each(said, whole, range(10)) if said.more else ((said, whole),):
                assert marker.id.queue == "workers"
                content = read_content(data)
                assert content.value == b"body %d" % marker.id.offset
                told = (marker.after_ms, marker.released, marker.attempt or 0, content.dead_letter)
                found.append((marker.id.offset, *told))
        return sorted(found)


def test_each_queue_has_the_limits_of_its_consumer() -> None:
    bench = Bench()
    bench.table.open(b"a", Policy(3, "a.dead"), 0.0)
    bench.table.open(b"b", NOBODYS, 0.0)
    found = bench.starts(taken(0, b"a"), taken(1, b"b"), taken(2, b"x", foreign=True), taken(3, b"a"))
    assert found == [(0, LEASE_MS, False, 1, "a.dead"), (1, LEASE_MS, False, 1, ""), (3, LEASE_MS, False, 1, "a.dead")]
    assert not bench.forsaken


def test_what_has_no_room_is_nobodys_counts_as_no_delivery_and_may_have_room_when_it_is_tried_again() -> None:
    bench = Bench(most=1)
    bench.table.open(b"a", Policy(3, "a.dead"), 0.0)
    batch = [taken(0, b"a"), taken(1, b"a")]
    assert bench.starts(*batch) == [(0, LEASE_MS, False, 1, "a.dead"), (1, 500, True, 0, "a.dead")]
    assert [each.waits for each in batch] == [False, True]
    assert [each.due for each in batch] == [0, 0]
    assert bench.starts(batch[1]) == [(1, LEASE_MS, False, 1, "a.dead")]
    assert not batch[1].waits
    assert not bench.forsaken


def test_what_nobody_consumes_is_told_and_comes_again() -> None:
    bench = Bench()
    bench.now = 20.0
    assert bench.starts(taken(0, b"b")) == [(0, 5_000, True, 0, "")]
    assert bench.forsaken == [b"b"]


def test_what_is_for_later_takes_no_room() -> None:
    bench = Bench(most=1)
    bench.table.open(b"a", NOBODYS, 0.0)
    found = bench.starts(taken(0, b"a", due=1_005_000), taken(1, b"a"))
    assert found == [(0, 5_000, True, 0, ""), (1, LEASE_MS, False, 1, "")]


def test_the_queue_of_a_record_is_its_key() -> None:
    assert [queue_of(Raw(key, b"")) for key in (b"a", None, b"")] == [b"a", b"", b""]
