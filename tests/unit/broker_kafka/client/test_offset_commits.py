"""`CommitQueue`: random histories with a client that executes commits in any order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as NativePartition
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.driver.contract import TopicPartition
from broker.errors import BrokerError, Closed, LeaseLost, SettleError
from broker_kafka.client.offset_commits import Answer, CommitQueue

AWAY = KafkaError(KafkaError._TIMED_OUT)
REFUSED = KafkaError(KafkaError.OFFSET_METADATA_TOO_LARGE)
PLACES = [TopicPartition("orders", number) for number in range(3)]
PARTITIONS = st.sets(st.integers(0, 2), min_size=1)
Positions = dict[int, tuple[int, str]]


class Client:
    """Stands for librdkafka: queues commits, executes them in the order of the test, calls back."""

    def __init__(self) -> None:
        self.commits: CommitQueue
        self.stored: dict[int, int] = {}
        self.in_flight: list[Positions] = []
        self.reported: list[tuple[KafkaError | None, Positions]] = []
        self.requests = 0

    def commit(self, *, offsets: list[NativePartition], asynchronous: bool) -> list[Any] | None:
        self.requests += 1
        positions = {each.partition: (each.offset, each.metadata or "") for each in offsets}
        if asynchronous:
            self.in_flight.append(positions)
            return None
        error = self._store(positions)
        if error is not None:
            raise KafkaException(error)
        return _answers(positions, None)

    def carry_out(self, which: int = 0, *, error: KafkaError | None = None, reached: bool = True) -> None:
        """A commit in flight reaches the coordinator, or not; the answer may be lost."""
        positions = self.in_flight.pop(which)
        refused = self._store(positions) if reached else None
        self.reported.append((error or refused, positions))

    def poll(self, timeout: float = 0.0) -> None:
        reported, self.reported = self.reported, []
        for error, positions in reported:
            self.commits.answered(error, _answers(positions, error))

    def _store(self, positions: Positions) -> KafkaError | None:
        good = {number: offset for number, (offset, text) in positions.items() if text != "too large"}
        self.stored |= good
        return None if len(good) == len(positions) else REFUSED


def _answers(positions: Positions, error: KafkaError | None) -> list[Any]:
    # The error of one partition is reported for all.
    return [
        SimpleNamespace(topic="orders", partition=number, offset=offset, error=error)
        for number, (offset, _) in positions.items()
    ]


class World:
    def __init__(self) -> None:
        self.client: Any = Client()
        self.answers: dict[int, Answer] = {}
        self.requested: list[Positions] = []
        self.commits = CommitQueue("billing", self._answer)
        self.client.commits = self.commits

    def request(self, *numbers: int, wait: bool = False, large: bool = False, owned: Any = None) -> int:
        """Have the positions of partitions be the number of this call."""
        number = len(self.requested)
        self.requested.append(dict.fromkeys(numbers, (number, "too large" if large else "")))
        offsets = [NativePartition("orders", each, *self.requested[number][each]) for each in numbers]
        waiter: Any = number
        self.commits.send(self.client, offsets, waiter, owned=owned, wait=wait)
        return number

    def go_on(self) -> None:
        self.client.poll()
        if self.commits.due:
            self.commits.go_on(self.client)

    def _answer(self, waiter: Any, answer: Answer) -> None:
        assert waiter not in self.answers
        self.answers[waiter] = answer


def test_a_newer_commit_waits_until_the_older_is_answered() -> None:
    world = World()
    first, second, third = world.request(0), world.request(0, 1), world.request(0)
    # The older of the two queued commits is never sent, and a commit of another partition does not wait.
    assert world.client.in_flight == [{0: (first, "")}, {1: (second, "")}]
    world.client.carry_out(1)
    world.go_on()
    assert world.answers == {}
    world.client.carry_out(0)
    world.go_on()
    assert world.answers == {first: {PLACES[0]: None}}
    assert world.client.in_flight == [{0: (third, "")}]
    world.client.carry_out(0)
    world.go_on()
    assert world.answers[second] == {PLACES[0]: None, PLACES[1]: None}
    assert world.answers[third] == {PLACES[0]: None}
    assert world.client.stored == {0: third, 1: second}
    assert not world.commits


def test_a_failed_answer_belongs_to_its_own_commit() -> None:
    world = World()
    first, second = world.request(0), world.request(0)
    world.client.carry_out(0, error=AWAY, reached=False)
    world.go_on()
    world.client.carry_out(0)
    world.go_on()
    assert isinstance(world.answers[first][PLACES[0]], BrokerError)
    assert world.answers[second] == {PLACES[0]: None}


def test_a_commit_overtaken_in_a_callback_is_repeated() -> None:
    world = World()
    first = world.request(0)
    world.commits.settle(world.client)
    assert world.answers == {first: {PLACES[0]: None}}
    last = world.request(0, wait=True)
    assert world.answers[last] == {PLACES[0]: None}
    # The client had kept the first, and repeats it now.
    world.client.carry_out(0)
    assert world.client.stored == {0: first}
    world.go_on()
    world.client.carry_out(0)
    assert world.client.stored == {0: last}
    world.go_on()
    assert not world.commits


def test_a_repeated_commit_does_not_undo_a_later_one() -> None:
    world = World()
    first = world.request(0)
    world.commits.settle(world.client)
    world.client.carry_out(0)
    # It is to be repeated now, and before it is another callback comes.
    world.client.poll()
    last = world.request(0, wait=True)
    world.request(1)
    while world.client.in_flight:
        world.client.carry_out(0)
        world.go_on()
    assert world.answers[last] == {PLACES[0]: None}
    assert world.client.stored[0] == last > first


def test_a_resent_commit_has_the_latest_position() -> None:
    world = World()
    world.request(0, 1)
    first, bad = world.request(0), world.request(1, large=True)
    world.client.carry_out(0)
    # Both go together, and the refusal of one counts for none.
    world.go_on()
    last = world.request(0, wait=True)
    while world.client.in_flight:
        world.client.carry_out(0)
        world.go_on()
    assert world.answers[first] == world.answers[last] == {PLACES[0]: None}
    assert isinstance(world.answers[bad][PLACES[1]], SettleError)
    assert world.client.stored[0] == last
    assert not world.commits


def test_a_waiting_commit_frees_its_partitions() -> None:
    world = World()
    world.request(0, 1, wait=True)
    later = world.request(0)
    assert world.client.in_flight == [{0: (later, "")}]


def test_a_rebalance_sends_queued_commits() -> None:
    world = World()
    first, second = world.request(0), world.request(0, 1)
    world.client.carry_out(1)
    world.commits.settle(world.client)
    assert world.answers == {first: {PLACES[0]: None}, second: {PLACES[0]: None, PLACES[1]: None}}
    assert world.client.stored == {0: second, 1: second}


def test_commits_of_an_earlier_assignment_are_not_sent() -> None:
    world = World()
    world.request(0)
    queued = world.request(0)
    world.commits.drop([PLACES[0]])
    assert isinstance(world.answers[queued][PLACES[0]], LeaseLost)
    world.client.carry_out(0)
    world.go_on()
    assert world.client.in_flight == []


@pytest.mark.parametrize("wait", [False, True])
def test_a_rejected_partition_does_not_fail_others(wait: bool) -> None:
    world = World()
    blocking = world.request(0, 1, 2)
    good, bad = world.request(0, 2), world.request(1, large=True)
    if wait:
        world.commits.settle(world.client)
    while world.client.in_flight or world.client.reported:
        if world.client.in_flight:
            world.client.carry_out(0)
        world.go_on()
    assert world.answers[good] == {PLACES[0]: None, PLACES[2]: None}
    assert isinstance(world.answers[bad][PLACES[1]], SettleError)
    assert world.client.stored == {0: good, 1: blocking, 2: good}


def test_unassigned_partitions_are_rejected_with_the_answer() -> None:
    world = World()
    mixed = world.request(0, 1, owned={("orders", 0)})
    gone = world.request(1, owned={("orders", 0)})
    assert isinstance(world.answers[gone][PLACES[1]], LeaseLost)
    world.client.carry_out(0)
    world.go_on()
    assert world.answers[mixed][PLACES[0]] is None
    error = world.answers[mixed][PLACES[1]]
    assert isinstance(error, LeaseLost)
    assert "Partition 1 of topic 'orders' is not assigned to this member of group" in str(error)
    assert world.client.stored == {0: mixed}


def test_closing_sends_queued_commits() -> None:
    world = World()
    world.request(0)
    last = world.request(0)
    world.client.carry_out(0)
    world.commits.finish(world.client)
    assert world.client.in_flight == [{0: (last, "")}]
    world.commits.close()
    assert isinstance(world.answers[last][PLACES[0]], Closed)


class Histories(RuleBasedStateMachine):
    """No older commit undoes one that was reported as stored, and every caller gets an answer."""

    @initialize()
    def begin(self) -> None:
        self.world = World()
        self.client = self.world.client
        self.since = [0, 0, 0]
        """The first call that counts, of each partition."""

    @rule(numbers=PARTITIONS, large=st.booleans())
    def request(self, numbers: set[int], large: bool) -> None:
        self.world.request(*sorted(numbers), large=large)

    @rule(numbers=PARTITIONS, settles=st.booleans())
    def ask_in_a_callback(self, numbers: set[int], settles: bool) -> None:
        if settles:
            self.world.commits.settle(self.client)
        self.world.request(*sorted(numbers), wait=True)

    @rule(number=st.integers(0, 2))
    def lose(self, number: int) -> None:
        self.world.commits.drop([PLACES[number]])
        self.since[number] = len(self.world.requested)

    @precondition(lambda self: self.client.in_flight)
    @rule(which=st.integers(0, 5), error=st.sampled_from([None, None, AWAY]), reached=st.booleans())
    def carry_out(self, which: int, error: KafkaError | None, reached: bool) -> None:
        which %= len(self.client.in_flight)
        self.client.carry_out(which, error=error, reached=reached or error is None)

    @rule()
    def poll(self) -> None:
        self.client.poll()

    @rule()
    def go_on(self) -> None:
        self.world.go_on()

    @invariant()
    def of_a_partition_one_commit_is_sent_without_waiting(self) -> None:
        numbers = [number for positions in self.client.in_flight for number in positions]
        assert len(numbers) == len(set(numbers))

    def teardown(self) -> None:
        while self.client.in_flight or self.client.reported or self.world.commits.due:
            if self.client.in_flight:
                self.client.carry_out(len(self.client.in_flight) - 1)
            self.world.go_on()
        assert not self.world.commits
        assert len(self.world.answers) == len(self.world.requested)
        for number, place in enumerate(PLACES):
            good = [
                call
                for call in range(self.since[number], len(self.world.requested))
                if number in self.world.requested[call] and self.world.answers[call][place] is None
            ]
            assert not good or self.client.stored[number] >= good[-1]


Histories.TestCase.settings = settings(stateful_step_count=30, deadline=None)
test_whatever_the_client_does = Histories.TestCase
