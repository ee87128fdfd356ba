"""Record batches as Arrow tables."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from broker.arrow import record_schema, records_to_arrow
from broker.errors import ConfigurationError, MissingClient
from broker.records import Record, RecordBatch
from tests.unit.broker.reading.record_fakes import VIEW, WRITTEN, record


def test_every_column_round_trips() -> None:
    bare: Record[bytes] = Record("orders", 3, 7_000_000_000, None, None, ({}, None), VIEW)
    table = RecordBatch([record(1, partition=2), bare]).to_arrow()
    assert table.schema == record_schema()
    assert table.to_pylist() == [
        {
            "topic": "orders",
            "partition": 2,
            "offset": 1,
            "id": "id-1",
            "key": b"k",
            "data": b"1",
            "attributes": [("n", "1")],
            "publish_time": WRITTEN,
            "broker_time": WRITTEN,
        },
        {
            "topic": "orders",
            "partition": 3,
            "offset": 7_000_000_000,
            "id": "id-?",
            "key": None,
            "data": None,
            "attributes": [],
            "publish_time": None,
            "broker_time": WRITTEN,
        },
    ]


def test_records_of_one_partition_and_of_many_have_equal_columns() -> None:
    first, second = record(1, partition=2), record(2, partition=5)
    apart = [RecordBatch([each]).to_arrow().to_pylist()[0] for each in (first, second, first)]
    assert RecordBatch([first, second, first]).to_arrow().to_pylist() == apart
    alone = RecordBatch([first, first]).to_arrow()
    assert alone.to_pylist() == [apart[0], apart[0]]
    assert alone.schema == record_schema()


def test_times_are_microseconds_in_utc() -> None:
    table = records_to_arrow([record(1)])
    assert table.schema.field("broker_time").type == pa.timestamp("us", tz="UTC")
    assert table["publish_time"][0].as_py() == datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)


def test_no_records_are_an_empty_table_of_the_same_schema() -> None:
    table = RecordBatch[bytes]([]).to_arrow()
    assert table.num_rows == 0
    assert table.schema == record_schema()


def test_only_requested_columns_are_read() -> None:
    class Costly:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"{name} was read")

    bare: Record[bytes] = Record("orders", 3, 7, b"k", b"d", None, Costly())  # type: ignore[arg-type]
    table = RecordBatch([bare]).to_arrow(["offset", "data", "topic"])
    assert table.to_pylist() == [{"offset": 7, "data": b"d", "topic": "orders"}]
    assert table.schema == record_schema("offset", "data", "topic")
    with pytest.raises(ConfigurationError, match=r"'color'.*topic, partition"):
        RecordBatch([bare]).to_arrow(["color"])


def test_without_pyarrow_the_error_has_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingClient, match=r"pip install 'anybroker\[arrow\]'"):
        records_to_arrow([])
