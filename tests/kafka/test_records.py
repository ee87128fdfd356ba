"""Members of a group on a real broker: starts, positions, seeks, changing topics, and blocked event loops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

import broker.blocking
from broker.bus import Bus, connect
from broker.driver.contract import RecordSubscription, TopicPartition
from broker.errors import BrokerError, LeaseLost, OffsetOutOfRange, TopicNotFound
from broker.hooks import Event, Hooks, PartitionsLost, PositionReset
from broker.names import ephemeral
from broker.outbound import OutboundMessage
from broker.reading.record_consumer import RecordConsumer
from broker.records import Record
from broker.testing.waiting import eventually, let_pass, read
from broker_kafka.backend import KafkaBackend
from broker_kafka.client import consumer as client_consumer
from broker_kafka.records import KafkaRecordSource
from broker_kafka.settings import KafkaSettings
from tests.kafka.conftest import MakeTopic
from tests.kafka.raw_positions import store
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin, produce

PATIENCE = 60.0
QUICK: dict[str, Any] = {
    "session_timeout_ms": 6000,
    "heartbeat_interval_ms": 300,
    "topic_metadata_refresh_interval_ms": 500,
}
PROTOCOLS = ("classic", pytest.param("consumer", marks=pytest.mark.deep))

Open = Callable[..., Any]


@pytest.fixture
async def open_bus(kafka: KafkaServer) -> AsyncIterator[Open]:
    """`await open_bus(offset_reset="latest")`: a bus that is closed at the end of the test."""
    opened: list[Bus] = []

    async def make(**settings: Any) -> Bus:
        protocol = settings.get("group_protocol", "classic")
        quick: dict[str, Any] = QUICK if protocol == "classic" else {"topic_metadata_refresh_interval_ms": 500}
        bus = connect(KafkaSettings(servers=(kafka.bootstrap,), **(quick | settings)))
        opened.append(bus)
        return await bus.__aenter__()

    yield make
    for bus in opened:
        await bus.close()


def bodies(count: int, prefix: str = "m") -> list[bytes]:
    return [f"{prefix}-{number:05}".encode() for number in range(count)]


def data_of(records: Sequence[Record[bytes]]) -> list[bytes | None]:
    return [record.data for record in records]


async def test_a_position_below_the_log_start_is_an_error(
    kafka: KafkaServer, admin: RawAdmin, open_bus: Open, topic: str, group: str
) -> None:
    produce(kafka.bootstrap, topic, bodies(20))
    bus = await open_bus()
    async with bus.records(topic, group=group) as log:
        await (await read(log, 5, PATIENCE))[-1].commit()
    admin.delete_records(topic, 10)
    async with bus.records(topic, group=group) as log:
        with pytest.raises(OffsetOutOfRange, match="begins at 10"):
            await log.next_record(timeout=PATIENCE)


@pytest.mark.parametrize(("policy", "first"), [("earliest", 10), ("latest", 20)])
async def test_a_position_reset_is_counted_and_reported(
    kafka: KafkaServer, admin: RawAdmin, open_bus: Open, topic: str, group: str, policy: str, first: int
) -> None:
    produce(kafka.bootstrap, topic, bodies(20))
    bus = await open_bus(offset_reset=policy)
    async with bus.records(topic, group=group) as log:
        await (await read(log, 5, PATIENCE))[-1].commit()
    admin.delete_records(topic, 10)
    events: list[Event] = []
    bus.hooks.listen(events.append)
    async with bus.records(topic, group=group) as log:
        await eventually(lambda: any(isinstance(each, PositionReset) for each in events), PATIENCE, "the reset")
        produce(kafka.bootstrap, topic, bodies(1, "later"))
        records = await read(log, 21 - first, PATIENCE)
    (reset,) = [each for each in events if isinstance(each, PositionReset)]
    assert (tuple(reset.partition), reset.position, reset.to, reset.policy) == ((topic, 0), 5, first, policy)
    assert [record.offset for record in records] == list(range(first, 21))


async def test_a_position_beyond_the_end_is_an_error(
    kafka: KafkaServer, admin: RawAdmin, open_bus: Open, topic: str, group: str
) -> None:
    produce(kafka.bootstrap, topic, bodies(3))
    store(admin, group, topic, 20)
    bus = await open_bus()
    async with bus.records(topic, group=group) as log:
        with pytest.raises(OffsetOutOfRange, match="position 20 is not in the log"):
            await log.next_record(timeout=PATIENCE)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_deleted_topic_is_reported(
    kafka: KafkaServer, admin: RawAdmin, open_bus: Open, topic: str, group: str, protocol: str
) -> None:
    produce(kafka.bootstrap, topic, bodies(3))
    bus = await open_bus(group_protocol=protocol)
    async with bus.records(topic, group=group) as log:
        await read(log, 3, PATIENCE)
        admin.delete_topic(topic)
        with pytest.raises(TopicNotFound):
            await log.next_record(timeout=2 * PATIENCE)


@pytest.mark.parametrize("start", ["earliest", "latest"])
async def test_added_partitions_are_read_from_the_start(
    kafka: KafkaServer, admin: RawAdmin, open_bus: Open, topic: str, group: str, start: Any
) -> None:
    bus = await open_bus()
    async with bus.records(topic, group=group, start=start) as log:
        await eventually(lambda: len(log.assignment()) == 1, PATIENCE, "the assignment")
        admin.add_partitions(topic, 2)
        produce(kafka.bootstrap, topic, bodies(5), partition=1)
        assert data_of(await read(log, 5, 2 * PATIENCE)) == bodies(5)


async def test_latest_is_resolved_when_the_group_is_created(
    kafka: KafkaServer, open_bus: Open, topic: str, group: str
) -> None:
    produce(kafka.bootstrap, topic, bodies(5, "old"))
    bus = await open_bus()
    async with bus.records(topic, group=group, start="latest"):
        pass
    produce(kafka.bootstrap, topic, bodies(5, "new"))
    async with bus.records(topic, group=group, start="latest") as log:
        assert data_of(await read(log, 5, PATIENCE)) == bodies(5, "new")


@pytest.mark.deep
async def test_an_ephemeral_group_is_deleted_on_close(kafka: KafkaServer, open_bus: Open, topic: str) -> None:
    produce(kafka.bootstrap, topic, bodies(5))
    bus = await open_bus()
    async with bus.records(topic, group=ephemeral(), start="earliest") as log:
        await (await read(log, 5, PATIENCE))[-1].commit()

    async def gone() -> bool:
        return not await bus.admin.subscriptions(topic)

    await eventually(gone, PATIENCE, "the end of the group")
    assert await bus.admin.subscriptions(topic) == []


@pytest.mark.deep
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_handler_may_exceed_the_poll_interval(
    kafka: KafkaServer, open_bus: Open, topic: str, group: str, protocol: str
) -> None:
    produce(kafka.bootstrap, topic, bodies(20_000))
    interval = 2.0
    milliseconds = int(interval * 1000)
    bus = await open_bus(group_protocol=protocol, max_poll_interval_ms=milliseconds, session_timeout_ms=milliseconds)
    events: list[Event] = []
    bus.hooks.listen(events.append)
    async with bus.records(topic, group=group, max_buffered=100) as log:
        first = await read(log, 10, PATIENCE)
        # Once with a blocked event loop: the thread polls all the same.
        time.sleep(1.5 * interval)  # noqa: ASYNC251
        await let_pass(1.5 * interval)
        await first[-1].commit()
        rest: list[bytes | None] = []
        while len(rest) < 19_990:
            rest += data_of(list(await log.next_batch(1000, timeout=PATIENCE)))
    assert data_of(first) + rest == bodies(20_000)
    assert not [event for event in events if isinstance(event, PartitionsLost)]


async def test_a_commit_interrupts_an_idle_poll(
    kafka: KafkaServer, open_bus: Open, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_consumer, "_IDLE_POLL", 3.0)
    produce(kafka.bootstrap, topic, bodies(50))
    bus = await open_bus()
    async with bus.records(topic, group=group) as log:
        records = await read(log, 50, PATIENCE)
        # Waiting for idle polls would take about 50 seconds.
        async with asyncio.timeout(PATIENCE / 2):
            for record in records:
                await record.commit()
        assert await log.committed() == {TopicPartition(topic, 0): 50}


async def test_a_commit_does_not_wait_for_unread_batches(
    kafka: KafkaServer, open_bus: Open, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_consumer, "_STALL_POLL", 10.0)
    produce(kafka.bootstrap, topic, bodies(20_000))
    bus = await open_bus()
    async with bus.records(topic, group=group, max_buffered=200) as log:
        # Waiting for a stalled poll would take ten seconds each time.
        async with asyncio.timeout(PATIENCE):
            for _ in range(15):
                batch = await log.next_batch(50, timeout=PATIENCE)
                await batch.commit()


async def test_close_hands_partitions_over_at_once(kafka: KafkaServer, open_bus: Open, topic: str, group: str) -> None:
    produce(kafka.bootstrap, topic, bodies(10))
    bus = await open_bus(session_timeout_ms=30_000)
    async with bus.records(topic, group=group) as log:
        await (await read(log, 5, PATIENCE))[-1].commit()
    begun = time.perf_counter()
    async with bus.records(topic, group=group) as log:
        assert data_of(await read(log, 5, PATIENCE)) == bodies(10)[5:]
    assert time.perf_counter() - begun < 15


async def test_a_static_member_gets_its_partitions_back(
    kafka: KafkaServer, open_bus: Open, topic: str, group: str
) -> None:
    produce(kafka.bootstrap, topic, bodies(10))
    bus = await open_bus(group_instance_id="the-one", session_timeout_ms=30_000)
    async with bus.records(topic, group=group) as log:
        await (await read(log, 5, PATIENCE))[-1].commit()
    async with bus.records(topic, group=group) as log:
        assert data_of(await read(log, 5, PATIENCE)) == bodies(10)[5:]


@pytest.mark.parametrize("strategy", ["range", "roundrobin", "cooperative-sticky"])
async def test_every_assignment_strategy_shares_partitions(
    kafka: KafkaServer, open_bus: Open, make_topic: MakeTopic, group: str, strategy: str
) -> None:
    topic = make_topic(partitions=4)
    first = await open_bus(partition_assignment_strategy=(strategy,))
    second = await open_bus(partition_assignment_strategy=(strategy,))
    async with first.records(topic, group=group) as one:
        await eventually(lambda: len(one.assignment()) == 4, PATIENCE, "the first assignment")
        async with second.records(topic, group=group) as two:
            await eventually(
                lambda: len(one.assignment()) == len(two.assignment()) == 2, PATIENCE, "two partitions for each"
            )
            assert not set(one.assignment()) & set(two.assignment())
        await eventually(lambda: len(one.assignment()) == 4, PATIENCE, "the take-over")


async def test_a_commit_of_an_unassigned_partition_is_rejected(kafka: KafkaServer, topic: str, group: str) -> None:
    produce(kafka.bootstrap, topic, bodies(5))
    hooks = Hooks()
    backend = KafkaBackend(KafkaSettings(servers=(kafka.bootstrap,)), hooks)
    await backend.open()
    try:
        wanted = RecordSubscription(topics=(topic,), group=group)
        consumer: RecordConsumer[bytes] = RecordConsumer(backend, wanted, hooks=hooks)
        async with consumer:
            source: Any = vars(vars(consumer)["_member"])["_source"]
            assert isinstance(source, KafkaRecordSource)
            await read(consumer, 5, PATIENCE)
            ours, other = TopicPartition(topic, 0), TopicPartition(topic, 7)
            results = await source.commit({ours: 3, other: 3})
            assert results[ours] is None
            assert isinstance(results[other], LeaseLost)
            with pytest.raises(LeaseLost):
                await source.group_metadata([other])
            assert await source.group_metadata([ours])
    finally:
        await backend.close()


async def test_a_seek_that_fails_for_one_partition_loses_no_records_of_others(
    kafka: KafkaServer, open_bus: Open, make_topic: MakeTopic, group: str
) -> None:
    topic = make_topic()
    produce(kafka.bootstrap, topic, bodies(100))
    ours, missing = TopicPartition(topic, 0), TopicPartition(topic, 7)
    moved: list[Sequence[TopicPartition]] = []
    async with (await open_bus()).records(topic, group=group) as log:
        await read(log, 100, PATIENCE)
        source: Any = vars(vars(log)["_member"])["_source"]
        # Like one that was lost to another member and not reported to the loop yet: a seek leaves it out.
        with pytest.raises(LeaseLost, match=f"Partition 7 of topic '{topic}' is not assigned to this member"):
            await source.thread.seek({missing: 0, ours: 90}, moved.append)
        assert (await read(log, 10, PATIENCE))[0].offset == 90
        with pytest.raises(LeaseLost):
            await source.thread.seek({missing: 0}, moved.append)
        await eventually(lambda: len(moved) == 2, PATIENCE)
    # What was not moved keeps what waits of it.
    assert moved == [[ours], []]


@pytest.mark.deep
async def test_a_seek_names_what_has_moved_if_the_group_takes_a_partition_meanwhile(
    kafka: KafkaServer, open_bus: Open, make_topic: MakeTopic, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A rebalance waits for the loop a second longer.
    monkeypatch.setattr("broker_kafka.records._REVOKE_SECONDS", 0.5)
    topic, url = make_topic(partitions=2), f"{kafka.url}?session_timeout_ms=6000&heartbeat_interval_ms=300"
    bus, both = await open_bus(), {TopicPartition(topic, 0): 4, TopicPartition(topic, 1): 4}
    await bus.topic(topic).publish_batch([OutboundMessage(b"%d" % n, partition=n % 2) for n in range(20)])
    with ExitStack() as stack:
        async with bus.records(topic, group=group) as log:
            await read(log, 20, PATIENCE)
            source: Any = vars(vars(log)["_member"])["_source"]
            seek, owned = source.thread.seek, vars(source.thread)["_owned"]

            def after_a_rebalance(*arguments: Any) -> Any:
                # The loop stands still, after the seek has checked its partitions: the client releases one without it.
                other = stack.enter_context(broker.blocking.connect(url))
                stack.enter_context(other.records(topic, group=group))
                until = time.monotonic() + PATIENCE
                while len(owned) > 1:
                    assert time.monotonic() < until, "the other member got no partition"
                    time.sleep(0.01)
                return seek(*arguments)

            monkeypatch.setattr(source.thread, "seek", after_a_rebalance)
            with pytest.raises(LeaseLost) as caught:
                await log.seek(both)
            (kept,) = owned
            (gone,) = both.keys() - owned
            assert caught.value.message.startswith(f"Partition {gone.partition} of topic {topic!r} is not assigned to")
            assert caught.value.message.endswith(f". Only {topic!r}[{kept[1]}] moved to the new position")
            places = [(record.partition, record.offset) for record in await read(log, 6, PATIENCE)]
            assert places == [(kept[1], offset) for offset in range(4, 10)]
            await eventually(lambda: log.assignment() == [kept], PATIENCE, "the report of the rebalance")


async def test_a_failed_subscribe_is_a_broker_error(open_bus: Open, topic: str, group: str) -> None:
    async with (await open_bus()).records(topic, group=group) as log:
        source: Any = vars(vars(log)["_member"])["_source"]
        with pytest.raises(BrokerError, match="Subscribing"):
            await source.thread.subscribe([""])
