"""E1 to E3, Q1 and H1 of goka's list: emitters, their futures and attributes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker import Bus, Closed, InvalidMessage, Json, NotFound, PublishError, Receipt
from broker_streams.emitter import Emitter
from tests.streams.brokers import CUT, StreamBroker, on
from tests.streams.support import SECONDS, Stream


@pytest.fixture
async def stream(server: StreamBroker, bus: Bus) -> Stream:
    """Only its input, of one partition."""
    stream = Stream(server, bus)
    await stream.topic("clicks", partitions=1)
    return stream


async def test_e1_errors_name_what_is_wrong(stream: Stream) -> None:
    wrong: Any = object()
    async with Emitter(stream.bus, stream.clicks, Json(int)) as emitter:
        with pytest.raises(InvalidMessage):
            await emitter.emit("a", wrong)
        with pytest.raises(InvalidMessage, match="key is 5"):
            await emitter.emit(5, 5)  # pyright: ignore[reportArgumentType]
        assert (await emitter.emit("a", 5)).partition == 0
    with pytest.raises(Closed, match="is closed"):
        await emitter.emit("a", 5)
    with pytest.raises(Closed, match="is closed"):
        await emitter.enqueue("a", 5)


async def test_e1_an_error_of_the_broker_is_raised(stream: Stream) -> None:
    async with Emitter(stream.bus, f"{stream.name}-nothing", Json(int)) as emitter:
        with pytest.raises(NotFound):
            await emitter.emit("a", 5)


@pytest.mark.parametrize("number", [2_000, pytest.param(100_000, marks=pytest.mark.deep)])
async def test_e2_offsets_of_a_partition_never_decrease(stream: Stream, number: int) -> None:
    async with Emitter(stream.bus, stream.clicks, Json(int)) as emitter:
        futures = [await emitter.enqueue("a", n) for n in range(number)]
        await emitter.flush()
    offsets = [future.result().offset or 0 for future in futures]
    assert offsets == sorted(set(offsets))
    assert len(offsets) == number


@on(*CUT, deep=("jetstream",))
async def test_e3_what_a_broken_connection_holds_up_fails(server: StreamBroker, stream: Stream) -> None:
    lone = await server.connect_alone()
    emitter = Emitter(lone, stream.clicks, Json(int))
    await emitter.emit("a", 1)
    server.cut(lone)
    futures = [await emitter.enqueue("a", n) for n in range(10)]
    async with asyncio.timeout(SECONDS):
        with pytest.raises(PublishError):
            await emitter.close()
    assert all(future.exception() is not None for future in futures)
    server.heal(lone)


async def test_q1_futures_end_in_order_and_late_callbacks_are_called(stream: Stream) -> None:
    ended: list[int] = []

    def ending(n: int, future: asyncio.Future[Receipt]) -> None:
        future.add_done_callback(lambda _: ended.append(n))

    async with Emitter(stream.bus, stream.clicks, Json(int)) as emitter:
        futures = [await emitter.enqueue("a", n) for n in range(50)]
        for n, future in enumerate(futures):
            ending(n, future)
    # Callbacks of futures are called in the next turn of the loop.
    await asyncio.sleep(0)
    assert ended == list(range(50))
    ending(50, futures[0])
    await asyncio.sleep(0)
    assert ended[-1] == 50


async def test_h1_attributes_of_a_call_come_on_top_of_those_of_the_emitter(stream: Stream) -> None:
    async with Emitter(stream.bus, stream.clicks, Json(int), attributes={"from": "here", "kind": "any"}) as emitter:
        await emitter.emit("a", 1)
        await emitter.emit("a", 2, attributes={"kind": "click", "n": "2"})
        await emitter.emit("a", 3)
    assert [dict(record.attributes) for record in await stream.records(stream.clicks)] == [
        {"from": "here", "kind": "any"},
        {"from": "here", "kind": "click", "n": "2"},
        {"from": "here", "kind": "any"},
    ]
