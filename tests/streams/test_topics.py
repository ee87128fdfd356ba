"""M1 of goka's list: the topics of a group are created once, and what does not fit is named."""

from __future__ import annotations

import pytest

from broker import Bus, ConfigurationError, Json, NotFound
from broker_streams.context import Context
from broker_streams.failures import DeadLetter
from broker_streams.graph import Edge, Group, Input, Join, Lookup, Loop, Output, Persist
from broker_streams.topics import TopicPolicy
from tests.streams.brokers import StreamBroker
from tests.streams.support import Stream

PARTITIONS = 3


@pytest.fixture
async def stream(server: StreamBroker, bus: Bus) -> Stream:
    """Only its input."""
    stream = Stream(server, bus)
    await stream.topic("clicks", partitions=PARTITIONS)
    return stream


def ignore(ctx: Context, value: int) -> None: ...


def group_of(stream: Stream, *edges: Edge) -> Group:
    return Group(stream.name, Input(stream.clicks, Json(int), ignore), Persist(Json(int)), *edges)


async def missing(stream: Stream, *topics: str) -> None:
    """None of these topics is there, or is created by asking for it."""
    for topic in topics:
        for _ in range(2):
            with pytest.raises(NotFound):
                await stream.bus.admin.describe_topic(topic)


async def test_m1_preparing_twice_changes_nothing(stream: Stream) -> None:
    group = group_of(stream, Loop(Json(int), ignore))
    assert await TopicPolicy().prepare(stream.bus, group) == PARTITIONS
    # They are there as soon as the call returns.
    table, loop = [await stream.bus.admin.describe_topic(f"{stream.name}-{end}") for end in ("table", "loop")]
    assert (table.partitions, table.compacted) == (PARTITIONS, True)
    assert (loop.partitions, loop.compacted) == (PARTITIONS, False)
    assert await TopicPolicy().prepare(stream.bus, group) == PARTITIONS
    again = await stream.bus.admin.describe_topic(stream.table)
    assert (again.partitions, again.compacted) == (PARTITIONS, True)


async def test_m1_missing_topics_are_named_and_nothing_is_created(stream: Stream) -> None:
    visits, users, prices, alerts, letters = (
        f"{stream.name}-{end}" for end in ("v", "users", "prices", "out", "letters")
    )
    codec = Json(int)
    edges = (
        Input(visits, codec, ignore, on_undecodable=DeadLetter(letters)),
        *(Join(users, codec), Lookup(prices, codec), Output(alerts, codec)),
    )
    with pytest.raises(ConfigurationError) as raised:
        await TopicPolicy().prepare(stream.bus, group_of(stream, *edges))
    named = (f"Input {visits!r}", f"Join {users!r}", f"Lookup {prices!r}", f"Output {alerts!r}", f"topic {letters!r}")
    for what in named:
        assert f"{what} does not exist" in str(raised.value)
    await missing(stream, visits, users, prices, alerts, letters, stream.table)


async def test_m1_nothing_is_created_with_create_false(stream: Stream) -> None:
    with pytest.raises(ConfigurationError, match=f"Table '{stream.table}' does not exist, and .* create=False"):
        await TopicPolicy(create=False).prepare(stream.bus, group_of(stream))
    await missing(stream, stream.table)


async def test_m1_a_table_with_another_number_of_partitions_is_refused(stream: Stream) -> None:
    await stream.topic("table", partitions=2, compacted=True)
    with pytest.raises(ConfigurationError, match="has 2 partitions, and the inputs have 3"):
        await TopicPolicy(mismatch="ignore").prepare(stream.bus, group_of(stream))


async def test_m1_a_table_that_is_not_compacted_is_refused_warned_of_or_ignored(
    stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    await stream.topic("table", partitions=PARTITIONS)
    with pytest.raises(ConfigurationError, match=f"Table '{stream.table}' is not compacted"):
        await TopicPolicy().prepare(stream.bus, group_of(stream))
    await TopicPolicy(mismatch="ignore").prepare(stream.bus, group_of(stream))
    assert "not compacted" not in caplog.text
    await TopicPolicy(mismatch="warn").prepare(stream.bus, group_of(stream))
    assert f"Table '{stream.table}' is not compacted" in caplog.text
