"""Random histories of a record consumer and of records served as messages, against a model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.driver.as_messages.source import RecordsAsMessages
from broker.driver.contract import RecordSubscription, Settlement, TopicPartition
from broker.errors import LeaseLost
from broker.hooks import Hooks
from broker.messages import Message, Outcome
from broker.reading.record_consumer import RecordConsumer
from broker.records import Record
from tests.unit.broker.consuming.warp import WarpLoop
from tests.unit.broker.reading.record_fakes import FakeBackend, FakeSource

T = TypeVar("T")
PARTITIONS = st.integers(0, 1)
SUBSCRIPTION = RecordSubscription(topics=["orders"], group="machine")


class OnALoop(RuleBasedStateMachine):
    """Runs each step on one event loop, whose time does not depend on the machine."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=WarpLoop)
        self.source = FakeSource(())
        self.backend: Any = FakeBackend(self.source)
        self.next_offset = [0, 0]

    def run(self, step: Awaitable[T]) -> T:
        async def settled() -> T:
            result = await step
            for _ in range(20):
                await asyncio.sleep(0)
            return result

        return self.runner.run(settled())

    def owned(self, partition: int) -> bool:
        return TopicPartition("orders", partition) in self.source.owned

    def begin(self) -> None:
        """Assign two partitions with records before the first step."""
        for partition in (0, 1):
            self.append(partition, [1, 2, 1, 3])
            self.assign(partition)

    def assign(self, partition: int) -> None:
        raise AssertionError("each machine has its own")

    @rule(partition=PARTITIONS, gaps=st.lists(st.integers(1, 3), min_size=1, max_size=5))
    def append(self, partition: int, gaps: list[int]) -> None:
        async def step() -> None:
            for gap in gaps:
                self.next_offset[partition] += gap
                self.source.append(self.next_offset[partition], partition=partition)

        self.run(step())

    def offsets(self, partition: TopicPartition) -> list[int]:
        return [record.offset for record in self.source.log.get(partition, ())]


class ConsumerMachine(OnALoop):
    """Within an assignment records come in order without gaps; a commit never covers undelivered records."""

    def __init__(self) -> None:
        super().__init__()
        self.consumer: RecordConsumer[bytes] = RecordConsumer(self.backend, SUBSCRIPTION, hooks=Hooks(), max_buffered=7)
        self.handed: dict[TopicPartition, list[int]] = {}
        """What was handed over since the assignment or the last seek."""
        self.since: dict[TopicPartition, int] = {}
        self.top: dict[TopicPartition, int] = {}
        """The position after everything handed over in any assignment."""
        self.kept: list[Record[Any]] = []
        self.paused: set[TopicPartition] = set()
        self.sought: set[TopicPartition] = set()
        """Where the next commit may take the position back, because the application called seek."""

    @initialize()
    def open(self) -> None:
        self.run(self.consumer.__aenter__())
        self.begin()

    @rule(partition=PARTITIONS)
    def assign(self, partition: int) -> None:
        if not self.owned(partition):
            key = TopicPartition("orders", partition)
            self.handed[key] = []
            self.since[key] = self.source.stored.get(key, 0)

            async def step() -> None:
                self.source.assign(partition)

            self.run(step())

    @rule(partition=PARTITIONS, peacefully=st.booleans())
    def take_away(self, partition: int, peacefully: bool) -> None:
        if self.owned(partition):
            self.paused.discard(TopicPartition("orders", partition))

            async def step() -> None:
                if peacefully:
                    await self.source.revoke(partition)
                else:
                    self.source.lose(partition)

            self.run(step())

    @rule(count=st.integers(1, 6), one_by_one=st.booleans())
    def read(self, count: int, one_by_one: bool) -> None:
        async def step() -> list[Record[Any]]:
            if not one_by_one:
                return list(await self.consumer.next_batch(count, timeout=0))
            record = await self.consumer.next_record(timeout=0)
            return [] if record is None else [record]

        for record in self.run(step()):
            key = TopicPartition(record.topic, record.partition)
            assert key in self.source.owned, "nothing is handed over of a partition that is not ours"
            assert key not in self.paused
            self.handed[key].append(record.offset)
            self.top[key] = max(self.top.get(key, 0), record.offset + 1)
            self.kept.append(record)

    @rule(data=st.data())
    def commit_some(self, data: st.DataObject) -> None:
        if self.kept:
            chosen = data.draw(st.lists(st.sampled_from(self.kept), min_size=1, max_size=4))

            async def step() -> None:
                try:
                    await self.consumer.commit_records(chosen)
                except LeaseLost:
                    return

            self.commit(step())

    def commit(self, step: Awaitable[None]) -> None:
        before = dict(self.source.stored)
        self.run(step)
        for key, position in self.source.stored.items():
            if position != before.get(key, 0):
                assert position > before.get(key, 0) or key in self.sought, "a commit took a position back"
                self.sought.discard(key)

    @rule()
    def commit_all(self) -> None:
        async def step() -> None:
            try:
                await self.consumer.commit()
            except LeaseLost:
                return

        self.commit(step())
        for key, handed in self.handed.items():
            if handed and key in self.source.owned:
                assert self.source.stored[key] > handed[-1]

    @rule(partition=PARTITIONS, data=st.data())
    def seek(self, partition: int, data: st.DataObject) -> None:
        key = TopicPartition("orders", partition)
        # After a seek beyond the delivered records a commit may cover the jump, which the model does not know.
        position = data.draw(st.none() | st.integers(0, self.top.get(key, 0)))
        if self.owned(partition):
            self.run(self.consumer.seek({key: position}))
            self.handed[key] = []
            self.since[key] = self.source.stored.get(key, 0) if position is None else position
            if position is not None and position < self.source.stored.get(key, 0):
                self.sought.add(key)

    @rule(partition=PARTITIONS)
    def pause(self, partition: int) -> None:
        key = TopicPartition("orders", partition)
        if self.owned(partition) and key not in self.paused:
            self.paused.add(key)

            async def step() -> None:
                self.consumer.pause([key])

            self.run(step())

    @rule(partition=PARTITIONS)
    def resume(self, partition: int) -> None:
        key = TopicPartition("orders", partition)
        if key in self.paused:
            self.paused.discard(key)

            async def step() -> None:
                self.consumer.resume([key])

            self.run(step())

    @invariant()
    def records_come_in_order_and_without_a_hole(self) -> None:
        for key, handed in getattr(self, "handed", {}).items():
            there = [offset for offset in self.offsets(key) if offset >= self.since[key]]
            assert handed == there[: len(handed)]

    @invariant()
    def nothing_is_committed_that_was_not_handed_over(self) -> None:
        for key, position in self.source.stored.items():
            assert position <= self.top.get(key, 0)

    def teardown(self) -> None:
        before = dict(self.source.stored)
        self.run(self.consumer.close())
        assert self.source.stored == before, "closing commits nothing"
        self.runner.close()


class MessagesMachine(OnALoop):
    """What is committed is finished; what is not finished is redelivered."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: RecordsAsMessages
        self.out: list[Message[Any]] = []
        """Delivered by the assignment that still holds, and not settled."""
        self.stale: list[Message[Any]] = []
        self.done: dict[TopicPartition, set[int]] = {}
        self.done_now: set[tuple[TopicPartition, int]] = set()
        """Finished in the assignment that still holds."""
        self.attempts: dict[tuple[TopicPartition, int], int] = {}

    @initialize()
    def open(self) -> None:
        self.start()
        self.begin()

    def start(self) -> None:
        async def step() -> None:
            self.messages = RecordsAsMessages(self, hooks=Hooks(), max_gap=4, commit_every=1)
            await self.messages.join(self.backend, SUBSCRIPTION)

        self.run(step())

    def lost(self, messages: Any) -> None:
        for message in messages:
            assert message in self.out
            self.out.remove(message)
            self.stale.append(message)

    def expired(self, messages: Any) -> None: ...

    def event(self, event: Any) -> None:
        return

    @rule(partition=PARTITIONS)
    def assign(self, partition: int) -> None:
        if not self.owned(partition):
            key = TopicPartition("orders", partition)
            self.attempts = {known: count for known, count in self.attempts.items() if known[0] != key}
            self.done_now = {known for known in self.done_now if known[0] != key}

            async def step() -> None:
                self.source.assign(partition)

            self.run(step())

    @rule(partition=PARTITIONS, peacefully=st.booleans())
    def take_away(self, partition: int, peacefully: bool) -> None:
        if self.owned(partition):

            async def step() -> None:
                if peacefully:
                    await self.source.revoke(partition)
                else:
                    self.source.lose(partition)

            self.run(step())

    @rule(count=st.integers(1, 6))
    def fetch(self, count: int) -> None:
        for message in self.run(self.messages.fetch(count, 1 << 20, 0.0001)):
            key, offset = self.place(message)
            assert key in self.source.owned
            assert (key, offset) not in self.done_now, "delivered again although it is done"
            assert all(self.place(other) != (key, offset) for other in self.out), "delivered while it is out"
            assert message.delivery_attempt == self.attempts.get((key, offset), 1)
            self.attempts[(key, offset)] = message.delivery_attempt or 0
            self.out.append(message)

    @precondition(lambda self: self.out)
    @rule(data=st.data(), outcome=st.sampled_from(list(Outcome)))
    def settle(self, data: st.DataObject, outcome: Outcome) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.out), min_size=1, max_size=3, unique_by=id))
        for message in chosen:
            self.out.remove(message)
            key, offset = self.place(message)
            if outcome in (Outcome.ACK, Outcome.REJECT):
                self.done.setdefault(key, set()).add(offset)
                self.done_now.add((key, offset))
            elif outcome is Outcome.NACK:
                self.attempts[(key, offset)] += 1
        results = self.run(self.messages.settle([Settlement(message, outcome) for message in chosen]))
        assert results == [None] * len(chosen)

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def settle_too_late(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(self.stale))
        (error,) = self.run(self.messages.settle([Settlement(message, Outcome.ACK)]))
        assert isinstance(error, LeaseLost)

    @rule()
    def close_and_start_again(self) -> None:
        held = [partition.partition for partition in self.source.owned]
        self.run(self.messages.close())
        self.out.clear()
        self.stale.clear()
        self.attempts.clear()
        self.done_now.clear()
        self.source.closed = False
        self.source.paused.clear()
        self.source.owned.clear()
        self.start()
        for partition in held:
            self.assign(partition)

    @invariant()
    def only_finished_records_are_committed(self) -> None:
        for key, position in self.source.stored.items():
            below = {offset for offset in self.offsets(key) if offset < position}
            assert below <= self.done.get(key, set())

    @invariant()
    def everything_contiguous_is_committed(self) -> None:
        for key in self.source.owned:
            stored = self.source.stored.get(key, 0)
            waiting = [offset for offset in self.offsets(key) if offset >= stored]
            assert not waiting or (key, waiting[0]) not in self.done_now

    def place(self, message: Message[Any]) -> tuple[TopicPartition, int]:
        return message.lease.partition, int(message.data or b"")

    def teardown(self) -> None:
        self.run(self.messages.close())
        self.runner.close()


TestConsumerMachine = ConsumerMachine.TestCase
TestMessagesMachine = MessagesMachine.TestCase
TestConsumerMachine.settings = settings(stateful_step_count=40, deadline=None)
TestMessagesMachine.settings = settings(stateful_step_count=40, deadline=None)
