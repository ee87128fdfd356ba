"""Writers of tables without `await`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import broker.blocking
from broker import CHECKPOINT_KEY, Closed, InvalidMessage, NotFound, OutboundMessage, TransactionFatal
from broker.testing.harness import unique


@pytest.fixture
def bus() -> Iterator[broker.blocking.Bus]:
    with broker.blocking.connect(f"inmem://{unique('tables')}") as bus:
        bus.admin.ensure_topic("balances", partitions=1, compacted=True)
        yield bus


def table_of(bus: broker.blocking.Bus) -> dict[bytes | None, bytes | None]:
    return {record.key: record.data for batch in bus.log.read("balances", 0) for record in batch}


def test_rows_and_checkpoint_are_written_and_an_older_writer_is_fenced(bus: broker.blocking.Bus) -> None:
    with bus.table_writer("balances", 0) as old:
        old.write([OutboundMessage(b"1", "ann")], checkpoint=b"7")
        assert table_of(bus) == {b"ann": b"1", CHECKPOINT_KEY: b"7"}
        with bus.table_writer("balances", 0) as new:
            with pytest.raises(TransactionFatal, match="partition 0 of table 'balances'"):
                old.write([OutboundMessage(b"2", "ann")], checkpoint=b"8")
            new.write([OutboundMessage(None, "ann")], checkpoint=b"9")
    assert table_of(bus) == {b"ann": None, CHECKPOINT_KEY: b"9"}


def test_errors_are_those_of_the_asynchronous_writer(bus: broker.blocking.Bus) -> None:
    with pytest.raises(NotFound, match="has no partition 3"), bus.table_writer("balances", 3):
        pytest.fail("there is no such partition")
    table = bus.table_writer("balances", 0)
    with pytest.raises(Closed, match="not open"):
        table.write([], checkpoint=b"1")
    with table, pytest.raises(InvalidMessage, match="no key"):
        table.write([OutboundMessage(b"1")], checkpoint=b"1")
    with pytest.raises(Closed, match="not open"):
        table.write([], checkpoint=b"1")
    assert table_of(bus) == {}
