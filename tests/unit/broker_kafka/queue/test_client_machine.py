"""Random histories of one process that consumes: its writes and commits fail or are answered late, partitions come and
go, and what it holds is renewed and settled in any order. Invariants I1, I3 and I7, by the numbers that
`tests/kafka/test_queue_invariants.py` lists, as its own code keeps them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any, TypeVar

from confluent_kafka import TIMESTAMP_CREATE_TIME
from confluent_kafka import Message as Record
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.driver.contract import Settlement, TopicPartition
from broker.errors import BrokerError, ConnectionFailed
from broker.hooks import Event
from broker.messages import Message, Outcome
from broker_kafka.codec.record_run import NativeRun
from broker_kafka.offsets.protocol import StoredOffset
from broker_kafka.queue.consumer.lease_manager import LeaseManager
from broker_kafka.queue.consumer.queue_client import QueueClient
from broker_kafka.queue.consumer.start_builder import StartBuilder
from broker_kafka.queue.consumer.unknown_commits import UnknownCommits
from broker_kafka.queue.markers.marker_producer import MarkerProducer, PlacedMarker
from broker_kafka.queue.markers.queue_filter import QueueFilter
from broker_kafka.queue.markers.wire import FORMATS, Kind, read_markers

T = TypeVar("T")

PLACES = [TopicPartition("orders", number) for number in range(2)]
LEASE = 3600.0
OUTCOMES = st.sampled_from([Outcome.ACK, Outcome.ACK, Outcome.REJECT, Outcome.NACK, Outcome.RELEASE])


def record(place: TopicPartition, offset: int) -> Any:
    """As the client reads it."""
    made: Any = Record
    time = TIMESTAMP_CREATE_TIME, 5
    return made(topic=place.topic, partition=place.partition, offset=offset, key=b"k", value=b"v", timestamp=time)


class Log(MarkerProducer):
    """Has each marker in the log in the order of the calls, or nowhere, and answers on command.

    :ivar said: of each message, by partition and offset, its markers; whether each is a release, whether it is known to
        be there, and in which partition.
    """

    def __init__(self) -> None:
        self.said: dict[tuple[int, int], list[list[Any]]] = {}
        self.fails = False
        self.answers = asyncio.Event()

    async def write(self, markers: Sequence[PlacedMarker], *, by: float = inf) -> list[BrokerError | None]:
        # Of several that are written together some may fail.
        failed = [self.fails and number % 2 == 0 for number in range(len(markers))]
        written: list[list[Any]] = []
        for placed, fails in zip(markers, failed, strict=True):
            for marker, _ in read_markers(placed.data):
                assert marker is not None
                for message in () if fails else marker.ids():
                    written.append([marker.kind, marker.released, False, placed.partition])
                    self.said.setdefault(message[1:3], []).append(written[-1])
        await self.answers.wait()
        for each in written:
            each[2] = True
        return [ConnectionFailed("It was not sent") if fails else None for fails in failed]

    async def close(self, timeout: float) -> None:
        self.answers.set()

    def started(self, place: TopicPartition) -> set[int]:
        """The offsets with a START that is on the brokers."""
        return {
            offset
            for (partition, offset), said in self.said.items()
            if partition == place.partition and any(kind is Kind.START and known for kind, _, known, _ in said)
        }


class Member:
    """The group's member, with endless partitions."""

    def __init__(self) -> None:
        self.committed = dict.fromkeys(PLACES, StoredOffset(0))
        self.position: dict[TopicPartition, int] = {}
        self.refuses = False
        self.answers = True

    async def fetch_runs(self, max_messages: int, max_bytes: int, wait: float) -> list[NativeRun]:
        runs: list[NativeRun] = []
        for place, position in self.position.items():
            count = min(max_messages, 3)
            if count and wait:
                runs.append(NativeRun(*place, [record(place, position + number) for number in range(count)]))
                self.position[place] += count
                max_messages -= count
        return runs

    async def commit_with_metadata(
        self, positions: Mapping[TopicPartition, tuple[int, str]]
    ) -> Mapping[TopicPartition, BrokerError | None]:
        if self.refuses:
            return dict.fromkeys(positions, ConnectionFailed("The coordinator is away"))
        self.committed |= {place: StoredOffset(*position) for place, position in positions.items()}
        return dict.fromkeys(positions, None if self.answers else ConnectionFailed("No answer"))

    async def stored(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, StoredOffset]:
        if self.refuses:
            raise ConnectionFailed("The coordinator is away")
        return {place: self.committed[place] for place in places}

    async def member_id(self) -> str:
        return "m"

    def interrupt(self) -> None: ...

    async def close(self) -> None: ...


class Listener:
    """Who hears of partitions, and of what comes again."""

    def __init__(self) -> None:
        self.had: dict[int, set[int]] = {place.partition: set() for place in PLACES}
        """By partition, what was handed over, or is reported as redelivered."""

    def expired(self, messages: Sequence[Message[Any]]) -> None:
        for message in messages:
            self.had[message.lease.id.partition].add(message.lease.id.offset)

    def event(self, event: Event) -> None: ...


class ClientMachine(RuleBasedStateMachine):
    @initialize(format=st.sampled_from(list(FORMATS)))
    def begin(self, format: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.member = Member()
        self.messages: list[Message[Any]] = []
        self.fetching: asyncio.Task[Any] | None = None
        self.others: set[asyncio.Task[Any]] = set()
        self.run(self.open(format))

    async def open(self, format: str) -> None:
        self.log = Log()
        written, member = FORMATS[format], self.member
        self.listener = Listener()
        listener: Any = self.listener
        unused: Any = None
        made: Any = member

        async def on_close(client: QueueClient) -> None: ...

        self.client = QueueClient(
            listener,
            connection=unused,
            member=lambda _: made,
            producer=self.log,
            start_builder=StartBuilder(
                QueueFilter("q", None),
                5,
                lease_ms=int(1000 * LEASE),
                holder="me",
                format=written,
                max_deliveries=None,
                dead_letter=None,
            ),
            transactions=None,
            unknown_commits=UnknownCommits(),
            leases=LeaseManager(self.log, lease_seconds=LEASE, format=written),
            failure=lambda: None,
            session_seconds=60.0,
            on_close=on_close,
        )
        self.assign(PLACES)

    # -- the process ---------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 6))
    def fetch(self, count: int) -> None:
        if self.fetching is None:
            self.fetching = self.loop.create_task(self.hand_over(self.client.fetch(count, 10**6, 0.01)))
        self.run()

    async def hand_over(self, fetched: Coroutine[Any, Any, Sequence[Message[Any]]]) -> None:
        try:
            messages = await fetched
        except ConnectionFailed:
            return
        for message in messages:
            said = self.log.said.get(message.lease.id[1:3], [])
            assert any(kind is Kind.START and known for kind, _, known, _ in said), "I3: handed over without a START"
            _, partition, offset, _ = message.lease.id
            had = self.listener.had[partition]
            had.add(offset)
            assert had.issuperset(range(offset)), "handed over before what comes again"
        self.messages += messages

    @precondition(lambda self: self.messages)
    @rule(outcome=OUTCOMES, first=st.integers(0, 9), count=st.integers(1, 4))
    def settle(self, outcome: Outcome, first: int, count: int) -> None:
        work = self.client.settle([Settlement(message, outcome) for message in self.picked(first, count)])
        self.others.add(self.loop.create_task(self.tried(work)))

    @precondition(lambda self: self.messages)
    @rule(first=st.integers(0, 9), count=st.integers(1, 9))
    def extend(self, first: int, count: int) -> None:
        self.others.add(self.loop.create_task(self.tried(self.client.extend(self.picked(first, count)))))

    @precondition(lambda self: self.messages)
    @rule(outcome=OUTCOMES, first=st.integers(0, 9), count=st.integers(1, 9))
    def extend_and_settle(self, outcome: Outcome, first: int, count: int) -> None:
        # Both are ready in the same turn of the loop.
        self.extend(first, count)
        self.settle(outcome, first, 1)

    @rule()
    def time_goes_on(self) -> None:
        self.run()

    # -- the brokers ---------------------------------------------------------------------------------------

    @rule(fails=st.sampled_from([False, False, True]))
    def markers_fail(self, fails: bool) -> None:
        self.log.fails = fails

    @rule(refuses=st.sampled_from([False, False, True]))
    def positions_are_refused(self, refuses: bool) -> None:
        self.member.refuses = refuses

    @rule(answers=st.booleans())
    def answers_come(self, answers: bool) -> None:
        if answers:
            self.log.answers.set()
        else:
            self.log.answers.clear()
        self.run()

    @rule(place=st.sampled_from(PLACES))
    def a_partition_goes_and_comes(self, place: TopicPartition) -> None:
        del self.member.position[place]
        self.client.lost([place])
        self.assign([place])

    @rule(place=st.sampled_from(PLACES), count=st.integers(1, 6))
    def a_partition_goes_before_its_commit_is_answered(self, place: TopicPartition, count: int) -> None:
        self.member.answers = False
        self.fetch(count)
        self.a_partition_goes_and_comes(place)
        self.member.answers = True

    # -- what always holds ---------------------------------------------------------------------------------

    @invariant()
    def i1_no_position_passes_a_message_without_a_start(self) -> None:
        for place, position in self.member.committed.items():
            assert set(range(position.offset)) <= self.log.started(place)

    @invariant()
    def i3_a_start_comes_first_and_nothing_after_an_end(self) -> None:
        for said in self.log.said.values():
            assert said[0][0] is Kind.START
            over = [place for place, (kind, released, _, _) in enumerate(said) if kind is Kind.END or released]
            assert over in ([], [len(said) - 1])

    @invariant()
    def i7_all_markers_of_a_message_lie_in_one_partition(self) -> None:
        for said in self.log.said.values():
            assert len({partition for _, _, _, partition in said}) == 1

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.log.answers.set()
        self.run(self.end())
        self.loop.close()

    # -- inside --------------------------------------------------------------------------------------------

    async def end(self) -> None:
        await self.client.close()
        if self.fetching is not None:
            self.others.add(self.fetching)
        if self.others:
            await asyncio.wait(self.others)
        for task in self.others:
            task.result()

    async def tried(self, work: Coroutine[Any, Any, Any]) -> None:
        with suppress(ConnectionFailed):
            await work

    def assign(self, places: Iterable[TopicPartition]) -> None:
        for place in places:
            self.member.position[place] = self.member.committed[place].offset
        self.client.assigned(list(places))

    def picked(self, first: int, count: int) -> list[Message[Any]]:
        first %= len(self.messages)
        return self.messages[first : first + count]

    def run(self, work: Coroutine[Any, Any, T] | None = None) -> T | None:
        """This, or some turns of the loop."""

        async def turns() -> None:
            for _ in range(20):
                await asyncio.sleep(0)

        answer = None if work is None else self.loop.run_until_complete(work)
        self.loop.run_until_complete(turns())
        if self.fetching is not None and self.fetching.done():
            done, self.fetching = self.fetching, None
            done.result()
        return answer


TestClientMachine = ClientMachine.TestCase
TestClientMachine.settings = settings(stateful_step_count=40, deadline=None)
