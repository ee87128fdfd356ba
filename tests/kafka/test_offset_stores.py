"""Every offset store against the same promises; (a) to (g) are defects that a known store of this kind had."""

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
from tests.kafka.offset_shelves import (
    KAFKA,
    OWN,
    Shelf,
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
async def test_a_what_is_committed_is_what_is_fetched(shelf: Shelf):
    """The fork read ZooKeeper's offsets and wrote Kafka's."""
    wanted = {shelf.partition(0): StoredOffset(17, "why"), shelf.partition(2): StoredOffset(4)}
    await committed(shelf, wanted)
    again = shelf.again()
    assert await again.fetch(shelf.owner.group, list(wanted)) == wanted
    assert await again.claim(shelf.owner, list(wanted)) == wanted
    assert await again.stored(shelf.owner.group) == wanted


@pytest.mark.parametrize("shelf", KAFKA, indirect=True)
async def test_a_what_is_committed_is_what_a_consumer_of_kafka_reads(shelf: Shelf, kafka: KafkaServer):
    await committed(shelf, {shelf.partition(1): StoredOffset(23, "seen")})
    found = await asyncio.to_thread(RawAdmin(kafka.bootstrap).committed, shelf.owner.group, shelf.topics[0], 1)
    assert (found.offset, found.metadata) == (23, "seen")


@every_store
async def test_b_every_partition_has_its_own_answer(shelf: Shelf, request: pytest.FixtureRequest):
    """The fork's answer had only failures, and what was not among the successes was committed again for ever."""
    good, bad = shelf.partition(0), shelf.partition(1)
    if "kafka" in request.node.name:
        bad = shelf.partition(99)
        expected: type[BrokerError] = TopicNotFound
    else:
        await shelf.store.claim(shelf.member(6), [bad])
        expected = LeaseLost
    results = await shelf.store.commit(shelf.owner, {bad: StoredOffset(8), good: StoredOffset(9)})
    assert set(results) == {good, bad}
    assert results[good] is None
    assert isinstance(results[bad], expected)
    assert str(bad.partition) in str(results[bad])
    found = await shelf.store.fetch(shelf.owner.group, [good, shelf.partition(2)])
    assert found == {good: StoredOffset(9), shelf.partition(2): None}


@every_store
async def test_c_an_offset_is_the_next_one_on_every_path(shelf: Shelf, request: pytest.FixtureRequest):
    """The fork stored the offset by one path and the offset + 1 by the other."""
    group, partition = shelf.owner.group, shelf.partition(0)
    await committed(shelf, {partition: StoredOffset(10)})
    assert (await shelf.store.fetch(group, [partition]))[partition] == StoredOffset(10)
    assert failures(await shelf.store.reset(group, {partition: StoredOffset(7)})) == {}
    assert (await shelf.store.fetch(group, [partition]))[partition] == StoredOffset(7)
    memory = MemoryOffsetStore()
    await migrate_offsets(shelf.store, memory, group)
    assert await memory.stored(group) == {partition: StoredOffset(7)}
    if shelf.engine is not None:
        await shelf.store.claim(shelf.owner, [partition])
        await save(shelf, shelf.owner, {partition: StoredOffset(12)})
        assert (await shelf.store.fetch(group, [partition]))[partition] == StoredOffset(12)


@every_store
async def test_d_never_committed_is_not_zero(shelf: Shelf):
    """The fork took a block that was missing from an answer for "never committed"."""
    zero, never = shelf.partition(0), shelf.partition(1)
    await committed(shelf, {zero: StoredOffset(0)})
    assert await shelf.store.fetch(shelf.owner.group, [zero, never]) == {zero: StoredOffset(0), never: None}
    assert await shelf.store.claim(shelf.owner, [zero, never]) == {zero: StoredOffset(0), never: None}
    assert await shelf.store.stored(shelf.owner.group) == {zero: StoredOffset(0)}


async def _break(shelf: Shelf) -> None:
    """Make the place unusable."""
    await execute(shelf.engine, f'DROP TABLE "{shelf.place}"')


@pytest.mark.parametrize("shelf", OWN[1:], indirect=True)
async def test_d_a_store_that_cannot_be_read_has_not_no_positions(shelf: Shelf):
    group, partitions = shelf.owner.group, [shelf.partition(0), shelf.partition(1)]
    await committed(shelf, {partitions[0]: StoredOffset(3)})
    await _break(shelf)
    for found in (await shelf.store.fetch(group, partitions), await shelf.store.claim(shelf.owner, partitions)):
        assert set(found) == set(partitions)
        assert all(isinstance(entry, SettleError) for entry in found.values())
    with pytest.raises(SettleError):
        await shelf.store.stored(group)
    with pytest.raises(SettleError):
        await migrate_offsets(shelf.store, MemoryOffsetStore(), group)


@every_store
async def test_e_all_topics_and_partitions_of_one_commit_are_kept(shelf: Shelf):
    """The fork's JSON store forgot a topic's other partitions."""
    wanted = {shelf.partition(n, t): StoredOffset(10 * t + n, f"{t}/{n}") for t in (0, 1) for n in range(3)}
    await committed(shelf, wanted)
    assert await shelf.again().stored(shelf.owner.group) == wanted
    await committed(shelf, {shelf.partition(1): StoredOffset(99)})
    assert await shelf.again().stored(shelf.owner.group) == wanted | {shelf.partition(1): StoredOffset(99)}


@pytest.mark.parametrize("shelf", OWN[1:], indirect=True)
async def test_f_a_write_that_fails_is_told(shelf: Shelf):
    """The fork ignored the errors of its database."""
    group, partitions = shelf.owner.group, [shelf.partition(0), shelf.partition(1)]
    await committed(shelf, {partitions[0]: StoredOffset(3)})
    if "sqlite" in str(shelf.engine.url):
        await execute(
            shelf.engine,
            f'CREATE TRIGGER "full" BEFORE UPDATE ON "{shelf.place}" BEGIN SELECT RAISE(ABORT, \'disk full\'); END',
        )
    else:
        await execute(shelf.engine, f'ALTER TABLE "{shelf.place}" ADD CHECK (next_offset < 5)')
    for results in (
        await shelf.store.commit(shelf.owner, dict.fromkeys(partitions, StoredOffset(7))),
        await shelf.store.reset(group, dict.fromkeys(partitions, StoredOffset(7))),
    ):
        assert set(results) == set(partitions)
        assert all(isinstance(error, SettleError) and error.native is not None for error in results.values())
    assert await shelf.again().stored(group) == {partitions[0]: StoredOffset(3)}


@pytest.mark.deep
async def test_d_and_f_kafka_out_of_reach_is_an_error_of_every_partition():
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
async def test_g_an_older_generation_cannot_overwrite(shelf: Shelf):
    """The fork let a member of an old generation put back a newer offset."""
    group, partition = shelf.owner.group, shelf.partition(0)
    await committed(shelf, {partition: StoredOffset(50)})
    newer = shelf.member(6)
    assert await shelf.store.claim(newer, [partition]) == {partition: StoredOffset(50)}
    # Before the new owner has committed anything.
    for how in ({}, {"rewind": True}):
        (error,) = (await shelf.store.commit(shelf.owner, {partition: StoredOffset(60)}, **how)).values()
        assert isinstance(error, LeaseLost)
        assert "generation 6" in str(error)
    assert await shelf.again().commit(newer, {partition: StoredOffset(55)}) == {partition: None}
    assert isinstance((await shelf.store.commit(shelf.owner, {partition: StoredOffset(60)}))[partition], LeaseLost)
    assert await shelf.store.fetch(group, [partition]) == {partition: StoredOffset(55)}
    # A former member that wakes up late does not get the partition back either.
    assert isinstance((await shelf.store.claim(shelf.owner, [partition]))[partition], LeaseLost)


@own_store
async def test_g_another_member_of_the_same_generation_is_not_the_owner(shelf: Shelf):
    partition = shelf.partition(0)
    await shelf.store.claim(shelf.owner, [partition])
    other = shelf.member(shelf.owner.generation, "other")
    assert isinstance((await shelf.store.commit(other, {partition: StoredOffset(1)}))[partition], LeaseLost)
    await committed(shelf, {partition: StoredOffset(1)})


@own_store
async def test_g_a_group_that_was_founded_anew_counts_from_the_beginning(shelf: Shelf):
    partition, first = shelf.partition(0), shelf.member(1)
    await committed(shelf, {partition: StoredOffset(50)})
    refused = (await shelf.store.claim(first, [partition]))[partition]
    assert isinstance(refused, LeaseLost)
    assert "restarted=True" in str(refused)
    assert await shelf.store.claim(first, [partition], restarted=True) == {partition: StoredOffset(50)}
    assert await shelf.store.commit(first, {partition: StoredOffset(51)}) == {partition: None}
    assert isinstance((await shelf.store.commit(shelf.owner, {partition: StoredOffset(52)}))[partition], LeaseLost)


@pytest.mark.parametrize("shelf", ["kafka-group"], indirect=True)
async def test_g_nobody_commits_past_a_group_that_runs(shelf: Shelf, kafka: KafkaServer):
    partition = shelf.partition(0)
    client = await asyncio.to_thread(join, kafka, shelf.owner.group, list(shelf.topics), 6)
    for write in (
        shelf.store.commit(shelf.owner, {partition: StoredOffset(9)}),
        shelf.store.reset(shelf.owner.group, {partition: StoredOffset(9)}),
    ):
        assert isinstance((await write)[partition], LeaseLost)
    assert await shelf.store.fetch(shelf.owner.group, [partition]) == {partition: None}
    await asyncio.to_thread(client.close)
    await committed(shelf, {partition: StoredOffset(9)})


@pytest.mark.deep
@pytest.mark.parametrize("shelf", ["kafka-member"], indirect=True)
async def test_g_a_member_that_was_replaced_cannot_commit(shelf: Shelf, kafka: KafkaServer):
    partition = shelf.partition(0)
    await committed(shelf, {partition: StoredOffset(5)})
    await shelf.store._client.call(lambda client: client.unsubscribe())  # type: ignore[attr-defined]
    other = await asyncio.to_thread(join, kafka, shelf.owner.group, list(shelf.topics), 6)
    (error,) = (await shelf.store.commit(shelf.owner, {partition: StoredOffset(6)})).values()
    assert isinstance(error, LeaseLost)
    assert other.committed([NativePartition(*partition)])[0].offset == 5
    await asyncio.to_thread(other.close)


@own_store
async def test_a_member_that_keeps_a_partition_commits_in_later_generations_too(shelf: Shelf):
    partition = shelf.partition(0)
    await shelf.store.claim(shelf.member(5, "same"), [partition])
    for generation in (6, 8):
        results = await shelf.store.commit(shelf.member(generation, "same"), {partition: StoredOffset(generation)})
        assert results == {partition: None}
    # Another member has to claim, whatever its generation is.
    assert isinstance((await shelf.store.commit(shelf.member(9), {partition: StoredOffset(9)}))[partition], LeaseLost)


@own_store
async def test_going_back_is_never_by_accident(shelf: Shelf):
    partition = shelf.partition(0)
    await committed(shelf, {partition: StoredOffset(9, "nine")})
    (error,) = (await shelf.store.commit(shelf.owner, {partition: StoredOffset(8)})).values()
    assert isinstance(error, SettleError)
    assert "9" in str(error)
    assert "rewind=True" in str(error)
    await committed(shelf, {partition: StoredOffset(9, "again")})
    await committed(shelf, {partition: StoredOffset(8)}, rewind=True)
    assert await shelf.store.fetch(shelf.owner.group, [partition]) == {partition: StoredOffset(8)}


@own_store
async def test_a_reset_fences_the_member_that_runs_in_spite_of_it(shelf: Shelf):
    partition = shelf.partition(0)
    await committed(shelf, {partition: StoredOffset(9)})
    assert await shelf.store.reset(shelf.owner.group, {partition: StoredOffset(2, "back")}) == {partition: None}
    assert isinstance((await shelf.store.commit(shelf.owner, {partition: StoredOffset(10)}))[partition], LeaseLost)
    assert await shelf.store.claim(shelf.owner, [partition]) == {partition: StoredOffset(2, "back")}
    await committed(shelf, {partition: StoredOffset(3)})


@own_store
async def test_groups_and_odd_names_are_kept_apart(shelf: Shelf):
    partition, text = shelf.partition(0), "ünïcode/../%2F.json"
    other = shelf.owner._replace(group=text)
    await committed(shelf, {partition: StoredOffset(1)})
    assert await shelf.store.commit(other, {partition: StoredOffset(2, "ünï\n'\"")}) == {partition: None}
    assert await shelf.store.stored(text) == {partition: StoredOffset(2, "ünï\n'\"")}
    assert await shelf.store.stored(shelf.owner.group) == {partition: StoredOffset(1)}


@own_store
async def test_a_closed_store_refuses(shelf: Shelf):
    await shelf.store.close()
    await shelf.store.close()
    for call in (
        shelf.store.fetch(shelf.owner.group, []),
        shelf.store.commit(shelf.owner, {}),
        shelf.store.stored(shelf.owner.group),
    ):
        with pytest.raises(Closed):
            await call


@own_store
async def test_commits_at_once_lose_nothing(shelf: Shelf):
    stores = [shelf.again() for _ in range(4)]

    async def climb(store: OffsetStore, partition: TopicPartition) -> None:
        for offset in range(1, 11):
            assert await store.commit(shelf.owner, {partition: StoredOffset(offset)}) == {partition: None}

    partitions = [shelf.partition(n, t) for n in range(2) for t in (0, 1)]
    await asyncio.gather(*map(climb, stores, partitions))
    assert await shelf.store.stored(shelf.owner.group) == dict.fromkeys(sorted(partitions), StoredOffset(10))


@own_store
async def test_of_many_who_claim_at_once_the_newest_wins(shelf: Shelf):
    partition = shelf.partition(0)
    members = [shelf.member(generation) for generation in (4, 9, 6, 8, 7, 5)]
    await asyncio.gather(*(shelf.again().claim(member, [partition]) for member in members))
    results = [
        (member.generation, (await shelf.store.commit(member, {partition: StoredOffset(1)}))[partition])
        for member in members
    ]
    assert [generation for generation, error in results if error is None] == [9]
