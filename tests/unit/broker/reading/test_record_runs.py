"""Records that are created on demand: the tests of a record consumer hold for them too."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.codecs import Json
from broker.driver.contract import TopicPartition
from broker.errors import ConfigurationError
from broker.reading.record_fetcher import RecordBuffer
from broker.records import Record, RecordBatch, RecordsOfRuns
from tests.unit.broker.driver import test_commits as test_record_commits
from tests.unit.broker.reading import record_bench, test_record_consumer, test_record_flow, test_record_positions
from tests.unit.broker.reading import test_decoding as test_record_decoding
from tests.unit.broker.reading.record_bench import P0, P1, bench
from tests.unit.broker.reading.record_fakes import VIEW, WRITTEN, FakeRun, RunSource, record, runs_of


@pytest.fixture(autouse=True)
def source_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_bench, "FakeSource", RunSource)


for _module in (
    test_record_commits,
    test_record_consumer,
    test_record_decoding,
    test_record_flow,
    test_record_positions,
):
    globals().update({name: test for name, test in vars(_module).items() if name.startswith("test_")})


async def test_a_batch_creates_its_records_once_on_access() -> None:
    async with bench(0, 1) as b:
        b.source.append(1, 2)
        b.source.append(5, 6, partition=1)
        await b.buffered(4)
        batch = await b.consumer.next_batch()
        runs: list[FakeRun] = [run for run, _ in batch._items._runs]  # pyright: ignore[reportAttributeAccessIssue]
        assert len(batch) == 4
        assert batch.to_arrow(["offset"]).column("offset").to_pylist() == [1, 2, 5, 6]
        await batch.commit()
        assert b.source.stored == {P0: 3, P1: 7}
        assert [run.made for run in runs] == [0, 0]
        assert [each.offset for each in batch] == [1, 2, 5, 6]
        assert [one is other for one, other in zip(batch, batch, strict=True)] == [True] * 4
        assert batch[3] is list(batch)[3]
        assert batch[-1].offset == 6
        assert batch.to_arrow(["data", "offset"]).column("data").to_pylist() == [b"1", b"2", b"5", b"6"]
        assert [run.made for run in runs] == [1, 1]


async def test_rows_create_records_only_for_columns_that_a_run_lacks() -> None:
    async with bench(0, 1) as b:
        b.source.append(1, 2)
        b.source.append(5, 6, partition=1)
        await b.buffered(4)
        batch = await b.consumer.next_batch()
        runs: list[FakeRun] = [run for run, _ in batch._items._runs]  # pyright: ignore[reportAttributeAccessIssue]
        assert list(batch.rows("offset")) == [(1,), (2,), (5,), (6,)]
        assert [run.made for run in runs] == [0, 0]
        rows = batch.rows("partition", "offset", "payload")
        assert list(rows) == [(0, 1, b"1"), (0, 2, b"2"), (1, 5, b"5"), (1, 6, b"6")]
        assert list(rows) == []
        assert [run.made for run in runs] == [1, 1]
        assert next(batch.rows("payload", "offset")) == (b"1", 1)


async def test_a_batch_is_parted_by_partition_without_records() -> None:
    async with bench(0, 1) as b:
        for first, partition in ((1, 0), (5, 1), (2, 0)):
            b.source.append(first, partition=partition)
            await b.buffered(1)
        await b.buffered(3)
        batch = await b.consumer.next_batch()
        runs: list[FakeRun] = [run for run, _ in batch._items._runs]  # pyright: ignore[reportAttributeAccessIssue]
        parts = batch.by_partition()
        assert {place: list(part.rows("offset")) for place, part in parts.items()} == {P0: [(1,), (2,)], P1: [(5,)]}
        assert [run.made for run in runs] == [0, 0, 0]
        await parts[P0].commit()
        assert b.source.stored == {P0: 3}
        made = sorted(batch, key=lambda each: (each.partition, each.offset))
        again = batch.by_partition()
        assert [one is other for one, other in zip([*again[P0], *again[P1]], made, strict=True)] == [True] * 3
        assert [*again[P0].by_partition()] == [P0]
    assert RecordBatch([]).by_partition() == RecordBatch(RecordsOfRuns([], None)).by_partition() == {}


async def test_times_are_whole_milliseconds() -> None:
    async with bench() as b:
        b.source.append(1)
        await b.buffered(1)
        batch = await b.consumer.next_batch()
        wanted = int(WRITTEN.timestamp()) * 1000 + WRITTEN.microsecond // 1000
        assert list(batch.rows("offset", "publish_time_ms", "broker_time_ms")) == [(1, wanted, wanted)]
        assert list(RecordBatch(list(batch)).rows("publish_time_ms")) == [(wanted,)]
    early: Record[bytes] = Record("orders", 3, 7, None, None, ({}, datetime(1969, 12, 31, 23, 59, 59, 999, UTC)), VIEW)
    bare: Record[bytes] = Record("orders", 3, 8, None, None, ({}, None), VIEW)
    assert list(RecordBatch([early, bare]).rows("publish_time_ms")) == [(-1000,), (None,)]


def test_rows_of_records_of_an_empty_batch_and_of_unknown_columns() -> None:
    batch = RecordBatch([record(1), record(4, 1)])
    assert list(batch.rows("offset", "data", "attributes")) == [(1, b"1", {"n": "1"}), (4, b"4", {"n": "4"})]
    assert list(RecordBatch([]).rows("offset")) == []
    assert list(RecordBatch(RecordsOfRuns([], None)).rows("offset", "data")) == []
    with pytest.raises(ConfigurationError, match=r"no column 'size'.*topic, partition, offset"):
        batch.rows("offset", "size")
    with pytest.raises(ConfigurationError, match="called without a column"):
        batch.rows()


async def test_single_records_and_batches_may_alternate() -> None:
    async with bench() as b:
        b.source.append(*range(1, 8))
        await b.buffered(7)
        seen: list[int] = []
        for count in (1, 2, 1, 3):
            if count == 1:
                one = await b.consumer.next_record()
                assert one is not None
                seen.append(one.offset)
            else:
                seen += [each.offset for each in await b.consumer.next_batch(count)]
        assert seen == list(range(1, 8))
        await b.consumer.commit()
        assert b.source.stored == {P0: 8}


async def test_with_a_codec_records_are_created_before_their_delivery() -> None:
    async with bench(codec=Json(int)) as b:
        b.source.append(1, 2)
        await b.buffered(2)
        assert [each.payload for each in await b.consumer.next_batch()] == [1, 2]


def test_the_last_record_of_each_run_is_bound() -> None:
    owner: Any = object()
    records = RecordsOfRuns([(run, 7) for run in runs_of([record(1), record(2), record(4, 1)])], owner)
    last = records.last_of_each()
    assert [(each.partition, each.offset, each.generation) for each in last] == [(0, 2, 7), (1, 4, 7)]
    assert all(each.owner is owner for each in last)
    assert next(iter(records)).owner is owner
    assert repr(RecordBatch(records)) == "<RecordBatch of 3>"


_PLACES = [TopicPartition("orders", number) for number in range(3)]


@pytest.mark.deep
@given(st.data())
def test_a_buffer_of_runs_agrees_with_one_of_records(data: st.DataObject) -> None:
    gone: set[TopicPartition] = set()
    runs, plain = [RecordBuffer(lambda place: place not in gone, lambda: None) for _ in range(2)]
    offset = 0

    def places(records: list[Record[Any]]) -> list[tuple[int, int]]:
        return [(each.partition, each.offset) for each in records]

    for _ in range(data.draw(st.integers(1, 40))):
        step = data.draw(st.sampled_from(("add", "add", "pop", "one", "peek", "back", "drop", "hold", "go", "clear")))
        some = set(data.draw(st.lists(st.sampled_from(_PLACES), min_size=1, max_size=2)))
        if step == "add":
            partitions = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
            new = [record(offset + number, partition) for number, partition in enumerate(sorted(partitions))]
            offset += len(new)
            gone = set(data.draw(st.lists(st.sampled_from(_PLACES), max_size=1)))
            runs.add_runs(runs_of(new))
            plain.add(new)
        elif step == "pop":
            limit = data.draw(st.integers(1, 7))
            found: list[Record[Any]] = []
            if runs.unmade:
                for run in runs.pop_runs(limit):
                    found += run.make(None, 0)
            else:
                found = runs.pop(limit)
            assert places(found) == places(plain.pop(limit))
        elif step == "back":
            limit = data.draw(st.integers(1, 7))
            for buffer in (runs, plain):
                buffer.put_back(buffer.pop(limit)[1:])
        elif step == "one" and len(plain):
            assert places([runs.pop_one()]) == places([plain.pop_one()])
        elif step == "peek":
            one, other = runs.peek(), plain.peek()
            assert places([one] if one else []) == places([other] if other else [])
        elif step in ("drop", "hold", "go", "clear"):
            for buffer in (runs, plain):
                if step == "clear":
                    buffer.clear()
                else:
                    {"drop": buffer.drop, "hold": buffer.pause, "go": buffer.resume}[step](sorted(some))
        assert (len(runs), runs.size) == (len(plain), plain.size)
    assert places(runs.pop(1000)) == places(plain.pop(1000))
