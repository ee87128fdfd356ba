"""The log reader's facade over a scripted log: checks, defaults and calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from broker.capabilities import RecordCapabilities
from broker.driver.contract import Bounds
from broker.errors import ConfigurationError, InvalidName, NotFound, OffsetOutOfRange, Unsupported
from broker.protocols import LogReader
from broker.reading.log_reader import LogReaderFacade
from broker.records import Record
from tests.unit.broker.reading.record_fakes import record


class ScriptedLog:
    """One partition with offsets 10, 12, 14, 16, 18; what lay below 10 was removed."""

    def __init__(self) -> None:
        self.offsets = [10, 12, 14, 16, 18]
        self.reads: list[tuple[int, int, int]] = []

    async def partitions(self, topic: str) -> Sequence[int]:
        return [0]

    async def bounds(self, topic: str) -> Mapping[int, Bounds]:
        return {0: Bounds(10, 19)}

    async def position_at(self, topic: str, time: datetime) -> Mapping[int, int]:
        return {0: 14}

    async def read(
        self, topic: str, partition: int, start: int, stop: int, max_records: int
    ) -> AsyncIterator[Sequence[Record[Any]]]:
        self.reads.append((start, stop, max_records))
        if start < 10 or stop > 19:
            raise OffsetOutOfRange("not held")
        found = [record(offset) for offset in self.offsets if start <= offset < stop]
        yield ()
        for at in range(0, len(found), max_records):
            yield tuple(found[at : at + max_records])


async def offsets(reader: LogReaderFacade, *args: Any, **options: Any) -> list[list[int]]:
    return [[r.offset for r in batch] async for batch in reader.read("orders", *args, **options)]


async def test_without_bounds_it_reads_the_current_log() -> None:
    log = ScriptedLog()
    assert await offsets(LogReaderFacade(log), 0) == [[10, 12, 14, 16, 18]]
    assert log.reads == [(10, 19, 1000)]


async def test_start_is_included_and_stop_is_not() -> None:
    log = ScriptedLog()
    assert await offsets(LogReaderFacade(log), 0, 12, 16, max_records=1) == [[12], [14]]
    assert await offsets(LogReaderFacade(log), 0, 13) == [[14, 16, 18]]
    assert await offsets(LogReaderFacade(log), 0, stop=12) == [[10]]
    assert await offsets(LogReaderFacade(log), 0, 19) == []


async def test_removed_and_future_positions_raise() -> None:
    reader = LogReaderFacade(ScriptedLog())
    for start, stop in ((3, None), (12, 40), (30, None), (None, 5)):
        with pytest.raises(OffsetOutOfRange):
            await offsets(reader, 0, start, stop)
    with pytest.raises(OffsetOutOfRange):
        reader.read("orders", 0, -1)


async def test_arguments_are_checked_when_read_is_called() -> None:
    reader = LogReaderFacade(ScriptedLog())
    with pytest.raises(InvalidName):
        reader.read("?", 0)
    with pytest.raises(ConfigurationError, match="max_records"):
        reader.read("orders", 0, max_records=0)
    with pytest.raises(ConfigurationError, match="below"):
        reader.read("orders", 0, 9, 3)
    with pytest.raises(NotFound, match="no partition 4"):
        await offsets(reader, 4)


async def test_positions_by_time_need_a_timezone_and_the_capability() -> None:
    moment = datetime(2024, 1, 1, tzinfo=UTC)
    assert await LogReaderFacade(ScriptedLog()).position_at("orders", moment) == {0: 14}
    with pytest.raises(ConfigurationError, match="timezone"):
        await LogReaderFacade(ScriptedLog()).position_at("orders", moment.replace(tzinfo=None))
    with pytest.raises(Unsupported):
        await LogReaderFacade(ScriptedLog(), RecordCapabilities()).position_at("orders", moment)


async def test_names_are_checked_and_the_protocol_is_met() -> None:
    reader = LogReaderFacade(ScriptedLog())
    _typed: LogReader = reader
    assert await reader.partitions("orders") == [0]
    assert await reader.bounds("orders") == {0: Bounds(10, 19)}
    with pytest.raises(InvalidName):
        await reader.partitions("..")
    with pytest.raises(InvalidName):
        await reader.bounds("..")


async def test_a_read_batch_has_nothing_to_commit() -> None:
    log = ScriptedLog()
    committed: list[int] = []
    async for batch in LogReaderFacade(log).read("orders", 0, max_records=2):
        await batch.commit()
        await batch[0].commit()
        committed += [r.offset for r in batch if r.owner is None]
    assert committed == [10, 12, 14, 16, 18], "the reading goes on, and no record belongs to a consumer"
    assert log.reads == [(10, 19, 2)]
