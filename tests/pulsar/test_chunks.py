"""Interleaved chunks in a log: each message is read once, wherever a read starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from threading import Event
from typing import Any

import pytest

import broker
from broker.bus import Bus
from broker.driver.contract import Bounds
from broker.errors import OperationTimeout
from broker.testing.waiting import eventually
from broker_pulsar import chunked_messages, log_reader
from broker_pulsar.assigned_partition import AssignedPartition
from broker_pulsar.client import open_reader, pulsar
from broker_pulsar.message_ids import PER_ENTRY
from tests.pulsar.chunk_writer import ChunkWriter
from tests.pulsar.test_log_reader import PATIENCE, shorten, unload
from tests.servers.pulsar import PulsarServer

pytestmark = pytest.mark.xdist_group("pulsar")

Write = Callable[..., None]


@pytest.fixture
async def bus(pulsar_server: PulsarServer) -> AsyncIterator[Bus]:
    async with broker.connect(f"{pulsar_server.url}&request_timeout=20") as bus:
        yield bus


@pytest.fixture
async def write(pulsar_server: PulsarServer, bus: Bus, topic: str) -> Write:
    """As `ChunkWriter.write`, to the topic."""
    connection = bus.backend.connection  # pyright: ignore[reportAttributeAccessIssue]
    log = connection.topic(topic).partition(0).url

    def write(layout: str, start: int = 0, stop: int | None = None) -> None:
        with ChunkWriter(pulsar_server.port, log) as writer:
            writer.write(layout, start, stop)

    # The broker accepts a producer only for a topic that it has loaded.
    await bus.log.bounds(topic)
    return write


async def log_bounds(bus: Bus, topic: str) -> Bounds:
    return (await bus.log.bounds(topic))[0]


async def read(bus: Bus, topic: str, start: int, stop: int) -> list[int]:
    """The entries, counted from the log's first, in which the messages of a read end."""
    first, end = await log_bounds(bus, topic)
    batches = bus.log.read(topic, 0, first + start * PER_ENTRY, min(first + stop * PER_ENTRY, end))
    return [(record.offset - first) // PER_ENTRY async for batch in batches for record in batch]


def ends(layout: str) -> Sequence[int]:
    """The entries in which the messages of a layout end."""
    found = [number for number, each in enumerate(layout) if each == "." or each.islower()]
    return [number for number in found if layout[number] == "." or layout.rindex(layout[number]) == number]


@pytest.mark.parametrize(
    "layout",
    [
        "abab.",
        # For a read that starts at its end, the log ends with the rest of a message.
        "aab.cbcc",
        "dcaddab.bbcca.c",
        "abcacb.dbcd.ed.e",
        "ab.Aa.bB.Ab.",
        # As many incomplete messages as the client keeps.
        "abcdefghijabcdefghij.",
    ],
)
async def test_each_message_is_read_once_wherever_a_read_starts_and_ends(
    bus: Bus, topic: str, write: Write, layout: str
) -> None:
    write(layout)
    size = len(layout)
    ranges = [(start, stop) for start in range(size) for stop in sorted({start + 1, size})]
    found = await asyncio.gather(*(read(bus, topic, start, stop) for start, stop in ranges))
    assert dict(zip(ranges, found, strict=True)) == {
        (start, stop): [end for end in ends(layout) if start <= end < stop] for start, stop in ranges
    }


@pytest.mark.deep
@pytest.mark.parametrize(("before", "rest"), [("a", "a."), ("b", "ab.a.")])
async def test_many_small_messages_between_two_chunks(
    bus: Bus, topic: str, write: Write, before: str, rest: str
) -> None:
    before += "." * 1000
    layout = before + rest
    write(layout)
    start = len(before)
    assert await read(bus, topic, start, len(layout)) == [end for end in ends(layout) if end >= start]


@pytest.mark.parametrize(("before", "rest"), [("." + "a" * 60, "a."), ("b" + "." * 30, "ab.a.")])
async def test_the_first_of_large_chunks_far_before_the_start(
    bus: Bus, topic: str, write: Write, monkeypatch: pytest.MonkeyPatch, before: str, rest: str
) -> None:
    # As with chunks so large that the smallest number of entries is searched.
    monkeypatch.setattr(chunked_messages, "_NEAR_BYTES", 0)
    layout = before + rest
    write(layout)
    start = len(before)
    assert await read(bus, topic, start, len(layout)) == [end for end in ends(layout) if end >= start]


@pytest.mark.deep
async def test_an_incomplete_message_is_reported_only_at_the_end_of_a_log(
    pulsar_server: PulsarServer, topic: str, write: Write
) -> None:
    async with broker.connect(f"{pulsar_server.url}&request_timeout=2") as bus:
        write("ab.aAb.A")
        found = await asyncio.gather(*(read(bus, topic, start, 8) for start in range(8)), return_exceptions=True)
        assert [type(each) for each in found] == [OperationTimeout] * 8
        for start in range(7):
            assert await read(bus, topic, start, 7) == [end for end in (2, 3, 5, 6) if end >= start]
        write(".")
        assert await read(bus, topic, 0, 9) == [2, 3, 5, 6, 8]


async def test_a_message_whose_first_chunk_was_removed_is_skipped(bus: Bus, topic: str, write: Write) -> None:
    write("ab.ba.c.c.", 0, 3)
    await unload(bus, topic)
    first = (await log_bounds(bus, topic)).first
    write("ab.ba.c.c.", 3)
    await shorten(bus, topic)
    assert (await log_bounds(bus, topic)).first > first
    for start in range(7):
        assert await read(bus, topic, start, 7) == [end for end in (2, 4, 5, 6) if end >= start]


async def test_a_read_cancelled_during_its_restart_closes_its_reader(
    bus: Bus, topic: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins_again, may_go_on, is_over = Event(), Event(), Event()
    begins: list[Any] = []

    def slow_reader(client: Any, log: Any, start: Any, **options: Any) -> Any:
        begins.append(start)
        if len(begins) == 1:
            return open_reader(client, log, start, **options)
        begins_again.set()
        assert may_go_on.wait(PATIENCE)
        reader = open_reader(client, log, start, **options)
        is_over.set()
        return reader

    async def readers() -> int:
        connection = bus.backend.connection  # pyright: ignore[reportAttributeAccessIssue]
        return len(await connection.http.get(f"{connection.topic(topic).partition(0).path}/subscriptions", topic))

    async def has_none() -> bool:
        return await readers() == 0

    monkeypatch.setattr(log_reader, "open_reader", slow_reader)
    write("ab.ab.")
    reading = asyncio.ensure_future(read(bus, topic, 1, 6))
    assert await asyncio.to_thread(begins_again.wait, PATIENCE)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    may_go_on.set()
    assert await asyncio.to_thread(is_over.wait, PATIENCE)
    await eventually(has_none, PATIENCE, "the end of all readers")


@pytest.mark.deep
async def test_a_group_can_seek_to_a_message_with_interleaved_chunks(bus: Bus, topic: str, write: Write) -> None:
    layout = "abcacb.bc"
    write(layout)
    first = (await log_bounds(bus, topic)).first
    async with bus.records(topic, group="audit") as log:
        assert await log.next_record(timeout=20) is not None
        for end in ends(layout):
            await log.seek({(topic, 0): first + end * PER_ENTRY})
            record = await log.next_record(timeout=20)
            assert record is not None
            assert record.offset == first + end * PER_ENTRY


@pytest.mark.parametrize("seeks", [False, True])
async def test_a_message_whose_chunks_arrive_slowly_is_complete(
    pulsar_server: PulsarServer, topic: str, write: Write, monkeypatch: pytest.MonkeyPatch, seeks: bool
) -> None:
    """No redelivery is requested: the client would drop a message whose first chunk comes twice."""
    checks = requests = 0
    judge = AssignedPartition.needs_redelivery_request

    def check(part: AssignedPartition, sent: int) -> bool:
        nonlocal checks
        checks += 1
        return judge(part, sent)

    def request(_consumer: Any) -> None:
        nonlocal requests
        requests += 1

    monkeypatch.setattr(AssignedPartition, "needs_redelivery_request", check)
    monkeypatch.setattr(pulsar.Consumer, "redeliver_unacknowledged_messages", request)
    async with (
        broker.connect(f"{pulsar_server.url}&rebalance_interval=0.1") as own,
        own.records(topic, group="billing") as log,
    ):
        await eventually(log.assignment, PATIENCE, "the assignment")
        if seeks:
            await log.seek({(topic, 0): (await log_bounds(own, topic)).first})
        await asyncio.to_thread(write, "aa.", 0, 1)
        checks = 0
        await eventually(lambda: checks >= 5, PATIENCE, "checks while a part of it has arrived")
        await asyncio.to_thread(write, "aa.", 1)
        records = [await log.next_record(timeout=PATIENCE) for _ in range(2)]
        assert [None if record is None else record.data for record in records] == [b"aa", b"."]
        assert requests == 0
