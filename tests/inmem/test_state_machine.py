"""Random histories of one subscription against a model: no loss, no double settlement, attempts and order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from broker.driver.contract import Settlement
from broker.driver.limits import MessageLimits
from broker.errors import LeaseLost
from broker.messages import Message, Outcome
from broker.outbound import OutboundMessage
from broker_inmem.message_queue import KeyShuffler, Member, MessageQueue
from broker_inmem.options import BrokerOptions
from broker_inmem.topic import Topic

LEASE = 10.0
KEYS: list[bytes | None] = [None, b"a", b"b", b"c"]


@dataclass
class Known:
    """The model of one published message."""

    key: bytes | None
    attempts: int = 0
    holder: int | None = None
    expires: float = 0.0
    not_before: float = 0.0
    done: bool = False
    failed: bool = False
    deliveries: list[Message[Any]] = field(default_factory=list[Message[Any]])


class QueueMachine(RuleBasedStateMachine):
    """Publishes, fetches, settles, lets leases end and consumers come and go."""

    ordered = False
    held = Bundle("held")

    @initialize(seed=st.integers(0, 2**16), window=st.sampled_from([0, 3, 8]))
    def begin(self, seed: int, window: int) -> None:
        options = BrokerOptions()
        self.topic = Topic("orders", 3, options, MessageLimits(options.capabilities()))
        self.queue = MessageQueue(
            "orders", "billing", native_delay=1000, shuffler=KeyShuffler(window, seed), start={0: 0, 1: 0, 2: 0}
        )
        self.topic.queues["billing"] = self.queue
        self.now = 1000.0
        self.known: list[Known] = []
        self.members: dict[int, Member] = {}
        self.numbers = 0
        self.come()

    @rule()
    def come(self) -> None:
        if len(self.members) < 3:
            self.numbers += 1
            self.members[self.numbers] = self.queue.join(self.numbers, self.ordered, LEASE)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6))
    def publish(self, keys: Sequence[bytes | None]) -> None:
        messages = [OutboundMessage(str(len(self.known) + n).encode(), key) for n, key in enumerate(keys)]
        self.known += [Known(key) for key in keys]
        outcomes = self.topic.publish(messages, self.now)
        assert not any(isinstance(outcome, Exception) for outcome in outcomes)

    @rule(target=held, count=st.integers(1, 5), which=st.integers(0, 2))
    def fetch(self, count: int, which: int) -> Any:
        number = self.member(which)
        taken = self.queue.take(self.members[number], count, 1 << 40, self.now)
        assert len(taken) <= count
        self.expire()
        for message in taken:
            self.delivered(message, number)
        return multiple(*[(message, number) for message in taken])

    @rule(delivery=consumes(held), outcome=st.sampled_from(Outcome), delay=st.sampled_from([None, 3.0, 25.0]))
    def settle(self, delivery: tuple[Message[Any], int], outcome: Outcome, delay: float | None) -> None:
        message, number = delivery
        if number not in self.members:
            return
        if outcome in (Outcome.ACK, Outcome.REJECT):
            delay = None
        self.expire()
        known = self.of(message)
        [error] = self.queue.settle(self.members[number], [Settlement(message, outcome, delay)], self.now)
        if known.deliveries and known.deliveries[-1] is message and known.holder == number:
            assert error is None
            known.holder = None
            if outcome in (Outcome.ACK, Outcome.REJECT):
                known.done = True
            else:
                known.attempts -= outcome is Outcome.RELEASE
                known.not_before = self.now + (delay or 0.0)
                known.failed = True
        else:
            assert isinstance(error, LeaseLost)

    @rule(delivery=held)
    def extend(self, delivery: tuple[Message[Any], int]) -> None:
        message, number = delivery
        if number not in self.members:
            return
        self.expire()
        known = self.of(message)
        [error] = self.queue.extend(self.members[number], [message], self.now)
        if known.deliveries[-1] is message and known.holder == number:
            assert error is None
            known.expires = self.now + LEASE
        elif message.lease.outcome is None:
            assert isinstance(error, LeaseLost)

    @rule(seconds=st.sampled_from([0.5, 2.5, 5.0, 10.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: len(self.members) > 1)
    @rule(which=st.integers(0, 2), dies=st.booleans())
    def go(self, which: int, dies: bool) -> None:
        number = self.member(which)
        member = self.members.pop(number)
        self.queue.advance(self.now)
        self.expire()
        if dies:
            self.queue.abandon(member)
            return
        self.queue.leave(member)
        for known in self.known:
            if known.holder == number:
                known.holder = None
                known.attempts -= 1
                known.failed = True

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "queue"):
            return
        self.queue.advance(self.now)
        self.expire()
        held = sum(known.holder is not None for known in self.known)
        assert self.queue.unsettled == held
        assert self.queue.waiting == sum(not known.done for known in self.known) - held

    def teardown(self) -> None:
        """In the end, the remaining consumers can drain everything, once."""
        if not hasattr(self, "queue"):
            return
        self.now += 10_000
        number = next(iter(self.members))
        left = {index for index, known in enumerate(self.known) if not known.done}
        while taken := self.queue.take(self.members[number], 7, 1 << 40, self.now):
            self.expire()
            for message in taken:
                self.delivered(message, number)
                left.remove(int(message.data or b""))
            settlements = [Settlement(message, Outcome.ACK) for message in taken]
            assert not any(self.queue.settle(self.members[number], settlements, self.now))
            for message in taken:
                self.of(message).holder = None
                self.of(message).done = True
        assert not left

    def member(self, which: int) -> int:
        return sorted(self.members)[which % len(self.members)]

    def of(self, message: Message[Any]) -> Known:
        return self.known[int(message.data or b"")]

    def expire(self) -> None:
        for known in self.known:
            if known.holder is not None and known.expires <= self.now:
                known.holder = None
                known.failed = True

    def delivered(self, message: Message[Any], number: int) -> None:
        index = int(message.data or b"")
        known = self.known[index]
        assert not known.done
        assert known.holder is None
        assert known.not_before <= self.now
        known.attempts += 1
        assert message.delivery_attempt == known.attempts
        assert message.key == known.key
        if known.key is not None:
            self.check_order(index, known, number)
        known.holder = number
        known.expires = self.now + LEASE
        known.deliveries.append(message)

    def check_order(self, index: int, known: Known, number: int) -> None:
        """Without failures of its key, a message comes after all earlier ones of its key."""
        earlier = [other for other in self.known[:index] if other.key == known.key]
        if not any(other.failed for other in earlier):
            assert all(other.deliveries for other in earlier)


class OrderedQueueMachine(QueueMachine):
    """The same with order by key: a key is with one consumer, and nothing overtakes a failed message."""

    ordered = True

    def check_order(self, index: int, known: Known, number: int) -> None:
        same = [other for other in self.known if other.key == known.key]
        assert all(other.holder in (None, number) for other in same)
        assert all(other.done or other.holder == number for other in same[: same.index(known)])


TestQueue = QueueMachine.TestCase
TestOrderedQueue = OrderedQueueMachine.TestCase
TestQueue.settings = TestOrderedQueue.settings = settings(stateful_step_count=40, deadline=None)
