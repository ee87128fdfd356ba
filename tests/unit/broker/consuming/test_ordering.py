"""Delivery in order by key."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from unittest.mock import ANY

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from broker.consuming.ordering import Lanes
from broker.consuming.retry.policy import Retry
from broker.messages import Message, MessageBatch, Outcome
from tests.unit.broker.consuming.scripted_source import NONE, VIEW, Letters, Raw, ScriptedSource, consuming, until


def make(id: str, key: bytes | None) -> Message:
    return Message("orders", b"", Raw(id, key, 1, NONE), VIEW)


class LanesMachine(RuleBasedStateMachine):
    """Against a broker that delivers in order by key, and redelivers a key from its first released message on."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0
        self.lanes = Lanes(3, lambda: self.time)
        self.next = 0
        self.returned: dict[bytes, list[int]] = defaultdict(list)
        self.waiting: dict[bytes, list[Message]] = defaultdict(list)
        self.handed: dict[bytes, Message] = {}
        self.worked_on: dict[bytes, Message] = {}
        self.done: dict[bytes, list[int]] = defaultdict(list)
        self.published: dict[bytes, list[int]] = defaultdict(list)

    @rule(key=st.sampled_from([b"a", b"b"]))
    def publish(self, key: bytes) -> None:
        number = self.next
        self.next += 1
        self.published[key].append(number)
        self._offer(key, number)

    @rule(key=st.sampled_from([b"a", b"b"]))
    def redeliver(self, key: bytes) -> None:
        again, self.returned[key] = sorted(self.returned[key]), []
        for number in again:
            self._offer(key, number)

    @rule(key=st.sampled_from([b"a", b"b"]))
    def publish_too_late(self, key: bytes) -> None:
        number = self.next
        self.next += 1
        self.published[key].append(number)
        self._pass_over(key, [number])

    @rule(key=st.sampled_from([b"a", b"b"]))
    def redeliver_too_late(self, key: bytes) -> None:
        again, self.returned[key] = sorted(self.returned[key]), []
        self._pass_over(key, again)

    def _pass_over(self, key: bytes, numbers: list[int]) -> None:
        self.lanes.expired([make(str(number), key) for number in numbers])
        self.returned[key] += numbers

    def _offer(self, key: bytes, number: int) -> None:
        message = make(str(number), key)
        if self.lanes.put_all([message]):
            self.returned[key].append(number)
        else:
            self.waiting[key].append(message)

    @rule()
    def take(self) -> None:
        message = self.lanes.take()
        if message is not None:
            assert message.key is not None
            assert message.key not in self.handed, "two messages of one key at once"
            assert message.key not in self.worked_on, "a message of a key beside the handler of another"
            assert message is self.waiting[message.key].pop(0)
            message.in_use = True
            self.handed[message.key] = message

    @rule(key=st.sampled_from([b"a", b"b"]))
    def finish(self, key: bytes) -> None:
        message = self.handed.pop(key, None)
        if message is not None:
            message.in_use = False
            self.done[key].append(int(message.id))
            self.lanes.done(message)

    @rule(key=st.sampled_from([b"a", b"b"]))
    def settle_early(self, key: bytes) -> None:
        message = self.handed.pop(key, None)
        if message is not None:
            self.done[key].append(int(message.id))
            self.worked_on[key] = message
            self.lanes.done(message)

    @rule(key=st.sampled_from([b"a", b"b"]))
    def return_late(self, key: bytes) -> None:
        message = self.worked_on.pop(key, None)
        if message is not None:
            message.in_use = False
            self.lanes.returned(message)

    @rule(key=st.sampled_from([b"a", b"b"]), early=st.booleans())
    def retry(self, key: bytes, early: bool) -> None:
        message = self.handed.pop(key, None)
        if message is not None:
            message.in_use = early
            if early:
                self.worked_on[key] = message
            copy = make(message.id, key)
            self.lanes.replace(message, copy)
            self.lanes.put_again(copy)
            self.waiting[key].insert(0, copy)

    @rule(key=st.sampled_from([b"a", b"b"]), working=st.booleans())
    def lose(self, key: bytes, working: bool) -> None:
        message = self.handed.pop(key, None)
        if message is not None:
            message.in_use = working
            if working:
                self.worked_on[key] = message
            self._abandon(key, message)

    @rule(key=st.sampled_from([b"a", b"b"]), at=st.integers(0, 2))
    def lose_one_that_waits(self, key: bytes, at: int) -> None:
        if at < len(self.waiting[key]):
            self._abandon(key, self.waiting[key].pop(at))

    def _abandon(self, key: bytes, message: Message) -> None:
        followers = self.lanes.abandon(message)
        for follower in followers:
            self.waiting[key].remove(follower)
        self.returned[key].extend([int(message.id), *(int(f.id) for f in followers)])

    @invariant()
    def order_per_key_is_kept(self) -> None:
        for key, done in self.done.items():
            assert done == self.published[key][: len(done)]

    def teardown(self) -> None:
        for _ in range(4 * self.next + 4):
            for key in (b"a", b"b"):
                self.redeliver(key)
                self.return_late(key)
            self.take()
            self.take()
            for key in (b"a", b"b"):
                self.finish(key)
        assert self.done == self.published


LanesMachine.TestCase.settings = settings(stateful_step_count=40, deadline=None)
TestLanes = LanesMachine.TestCase


def test_a_hot_key_is_limited_to_its_share() -> None:
    lanes = Lanes(2, lambda: 0.0)
    refused = lanes.put_all([make(str(n), b"hot") for n in range(10)])
    assert [message.id for message, _ in refused] == [str(n) for n in range(2, 10)]
    assert list(lanes.put_all([make("cold", b"cold")])) == []


def test_a_released_message_that_is_not_redelivered_unblocks_its_key_after_a_while() -> None:
    now = 0.0
    lanes = Lanes(1, lambda: now)
    lanes.put_all([make("1", b"k")])
    assert lanes.put_all([make("2", b"k")])
    head = lanes.take()
    assert head is not None
    lanes.done(head)
    assert lanes.put_all([make("3", b"k")])
    now = 61.0
    assert lanes.put_all([make("3", b"k")]) == []


def test_an_expired_message_that_is_not_redelivered_unblocks_its_key_after_a_while() -> None:
    now = 0.0
    lanes = Lanes(None, lambda: now)
    lanes.expired([make("1", b"k"), make("none", None)])
    assert lanes.put_all([make("2", b"k"), make("3", b"other"), make("4", None)]) == [(ANY, ANY)]
    assert [message.id for message in lanes.take_some(5)] == ["3", "4"]
    now = 61.0
    assert lanes.put_all([make("2", b"k")]) == []


def test_a_message_that_waited_for_its_key_keeps_its_turn() -> None:
    lanes = Lanes(None, lambda: 0.0)
    lanes.put_all([make(f"first-{n}", b"first") for n in range(5)])
    lanes.put_all([make(str(n), b"%d" % n) for n in range(1000)])
    order: list[str] = []
    while (message := lanes.take()) is not None:
        order.append(message.id)
        lanes.done(message)
    assert [order.index(f"first-{n}") for n in range(5)] == [0, 1, 3, 5, 7]


def test_the_oldest_message_that_waited_for_its_key_comes_first() -> None:
    lanes = Lanes(None, lambda: 0.0)
    lanes.put_all([make(f"{key}-{n}", key.encode()) for n in range(3) for key in ("a", "b", "c")])
    heads = {message.id[0]: message for message in (lanes.take(), lanes.take(), lanes.take()) if message is not None}
    lanes.done(heads["c"])
    lanes.done(heads["b"])
    lanes.put_again(heads["a"])
    order: list[str] = []
    while (message := lanes.take()) is not None:
        order.append(message.id)
        lanes.done(message)
    assert order == ["a-0", "a-1", "b-1", "c-1", "a-2", "b-2", "c-2"]


def test_a_deep_lane_leaves_every_second_turn_to_other_keys() -> None:
    lanes = Lanes(None, lambda: 0.0)
    lanes.put_all([make(str(n), b"hot") for n in range(100)])
    lanes.put_all([make(f"cold-{n}", b"cold-%d" % n) for n in range(3)])
    order: list[str] = []
    while (message := lanes.take()) is not None:
        order.append(message.id)
        lanes.done(message)
    assert max(order.index(f"cold-{n}") for n in range(3)) <= 6


def test_messages_without_a_key_do_not_wait_for_each_other() -> None:
    lanes = Lanes(1, lambda: 0.0)
    assert list(lanes.put_all([make("1", None), make("2", None)])) == []
    assert lanes.take() is not None
    assert lanes.take() is not None


async def test_a_failed_message_is_retried_in_memory_and_blocks_only_its_key() -> None:
    source = ScriptedSource()
    letters = Letters()
    source.add("1", "2", key=b"bad")
    source.add("3", "4", key=b"good")
    order: list[str] = []
    retry = Retry(max_attempts=3, initial=0.01, maximum=0.01)
    async with consuming(source, ordered_by_key=True, letters=letters, retry=retry, stop_when_idle=0.1) as consumer:

        async def handle(message: Message) -> None:
            order.append(message.id)
            if message.id == "1":
                raise RuntimeError("bad")

        await consumer.receive(handle, concurrency=2)
    assert [one for one in order if one in "12"] == ["1", "1", "1", "2"]
    assert order.index("4") < order.index("2")
    assert source.outcomes(Outcome.NACK) == []
    assert [letter.attributes["dead-letter-id"] for letter in letters.written] == ["1"]


@pytest.mark.parametrize(
    ("settle", "again"), [(Message.ack, []), (partial(Message.nack, delay=0.0), ["1"]), (Message.reject, [])]
)
async def test_a_handler_that_settles_early_keeps_its_key(
    settle: Callable[[Message], Awaitable[None]], again: list[str]
) -> None:
    source = ScriptedSource()
    source.add("1", "2", key=b"k")
    source.add("3", key=b"other")
    running: set[bytes | None] = set()
    beside: list[str] = []
    order: list[str] = []
    async with consuming(source, ordered_by_key=True, drop=True, stop_when_idle=0.05) as consumer:

        async def handle(message: Message) -> None:
            if message.key in running:
                beside.append(message.id)
            running.add(message.key)
            if not order:
                order.append(message.id)
                await settle(message)
                await until(lambda: "3" in order)
                # Longer than another handler would need to start.
                for _ in range(100):
                    await asyncio.sleep(0)
            else:
                order.append(message.id)
            running.discard(message.key)

        await consumer.receive(handle, concurrency=4)
    assert beside == []
    assert [one for one in order if one != "3"] == ["1", *again, "2"]


async def test_a_batch_that_is_acked_early_keeps_its_keys() -> None:
    source = ScriptedSource()
    source.add("1", "2", key=b"k")
    steps: list[str] = []
    async with consuming(source, ordered_by_key=True, stop_when_idle=0.05) as consumer:

        async def handle(batch: MessageBatch) -> None:
            ids = " ".join(message.id for message in batch)
            steps.append(f"{ids} begins")
            await batch.ack()
            for _ in range(100):
                await asyncio.sleep(0)
            steps.append(f"{ids} ends")

        await consumer.receive_batches(handle, concurrency=4)
    assert steps == ["1 begins", "1 ends", "2 begins", "2 ends"]


async def test_settling_by_hand_releases_the_next_message_of_the_key() -> None:
    source = ScriptedSource()
    source.add("1", "2", "3", key=b"k")
    async with consuming(source, ordered_by_key=True) as consumer:
        first = await consumer.next_message(timeout=60)
        assert first is not None
        await first.ack()
        second = await consumer.next_message(timeout=60)
        assert second is not None
        async with second:
            await second.ack()
            assert await consumer.next_message(timeout=0.02) is None
        third = await consumer.next_message(timeout=60)
        assert [first.id, second.id] == ["1", "2"]
        assert third is not None
        assert third.id == "3"


async def test_a_receive_cancelled_after_an_early_ack_frees_its_key() -> None:
    source = ScriptedSource()
    source.add("1", "2", key=b"k")
    acked = asyncio.Event()
    async with consuming(source, ordered_by_key=True) as consumer:

        async def handle(message: Message) -> None:
            await message.ack()
            acked.set()
            await asyncio.Event().wait()

        receiving = asyncio.create_task(consumer.receive(handle))
        await acked.wait()
        receiving.cancel()
        await asyncio.wait({receiving})
        following = await consumer.next_message(timeout=60)
        assert following is not None
        assert following.id == "2"


async def test_a_lost_lease_releases_all_messages_of_its_key() -> None:
    source = ScriptedSource(redelivers=False)
    source.add("1", "2", "3", key=b"k")
    source.add("4", key=b"other")
    async with consuming(source, ordered_by_key=True) as consumer:
        head = await consumer.next_message(timeout=60)
        other = await consumer.next_message(timeout=60)
        assert head is not None
        assert other is not None
        assert await consumer.next_message(timeout=0.05) is None
        assert source.listener is not None
        source.listener.lost([head])
        await other.ack()
        await until(lambda: len(source.outcomes(Outcome.RELEASE)) >= 2)
        assert source.outcomes(Outcome.RELEASE) == ["2", "3"]
