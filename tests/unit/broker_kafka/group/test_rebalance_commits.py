"""Commits that the client cannot send because its group rebalances are stored past the client."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from broker.driver.contract import TopicPartition
from broker.errors import BrokerError, NotAuthorized
from broker_kafka.fenced_writer import NotWritten, OutcomeUnknown, Positions
from broker_kafka.group import commits as group_commits
from broker_kafka.group import rebalance_commits
from broker_kafka.group.commits import CommitAttempts
from broker_kafka.group.rebalance_commits import RebalanceCommits
from broker_kafka.offsets.protocol import GroupMember, StoredOffset

PLACE = TopicPartition("orders", 0)
FIVE = {PLACE: StoredOffset(5, "text")}


def metadata_of(generation: int, member: str) -> bytes:
    return b"CGMDv2:" + generation.to_bytes(4, "little", signed=True) + b"g\0" + member.encode() + b"\0\0"


class Member:
    """A member whose own commits are answered on request, and the writer that passes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, generation: int = 3, member: str = "m") -> None:
        self.metadata = metadata_of(generation, member)
        self.answers: list[asyncio.Future[Mapping[TopicPartition, BrokerError | None]]] = []
        self.errors: list[BrokerError] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.written: list[tuple[int, str | None]] = []
        self.opened: list[str] = []
        self.stopped = 0
        self.down = False
        monkeypatch.setattr(group_commits, "_OPEN_REBALANCE", 0.0)
        monkeypatch.setattr(rebalance_commits, "FencedWriter", self.open)
        connection: Any = self
        self.beside = RebalanceCommits(connection, "g", self.read_metadata)
        store: Any = self
        self.attempts = CommitAttempts(store, lambda: GroupMember("g", 3), group="g", timeout=30.0, beside=self.beside)

    def open(self, connection: object, id: str, timeout_ms: int) -> Member:
        self.opened.append(id)
        return self

    async def read_metadata(self) -> bytes:
        return self.metadata

    # -- the store -----------------------------------------------------------------------------------------

    async def commit(
        self, owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], *, rewind: bool = False
    ) -> Mapping[TopicPartition, BrokerError | None]:
        self.answers.append(asyncio.get_running_loop().create_future())
        return await self.answers[-1]

    # -- the writer ----------------------------------------------------------------------------------------

    async def start(self) -> None: ...

    async def write(self, records: Sequence[object], positions: Positions) -> None:
        assert not records
        assert positions.metadata == self.metadata
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        self.written += [(each.offset, each.metadata) for each in positions.offsets]

    async def stop(self, timeout: float) -> None:
        self.stopped += 1


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


async def test_positions_are_stored_while_the_group_rebalances(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Member(monkeypatch)
    for _ in range(2):
        assert await member.attempts.attempt(FIVE) == {PLACE: None}
    assert member.written == [(5, "text")] * 2
    assert len(member.opened) == 1
    assert member.opened[0].startswith("g.commits-")
    await member.beside.close()
    assert member.stopped == 1


async def test_later_commits_of_the_same_rebalance_do_not_wait_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Member(monkeypatch)
    assert await member.attempts.attempt(FIVE) == {PLACE: None}
    monkeypatch.setattr(group_commits, "_OPEN_REBALANCE", 3600.0)
    for _ in range(2):
        assert await member.attempts.attempt(FIVE) == {PLACE: None}
    # The next answer of the client shows that the rebalance is over.
    attempt = asyncio.ensure_future(member.attempts.attempt(FIVE))
    await until(lambda: len(member.answers) == 4)
    member.answers[3].set_result({PLACE: None})
    await attempt
    attempt = asyncio.ensure_future(member.attempts.attempt(FIVE))
    await until(lambda: len(member.answers) == 5)
    assert len(member.written) == 3
    member.answers[4].set_result({PLACE: None})
    await attempt


async def test_an_answer_of_the_client_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Member(monkeypatch)
    member.gate.clear()
    attempt = asyncio.ensure_future(member.attempts.attempt(FIVE))
    await until(lambda: member.opened)
    error = BrokerError("the answer")
    member.answers[0].set_result({PLACE: error})
    assert await attempt == {PLACE: error}
    # A write that is late must not undo the next commit.
    attempt = asyncio.ensure_future(member.attempts.attempt({PLACE: StoredOffset(6)}))
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(member.answers) == 1
    member.gate.set()
    assert await attempt == {PLACE: None}
    assert [offset for offset, _ in member.written] == [5, 6]


@pytest.mark.parametrize(("generation", "name"), [(-1, "m"), (3, "")])
async def test_nothing_is_stored_without_a_generation_that_fences(
    monkeypatch: pytest.MonkeyPatch, generation: int, name: str
) -> None:
    member = Member(monkeypatch, generation=generation, member=name)
    assert not await member.beside.begin(FIVE)
    assert not member.opened


async def test_a_refused_write_leaves_the_positions_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Member(monkeypatch)
    member.errors = [NotWritten("another generation", refused={}, native=None), OutcomeUnknown("no answer")]
    for _ in range(2):
        attempt = asyncio.ensure_future(member.attempts.attempt(FIVE))
        count = len(member.errors)
        await until(lambda count=count: len(member.errors) < count)
        member.answers[-1].set_result({PLACE: None})
        assert await attempt == {PLACE: None}
    assert (len(member.opened), member.stopped, member.written) == (1, 1, [])
    assert await member.beside.begin(FIVE)
    assert len(member.opened) == 2


async def test_without_the_right_nothing_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Member(monkeypatch)
    member.errors = [NotAuthorized("no right to the id")]
    assert not await member.beside.begin(FIVE)
    assert not await member.beside.begin(FIVE)
    assert (member.written, len(member.opened)) == ([], 1)


async def test_nothing_is_tried_while_no_broker_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Member(monkeypatch)
    member.down = True
    assert not await member.beside.begin(FIVE)
    assert not member.opened
