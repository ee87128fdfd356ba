"""Writers of tables: what they refuse, and with which words."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

import broker
from broker.bus import Bus
from broker.driver.tables import CHECKPOINT_KEY
from broker.errors import (
    BackendError,
    Closed,
    ConfigurationError,
    InvalidMessage,
    NotFound,
    TopicNotFound,
    TransactionFatal,
    Unsupported,
)
from broker.outbound import OutboundMessage
from broker.publishing.tables import TableWriterFacade
from broker.testing.harness import unique

GOOD = OutboundMessage(b"1", "ann")


class Writer:
    """Keeps what it is to write; `go` lets the writes out."""

    def __init__(self) -> None:
        self.written: list[Sequence[OutboundMessage]] = []
        self.error: Exception | None = None
        self.closed = False
        self.go = asyncio.Event()
        self.go.set()

    async def write(self, rows: Sequence[OutboundMessage]) -> None:
        await self.go.wait()
        if self.error is not None:
            raise self.error
        self.written.append(rows)

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with broker.connect(f"inmem://{unique('tables')}") as bus:
        await bus.admin.ensure_topic("balances", partitions=2, compacted=True)
        yield bus


async def test_rows_get_the_partition_of_the_writer_and_the_checkpoint_comes_last() -> None:
    spi = Writer()
    table = TableWriterFacade("balances", 1, spi, None, "test")
    await table.write([GOOD, OutboundMessage(None, "ben", {"why": "closed"}, partition=1)], checkpoint=b"7")
    (rows,) = spi.written
    assert [(row.data, row.key, row.partition, dict(row.attributes)) for row in rows] == [
        (b"1", b"ann", 1, {}),
        (None, b"ben", 1, {"why": "closed"}),
        (b"7", CHECKPOINT_KEY, 1, {}),
    ]


@pytest.mark.parametrize(
    ("row", "text", "advice"),
    [
        (OutboundMessage(b"1"), "no key, and topic 'balances' is compacted", "a key"),
        (OutboundMessage(b"1", CHECKPOINT_KEY), "the key b'anybroker-checkpoint'", "checkpoint="),
        (OutboundMessage(b"1", "ann", partition=1), "partition 1, and this writer writes 0", "each partition"),
        (OutboundMessage(b"1", "ann", id="i-1"), "id='i-1'", "Leave it out"),
        (OutboundMessage(b"1", "ann", deliver_at=datetime(2040, 1, 1, tzinfo=UTC)), "deliver_at=datetime", "Leave it"),
        (b"1", "of type bytes", "OutboundMessage"),
    ],
)
async def test_a_bad_row_is_named_and_nothing_is_written(row: Any, text: str, advice: str) -> None:
    spi = Writer()
    table = TableWriterFacade("balances", 0, spi, None, "test")
    with pytest.raises(InvalidMessage, match=re.escape(text)) as raised:
        await table.write([GOOD, row], checkpoint=b"7")
    assert advice in raised.value.advice
    assert spi.written == []


async def test_more_rows_than_the_broker_takes_are_refused() -> None:
    spi = Writer()
    table = TableWriterFacade("balances", 0, spi, 2, "test")
    with pytest.raises(InvalidMessage, match=r"has 3 rows; test takes 2 .*capabilities.publish.table_rows"):
        await table.write([GOOD] * 3, checkpoint=b"7")
    await table.write([GOOD] * 2, checkpoint=b"7")
    assert len(spi.written) == 1


@pytest.mark.parametrize("checkpoint", [None, "7", 7])
async def test_a_checkpoint_is_bytes(checkpoint: Any) -> None:
    spi = Writer()
    table = TableWriterFacade("balances", 0, spi, None, "test")
    with pytest.raises(InvalidMessage, match=f"^checkpoint is {checkpoint!r}") as raised:
        await table.write([GOOD], checkpoint=checkpoint)
    assert "bytes" in raised.value.advice
    assert spi.written == [], "None would have deleted the checkpoint"


async def test_an_error_that_is_no_broker_error_is_wrapped() -> None:
    spi = Writer()
    spi.error = ZeroDivisionError("oops")
    with pytest.raises(BackendError, match=r"table 'balances' failed: oops"):
        await TableWriterFacade("balances", 0, spi, None, "test").write([], checkpoint=b"7")


async def test_a_cancelled_write_is_carried_out_and_the_close_waits_for_it() -> None:
    spi = Writer()
    table = TableWriterFacade("balances", 0, spi, None, "test")
    spi.go.clear()
    writing = asyncio.create_task(table.write([GOOD], checkpoint=b"7"))
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait((writing,))
    closing = asyncio.create_task(table.close())
    await asyncio.sleep(0)
    assert not spi.closed
    spi.go.set()
    await closing
    assert len(spi.written) == 1
    assert spi.closed
    with pytest.raises(Closed, match="partition 0 of table 'balances' is closed"):
        await table.write([GOOD], checkpoint=b"8")


@pytest.mark.parametrize("partition", [-1, True, "0", None])
async def test_a_partition_is_a_number(bus: Bus, partition: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^partition is "):
        async with bus.table_writer("balances", partition):
            pytest.fail("there is no such partition")


async def test_only_partitions_of_compacted_topics_have_writers(bus: Bus) -> None:
    await bus.admin.ensure_topic("orders")
    with pytest.raises(Unsupported, match=r"'orders' is not compacted.*compacted=True"):
        async with bus.table_writer("orders", 0):
            pytest.fail("it is not compacted")
    with pytest.raises(NotFound, match=r"'balances' has no partition 2.*0 to 1"):
        async with bus.table_writer("balances", 2):
            pytest.fail("it has two")
    with pytest.raises(TopicNotFound, match="ensure_topic"):
        async with bus.table_writer("missing", 0):
            pytest.fail("there is none")


async def test_a_fenced_writer_names_its_table_and_what_to_do(bus: Bus) -> None:
    async with bus.table_writer("balances", 0) as old, bus.table_writer("balances", 0) as new:
        with pytest.raises(TransactionFatal, match=r"partition 0 of table 'balances' ended") as raised:
            await old.write([GOOD], checkpoint=b"7")
        assert "open a new writer" in raised.value.advice
        await new.write([GOOD], checkpoint=b"8")
