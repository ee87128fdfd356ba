"""What STARTs say does not depend on how many messages have one, and a record takes each that is not large itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME
from hypothesis import given
from hypothesis import strategies as st

from broker.driver.contract import TopicPartition
from broker_kafka.queue.consumer.lease_manager import HeldMessage
from broker_kafka.queue.consumer.start_builder import FetchedRecord, StartBuilder, StartRecord
from broker_kafka.queue.markers.marker_producer import PACKED_BYTES
from broker_kafka.queue.markers.queue_filter import QueueFilter
from broker_kafka.queue.markers.start_writer import read_each
from broker_kafka.queue.markers.wire import (
    FORMATS,
    Content,
    Headers,
    Kind,
    Marker,
    MarkerFormat,
    MessageId,
    read_content,
    read_markers,
)

NOW = 1_000_000
ONE_EACH = MarkerFormat(markers_per_record=1, place_by_key=False, v1=False)


class Raw:
    """What is read of a record of the client."""

    def __init__(self, key: bytes | None, value: bytes | None, timestamp: tuple[int, int]) -> None:
        self._key = key
        self._value = value
        self._timestamp = timestamp

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> bytes | None:
        return self._value

    def timestamp(self) -> tuple[int, int]:
        return self._timestamp


def fetched(
    offset: int,
    key: bytes | None = b"k",
    value: bytes | None = b"v",
    headers: Headers = (),
    *,
    timestamp: tuple[int, int] = (TIMESTAMP_CREATE_TIME, 5),
    attempt: int = 1,
    due: int = 0,
    partition: int = 0,
) -> FetchedRecord:
    raw: Any = Raw(key, value, timestamp)
    place = TopicPartition("orders", partition)
    hold = HeldMessage(MessageId(*place, offset, "q"), partition, attempt)
    return FetchedRecord(place, 1, raw, offset, headers, hold, due, is_first=attempt == 1)


def starts(messages: Sequence[FetchedRecord], format: MarkerFormat) -> list[StartRecord]:
    queue_filter = QueueFilter("q", None)
    shared: dict[str, Any] = {"lease_ms": 30_000, "holder": "me", "max_deliveries": 5, "dead_letter": "d"}
    return StartBuilder(queue_filter, 2, format=format, **shared).starts(messages, NOW)


def contents(started: Sequence[StartRecord]) -> dict[MessageId, tuple[Marker, Content, int]]:
    """What is said of each message, and in which partition."""
    found: dict[MessageId, tuple[Marker, Content, int]] = {}
    for each in started:
        ((marker, data),) = read_markers(each.marker.data)
        assert marker is not None
        assert marker.kind is Kind.START
        assert [message.offset for message in marker.ids()] == [one.offset for one in each.records]
        parts = read_each(marker, data, range(1000)) if marker.more else [(marker, data)]
        found |= {start.id: (start, read_content(part), each.marker.partition) for start, part in parts}
    return found


payloads = st.none() | st.binary(max_size=4)
messages = st.lists(
    st.builds(
        dict,
        key=payloads,
        value=st.binary(max_size=4) | st.just(bytes(20_000)) | st.none(),
        headers=st.lists(st.tuples(st.text(max_size=3), payloads), max_size=2).map(tuple),
        timestamp=st.tuples(st.sampled_from([TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME]), st.integers(-1, 9)),
        attempt=st.sampled_from([1, 1, 1, 2]),
        due=st.sampled_from([0, 0, 0, NOW - 1, NOW + 1]),
        partition=st.integers(0, 1),
    ),
    max_size=12,
)


@given(messages, st.booleans(), st.booleans())
def test_a_start_of_several_equals_single_starts(drawn: list[dict[str, Any]], keyed: bool, valued: bool) -> None:
    for each in drawn:
        # Most often a topic has keys and values in all records.
        each["key"] = each["key"] or b"k" if keyed else each["key"]
        each["value"] = each["value"] or b"v" if valued else each["value"]
    batch = [fetched(offset, **each) for offset, each in enumerate(drawn)]
    together, alone = starts(batch, FORMATS["v2"]), starts(batch, ONE_EACH)
    assert contents(together) == contents(alone)
    assert len(alone) == len(batch)
    assert [each.deferred for each in batch] == [each.due > NOW for each in batch]


def test_messages_with_keys_and_headers_have_one_start() -> None:
    batch = [fetched(offset, b"%d" % offset, headers=(("a", b"b"),) * (offset % 2)) for offset in range(200)]
    (start,) = starts(batch, FORMATS["v2"])
    assert start.marker.whole
    assert len(start.records) == 200


def test_a_start_covers_as_many_messages_as_a_record_takes() -> None:
    small = starts([fetched(offset) for offset in range(401)], FORMATS["v2"])
    assert [len(each.records) for each in small] == [200, 200, 1]
    large = starts([fetched(offset, value=bytes(12_000)) for offset in range(5)], FORMATS["v2"])
    assert [len(each.records) for each in large] == [2, 2, 1]
    assert all(len(each.marker.data) <= PACKED_BYTES for each in small + large)
    mixed = starts([fetched(0), fetched(1, value=bytes(50_000)), fetched(2), fetched(3)], FORMATS["v2"])
    assert [(len(each.records), each.marker.whole) for each in mixed] == [(1, False), (1, False), (2, True)]
