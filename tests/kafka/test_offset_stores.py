"""The contract of `OffsetStore`, against every store. Several tests reproduce defects of a known store of this kind."""

from __future__ import annotations

import asyncio

import pytest
from confluent_kafka import TopicPartition as NativePartition

from broker.driver.contract import TopicPartition
from broker.errors import BrokerError, Closed, LeaseLost, SettleError, TopicNotFound
from broker_kafka.offsets import (
    GroupMember,
    GroupOffsetStore,
    MemoryOffsetStore,
    OffsetStore,
    StoredOffset,
    migrate_offsets,
)
from broker_kafka.offsets.protocol import failures
from tests.kafka.offset_store_cases import (
    KAFKA,
    OWN,
    StoreCase,
    committed,
    connect,
    every_store,
    execute,
    join,
    own_store,
    save,
)
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin


@every_store
async def test_committed_offsets_are_fetched(case: StoreCase):
    """The fork read ZooKeeper's offsets and wrote Kafka's."""
    wanted = {case.partition(0): StoredOffset(17, "why"), case.partition(2): StoredOffset(4)}
    await committed(case, wanted)
    again = case.again()
    assert await again.fetch(case.owner.group, list(wanted)) == wanted
    assert await again.claim(case.owner, list(wanted)) == wanted
    assert await again.stored(case.owner.group) == wanted


@pytest.mark.parametrize("case", KAFKA, indirect=True)
async def test_committed_offsets_are_read_by_a_kafka_consumer(case: StoreCase, kafka: KafkaServer):
    await committed(case, {case.partition(1): StoredOffset(23, "seen")})
    found = await asyncio.to_thread(RawAdmin(kafka.bootstrap).committed, case.owner.group, case.topics[0], 1)
    assert (found.offset, found.metadata) == (23, "seen")


@every_store
async def test_every_partition_has_its_own_result(case: StoreCase, request: pytest.FixtureRequest):
    """The fork's answer had only failures, and what was not among the successes was committed again for ever."""
    good, bad = case.partition(0), case.partition(1)
    if "kafka" in request.node.name:
        bad = case.partition(99)
        expected: type[BrokerError] = TopicNotFound
    else:
        await case.store.claim(case.member(6), [bad])
        expected = LeaseLost
    results = await case.store.commit(case.owner, {bad: StoredOffset(8), good: StoredOffset(9)})
    assert set(results) == {good, bad}
    assert results[good] is None
    assert isinstance(results[bad], expected)
    assert str(bad.partition) in str(results[bad])
    found = await case.store.fetch(case.owner.group, [good, case.partition(2)])
    assert found == {good: StoredOffset(9), case.partition(2): None}


@every_store
async def test_an_offset_is_the_next_one_to_read(case: StoreCase, request: pytest.FixtureRequest):
    """The fork stored the offset by one path and the offset + 1 by the other."""
    group, partition = case.owner.group, case.partition(0)
    await committed(case, {partition: StoredOffset(10)})
    assert (await case.store.fetch(group, [partition]))[partition] == StoredOffset(10)
    assert failures(await case.store.reset(group, {partition: StoredOffset(7)})) == {}
    assert (await case.store.fetch(group, [partition]))[partition] == StoredOffset(7)
    memory = MemoryOffsetStore()
    await migrate_offsets(case.store, memory, group)
    assert await memory.stored(group) == {partition: StoredOffset(7)}
    if case.engine is not None:
        await case.store.claim(case.owner, [partition])
        await save(case, case.owner, {partition: StoredOffset(12)})
        assert (await case.store.fetch(group, [partition]))[partition] == StoredOffset(12)


@every_store
async def test_never_committed_is_not_zero(case: StoreCase):
    """The fork took a block that was missing from an answer for "never committed"."""
    zero, never = case.partition(0), case.partition(1)
    await committed(case, {zero: StoredOffset(0)})
    assert await case.store.fetch(case.owner.group, [zero, never]) == {zero: StoredOffset(0), never: None}
    assert await case.store.claim(case.owner, [zero, never]) == {zero: StoredOffset(0), never: None}
    assert await case.store.stored(case.owner.group) == {zero: StoredOffset(0)}


async def _break(case: StoreCase) -> None:
    """Make the place unusable."""
    await execute(case.engine, f'DROP TABLE "{case.place}"')


@pytest.mark.parametrize("case", OWN[1:], indirect=True)
async def test_an_unreadable_store_is_an_error_and_not_empty(case: StoreCase):
    group, partitions = case.owner.group, [case.partition(0), case.partition(1)]
    await committed(case, {partitions[0]: StoredOffset(3)})
    await _break(case)
    for found in (await case.store.fetch(group, partitions), await case.store.claim(case.owner, partitions)):
        assert set(found) == set(partitions)
        assert all(isinstance(entry, SettleError) for entry in found.values())
    with pytest.raises(SettleError):
        await case.store.stored(group)
    with pytest.raises(SettleError):
        await migrate_offsets(case.store, MemoryOffsetStore(), group)


@every_store
async def test_one_commit_stores_all_topics_and_partitions(case: StoreCase):
    """The fork's JSON store forgot a topic's other partitions."""
    wanted = {case.partition(n, t): StoredOffset(10 * t + n, f"{t}/{n}") for t in (0, 1) for n in range(3)}
    await committed(case, wanted)
    assert await case.again().stored(case.owner.group) == wanted
    await committed(case, {case.partition(1): StoredOffset(99)})
    assert await case.again().stored(case.owner.group) == wanted | {case.partition(1): StoredOffset(99)}


@pytest.mark.parametrize("case", OWN[1:], indirect=True)
async def test_a_failed_write_is_reported(case: StoreCase):
    """The fork ignored the errors of its database."""
    group, partitions = case.owner.group, [case.partition(0), case.partition(1)]
    await committed(case, {partitions[0]: StoredOffset(3)})
    if "sqlite" in str(case.engine.url):
        await execute(
            case.engine,
            f'CREATE TRIGGER "full" BEFORE UPDATE ON "{case.place}" BEGIN SELECT RAISE(ABORT, \'disk full\'); END',
        )
    else:
        await execute(case.engine, f'ALTER TABLE "{case.place}" ADD CHECK (next_offset < 5)')
    for results in (
        await case.store.commit(case.owner, dict.fromkeys(partitions, StoredOffset(7))),
        await case.store.reset(group, dict.fromkeys(partitions, StoredOffset(7))),
    ):
        assert set(results) == set(partitions)
        assert all(isinstance(error, SettleError) and error.native is not None for error in results.values())
    assert await case.again().stored(group) == {partitions[0]: StoredOffset(3)}


@pytest.mark.deep
async def test_unreachable_kafka_is_an_error_of_every_partition():
    with KafkaServer() as server:
        connection = await connect(server, request_timeout=1.0)
        await asyncio.to_thread(server.kill)
        store, partitions = GroupOffsetStore(connection), [TopicPartition("left", 0), TopicPartition("left", 1)]
        for results in (
            await store.fetch("group", partitions),
            await store.commit(GroupMember("group", 1), dict.fromkeys(partitions, StoredOffset(1))),
        ):
            assert set(results) == set(partitions)
            assert all(isinstance(error, BrokerError) for error in results.values())
        with pytest.raises(BrokerError):
            await store.stored("group")
        await connection.close()


@own_store
async def test_an_older_generation_cannot_commit(case: StoreCase):
    """The fork let a member of an old generation put back a newer offset."""
    group, partition = case.owner.group, case.partition(0)
    await committed(case, {partition: StoredOffset(50)})
    newer = case.member(6)
    assert await case.store.claim(newer, [partition]) == {partition: StoredOffset(50)}
    # Before the new owner has committed anything.
    for how in ({}, {"rewind": True}):
        (error,) = (await case.store.commit(case.owner, {partition: StoredOffset(60)}, **how)).values()
        assert isinstance(error, LeaseLost)
        assert "generation 6" in str(error)
    assert await case.again().commit(newer, {partition: StoredOffset(55)}) == {partition: None}
    assert isinstance((await case.store.commit(case.owner, {partition: StoredOffset(60)}))[partition], LeaseLost)
    assert await case.store.fetch(group, [partition]) == {partition: StoredOffset(55)}
    # A former member that wakes up late does not get the partition back either.
    assert isinstance((await case.store.claim(case.owner, [partition]))[partition], LeaseLost)


@own_store
async def test_another_member_of_the_same_generation_cannot_commit(case: StoreCase):
    partition = case.partition(0)
    await case.store.claim(case.owner, [partition])
    other = case.member(case.owner.generation, "other")
    assert isinstance((await case.store.commit(other, {partition: StoredOffset(1)}))[partition], LeaseLost)
    await committed(case, {partition: StoredOffset(1)})


@own_store
async def test_a_recreated_group_restarts_its_generations(case: StoreCase):
    partition, first = case.partition(0), case.member(1)
    await committed(case, {partition: StoredOffset(50)})
    refused = (await case.store.claim(first, [partition]))[partition]
    assert isinstance(refused, LeaseLost)
    assert "restarted=True" in str(refused)
    assert await case.store.claim(first, [partition], restarted=True) == {partition: StoredOffset(50)}
    assert await case.store.commit(first, {partition: StoredOffset(51)}) == {partition: None}
    assert isinstance((await case.store.commit(case.owner, {partition: StoredOffset(52)}))[partition], LeaseLost)


@pytest.mark.parametrize("case", ["kafka-group"], indirect=True)
async def test_a_running_group_is_not_reset(case: StoreCase, kafka: KafkaServer):
    partition = case.partition(0)
    client = await asyncio.to_thread(join, kafka, case.owner.group, list(case.topics), 6)
    for write in (
        case.store.commit(case.owner, {partition: StoredOffset(9)}),
        case.store.reset(case.owner.group, {partition: StoredOffset(9)}),
    ):
        assert isinstance((await write)[partition], LeaseLost)
    assert await case.store.fetch(case.owner.group, [partition]) == {partition: None}
    await asyncio.to_thread(client.close)
    await committed(case, {partition: StoredOffset(9)})


@pytest.mark.deep
@pytest.mark.parametrize("case", ["kafka-member"], indirect=True)
async def test_a_replaced_member_cannot_commit(case: StoreCase, kafka: KafkaServer):
    partition = case.partition(0)
    await committed(case, {partition: StoredOffset(5)})
    await case.store._client.call(lambda client: client.unsubscribe())  # type: ignore[attr-defined]
    other = await asyncio.to_thread(join, kafka, case.owner.group, list(case.topics), 6)
    (error,) = (await case.store.commit(case.owner, {partition: StoredOffset(6)})).values()
    assert isinstance(error, LeaseLost)
    assert other.committed([NativePartition(*partition)])[0].offset == 5
    await asyncio.to_thread(other.close)


@own_store
async def test_a_member_that_keeps_a_partition_commits_in_later_generations(case: StoreCase):
    partition = case.partition(0)
    await case.store.claim(case.member(5, "same"), [partition])
    for generation in (6, 8):
        results = await case.store.commit(case.member(generation, "same"), {partition: StoredOffset(generation)})
        assert results == {partition: None}
    # Another member has to claim, whatever its generation is.
    assert isinstance((await case.store.commit(case.member(9), {partition: StoredOffset(9)}))[partition], LeaseLost)


@own_store
async def test_a_commit_below_the_position_needs_rewind(case: StoreCase):
    partition = case.partition(0)
    await committed(case, {partition: StoredOffset(9, "nine")})
    (error,) = (await case.store.commit(case.owner, {partition: StoredOffset(8)})).values()
    assert isinstance(error, SettleError)
    assert "9" in str(error)
    assert "rewind=True" in str(error)
    await committed(case, {partition: StoredOffset(9, "again")})
    await committed(case, {partition: StoredOffset(8)}, rewind=True)
    assert await case.store.fetch(case.owner.group, [partition]) == {partition: StoredOffset(8)}


@own_store
async def test_a_reset_fences_a_running_member(case: StoreCase):
    partition = case.partition(0)
    await committed(case, {partition: StoredOffset(9)})
    assert await case.store.reset(case.owner.group, {partition: StoredOffset(2, "back")}) == {partition: None}
    assert isinstance((await case.store.commit(case.owner, {partition: StoredOffset(10)}))[partition], LeaseLost)
    assert await case.store.claim(case.owner, [partition]) == {partition: StoredOffset(2, "back")}
    await committed(case, {partition: StoredOffset(3)})


@own_store
async def test_groups_and_unusual_names_are_kept_apart(case: StoreCase):
    partition, text = case.partition(0), "ünïcode/../%2F.json"
    other = case.owner._replace(group=text)
    await committed(case, {partition: StoredOffset(1)})
    assert await case.store.commit(other, {partition: StoredOffset(2, "ünï\n'\"")}) == {partition: None}
    assert await case.store.stored(text) == {partition: StoredOffset(2, "ünï\n'\"")}
    assert await case.store.stored(case.owner.group) == {partition: StoredOffset(1)}


@own_store
async def test_a_closed_store_refuses(case: StoreCase):
    await case.store.close()
    await case.store.close()
    for call in (
        case.store.fetch(case.owner.group, []),
        case.store.commit(case.owner, {}),
        case.store.stored(case.owner.group),
    ):
        with pytest.raises(Closed):
            await call


@own_store
async def test_concurrent_commits_lose_nothing(case: StoreCase):
    stores = [case.again() for _ in range(4)]

    async def climb(store: OffsetStore, partition: TopicPartition) -> None:
        for offset in range(1, 11):
            assert await store.commit(case.owner, {partition: StoredOffset(offset)}) == {partition: None}

    partitions = [case.partition(n, t) for n in range(2) for t in (0, 1)]
    await asyncio.gather(*map(climb, stores, partitions))
    assert await case.store.stored(case.owner.group) == dict.fromkeys(sorted(partitions), StoredOffset(10))


@own_store
async def test_the_newest_of_concurrent_claims_wins(case: StoreCase):
    partition = case.partition(0)
    members = [case.member(generation) for generation in (4, 9, 6, 8, 7, 5)]
    await asyncio.gather(*(case.again().claim(member, [partition]) for member in members))
    results = [
        (member.generation, (await case.store.commit(member, {partition: StoredOffset(1)}))[partition])
        for member in members
    ]
    assert [generation for generation, error in results if error is None] == [9]
