"""V1 to V7 of goka's list: visits of all rows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker import ConfigurationError
from broker_streams.context import Context
from broker_streams.failures import StreamFailed
from broker_streams.graph import Group, Visitor
from broker_streams.processor import VisitAborted
from tests.streams.brokers import StreamBroker
from tests.streams.support import SECONDS, Stream, ones, total, until

ROWS = 1000
MOVES = 500
"""Visits after which at least one of the partitions has finished a hundred, which are counted together."""


class Slow:
    """A visitor that waits at the gate after some visits."""

    def __init__(self, stream: Stream, freely: int) -> None:
        self._stream = stream
        self._freely = freely
        self.visits = 0
        self.waiting = asyncio.Event()
        self.gate = asyncio.Event()

    @property
    def group(self) -> Group:
        return self._stream.group(None, Visitor("set", self.visit))

    async def visit(self, ctx: Context, meta: int) -> None:
        self.visits += 1
        if self.visits > self._freely:
            self.waiting.set()
            await self.gate.wait()
        ctx[self._stream.counts] = meta


def setting(stream: Stream) -> Group:
    def visit(ctx: Context, meta: Any) -> None:
        if not isinstance(meta, int):
            raise TypeError(f"meta is {meta!r}")
        ctx[stream.counts] = meta

    return stream.group(None, Visitor("set", visit))


async def test_v1_a_visit_sets_all_rows(stream: Stream) -> None:
    await stream.publish(ones(100, keys=50))
    async with stream.processing(setting(stream)) as processor, stream.viewing() as view:
        await processor.ready()
        await until(lambda: total(view) == 100)
        assert await processor.visit("set", 7) == 50
        await until(lambda: total(view) == 350)
        assert await processor.get("key-3") == 7
        with pytest.raises(ConfigurationError, match="has no Visitor 'other'"):
            await processor.visit("other")


@pytest.mark.parametrize("rows", [2, 500])
async def test_v2_v3_a_visitor_that_fails_ends_the_processor_and_the_visit(stream: Stream, rows: int) -> None:
    await stream.publish(ones(rows, keys=rows))
    with pytest.raises(StreamFailed, match="meta is 'wrong'"):
        async with stream.processing(setting(stream)) as processor, stream.viewing() as view:
            await processor.ready()
            await until(lambda: total(view) == rows)
            async with asyncio.timeout(SECONDS):
                with pytest.raises(VisitAborted, match="the visitor failed"):
                    await processor.visit("set", "wrong")


async def test_v4_v5_a_cancelled_visit_can_be_repeated(stream: Stream) -> None:
    slow = Slow(stream, 1)
    await stream.publish(ones(2, keys=2))
    async with stream.processing(slow.group) as processor, stream.viewing() as view:
        await processor.ready()
        await until(lambda: total(view) == 2)
        visiting = asyncio.create_task(processor.visit("set", 7))
        # One of two rows is visited.
        await asyncio.wait_for(slow.waiting.wait(), SECONDS)
        visiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await visiting
        slow.gate.set()
        assert await processor.visit("set", 7) == 2
        await until(lambda: total(view) == 14)


async def test_v6_the_end_of_the_processor_aborts_a_visit(stream: Stream) -> None:
    slow = Slow(stream, MOVES)
    await stream.publish(ones(ROWS, keys=ROWS))
    async with stream.viewing() as view:
        async with stream.processing(slow.group) as processor:
            await processor.ready()
            await until(lambda: total(view) == ROWS)
            visiting = asyncio.create_task(processor.visit("set", 7))
            await asyncio.wait_for(slow.waiting.wait(), SECONDS)
        with pytest.raises(VisitAborted) as raised:
            await asyncio.wait_for(visiting, SECONDS)
        assert 0 < raised.value.visited < ROWS
    with pytest.raises(VisitAborted, match="stopped"):
        await processor.visit("set", 7)


async def test_v7_a_rebalance_aborts_a_visit(server: StreamBroker, stream: Stream) -> None:
    slow = Slow(stream, MOVES)
    await stream.publish(ones(ROWS, keys=ROWS))
    async with stream.viewing() as view, stream.processing(slow.group) as processor:
        await processor.ready()
        await until(lambda: total(view) == ROWS)
        visiting = asyncio.create_task(processor.visit("set", 7))
        await asyncio.wait_for(slow.waiting.wait(), SECONDS)
        async with stream.processing(slow.group, await server.connect()) as second:
            await second.ready()
            slow.gate.set()
            with pytest.raises(VisitAborted) as raised:
                await asyncio.wait_for(visiting, SECONDS)
            assert 0 < raised.value.visited < ROWS
