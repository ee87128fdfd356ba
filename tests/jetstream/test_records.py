"""The Record family: groups, order, commits, seeks, rebalancing, fail-over, and the log reader."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from broker.driver.contract import Bounds, RecordSource, RecordSubscription, Start, TopicPartition
from broker.driver.seeking import PartialSeek
from broker.errors import LeaseLost, NotFound, OffsetOutOfRange, OperationTimeout, SubscriptionNotFound
from broker.names import EPHEMERAL, Ephemeral, native_name
from broker.outbound import OutboundMessage
from broker.records import Record
from broker.testing.waiting import let_pass
from broker_jetstream.backend import JetStreamBackend
from broker_jetstream.membership import plan
from broker_jetstream.names import group_consumer
from tests.jetstream.conftest import Open
from tests.jetstream.support import GroupListener, make_topic, publish, read, until


async def join(
    backend: JetStreamBackend,
    *topics: str,
    group: str | Ephemeral = "audit",
    listener: GroupListener | None = None,
    start: Start = "earliest",
) -> RecordSource:
    return await backend.join(RecordSubscription(topics=topics, group=group, start=start), listener or GroupListener())


def numbered(number: int, first: int = 0) -> list[OutboundMessage]:
    return [OutboundMessage(b"%d" % n, key=f"k{n % 10}") for n in range(first, first + number)]


def values(records: Sequence[Record[Any]]) -> list[int]:
    return [int(record.data or b"") for record in records]


def positions(records: Sequence[Record[Any]]) -> dict[TopicPartition, int]:
    return {TopicPartition(record.topic, record.partition): record.offset + 1 for record in records}


async def commit(source: RecordSource, records: Sequence[Record[Any]]) -> None:
    results = await source.commit(positions(records))
    assert set(results.values()) == {None}


async def test_records_arrive_in_order_per_partition(both_ways: JetStreamBackend, topic: str) -> None:
    await make_topic(both_ways, topic, partitions=3)
    receipts = await publish(both_ways, topic, *numbered(300))
    source = await join(both_ways, topic)
    assert source.assignment() == [TopicPartition(topic, n) for n in range(3)]
    found = await read(source, 300)
    for number in range(3):
        mine = [record.offset for record in found if record.partition == number]
        assert mine == [receipt.offset for receipt in receipts if receipt.partition == number]
    by_value = {int(record.data or b""): record for record in found}
    assert all(by_value[n].key == f"k{n % 10}".encode() and by_value[n].id == receipts[n].id for n in range(300))
    assert await source.fetch(10, 1 << 20, 0.1) == []


async def test_a_group_continues_at_its_commits(both_ways: JetStreamBackend, topic: str) -> None:
    await make_topic(both_ways, topic, partitions=2)
    await publish(both_ways, topic, *numbered(100))
    source = await join(both_ways, topic)
    places = source.assignment()
    assert await source.committed(places) == dict.fromkeys(places)
    found = await read(source, 60)
    await commit(source, found)
    assert await source.committed(places) == positions(found)
    await source.close()
    await publish(both_ways, topic, *numbered(10, 100))
    again = await join(both_ways, topic)
    rest = await read(again, 50)
    assert sorted(values(found) + values(rest)) == list(range(110))
    await commit(again, rest)
    lag = await both_ways.admin().lag(topic, "audit")
    assert (lag.waiting, lag.partitions) == (0, {0: 0, 1: 0})


async def test_groups_are_independent_and_do_not_disturb_subscriptions(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic, partitions=2)
    await publish(backend, topic, *numbered(20))
    one, two = await join(backend, topic, group="one.group"), await join(backend, topic, group="two.group")
    assert len(await read(one, 20)) == len(await read(two, 20)) == 20
    await backend.admin().ensure_subscription(topic, "one.group", start="earliest", options={})
    admin = backend.admin()
    assert await admin.list_subscriptions(topic) == ["one.group", "two.group"]
    assert (await admin.lag(topic, "two.group")).partitions == {0: 10, 1: 10} or sum(
        (await admin.lag(topic, "two.group")).partitions.values()
    ) == 20
    await admin.delete_subscription(topic, "one.group")
    assert await admin.list_subscriptions(topic) == ["two.group"]
    with pytest.raises(SubscriptionNotFound):
        await admin.describe_subscription(topic, "one.group")


async def test_start_of_a_new_group(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic, partitions=2)
    await publish(backend, topic, *numbered(10))
    middle = datetime.now(UTC)
    await publish(backend, topic, *numbered(10, 10))
    latest = await join(backend, topic, group="latest", start="latest")
    timed = await join(backend, topic, group="timed", start=middle)
    assert sum((await backend.admin().lag(topic, "latest")).partitions.values()) == 0
    assert sum((await backend.admin().lag(topic, "timed")).partitions.values()) == 10
    await publish(backend, topic, *numbered(10, 20))
    assert sorted(values(await read(latest, 10))) == list(range(20, 30))
    assert sorted(values(await read(timed, 20))) == list(range(10, 30))
    await latest.close()
    again = await join(backend, topic, group="latest", start="earliest")
    assert sorted(values(await read(again, 10))) == list(range(20, 30))
    assert await read(again, 1, 0.3) == []


async def test_seek_moves_the_position_but_not_the_commit(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic)
    await publish(backend, topic, *numbered(20))
    listener = GroupListener()
    source = await join(backend, topic, listener=listener)
    place = TopicPartition(topic, 0)
    await commit(source, (await read(source, 10))[:10])
    assert await source.committed([place]) == {place: 11}
    await source.seek({place: 3})
    assert values(await read(source, 18)) == list(range(2, 20))
    assert await source.committed([place]) == {place: 11}
    await source.seek({place: 18})
    assert values(await read(source, 3)) == [17, 18, 19]
    assert await source.committed([place]) == {place: 11}
    await source.seek({place: None})
    assert values(await read(source, 10)) == list(range(10, 20))
    for beyond in (22, 1000):
        with pytest.raises(OffsetOutOfRange):
            await source.seek({place: beyond})
    await source.seek({place: 16})
    await source.close()
    again = await join(backend, topic)
    found = await read(again, 10)
    assert values(found) == list(range(10, 20))
    await commit(again, found)
    assert await again.committed([place]) == {place: 21}
    # A commit may also go back.
    assert await again.commit({place: 5}) == {place: None}
    assert await again.committed([place]) == {place: 5}
    await again.close()
    assert values(await read(await join(backend, topic), 16)) == list(range(4, 20))


async def test_a_refused_seek_changes_nothing(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic, partitions=2)
    await publish(backend, topic, *(OutboundMessage(b"%d" % n, partition=0) for n in range(20)))
    listener = GroupListener()
    source = await join(backend, topic, listener=listener)
    assert values(await read(source, 5)) == list(range(5))
    with pytest.raises(OffsetOutOfRange):
        await source.seek({TopicPartition(topic, 0): 1, TopicPartition(topic, 1): 1000})
    with pytest.raises(LeaseLost):
        await source.seek({TopicPartition(topic, 0): 1, TopicPartition(topic, 2): 1})
    assert values(await read(source, 15)) == list(range(5, 20))
    assert listener.gone == []


@pytest.mark.parametrize("failures", [1, 2], ids=["seek", "takeover"])
async def test_reading_continues_after_a_failed_seek(
    open_backend: Open, topic: str, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """Though the seek has discarded the fetched records, and no new record arrives."""
    backend = await open_backend(owner_timeout=3.0)
    connection = backend._connection
    call = connection.api

    async def fail(subject: str, body: Mapping[str, Any] | None = None, *, what: str) -> dict[str, Any]:
        nonlocal failures
        if subject.startswith("CONSUMER.RESET.") and failures:
            failures -= 1
            raise OperationTimeout(what)
        return await call(subject, body, what=what)

    await make_topic(backend, topic)
    await publish(backend, topic, *numbered(20))
    listener = GroupListener()
    source = await join(backend, topic, listener=listener)
    assert values(await source.fetch(20, 1, 30)) == [0]
    (partition,) = source._partitions()  # pyright: ignore[reportAttributeAccessIssue]
    await until(lambda: partition.buffered == 19)
    monkeypatch.setattr(connection, "api", fail)
    with pytest.raises(OperationTimeout):
        await source.seek({TopicPartition(topic, 0): 1})
    assert values(await read(source, 19)) == list(range(1, 20))
    assert listener.gone == []


async def test_a_seek_that_fails_half_way_moves_whole_partitions(
    open_backend: Open, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = await open_backend(owner_timeout=3.0)
    connection = backend._connection
    call = connection.api

    async def fail(subject: str, body: Mapping[str, Any] | None = None, *, what: str) -> dict[str, Any]:
        if subject.startswith("CONSUMER.RESET.") and subject.endswith(f"{group_consumer('audit', 1)}"):
            monkeypatch.undo()
            raise OperationTimeout(what)
        return await call(subject, body, what=what)

    await make_topic(backend, topic, partitions=2)
    await publish(backend, topic, *(OutboundMessage(b"%d" % n, partition=n % 2) for n in range(10)))
    source, first, second = await join(backend, topic), TopicPartition(topic, 0), TopicPartition(topic, 1)
    assert len(await read(source, 10)) == 10
    monkeypatch.setattr(connection, "api", fail)
    with pytest.raises(PartialSeek) as caught:
        await source.seek({second: 1, first: 1})
    assert (caught.value.moved, type(caught.value.error)) == ([first], OperationTimeout)
    assert values(await read(source, 5)) == [0, 2, 4, 6, 8]


async def test_pause_and_resume(open_backend: Open, topic: str) -> None:
    backend = await open_backend(owner_timeout=2.0)
    await make_topic(backend, topic, partitions=2)
    source = await join(backend, topic)
    first = TopicPartition(topic, 0)
    source.pause([first])
    await publish(backend, topic, *(OutboundMessage(b"%d" % n, partition=n % 2) for n in range(10)))
    assert {record.partition for record in await read(source, 5)} == {1}
    assert await read(source, 1, 0.3) == []
    await let_pass(2.2)  # longer than owner_timeout: a paused partition stays assigned
    source.resume([first])
    assert values(await read(source, 5)) == [0, 2, 4, 6, 8]
    assert source.assignment() == [first, TopicPartition(topic, 1)]


async def test_partitions_are_rebalanced_when_members_join_and_leave(open_backend: Open, topic: str) -> None:
    backends = [await open_backend(owner_timeout=30.0) for _ in range(3)]
    await make_topic(backends[0], topic, partitions=6)
    listeners = [GroupListener() for _ in backends]
    first = await join(backends[0], topic, listener=listeners[0])
    await publish(backends[0], topic, *numbered(60))
    begun = await read(first, 60)

    async def commit_what_was_read(going: Sequence[TopicPartition]) -> None:
        await first.commit({place: at for place, at in positions(begun).items() if place in going})

    listeners[0].on_revoke = commit_what_was_read
    second = await join(backends[1], topic, listener=listeners[1])
    await until(lambda: len(first.assignment()) == len(second.assignment()) == 3)
    third = await join(backends[2], topic, listener=listeners[2])
    await until(lambda: len(first.assignment()) == len(second.assignment()) == len(third.assignment()) == 2)
    everything = {*first.assignment(), *second.assignment(), *third.assignment()}
    assert len(everything) == 6
    # Positions committed during the revocation hold, and no member lost a partition without a revocation.
    assert await second.fetch(10, 1 << 20, 0.2) == []
    assert not any(listener.gone for listener in listeners)
    await publish(backends[0], topic, *numbered(60, 60))
    found: list[Record[Any]] = []
    async with asyncio.timeout(60):
        while len(found) < 60:
            for source in (first, second, third):
                found += await source.fetch(60, 1 << 24, 0.1)
    assert sorted(values(found)) == list(range(60, 120))
    await first.close()
    await third.close()
    await until(lambda: len(second.assignment()) == 6)
    results = await second.commit({TopicPartition(topic, 0): 1})
    assert set(results.values()) == {None}


async def test_uncommitted_records_go_to_the_next_owner(open_backend: Open, topic: str) -> None:
    one, two = await open_backend(owner_timeout=60.0), await open_backend(owner_timeout=60.0)
    await make_topic(one, topic)
    await publish(one, topic, *numbered(50))
    first, second = await join(one, topic), await join(two, topic)
    found = await read(first, 50)
    await first.commit({TopicPartition(topic, 0): found[19].offset + 1})
    await first.close()
    # A clean close unpins at once.
    assert values(await read(second, 30, 30)) == list(range(20, 50))


async def test_a_commit_of_an_unassigned_partition_is_refused(open_backend: Open, topic: str) -> None:
    one, two = await open_backend(), await open_backend()
    await make_topic(one, topic)
    first, second = await join(one, topic), await join(two, topic)
    assert second.assignment() == []
    (result,) = (await second.commit({TopicPartition(topic, 0): 1})).values()
    assert isinstance(result, LeaseLost)
    with pytest.raises(LeaseLost, match="not assigned to this member of group 'audit', which has none"):
        await second.seek({TopicPartition(topic, 0): 1})
    assert first.assignment() == [TopicPartition(topic, 0)]


async def test_an_ephemeral_group_is_deleted_at_close(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic, partitions=2)
    source = await join(backend, topic, group=EPHEMERAL, start="latest")
    await publish(backend, topic, *numbered(10))
    assert sorted(values(await read(source, 10))) == list(range(10))
    assert await backend.admin().list_subscriptions(topic) == []
    await source.close()
    stream = topic.replace(".", "=")
    assert not (await backend._connection.api(f"CONSUMER.NAMES.{stream}", {}, what="x"))["consumers"]


# The log reader.


async def slurp(
    backend: JetStreamBackend, topic: str, partition: int, start: int, stop: int, most: int = 100
) -> list[Record[Any]]:
    batches = backend.log_reader().read(topic, partition, start, stop, most)
    return [record async for batch in batches for record in batch]


async def test_the_log_by_offsets(both_ways: JetStreamBackend, topic: str) -> None:
    await make_topic(both_ways, topic, partitions=3)
    reader = both_ways.log_reader()
    assert list(await reader.partitions(topic)) == [0, 1, 2]
    assert await reader.bounds(topic) == {n: Bounds(1, 1) for n in range(3)}
    attributes = {"a": "b\n", "c": "d"}
    messages = [
        OutboundMessage(b"%d" % n, key="k", attributes=attributes, partition=n % 2, id=f"i{n}") for n in range(500)
    ]
    await publish(both_ways, topic, *messages, OutboundMessage(None, partition=0))
    bounds = await reader.bounds(topic)
    assert bounds == {0: Bounds(1, 502), 1: Bounds(2, 501), 2: Bounds(502, 502)}
    found = await slurp(both_ways, topic, 1, *bounds[1], most=70)
    assert values(found) == list(range(1, 500, 2))
    record = found[3]
    assert (record.topic, record.partition, record.offset, record.key, record.id) == (topic, 1, 8, b"k", "i7")
    assert dict(record.attributes) == attributes
    assert record.publish_time is not None
    assert record.broker_time is not None
    assert abs(record.broker_time - record.publish_time) < timedelta(seconds=5)
    assert [each.offset for each in await slurp(both_ways, topic, 0, 10, 20)] == [11, 13, 15, 17, 19]
    assert (await slurp(both_ways, topic, 0, 501, 502))[0].data is None
    assert await slurp(both_ways, topic, 2, 502, 502) == []
    assert await slurp(both_ways, topic, 0, 12, 12) == []


async def test_the_log_by_time(both_ways: JetStreamBackend, topic: str) -> None:
    await make_topic(both_ways, topic, partitions=3)
    await publish(both_ways, topic, *(OutboundMessage(b"x", partition=n % 2) for n in range(4)))
    middle = datetime.now(UTC)
    await publish(both_ways, topic, OutboundMessage(b"y", partition=1))
    reader = both_ways.log_reader()
    assert await reader.position_at(topic, middle) == {0: 4, 1: 5, 2: 6}
    assert await reader.position_at(topic, middle - timedelta(hours=1)) == {0: 1, 1: 2, 2: 6}
    assert await reader.position_at(topic, middle + timedelta(hours=1)) == {0: 4, 1: 6, 2: 6}


async def test_a_start_that_retention_removed_raises(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic, max_messages=10)
    await publish(backend, topic, *numbered(30))
    assert await backend.log_reader().bounds(topic) == {0: Bounds(21, 31)}
    assert values(await slurp(backend, topic, 0, 21, 31)) == list(range(20, 30))
    for start, stop in ((20, 31), (1, 2), (21, 32)):
        with pytest.raises(OffsetOutOfRange):
            await slurp(backend, topic, 0, start, stop)
    with pytest.raises(NotFound, match="no partition 5"):
        await slurp(backend, topic, 5, 21, 31)


async def test_retention_that_overtakes_a_read_raises(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic)
    await publish(backend, topic, *numbered(100))
    batches = backend.log_reader().read(topic, 0, 1, 101, 10)
    assert values(await anext(batches)) == list(range(10))
    await backend.admin().purge(topic)
    with pytest.raises(OffsetOutOfRange):
        await anext(batches)


async def test_a_foreign_stream_has_one_partition(backend: JetStreamBackend, topic: str) -> None:
    stream = f"foreign-{topic[6:]}"
    config = {"name": stream, "subjects": [f"{stream}.>"], "allow_direct": True}
    await backend._connection.api(f"STREAM.CREATE.{stream}", config, what="x")
    for n in range(10):
        await backend._connection.request(f"{stream}.a.{n}", b"%d" % n)
    name = native_name(stream)
    assert await backend.log_reader().bounds(name) == {0: Bounds(1, 11)}
    assert values(await slurp(backend, name, 0, 1, 11)) == list(range(10))
    source = await join(backend, name)
    found = await read(source, 10)
    assert values(found) == list(range(10))
    await commit(source, found)


@pytest.mark.parametrize(
    ("mine", "others", "partitions", "claim", "release"),
    [
        ((), {}, 4, [0, 1, 2, 3], []),
        ((0, 1, 2, 3), {"b": ()}, 4, [], [2, 3]),
        ((), {"b": (0, 1)}, 4, [2, 3], []),
        ((), {"b": (0, 1, 2, 3)}, 4, [], []),
        ((0,), {"b": ()}, 1, [], []),
        ((), {"b": (0,)}, 1, [], []),
        ((0, 1), {"b": (2,)}, 3, [], []),
        ((0,), {"b": (1,), "c": ()}, 3, [], []),
        ((), {"b": (1,), "c": (0,)}, 3, [2], []),
    ],
)
def test_the_share_of_a_member(mine: Any, others: Any, partitions: int, claim: list[int], release: list[int]) -> None:
    assert plan("a", mine, others, partitions, "salt") == (claim, release)
