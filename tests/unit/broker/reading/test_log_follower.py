"""A followed log over a scripted reader: when it has caught up, new partitions, errors, calls that are cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, cast

import pytest

from broker.capabilities import RecordCapabilities
from broker.driver.contract import Bounds
from broker.errors import (
    BrokerError,
    Closed,
    ConfigurationError,
    ConnectionFailed,
    InvalidName,
    NotFound,
    OffsetOutOfRange,
    TopicNotFound,
    TopicRecreated,
    Unsupported,
)
from broker.hooks import Event, FetchFailed, Hooks
from broker.reading import log_follower
from broker.reading.log_follower import LogFollower
from broker.reading.log_reader import LogReaderFacade
from broker.records import Record
from tests.unit.broker.reading.record_fakes import record


class ScriptedFollower:
    """Returns what was put, an exception by raising it."""

    def __init__(self, positions: Mapping[int, int]) -> None:
        self.added: list[Mapping[int, int]] = [positions]
        self.positions = dict(positions)
        self.results: asyncio.Queue[tuple[Sequence[Record[Any]], Mapping[int, int]] | BrokerError] = asyncio.Queue()
        self.closed = 0

    def put(self, *offsets: tuple[int, int], reached: Mapping[int, int] | None = None) -> None:
        """Return records of these partitions and offsets, which reach the positions behind them."""
        after = {partition: offset + 1 for partition, offset in offsets} | dict(reached or {})
        self.results.put_nowait(([record(offset, partition) for partition, offset in offsets], after))

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        result = await self.results.get()
        if isinstance(result, BrokerError):
            raise result
        records, reached = result
        self.positions |= reached
        return records

    def interrupt(self) -> None:
        self.results.put_nowait(((), {}))

    def reached(self, partition: int) -> int:
        return self.positions[partition]

    async def add(self, positions: Mapping[int, int]) -> None:
        self.added.append(positions)
        self.positions |= positions

    async def close(self) -> None:
        self.closed += 1


class ScriptedReader:
    """Partitions with offsets from 10 on."""

    def __init__(self, **nexts: int) -> None:
        self.bounds_of = {int(name[1:]): Bounds(10, following) for name, following in nexts.items()}
        self.identity: str | None = "a"
        self.follower: ScriptedFollower | None = None

    async def partitions(self, topic: str) -> Sequence[int]:
        return list(self.bounds_of)

    async def bounds(self, topic: str) -> Mapping[int, Bounds]:
        return self.bounds_of

    async def position_at(self, topic: str, time: datetime) -> Mapping[int, int]:
        return {}

    async def follow(self, topic: str, positions: Mapping[int, int]) -> ScriptedFollower:
        self.follower = ScriptedFollower(positions)
        return self.follower

    async def ask_identity(self, topic: str) -> str | None:
        if self.identity == "":
            raise TopicNotFound(f"Topic {topic!r} does not exist")
        return self.identity


def open_log(reader: ScriptedReader, *args: Any, hooks: Hooks | None = None, **options: Any) -> LogFollower:
    facade = LogReaderFacade(
        cast("Any", reader), RecordCapabilities(follow=True), hooks=hooks, identity=reader.ask_identity
    )
    return facade.follow("orders", *args, **options)


def source(reader: ScriptedReader) -> ScriptedFollower:
    assert reader.follower is not None
    return reader.follower


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_follower, "_LOOK_SECONDS", 0.01)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("args", "options", "begins"),
    [
        ((), {}, {0: 10, 1: 10}),
        (({1: 13},), {}, {1: 13}),
        (({1: 13},), {"others": "earliest"}, {0: 10, 1: 13}),
        (({1: 13},), {"others": "latest"}, {0: 20, 1: 13}),
        (({},), {"others": "latest"}, {0: 20, 1: 15}),
    ],
)
async def test_where_partitions_begin(args: Any, options: Any, begins: Mapping[int, int]) -> None:
    reader = ScriptedReader(p0=20, p1=15)
    async with open_log(reader, *args, **options) as log:
        assert source(reader).added == [begins]
        assert log.behind == begins.keys()
    assert source(reader).closed == 1
    assert log.closed


async def test_catching_up_is_told_with_the_batch_that_does_it() -> None:
    reader = ScriptedReader(p0=13, p1=10)
    async with open_log(reader) as log:
        assert len(await log.next_batch()) == 0
        assert log.behind == {0}
        source(reader).put((0, 10), (0, 11), (0, 12), (1, 10), (0, 13))
        assert [each.offset for each in await log.next_batch(2)] == [10, 11]
        assert log.behind == {0}
        # What was fetched together counts together.
        assert [each.offset for each in await log.next_batch(2)] == [12, 10]
        assert [each.offset for each in await log.next_batch(2)] == [13]
        assert log.behind == set()
        assert len(await log.next_batch(timeout=0.01)) == 0


async def test_an_end_without_records_is_told_by_an_empty_batch() -> None:
    reader = ScriptedReader(p0=13)
    async with open_log(reader) as log:
        source(reader).put((0, 10))
        assert len(await log.next_batch()) == 1
        assert log.behind == {0}
        source(reader).put(reached={0: 13})
        batches = log.batches()
        assert len(await anext(batches)) == 0
        assert log.behind == set()
        source(reader).put((0, 13))
        assert [each.offset for each in await anext(batches)] == [13]


async def test_a_cancelled_call_loses_nothing_and_a_batch_can_be_given_back() -> None:
    reader = ScriptedReader(p0=10)
    async with open_log(reader) as log:
        await log.next_batch()
        waiting = asyncio.ensure_future(log.next_batch())
        await asyncio.sleep(0)
        waiting.cancel()
        source(reader).put((0, 10), (0, 11))
        batch = await log.next_batch(1)
        log.give_back(batch)
        assert [each.offset for each in await log.next_batch()] == [10, 11]


async def test_a_retriable_error_is_an_event_and_the_fetch_goes_on() -> None:
    reader, hooks, events = ScriptedReader(p0=12), Hooks(), list[Event]()
    hooks.listen(events.append)
    async with open_log(reader, hooks=hooks) as log:
        source(reader).put((0, 10))
        source(reader).results.put_nowait(ConnectionFailed("down"))
        source(reader).put((0, 11))
        assert [each.offset for each in await log.next_batch()] == [10]
        assert [each.offset for each in await log.next_batch()] == [11]
        assert [type(event) for event in events if isinstance(event, FetchFailed)] == [FetchFailed]


async def test_an_error_is_raised_once_after_the_records_before_it() -> None:
    reader = ScriptedReader(p0=12)
    async with open_log(reader) as log:
        source(reader).put((0, 10))
        source(reader).results.put_nowait(OffsetOutOfRange("removed"))
        await until(lambda: not log.healthy)
        assert [each.offset for each in await log.next_batch()] == [10]
        with pytest.raises(OffsetOutOfRange, match="removed"):
            await log.next_batch()
        assert log.closed
        with pytest.raises(Closed):
            await log.next_batch()
        assert [batch async for batch in log.batches()] == []


async def test_an_error_that_a_recreated_topic_caused_is_named() -> None:
    reader = ScriptedReader(p0=12)
    async with open_log(reader) as log:
        reader.identity = "b"
        source(reader).results.put_nowait(OffsetOutOfRange("removed"))
        with pytest.raises(TopicRecreated, match="'orders' was deleted and recreated"):
            await log.next_batch()


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize(("identity", "error"), [("b", TopicRecreated), ("", TopicNotFound)])
async def test_a_topic_that_is_gone_ends_it_and_its_records_are_dropped(identity: str, error: type) -> None:
    reader = ScriptedReader(p0=12)
    async with open_log(reader) as log:
        source(reader).put((0, 10))
        reader.identity = identity
        await until(lambda: not log.healthy)
        with pytest.raises(error):
            await log.next_batch()


@pytest.mark.usefixtures("looks_often")
async def test_new_partitions_are_followed_from_their_first_record() -> None:
    whole, part = ScriptedReader(p0=12), ScriptedReader(p0=12)
    async with open_log(whole, others="latest") as log, open_log(part, {0: 11}):
        for reader in (whole, part):
            reader.bounds_of[1] = Bounds(10, 15)
        await until(lambda: len(source(whole).added) == 2)
        assert source(whole).added[1] == {1: 10}
        source(whole).put((1, 10))
        await until(lambda: 1 not in log.behind and log.healthy)
        await asyncio.sleep(0.05)
        assert source(part).added == [{0: 11}]


async def test_closing_ends_waiting_calls() -> None:
    reader = ScriptedReader(p0=10)
    async with open_log(reader) as log:
        await log.next_batch()
        waiting = asyncio.ensure_future(log.next_batch())
        iterating = asyncio.ensure_future(anext(log.batches(), None))
        await asyncio.sleep(0.01)
        await log.close()
        await log.close()
        with pytest.raises(Closed):
            await waiting
        assert await iterating is None
    with pytest.raises(Closed, match="opens once"):
        await log.__aenter__()


async def test_arguments_are_checked() -> None:
    reader = ScriptedReader(p0=12)
    for positions in ([0], {"0": 1}, {0: "1"}, {0: None}, {True: 1}, {}):
        with pytest.raises(ConfigurationError, match="positions"):
            open_log(reader, positions)
    with pytest.raises(ConfigurationError, match="others"):
        open_log(reader, others="oldest")
    with pytest.raises(OffsetOutOfRange, match="-1"):
        open_log(reader, {0: -1})
    with pytest.raises(InvalidName):
        LogReaderFacade(cast("Any", reader), RecordCapabilities(follow=True)).follow("a/b")
    with pytest.raises(Unsupported):
        LogReaderFacade(cast("Any", reader), RecordCapabilities()).follow("orders")
    with pytest.raises(NotFound, match="no partition 7"):
        await open_log(reader, {7: 10}).__aenter__()
    with pytest.raises(Closed, match="not open"):
        await open_log(reader).next_batch()
