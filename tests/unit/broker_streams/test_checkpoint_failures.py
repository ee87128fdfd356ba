"""Checkpoints that fail while partitions come, go and are read: nothing is lost, and nothing old is written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest

from broker import (
    Bus,
    Capabilities,
    ConnectionFailed,
    Json,
    OutboundMessage,
    TransactionAborted,
    TransactionFatal,
    connect,
)
from broker_inmem import Broker, BrokerOptions, InmemSettings
from broker_streams.commits import Fenced
from broker_streams.context import Context
from broker_streams.graph import Group, Input, Output, Persist, Visitor
from broker_streams.partition import PartitionRunner
from broker_streams.processor import Processor, VisitAborted
from broker_streams.stats import ProcessorState
from broker_streams.stores.memory import Memory
from broker_streams.view import View

SECONDS = 60.0
TRIES = 4
"""How often a checkpoint is refused before its messages are handled again."""

counts = Persist(Json(int))
sums = Output("sums", Json(int))


def count(ctx: Context, value: int) -> None:
    total = ctx[counts] = (ctx[counts] or 0) + value
    ctx.emit(sums, key=ctx.key, value=total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Untransacted(BrokerOptions):
    """A broker that writes rows together, but has no transactions."""

    def capabilities(self) -> Capabilities:
        able = BrokerOptions.capabilities(self)
        return replace(able, publish=replace(able.publish, transactions=False))


@pytest.fixture
def server() -> Broker:
    return Broker()


@pytest.fixture
async def bus(server: Broker) -> AsyncIterator[Bus]:
    async with connect(InmemSettings(broker=server)) as bus:
        await prepare(bus)
        yield bus


async def prepare(bus: Bus) -> None:
    for topic in ("numbers", "sums"):
        await bus.admin.ensure_topic(topic, partitions=1)
    await bus.admin.ensure_topic("counts-table", partitions=1, compacted=True)


def processing(bus: Bus, checkpoint_interval: float = 0.01) -> Processor:
    group = Group("counts", Input("numbers", Json(int), count), counts, sums, Visitor("all", lambda ctx, meta: None))
    return Processor(bus, group, store=Memory(), checkpoint_interval=checkpoint_interval)


async def publish(bus: Bus, number: int) -> None:
    await bus.topic("numbers").publish_batch([OutboundMessage(b"1", "key")] * number)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


def runner_of(processor: Processor) -> PartitionRunner:
    return next(iter(processor.runners))


async def test_records_that_come_before_the_seek_are_not_handled_first(bus: Bus, server: Broker) -> None:
    async with processing(bus) as processor, View(bus, "counts-table", Json(int)) as view:
        await processor.ready()
        inside: Any = vars(processor)["_reading"]
        seek = inside.seek
        met = asyncio.Event()

        async def slow_seek(positions: Any) -> None:
            # Records from beyond the position arrive while the partition goes back.
            await publish(bus, 10)
            await until(lambda: runner_of(processor).backlog > 0)
            await seek(positions)
            met.set()

        inside.seek = slow_seek
        server.faults.fail("transaction", TransactionAborted("a fault"), times=TRIES)
        await publish(bus, 10)
        async with asyncio.timeout(SECONDS):
            await met.wait()
        inside.seek = seek
        await until(lambda: view.get("key") == 20)


async def test_a_publisher_that_ends_while_it_publishes_is_opened_again(bus: Bus, server: Broker) -> None:
    """As after a transaction that was open for too long, whose messages are refused one by one."""
    async with processing(bus) as processor, View(bus, "counts-table", Json(int)) as view:
        await processor.ready()
        server.faults.fail_publish(TransactionFatal("a fault"), topic="counts-table")
        await publish(bus, 10)
        await until(lambda: view.get("key") == 10)
        assert processor.stats().failed_checkpoints == 1


async def test_a_broker_that_is_away_when_a_partition_is_read_again(bus: Bus, server: Broker) -> None:
    async with processing(bus) as processor, View(bus, "counts-table", Json(int)) as view:
        await processor.ready()
        inside: Any = vars(processor)["_reading"]
        seek, failures = inside.seek, 3

        async def failing_seek(positions: Any) -> None:
            nonlocal failures
            if failures:
                failures -= 1
                raise ConnectionFailed("a fault")
            await seek(positions)

        inside.seek = failing_seek
        server.faults.fail("transaction", TransactionAborted("a fault"), times=TRIES)
        await publish(bus, 10)
        await until(lambda: view.get("key") == 10)
        assert not failures


async def test_a_call_that_is_cancelled_while_it_undoes_leaves_the_partitions_running(bus: Bus, server: Broker) -> None:
    async with processing(bus, checkpoint_interval=3600.0) as processor, View(bus, "counts-table", Json(int)) as view:
        await processor.ready()
        inside: Any = vars(processor)["_checkpoints"]
        runner = runner_of(processor)
        await publish(bus, 10)
        await until(lambda: runner.engine.positions.get("numbers") == 10)
        undoing, go_on = asyncio.Event(), asyncio.Event()
        abort = runner.abort

        async def slow_abort() -> None:
            undoing.set()
            await go_on.wait()
            await abort()

        runner.abort = slow_abort
        server.faults.fail("transaction", TransactionAborted("a fault"), times=TRIES)
        writing = asyncio.create_task(inside.write((runner,), patience=SECONDS))
        async with asyncio.timeout(SECONDS):
            await undoing.wait()
        writing.cancel()
        await asyncio.wait((writing,))
        runner.abort = abort
        go_on.set()
        await until(lambda: runner.undone == 1 and runner.engine.positions.get("numbers") == 10)
        await inside.write((runner,), patience=SECONDS)
        await until(lambda: view.get("key") == 10)


class Refused:
    """Commits that fail for good once they may."""

    def __init__(self, commits: Any) -> None:
        self.commits = commits
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        self.writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.commits, name)

    async def write(self, parts: Sequence[Any]) -> Any:
        self.writes += 1
        self.reached.set()
        await self.go_on.wait()
        raise ConnectionFailed("a fault", retriable=False)


@pytest.mark.parametrize("how", ["stop", "visit", "run"])
async def test_nothing_is_written_after_a_checkpoint_that_failed_for_good(bus: Bus, how: str) -> None:
    processor = processing(bus, checkpoint_interval=3600.0)
    refused: Any = None
    with pytest.raises(ConnectionFailed):
        async with processor:
            await processor.ready()
            inside: Any = vars(processor)["_checkpoints"]
            refused = inside.commits = Refused(inside.commits)
            runner = runner_of(processor)
            await publish(bus, 10)
            await until(lambda: runner.engine.positions.get("numbers") == 10)
            visit: asyncio.Task[int] | None = None
            if how == "visit":
                visit = asyncio.create_task(processor.visit("all"))
            else:
                inside.wake()
            async with asyncio.timeout(SECONDS):
                await refused.reached.wait()
            await publish(bus, 10)
            await until(lambda: runner.engine.positions.get("numbers") == 20)
            if how == "stop":
                processor.stop()
            refused.go_on.set()
            if visit is not None:
                with pytest.raises(VisitAborted):
                    await visit
            await until(lambda: processor.state is ProcessorState.STOPPED)
    assert refused.writes == 1


async def test_a_refused_checkpoint_is_written_again_and_nothing_is_handled_again(bus: Bus, server: Broker) -> None:
    handled: list[int] = []

    def note(ctx: Context, value: int) -> None:
        handled.append(ctx.offset)
        count(ctx, value)

    group = Group("counts", Input("numbers", Json(int), note), counts, sums)
    async with (
        Processor(bus, group, store=Memory(), checkpoint_interval=0.01) as processor,
        View(bus, "counts-table", Json(int)) as view,
    ):
        await processor.ready()
        server.faults.fail("transaction", TransactionAborted("a fault"), times=TRIES - 1)
        await publish(bus, 10)
        await until(lambda: view.get("key") == 10)
        await publish(bus, 10)
        await until(lambda: view.get("key") == 20)
        assert handled == list(range(20))
        assert processor.stats().failed_checkpoints == runner_of(processor).undone == 0


class Held:
    """Commits of which one write is held back before it begins."""

    def __init__(self, commits: Any) -> None:
        self.commits = commits
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        self.over = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.commits, name)

    async def write(self, parts: Sequence[Any]) -> Any:
        self.reached.set()
        await self.go_on.wait()
        try:
            return await self.commits.write(parts)
        finally:
            self.over.set()


@pytest.mark.parametrize("options", [BrokerOptions(), Untransacted()], ids=["transactions", "atomic"])
async def test_a_checkpoint_of_an_earlier_assignment_is_not_written(options: BrokerOptions) -> None:
    """The partition goes to another member and comes back while the checkpoint waits for its turn."""
    server = Broker(replace(options, session_seconds=0.3))
    async with connect(InmemSettings(broker=server)) as bus, connect(InmemSettings(broker=server)) as cut:
        await prepare(bus)
        async with View(bus, "counts-table", Json(int)) as view, processing(cut) as first:
            await first.ready()
            await publish(bus, 10)
            await until(lambda: view.get("key") == 10)
            inside: Any = vars(first)["_checkpoints"]
            inside.commits = held = Held(inside.commits)
            await publish(bus, 10)
            async with asyncio.timeout(SECONDS):
                await held.reached.wait()
            old = runner_of(first)
            server.faults.isolate(cut)
            async with processing(bus) as second:
                await until(lambda: view.get("key") == 20)
                await publish(bus, 10)
                await until(lambda: view.get("key") == 30)
                server.faults.heal(cut)
                await until(lambda: old not in first.runners)
                second.stop()
            await until(lambda: bool(first.runners) and runner_of(first) is not old)
            held.go_on.set()
            async with asyncio.timeout(SECONDS):
                await held.over.wait()
            inside.commits = held.commits
            await publish(bus, 10)
            await until(lambda: view.get("key") == 40)


async def test_a_checkpoint_without_messages_is_fenced_too() -> None:
    """What a visitor has changed is written with the positions of the last checkpoint."""
    server = Broker(BrokerOptions(session_seconds=0.3))

    def double(ctx: Context, _: object) -> None:
        ctx[counts] = 2 * (ctx[counts] or 0)

    def doubling(bus: Bus) -> Processor:
        group = Group("counts", Input("numbers", Json(int), count), counts, sums, Visitor("double", double))
        return Processor(bus, group, store=Memory(), checkpoint_interval=3600.0)

    async with connect(InmemSettings(broker=server)) as bus, connect(InmemSettings(broker=server)) as cut:
        await prepare(bus)
        async with View(bus, "counts-table", Json(int)) as view, doubling(cut) as first:
            await first.ready()
            await publish(bus, 10)
            runner = runner_of(first)
            await until(lambda: runner.engine.positions.get("numbers") == 10)
            inside: Any = vars(first)["_checkpoints"]
            await inside.write((runner,), patience=SECONDS)
            await until(lambda: view.get("key") == 10)
            await runner.visit("double", None, [b"key"])
            part = await runner.take()
            server.faults.isolate(cut)
            async with doubling(bus) as second:
                await second.ready()
                # The member does not know yet that the partition has gone.
                server.faults.heal(cut)
                with suppress(TransactionAborted):
                    # Without an error the member has found out, and leaves the partition out.
                    assert isinstance((await inside.commits.write([part]))[0], Fenced)
                assert await second.get("key") == 10
