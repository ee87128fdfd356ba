"""P1 to P15 of goka's list: restarts, failures, rebalances and the end of a processor."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from broker import BrokerError, Closed, ConfigurationError, Json, OutboundMessage, TopicPartition
from broker_streams import keys
from broker_streams.context import Context
from broker_streams.failures import StreamFailed
from broker_streams.graph import Edge, Group, Input, Join, Loop, Output
from broker_streams.partition import PartitionState, PartitionTables
from broker_streams.processor import Processor
from broker_streams.recovery import CopyState
from broker_streams.stats import ProcessorState
from tests.streams.brokers import ALL, CUT, StreamBroker, on
from tests.streams.support import PARTITIONS, Stream, ones, total, until


def own(processor: Processor) -> dict[int, list[TopicPartition]]:
    """The topics that a member reads of each partition."""
    return dict(vars(processor)["_places"])


def rows_of(processor: Processor, partition: int) -> tuple[int, ...]:
    """How many rows a member has here: of its group's table, and of each joined one."""
    tables: PartitionTables | None = vars(processor)["_tables"].get(partition)
    if tables is None:
        return ()
    stores = [copy.store for copy in (tables.own, *tables.joins.values())]
    # Without the reserved ones.
    return tuple(sum(not keys.is_reserved(key) for key, _ in each.items(keys.ROWS)) for each in stores)


def exact(processor: Processor) -> bool:
    return processor.stats().guarantee == "exactly_once"


@on(*ALL, "memory-atomic", "memory-10-rows", "memory-fenced", "memory-plain")
async def test_p1_restarts_count_nothing_twice(stream: Stream) -> None:
    await stream.publish(ones(10, keys=3))
    async with stream.viewing() as view:
        for _ in range(4):
            async with stream.processing() as processor:
                await processor.ready()
                await until(lambda: total(view) >= 10)
            assert dict(view.items()) == {"key-0": 4, "key-1": 3, "key-2": 3}
    assert len(await stream.outputs()) == 10
    # The last offset of a partition may be that of a transaction.
    assert await stream.waiting() <= PARTITIONS


@on(*CUT, deep=("jetstream",))
async def test_p2_what_was_not_committed_is_handled_again(server: StreamBroker, stream: Stream) -> None:
    handled: list[int] = []

    def note(ctx: Context, value: int) -> None:
        handled.append(value)
        stream.count(ctx, value)

    await stream.publish(ones(10))
    lone = await server.connect_alone()
    async with stream.viewing() as view:
        with suppress(BrokerError):
            async with stream.processing(stream.group(note), lone, checkpoint_interval=1000):
                await until(lambda: len(handled) == 10)
                server.cut(lone)
        assert total(view) == 0
        await stream.handle(stream.group(note), lambda: total(view) == 10)
    server.heal(lone)
    assert len(handled) == 20
    assert len(await stream.outputs()) == 10


async def test_p3_a_failing_message_keeps_what_was_before_it(stream: Stream) -> None:
    seen: list[int] = []

    def failing(ctx: Context, value: int) -> None:
        seen.append(value)
        if value == 2 and seen.count(2) == 1:
            raise ValueError("the second")
        stream.count(ctx, value)

    await stream.publish([("a", 1), ("a", 2)])
    async with stream.viewing() as view:
        with pytest.raises(StreamFailed, match="the second"):
            await stream.processing(stream.group(failing)).run()
        await until(lambda: view.get("a") == 1)
        await stream.handle(stream.group(failing), lambda: view.get("a") == 3)
    assert seen == [1, 2, 2]


async def test_p4_restarts_under_load_lose_nothing(stream: Stream) -> None:
    sent = 0
    over = asyncio.Event()

    async def load() -> None:
        nonlocal sent
        while not over.is_set():
            await stream.publish(ones(50))
            sent += 50
            await asyncio.sleep(0.02)

    async with stream.viewing() as view:
        loading = asyncio.create_task(load())
        for _ in range(10):
            before = total(view)
            async with stream.processing() as processor:
                await until(lambda: total(view) > before)  # noqa: B023
            with pytest.raises(Closed, match="opens once"):
                await processor.run()
        over.set()
        await loading
        async with stream.processing() as processor:
            await until(lambda: total(view) >= sent)
            assert total(view) == sent or not exact(processor)
    assert len(set(await stream.outputs())) == sent


async def test_p4_a_processor_opens_once(stream: Stream) -> None:
    processor = stream.processing()
    with pytest.raises(Closed, match="is not open"):
        await processor.ready()
    async with processor:
        pass
    with pytest.raises(Closed, match="opens once"):
        await processor.run()
    with pytest.raises(Closed):
        await processor.ready()


@on(*ALL, "memory-atomic", "memory-plain")
async def test_p5_members_share_the_partitions(server: StreamBroker, stream: Stream) -> None:
    other = await server.connect()
    async with stream.viewing() as view, stream.processing(standby="all") as first:
        # A broker may hand out the partitions in several steps.
        await until(lambda: len(first.partitions) == PARTITIONS and first.stats().standby == ())
        await first.ready()
        await stream.publish(ones(200, keys=40))
        async with stream.processing(bus=other, standby="all") as second:
            await until(lambda: len(first.partitions) == len(second.partitions) == PARTITIONS // 2)
            assert sorted([*first.partitions, *second.partitions]) == list(range(PARTITIONS))
            await until(lambda: first.stats().standby == tuple(sorted(second.partitions)))
            await until(lambda: second.stats().standby == tuple(sorted(first.partitions)))
            await stream.publish(ones(200, keys=40))
            await until(lambda: total(view) >= 400)
        await until(lambda: len(first.partitions) == PARTITIONS)
        assert first.stats().standby == ()
        await stream.publish(ones(200, keys=40))
        await until(lambda: total(view) >= 600)
        assert total(view) == 600 or not exact(first)
    assert len(set(await stream.outputs())) == 600


async def test_p6_members_come_and_go_under_load(server: StreamBroker, stream: Stream) -> None:
    sent = 0
    members: list[Processor] = []

    async def join() -> None:
        bus = stream.bus if not members else await server.connect()
        members.append(await stream.processing(bus=bus, standby="all", recover_ahead=True).__aenter__())

    async with stream.viewing() as view:
        for turn in range(10):
            if turn < 5:
                await join()
            elif turn < 9:
                await members.pop(turn % len(members)).__aexit__(None, None, None)
            await stream.publish(ones(100, keys=20))
            sent += 100
            await until(lambda: total(view) >= sent)  # noqa: B023
        (last,) = members
        await until(lambda: len(last.partitions) == PARTITIONS)
        assert total(view) == sent or not exact(last)
        await last.__aexit__(None, None, None)
    assert len(set(await stream.outputs())) == sent


async def test_p7_standby_has_rows_of_partitions_of_others(server: StreamBroker, stream: Stream) -> None:
    users = Join(await stream.topic("users", compacted=True), Json(int))
    await stream.publish([(f"key-{n}", n) for n in range(40)], users.table)
    group = stream.group(None, users)
    async with stream.viewing() as view, stream.processing(group) as first:
        await first.ready()
        await stream.publish(ones(40, keys=40))
        await until(lambda: total(view) == 40)
        other = await server.connect()
        async with stream.processing(group, other, standby="all") as second:
            await until(lambda: len(second.partitions) == PARTITIONS // 2)
            await until(lambda: sum(rows_of(second, n)[0] for n in range(PARTITIONS) if rows_of(second, n)) == 40)
            await until(lambda: sum(rows_of(second, n)[1] for n in range(PARTITIONS)) == 40)
            await stream.publish([(f"new-{n}", 1) for n in range(40)], users.table)
            await until(lambda: sum(rows_of(second, n)[1] for n in range(PARTITIONS)) == 80)
            await until(lambda: sum(rows_of(first, n)[1] for n in first.partitions) > 20)
            assert second.stats().standby == tuple(sorted(first.partitions))
            assert first.stats().standby == ()


async def test_p8_tables_are_recovered_ahead_by_members_without_partitions(server: StreamBroker, bus: Any) -> None:
    stream = Stream(server, bus)
    await stream.prepare(1)
    await stream.publish(ones(100))
    async with stream.viewing() as view:
        await stream.handle(stream.group(), lambda: total(view) == 100)
    async with stream.processing(recover_ahead=True) as first:
        await first.ready()
        assert await first.get("key-1") == 10
        async with stream.processing(bus=await server.connect(), recover_ahead=True) as second:
            await until(lambda: second.state is ProcessorState.RUNNING)
            assert rows_of(second, 0) == (10,)
            await until(lambda: len(first.partitions) + len(second.partitions) == 1)


async def test_p9_an_output_that_is_not_declared_ends_it_after_many_messages(stream: Stream) -> None:
    undeclared = Output("others", Json(int))

    def emit(ctx: Context, value: int) -> None:
        ctx[stream.counts] = (ctx[stream.counts] or 0) + 1
        if value == 9_995:
            ctx.emit(undeclared, key=ctx.key, value=value)

    await stream.publish([("a", n) for n in range(1, 10_001)])
    async with stream.viewing() as view:
        with pytest.raises(StreamFailed, match="'others'"):
            await stream.handle(stream.group(emit), lambda: False)
        await until(lambda: view.get("a") == 9_994)


async def test_p10_an_exception_in_a_busy_partition_ends_it(stream: Stream) -> None:
    async def busy(ctx: Context, value: int) -> None:
        await asyncio.sleep(0.001)
        if value == 2:
            raise ValueError("stuck")
        stream.count(ctx, value)

    await stream.publish_to_each(*[1] * 20)
    await stream.bus.topic(stream.clicks).publish(OutboundMessage(b"2", "a", partition=1))
    await stream.publish_to_each(*[1] * 200)
    with pytest.raises(StreamFailed, match="stuck"):
        await stream.handle(stream.group(busy), lambda: False)


async def test_p10_a_partition_that_waits_does_not_stop_the_others(stream: Stream) -> None:
    gate = asyncio.Event()

    async def wait(ctx: Context, value: int) -> None:
        if value == 100:
            await gate.wait()
        stream.count(ctx, value)

    await stream.bus.topic(stream.clicks).publish(OutboundMessage(b"100", "a", partition=0))
    await stream.publish_to_each(1)
    async with stream.processing(stream.group(wait)), stream.viewing() as view:
        await until(lambda: total(view) == PARTITIONS - 1)
        gate.set()
        await until(lambda: total(view) == PARTITIONS + 100)


@on("memory", "jetstream", "kafka", "pulsar")
async def test_p11_five_inputs_and_a_loop_reach_the_exact_sum(stream: Stream) -> None:
    topics = [await stream.topic(f"input-{n}") for n in range(5)]
    await stream.topic("loop")

    async def forward(ctx: Context, value: int) -> None:
        if value % 2:
            await asyncio.sleep(0)
        ctx.loop(loop, key="sum", value=value)

    def add(ctx: Context, value: int) -> None:
        ctx[stream.counts] = (ctx[stream.counts] or 0) + value

    loop = Loop(Json(int), add)
    edges: list[Edge] = [Input(topics, Json(int), forward), loop, stream.counts]
    wanted = 0
    for n, topic in enumerate(topics):
        await stream.publish([(f"key-{value}", value * n) for value in range(40)], topic)
        wanted += sum(value * n for value in range(40))
    async with stream.viewing() as view, stream.processing(Group(stream.name, *edges)) as processor:
        await until(lambda: view.get("sum") == wanted)
        assert await processor.get("sum") == wanted


@on(*CUT, deep=("jetstream",))
async def test_p12_a_lost_connection_is_survived(server: StreamBroker, stream: Stream) -> None:
    lone = await server.connect_alone()
    async with stream.viewing(lone) as near, stream.viewing() as view, stream.processing(bus=lone) as processor:
        await processor.ready()
        await stream.publish(ones(50))
        await until(lambda: total(view) == 50)
        server.cut(lone)
        await until(lambda: near.state is CopyState.CONNECTING)
        await stream.publish(ones(50))
        server.heal(lone)
        await until(lambda: total(view) >= 100)
        assert total(view) == 100 or not exact(processor)
        assert processor.state is ProcessorState.RUNNING
    assert len(set(await stream.outputs())) == 100


@on("jetstream", "kafka-cut", "pulsar-cut", deep=("jetstream",))
async def test_a_broker_that_is_away_for_a_minute(server: StreamBroker, stream: Stream) -> None:
    lone = await server.connect_alone()
    async with stream.viewing() as view, stream.processing(bus=lone) as processor:
        await processor.ready()
        await stream.publish(ones(50))
        await until(lambda: total(view) == 50)
        server.cut(lone)
        await stream.publish(ones(50))
        await asyncio.sleep(60)
        assert processor.state is ProcessorState.RUNNING
        server.heal(lone)
        await until(lambda: total(view) >= 100)
        assert total(view) == 100 or not exact(processor)
    assert len(set(await stream.outputs())) == 100


@on("kafka")  # the others refuse such a key, by name
async def test_a_key_of_a_hundred_kilobytes(stream: Stream) -> None:
    key = "k" * 100_000
    async with stream.viewing() as view, stream.processing() as processor:
        await stream.publish([(key, 1), (key, 2)])
        await until(lambda: view.get(key) == 3)
        assert await processor.get(key) == 3
    async with stream.processing() as processor:
        await processor.ready()
        assert await processor.get(key) == 3
    assert len(set(await stream.outputs())) == 2


async def test_p13_states_and_the_error_of_the_end(stream: Stream) -> None:
    def fail(ctx: Context, value: int) -> None:
        raise ValueError("always")

    processor = stream.processing(stream.group(fail))
    seen: list[ProcessorState] = []

    async def watch() -> None:
        async for state in processor.states():
            seen.append(state)  # noqa: PERF401 - as they come

    watching = asyncio.create_task(watch())
    await until(lambda: seen)
    with pytest.raises(StreamFailed, match="always"):
        async with processor:
            await processor.ready()
            assert processor.state is ProcessorState.RUNNING
            await until(lambda: processor.partitions == dict.fromkeys(range(PARTITIONS), PartitionState.RUNNING))
            await stream.publish([("a", 1)])
            await watching
            with pytest.raises(StreamFailed, match="always"):
                await processor.ready()
    assert (seen[0], seen[-1]) == (ProcessorState.IDLE, ProcessorState.STOPPED)
    assert ProcessorState.RUNNING in seen
    assert processor.partitions == {}
    assert [state async for state in processor.states()] == [ProcessorState.STOPPED]


async def test_p13_stop_ends_run(stream: Stream) -> None:
    processor = stream.processing()
    running = asyncio.create_task(processor.run())
    await until(lambda: processor.state is ProcessorState.RUNNING)
    processor.stop()
    await running
    assert processor.state is ProcessorState.STOPPED


async def test_p14_topics_of_unequal_partitions_are_refused(stream: Stream) -> None:
    users = Join(await stream.topic("users", partitions=PARTITIONS - 1, compacted=True), Json(int))
    processor = stream.processing(stream.group(None, users))
    with pytest.raises(ConfigurationError, match=f"{stream.clicks}' has 4, '{users.table}' has 3"):
        await processor.run()
    assert processor.state is ProcessorState.STOPPED


@on("memory", "jetstream", "kafka", "pulsar")
async def test_p15_members_own_whole_numbers_of_all_topics(server: StreamBroker, stream: Stream) -> None:
    topics = [stream.clicks, await stream.topic("visits"), await stream.topic("views")]
    group = Group(stream.name, Input(topics, Json(int), stream.count), stream.counts, stream.alerts)
    members = [stream.processing(group, bus) for bus in (stream.bus, await server.connect(), await server.connect())]
    async with members[0], members[1]:
        async with members[2]:
            await until(lambda: sorted(number for each in members for number in own(each)) == list(range(PARTITIONS)))
            await until(lambda: all(own(each) for each in members))
            for places in (places for each in members for places in own(each).values()):
                assert sorted(place.topic for place in places) == sorted(topics)
            assert max(len(own(each)) for each in members) == 2
        await until(lambda: [len(own(each)) for each in members[:2]] == [2, 2])
