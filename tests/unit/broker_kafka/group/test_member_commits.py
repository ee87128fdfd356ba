"""A member commits only what it owns: a broker accepts a commit of any member, for any partition."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from itertools import count
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError

from broker.driver.contract import TopicPartition
from broker.errors import BrokerError, LeaseLost
from broker_kafka.errors import translate
from broker_kafka.group import commits as member_commits
from broker_kafka.group.commits import RecordCommits
from broker_kafka.offsets.protocol import GroupMember, StoredOffset
from tests.kafka.group_members import record_commits


async def test_a_partition_revoked_before_its_commit_is_rejected_by_the_store() -> None:
    place = TopicPartition("orders", 0)
    owned = {place: 1}

    async def refuse(
        owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], *, rewind: bool = False
    ) -> Mapping[TopicPartition, BrokerError | None]:
        assert not owned
        return dict.fromkeys(positions, LeaseLost("Another has it"))

    commits = record_commits(SimpleNamespace(commit=refuse), SimpleNamespace(calling_back=False), owned)
    committing = asyncio.ensure_future(commits.commit({place: StoredOffset(5)}))
    # The task of the commit is made in this turn of the loop and begins in the next.
    asyncio.get_running_loop().call_soon(owned.clear)
    assert isinstance((await committing)[place], LeaseLost)


async def test_a_commit_is_retried_while_the_coordinator_loads() -> None:
    place = TopicPartition("orders", 0)
    loading = KafkaError(KafkaError.COORDINATOR_LOAD_IN_PROGRESS)
    answers: list[BrokerError | None] = [translate(loading, "Committing"), translate(loading, "Committing"), None]
    stored: list[int] = []

    async def load(
        owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], *, rewind: bool = False
    ) -> Mapping[TopicPartition, BrokerError | None]:
        stored.append(positions[place].offset)
        return {place: answers.pop(0)}

    commits = record_commits(SimpleNamespace(commit=load), SimpleNamespace(calling_back=False), {place: 1})
    assert await commits.commit({place: StoredOffset(5)}) == {place: None}
    assert stored == [5, 5, 5]


def member(commit: Callable[[int], Awaitable[BrokerError | None]], thread: SimpleNamespace) -> RecordCommits:
    """Of partition 0 of orders. `commit` is given the number of the attempt."""
    attempts = count(1)

    async def store(
        owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], *, rewind: bool = False
    ) -> Mapping[TopicPartition, BrokerError | None]:
        return dict.fromkeys(positions, await commit(next(attempts)))

    return record_commits(SimpleNamespace(commit=store), thread, {TopicPartition("orders", 0): 1})


async def test_a_commit_rejected_before_an_assignment_is_retried_after_it() -> None:
    thread = SimpleNamespace(calling_back=False)

    async def refuse_once(attempt: int) -> BrokerError | None:
        thread.calling_back = True
        return LeaseLost("Another generation") if attempt == 1 else None

    place = TopicPartition("orders", 0)
    assert await member(refuse_once, thread).commit({place: StoredOffset(5)}) == {place: None}


async def test_a_commit_rejected_within_a_callback_is_not_retried_there() -> None:
    seen: list[int] = []

    async def refuse(attempt: int) -> BrokerError | None:
        seen.append(attempt)
        return LeaseLost("Another has it")

    place = TopicPartition("orders", 0)
    found = await member(refuse, SimpleNamespace(calling_back=True)).commit({place: StoredOffset(5)})
    assert isinstance(found[place], LeaseLost)
    assert seen == [1]


async def test_a_commit_rejected_after_a_long_rebalance_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_commits, "_RETRY_SECONDS", 0.2)

    async def refuse_late(attempt: int) -> BrokerError | None:
        if attempt > 1:
            return None
        # The request waits behind that of the joining.
        await asyncio.sleep(0.3)
        return LeaseLost("Another generation")

    place = TopicPartition("orders", 0)
    commits = member(refuse_late, SimpleNamespace(calling_back=False))
    assert await commits.commit({place: StoredOffset(5)}) == {place: None}
