"""Runs of fetched records: the records they make, how they are split, and the buffer of those not read yet."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, KafkaError
from confluent_kafka import Message as NativeRecord
from hypothesis import given
from hypothesis import strategies as st

from broker.arrow import record_schema
from broker.driver.contract import TopicPartition
from broker.records import RecordBatch, RecordsOfRuns
from broker_kafka.codec.record_run import NativeRun, runs_of
from broker_kafka.records import FetchedRuns

_MOMENT = 1_700_000_000_123
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def native(offset: int, partition: int = 0, topic: str = "orders", value: bytes | None = b"data", **more: Any) -> Any:
    made: Any = NativeRecord
    timestamp = more.pop("timestamp", (TIMESTAMP_CREATE_TIME, _MOMENT))
    return made(topic=topic, partition=partition, offset=offset, key=b"key", value=value, timestamp=timestamp, **more)


def places(runs: list[NativeRun]) -> list[tuple[str, int, list[int]]]:
    return [(run.topic, run.partition, [each.offset for each in run.make(None, 0)]) for run in runs]


def test_errors_are_left_out_and_runs_end_where_the_partition_changes() -> None:
    assert runs_of([]) == []
    refused = native(3, error=KafkaError(KafkaError._PARTITION_EOF))
    assert runs_of([refused]) == []
    assert places(runs_of([native(1), native(2), refused, native(4)])) == [("orders", 0, [1, 2, 4])]
    mixed = [native(1), native(2), native(7, 1), native(3), native(4, topic="other")]
    assert places(runs_of(mixed)) == [
        ("orders", 0, [1, 2]),
        ("orders", 1, [7]),
        ("orders", 0, [3]),
        ("other", 0, [4]),
    ]


def test_records_are_made_bound_and_complete() -> None:
    owner = object()
    (run,) = runs_of([native(5), native(6, value=None), native(8, value=b"")])
    assert (len(run), run.size, run.last) == (3, 4, 8)
    first, tombstone, empty = run.make(owner, 3)
    fields = {name: getattr(first, name) for name in msgspec.structs.asdict(first)}
    assert fields["owner"] is owner
    assert (first.topic, first.partition, first.offset, first.key, first.data) == ("orders", 0, 5, b"key", b"data")
    assert (first.size, first.generation, first.payload) == (4, 3, b"data")
    assert first.publish_time == datetime.fromtimestamp(_MOMENT / 1000, UTC)
    assert first.native.offset() == 5
    assert (tombstone.data, tombstone.size, empty.data, empty.size) == (None, 0, b"", 0)


def test_columns_are_those_of_the_records() -> None:
    headers: list[tuple[str, Any]] = [("kind", b"new")]
    runs = runs_of([native(5), native(6, value=None, headers=headers), native(7, 1), native(8, 1)])
    lazy = RecordsOfRuns([(run, 1) for run in runs], None)
    made = RecordBatch([record for run in runs for record in run.make(None, 1)])
    assert RecordBatch(lazy).to_arrow().equals(made.to_arrow())
    some = ["topic", "data", "offset", "partition", "key", "publish_time", "broker_time"]
    assert RecordBatch(lazy).to_arrow(some).equals(made.to_arrow(some))


_HEADERS = st.lists(
    st.tuples(
        st.sampled_from(["kind", "", "anybroker-id", "anybroker-time", "anybroker-attributes", "anybroker-x", "ä"]),
        st.sampled_from([b"new", None, b"", b"\xff", b"1700000000000001", b"a%00=b&=c&d"]),
    ),
    max_size=4,
)
_TIMES = st.tuples(st.sampled_from([0, 1, 2]), st.sampled_from([_MOMENT, _MOMENT + 1, 0, 2**62]))


@given(st.lists(st.tuples(st.none() | _HEADERS, _TIMES), min_size=1, max_size=8))
def test_rows_and_columns_are_those_of_the_records_whatever_the_headers_say(each: list[tuple[Any, Any]]) -> None:
    names = ["topic", "partition", "offset", "id", "key", "data", "attributes", "publish_time", "broker_time"]
    messages = [native(number, headers=headers, timestamp=time) for number, (headers, time) in enumerate(each)]
    (run,) = runs_of(messages)
    lazy = RecordBatch(RecordsOfRuns([(run, 1)], None))
    records = run.make(None, 1)
    assert list(lazy.rows(*names)) == [tuple(getattr(record, name) for name in names) for record in records]
    times = [
        tuple(None if time is None else (time - _EPOCH) // timedelta(milliseconds=1) for time in times)
        for times in lazy.rows("publish_time", "broker_time")
    ]
    assert list(lazy.rows("publish_time_ms", "broker_time_ms")) == times
    assert list(RecordBatch(records).rows("publish_time_ms", "broker_time_ms")) == times
    assert lazy.to_arrow().equals(RecordBatch(records).to_arrow())


def test_where_all_is_of_one_topic_only_partitions_part_runs() -> None:
    assert places(runs_of([native(1), native(2, 1), native(3, 1)], "orders")) == [
        ("orders", 0, [1]),
        ("orders", 1, [2, 3]),
    ]
    assert places(runs_of([native(1), native(2, topic="other")], "customers")) == [
        ("orders", 0, [1]),
        ("other", 0, [2]),
    ]


def test_where_all_is_of_one_partition_no_record_is_asked() -> None:
    sole = ("orders", 1)
    assert places(runs_of([native(1, 1), native(2, 1)], None, sole)) == [("orders", 1, [1, 2])]
    refused = native(3, 1, error=KafkaError(KafkaError._PARTITION_EOF))
    assert places(runs_of([native(1, 1), refused], None, sole)) == [("orders", 1, [1])]
    # Another partition at either end shows that there were several.
    assert places(runs_of([native(1, 1), native(2)], None, sole)) == [("orders", 1, [1]), ("orders", 0, [2])]
    assert places(runs_of([native(1), native(2, 1)], "orders", sole)) == [("orders", 0, [1]), ("orders", 1, [2])]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(0, 100))
def test_as_many_as_fit_into_so_many_bytes(sizes: list[int], room: int) -> None:
    (run,) = runs_of([native(number, value=b"x" * size) for number, size in enumerate(sizes)])
    count = run.within(room)
    assert sum(sizes[:count]) <= room or count == 0
    assert count == len(sizes) or sum(sizes[: count + 1]) > room


@given(st.data())
def test_what_arrives_leaves_in_its_order_and_within_the_bounds(data: st.DataObject) -> None:
    answered: list[None] = []
    arrivals = FetchedRuns(lambda: answered.append(None))
    batches = data.draw(st.integers(1, 4))
    sent: list[tuple[int, int, int]] = []
    for _ in range(batches):
        new = [
            (partition, len(sent) + number, size)
            for number, (partition, size) in enumerate(
                data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=8))
            )
        ]
        sent += new
        arrivals.add(runs_of([native(offset, partition, value=b"x" * size) for partition, offset, size in new]))
    paused = data.draw(st.sampled_from([None, 0, 1]))
    if paused is not None:
        arrivals.pause([TopicPartition("orders", paused)])
    left = [each for each in sent if each[0] != paused]
    taken: list[tuple[int, int, int]] = []
    while arrivals:
        most, size = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 20))
        found = [each for run in arrivals.take(most, size) for each in run.make(None, 0)]
        assert 1 <= len(found) <= most
        assert len(found) == 1 or sum(each.size for each in found) <= size
        taken += [(each.partition, each.offset, each.size) for each in found]
    assert taken == left
    assert len(answered) == batches
    if paused is not None:
        arrivals.resume([TopicPartition("orders", paused)])
        rest = [each.offset for run in (arrivals.take(100, 1000) if arrivals else []) for each in run.make(None, 0)]
        assert rest == [offset for partition, offset, _ in sent if partition == paused]
        assert len(answered) == batches


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_is_split(count: int) -> None:
    (run,) = runs_of([native(1), native(2), native(4)])
    first, rest = run.split(count)
    assert (len(first), len(rest), first.size + rest.size, rest.last) == (count, 3 - count, run.size, 4)


def test_a_part_may_be_empty() -> None:
    (run,) = runs_of([native(1), native(2)])
    whole, nothing = run.split(2)
    assert (list(whole.offsets), list(nothing.offsets), nothing.make(None, 0)) == ([1, 2], [], [])
    assert nothing.column("offset") == range(0)


@given(st.sets(st.integers(0, 12), min_size=1), st.integers(1, 2))
def test_columns_tell_what_the_records_do_with_and_without_gaps(offsets: set[int], partitions: int) -> None:
    rows = [(partition, offset) for partition in range(partitions) for offset in sorted(offsets)]
    runs = runs_of([native(offset, partition, value=b"%d" % offset) for partition, offset in rows])
    names = ["topic", "partition", "offset", "key", "data"]
    table = RecordBatch(RecordsOfRuns([(run, 0) for run in runs], None)).to_arrow(names)
    assert table.schema == record_schema(*names)
    assert table.equals(RecordBatch([each for run in runs for each in run.make(None, 0)]).to_arrow(names))
    assert list(zip(*(table.column(name).to_pylist() for name in ("partition", "offset")), strict=True)) == rows


@given(st.lists(st.integers(0, 9), min_size=2, max_size=12), st.data())
def test_parts_of_parts_are_the_whole(sizes: list[int], data: st.DataObject) -> None:
    (whole,) = runs_of([native(number, value=b"x" * size) for number, size in enumerate(sizes)])
    parts = [whole]
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(parts) - 1))
        if len(parts[place]) > 1:
            parts[place : place + 1] = parts[place].split(data.draw(st.integers(1, len(parts[place]) - 1)))
    made = [(part.make(None, 0), part) for part in parts]
    assert [each.offset for records, _ in made for each in records] == list(range(len(sizes)))
    for records, part in made:
        assert (len(part), part.last) == (len(records), records[-1].offset)
        assert part.size == sum(each.size for each in records)
        assert (
            list(part.values("offset") or ()) == list(part.column("offset") or ()) == [each.offset for each in records]
        )
        assert part.within(part.size) == len(part)
