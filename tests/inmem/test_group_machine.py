"""Random histories of one group: members join, leave, die and are isolated; no record is skipped."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.driver.contract import RecordSource, TopicPartition
from broker.errors import ConnectionFailed, LeaseLost
from broker.outbound import OutboundMessage
from broker.records import Record
from broker_inmem import Broker, BrokerOptions, ManualClock
from broker_inmem.records import InmemRecordSource
from tests.inmem.clients import Client, PartitionListener, published, read

T = TypeVar("T")
PARTITIONS = 5


class Reader(PartitionListener):
    """Records how far each partition was delivered since its assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.reached: dict[TopicPartition, int] = {}

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        assert not self.reached.keys() & set(partitions)

    async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
        self.lost(partitions)

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        for partition in partitions:
            self.reached.pop(partition, None)


class StuckReader(Reader):
    """Never answers a revocation, so that it ends by the clock."""

    async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
        await asyncio.Event().wait()


class Member:
    """One client with one member of the group."""

    def __init__(self, client: Client, source: RecordSource, reader: Reader) -> None:
        self.client = client
        self.source = source
        self.reader = reader
        self.cut_off = False
        self.deaf = False
        """It was healed and has not called since."""


class GroupMachine(RuleBasedStateMachine):
    """Checks each delivery against the commits of the group."""

    @initialize(stuck=st.booleans())
    def begin(self, stuck: bool) -> None:
        self.reader = StuckReader if stuck else Reader
        self.loop = asyncio.new_event_loop()
        self.clock = ManualClock()
        self.broker = Broker(BrokerOptions(seed=1), clock=self.clock)
        self.members: list[Member] = []
        self.ends: defaultdict[TopicPartition, int] = defaultdict(int)
        self.committed: dict[TopicPartition, int] = {}
        self.admin = Client(self.broker)
        self.run(self.admin.backend.open())
        self.run(self.admin.topic(partitions=PARTITIONS))
        self.come()

    @precondition(lambda self: len(self.members) < 4)
    @rule()
    def come(self) -> None:
        async def join() -> Member:
            client, reader = Client(self.broker), self.reader()
            await client.backend.open()
            return Member(client, await client.join(listener=reader), reader)

        self.members.append(self.run(join()))

    @rule(count=st.integers(1, 12), start=st.integers(0, PARTITIONS - 1))
    def publish(self, count: int, start: int) -> None:
        messages = [OutboundMessage(b"x", partition=(start + n) % PARTITIONS) for n in range(count)]
        for receipt in self.run(published(self.admin, messages)):
            assert receipt.partition is not None
            assert receipt.offset is not None
            self.ends[TopicPartition("orders", receipt.partition)] = receipt.offset + 1

    @rule(which=st.integers(0, 3), count=st.integers(1, 8))
    def fetch(self, which: int, count: int) -> None:
        member = self.pick(which)
        if member is None or member.cut_off:
            return
        self.run(self.check(member, count))

    async def check(self, member: Member, count: int) -> None:
        """A new owner starts at the commit, and no record is skipped."""
        member.deaf = False
        records: list[Record[Any]] = []
        # A break is reported once.
        with suppress(ConnectionFailed):
            records = await read(member.source, count)
        reached, mine = member.reader.reached, set(member.source.assignment())
        for record in records:
            partition = TopicPartition(record.topic, record.partition)
            assert partition in mine
            assert record.offset == reached.get(partition, self.committed.get(partition, 0))
            reached[partition] = record.offset + 1

    @rule(which=st.integers(0, 3))
    def commit(self, which: int) -> None:
        member = self.pick(which)
        if member is None or member.cut_off or not member.reader.reached:
            return
        wanted = dict(member.reader.reached)
        owners = dict(self.broker.groups["audit"].owners)
        number = self.number(member)
        member.deaf = False
        results = self.run(member.source.commit(wanted))
        for partition, error in results.items():
            if error is None:
                assert owners[partition] == number
                self.committed[partition] = wanted[partition]
            else:
                assert isinstance(error, LeaseLost)

    @precondition(lambda self: len(self.members) > 1)
    @rule(which=st.integers(0, 3), how=st.sampled_from(["close", "kill", "drop"]))
    def go(self, which: int, how: str) -> None:
        member = self.pick(which)
        assert member is not None
        self.members.remove(member)
        if how != "close":
            self.broker.faults.kill(member.client.backend, drop_leases=how == "drop")
        self.run(member.client.backend.close())

    @rule(which=st.integers(0, 3))
    def cut_off_or_heal(self, which: int) -> None:
        member = self.pick(which)
        if member is None:
            return
        if member.cut_off:
            self.broker.faults.heal(member.client.backend)
        else:
            self.broker.faults.isolate(member.client.backend)
        member.cut_off = not member.cut_off
        self.run(asyncio.sleep(0))
        member.deaf = not member.cut_off

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.run(asyncio.sleep(0))

    @invariant()
    def members_that_hear_have_what_the_group_says(self) -> None:
        if not hasattr(self, "broker"):
            return
        self.run(asyncio.sleep(0))
        owners = self.broker.groups["audit"].owners
        for member in self.members:
            mine = sorted(partition for partition, owner in owners.items() if owner == self.number(member))
            assert member.cut_off or member.deaf or member.source.assignment() == mine

    def teardown(self) -> None:
        """In the end, the remaining members read all uncommitted records, in order."""
        if not hasattr(self, "broker"):
            return
        try:
            if not self.members:
                self.come()
            for member in self.members[1:]:
                self.run(member.client.backend.close())
            last = self.members[0]
            del self.members[1:]
            if last.cut_off:
                self.cut_off_or_heal(0)
            self.clock.advance(100)
            self.run(self.check(last, 0))
            self.run(self.check(last, 0))
            self.run(last.source.seek(dict.fromkeys(last.source.assignment())))
            last.reader.reached.clear()
            assert len(last.source.assignment()) == PARTITIONS
            for _ in range(20):
                self.fetch(0, 1000)
            for partition, end in self.ends.items():
                assert last.reader.reached.get(partition, self.committed.get(partition, 0)) == end
        finally:
            for member in self.members:
                self.run(member.client.backend.close())
            self.run(self.admin.backend.close())
            self.loop.close()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call and its consequences."""

        async def settle() -> T:
            result = await call
            for _ in range(5):
                await asyncio.sleep(0)
            return result

        return self.loop.run_until_complete(settle())

    def number(self, member: Member) -> int:
        assert isinstance(member.source, InmemRecordSource)
        return member.source._number

    def pick(self, which: int) -> Member | None:
        return self.members[which % len(self.members)] if self.members else None


TestGroup = GroupMachine.TestCase
TestGroup.settings = settings(stateful_step_count=40, deadline=None)
