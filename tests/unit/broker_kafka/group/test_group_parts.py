"""Parts of the group consumer without a broker: marks, the stash, topic patterns, options."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import broker
from broker.driver.contract import TopicPartition
from broker.errors import (
    BrokerError,
    ConfigurationError,
    ConnectionFailed,
    InvalidName,
    InvalidSetting,
    Unsupported,
)
from broker.records import Record
from broker_kafka.codec.headers import RECORD_VIEW
from broker_kafka.group import GroupConsumer, OffsetStash, TopicPattern
from broker_kafka.group.assigned_partition import AssignedPartition, Marks, Runs
from broker_kafka.group.commits import CommitAttempts, MarkCommits
from broker_kafka.group.options import with_options
from broker_kafka.group.readers import Readers
from broker_kafka.group.topics import read_topics
from broker_kafka.offsets import MemoryOffsetStore, StoredOffset
from broker_kafka.offsets.protocol import GroupMember
from broker_kafka.settings import KafkaSettings
from tests.unit.broker.consuming.warp import in_jumping_time


def record(offset: int, partition: int = 0, generation: int = 1) -> Record[Any]:
    return Record("orders", partition, offset, None, b"", None, RECORD_VIEW, generation=generation)


ORDERS = TopicPartition("orders", 0)


class _Preparing:
    def pack(self, payload: object, message: broker.OutboundMessage, topic: str) -> broker.OutboundMessage:
        return message

    def unpack(self, envelope: broker.Envelope) -> object:
        return envelope.data

    async def prepare(self, envelopes: Sequence[broker.Envelope]) -> None: ...


# -- marks -----------------------------------------------------------------------------------------------------


def test_a_mark_is_the_next_offset_and_only_grows():
    marks = Marks(None)
    assert not marks.dirty
    assert marks.mark(8) == 1
    assert marks.mark(5) == 0
    assert marks.mark(12, "why") == 4
    assert marks.current == StoredOffset(12, "why")
    assert marks.dirty


def test_a_mark_below_the_stored_position_is_stale():
    marks = Marks(StoredOffset(20, "stored"))
    assert marks.mark(20) == 0
    assert marks.mark(7) == 0
    assert not marks.dirty


def test_a_reset_only_goes_back():
    marks = Marks(StoredOffset(20))
    assert not marks.reset(21)
    assert marks.reset(20, "same")
    assert marks.dirty
    assert not marks.rewinds
    assert marks.reset(4, "back")
    assert marks.current == StoredOffset(4, "back")
    assert marks.rewinds
    assert marks.mark(6) == 2
    assert not Marks(None).reset(0)


def test_only_a_commit_of_the_current_mark_clears_it():
    marks = Marks(None)
    marks.mark(8)
    marks.mark(9)
    marks.stored(StoredOffset(8))
    assert marks.dirty
    marks.stored(StoredOffset(9))
    assert not marks.dirty
    marks.reset(8)
    assert marks.dirty


def test_an_unanswered_commit_leaves_the_mark_pending():
    marks = Marks(StoredOffset(8))
    marks.mark(12)
    marks.trying()
    # It may have been carried out, or be carried out yet.
    assert marks.reset(8)
    assert marks.dirty
    assert marks.rewinds
    marks.trying()
    marks.stored(StoredOffset(8))
    assert not marks.dirty


def test_finished_records_count_up_to_the_first_unfinished_one():
    marks = Marks(None)
    marks.runs.hand_over([record(offset) for offset in (3, 4, 5, 9, 10)])
    assert marks.finish(4) == 0
    assert marks.finish(9) == 0
    assert marks.current is None
    assert marks.finish(3, "low") == 1
    assert marks.current == StoredOffset(5, "low")
    marks.finish(5)
    assert marks.current == StoredOffset(10)
    assert marks.finish(5) == 0
    assert marks.runs.unfinished == 1


def test_a_mark_joins_the_finished_records_above_it():
    marks = Marks(None)
    marks.runs.hand_over([record(offset) for offset in range(10)])
    marks.finish(6)
    marks.finish(7)
    marks.mark(6)
    assert marks.current == StoredOffset(8)
    assert marks.runs.unfinished == 2


@given(st.data())
def test_runs_agree_with_a_plain_set(data: st.DataObject):
    offsets = sorted(data.draw(st.sets(st.integers(0, 60), min_size=1)))
    runs, todo, below = Runs(), list(offsets), 0
    given_out: list[int] = []
    done: set[int] = set()
    for _ in range(data.draw(st.integers(1, 80))):
        step = data.draw(st.sampled_from(("hand over", "hand over one", "finish", "pass")))
        if step == "hand over" and todo:
            count = data.draw(st.integers(1, len(todo)))
            runs.hand_over([record(offset) for offset in todo[:count]])
            given_out += todo[:count]
            del todo[:count]
        elif step == "hand over one" and todo:
            runs.hand_over_one(todo[0])
            given_out.append(todo.pop(0))
        elif step == "finish" and given_out:
            offset = data.draw(st.sampled_from(given_out))
            position = runs.finish(offset)
            done.add(offset)
            left = [each for each in given_out if each not in done]
            reached = max([each for each in given_out if not left or each < left[0]], default=-1) + 1
            assert position is None or position == reached
            if reached > below:
                assert position == reached
                below = reached
        elif step == "pass" and given_out:
            position = data.draw(st.sampled_from(given_out)) + 1
            done |= {each for each in given_out if each < position}
            left = [each for each in given_out if each not in done]
            reached = max([each for each in given_out if not left or each < left[0]], default=-1) + 1
            assert runs.pass_to(position) == (reached if position > below else position)
            below = max(below, reached)
        assert runs.unfinished == len([each for each in given_out if each not in done])


# -- the stash -------------------------------------------------------------------------------------------------


def test_a_stash_keeps_the_largest_mark_and_the_smallest_reset():
    stash = OffsetStash()
    stash.mark(record(7), "a")
    stash.mark(record(5), "b")
    stash.mark_position("orders", 0, 8, "c")
    assert stash.positions() == {ORDERS: StoredOffset(8, "a")}
    stash.reset(record(3), "d")
    stash.reset_position("orders", 0, 6)
    assert stash.positions() == {ORDERS: StoredOffset(4, "d")}
    stash.reset_position("orders", 1, 9)
    assert stash.positions()[TopicPartition("orders", 1)] == StoredOffset(9)
    assert len(stash) == 2
    assert set(stash.drain()) == {ORDERS, TopicPartition("orders", 1)}
    assert not stash.positions()


def test_a_stash_drops_marks_of_an_earlier_assignment():
    stash = OffsetStash()
    stash.mark(record(70, generation=1))
    stash.mark(record(5, generation=2))
    assert stash.positions() == {ORDERS: StoredOffset(6)}


def test_a_stash_rejects_records_of_an_earlier_assignment():
    stash = OffsetStash()
    stash.mark(record(5, generation=2))
    stash.mark(record(70, generation=1))
    assert stash.positions() == {ORDERS: StoredOffset(6)}
    stash.reset(record(3, generation=2))
    stash.reset(record(1, generation=1))
    assert stash.positions() == {ORDERS: StoredOffset(4)}


@pytest.mark.parametrize("position", [-1, 1.5, True, None, "7"])
def test_invalid_positions_are_rejected(position: Any):
    with pytest.raises(ConfigurationError, match="orders"):
        OffsetStash().mark_position("orders", 0, position)


@pytest.mark.parametrize("text", ["a\0b", "\ud800", 5, None, b"x"])
def test_a_stash_refuses_metadata_that_cannot_be_stored(text: Any):
    stash = OffsetStash()
    for mark in (stash.mark, stash.reset):
        with pytest.raises(ConfigurationError, match="metadata of 'orders'"):
            mark(record(3), text)
    for position in (stash.mark_position, stash.reset_position):
        with pytest.raises(ConfigurationError, match="metadata of 'orders'"):
            position("orders", 0, 3, text)
    assert len(stash) == 0


# -- topics ----------------------------------------------------------------------------------------------------


def test_exclude_overrides_include_but_not_explicit_topics():
    pattern = TopicPattern(include=["orders-.*", re.compile("payments")], exclude=".*-test")
    topics = ["orders-eu", "orders-test", "orders", "payments", "payments2", "__consumer_offsets", "audit-test"]
    assert read_topics(pattern).matching(topics) == ["orders-eu", "payments"]
    assert read_topics(["audit-test", pattern]).matching(topics) == ["audit-test", "orders-eu", "payments"]
    assert read_topics(TopicPattern(exclude="o.*")).matching(topics) == ["audit-test", "payments", "payments2"]
    assert str(pattern) == "orders-.*|payments without .*-test"


@pytest.mark.parametrize(
    ("topics", "error", "says"),
    [
        ([], ConfigurationError, "topics is empty"),
        ("a b", InvalidName, "a b"),
        ("^orders-.*", ConfigurationError, "TopicPattern"),
        ([7], InvalidName, "7"),
        (7, InvalidName, "7"),
    ],
)
def test_invalid_topics(topics: Any, error: type[Exception], says: str):
    with pytest.raises(error, match=re.escape(says)):
        read_topics(topics)


@pytest.mark.parametrize("bad", ["(", 7, ["ok", None]])
def test_invalid_patterns(bad: Any):
    with pytest.raises(ConfigurationError, match="include of a TopicPattern"):
        TopicPattern(include=bad)
    with pytest.raises(ConfigurationError, match="exclude of a TopicPattern"):
        TopicPattern(exclude=bad)


def test_an_empty_pattern():
    with pytest.raises(ConfigurationError, match="include of a TopicPattern is empty"):
        TopicPattern(include=[])


# -- options ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"group": "a b"}, "group name 'a b'"),
        ({"group": 7}, "group name is 7"),
        ({"start": "now"}, "start is 'now'"),
        ({"start": datetime(2026, 1, 1)}, "no timezone"),  # noqa: DTZ001 - on purpose
        ({"start": {"orders": 7}}, "start has the key 'orders'"),
        ({"start": {ORDERS: -1}}, "start of 'orders'[0] is -1"),
        ({"start": {ORDERS: 2**63}}, "start of 'orders'[0] is 9223372036854775808"),
        ({"start": {("orders", -1): 0}}, "start has the key ('orders', -1)"),
        ({"start": {("order", 0): 1}}, "start names topic 'order', but this consumer reads orders. Name a topic"),
        ({"store": 5}, "store is 5"),
        ({"store": MemoryOffsetStore}, "an OffsetStore, which has fetch"),
        ({"codec": broker.Text}, "codec is the class Text"),
        ({"codec": 5}, "codec is 5"),
        ({"isolation": "none"}, "isolation is 'none'"),
        ({"on_revoking": 7}, "on_revoking is 7"),
        ({"flush_timeout": 0}, "flush_timeout is 0"),
        ({"flush_timeout": float("nan")}, "flush_timeout is nan"),
        ({"flush_timeout": 151}, "Give half of that, 150, or less"),
        ({"commit_interval": -1}, "commit_interval is -1"),
        ({"commit_every": 0}, "commit_every is 0"),
        ({"commit_every": True}, "commit_every is True"),
        ({"max_buffered": 0}, "max_buffered is 0"),
        ({"max_buffered_bytes": 1.5}, "max_buffered_bytes is 1.5"),
        ({"stop_when_idle": "1"}, "stop_when_idle is '1'"),
        ({"close_timeout": None}, "close_timeout is None"),
        ({"group_protocl": "consumer"}, "Did you mean 'group_protocol'?"),
        ({"sasl_username": "me"}, "Give it to the bus"),
        ({"acks": "1"}, "Give it to the bus"),
        ({"session_timeout_ms": 0}, "session_timeout_ms"),
        ({"max_poll_interval_ms": 10}, "max_poll_interval_ms 10 is below session_timeout_ms 10000"),
        ({"partition_assignment_strategy": ("sticky",)}, "partition_assignment_strategy"),
        ({"properties": {"group.id": "other"}}, "group.id"),
        ({"codec": _Preparing()}, "has prepare, which a GroupConsumer does not call. Use bus.records"),
    ],
)
async def test_invalid_options_are_named(options: dict[str, Any], says: str):
    arguments: dict[str, Any] = {"group": "audit", **options}
    bus = broker.connect("kafka://127.0.0.1:1")
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        GroupConsumer(bus, "orders", **arguments)


def test_options_override_the_settings():
    settings = KafkaSettings(servers=("host:1",), session_timeout_ms=7000, properties={"check.crcs": "true"})
    changed = with_options(settings, {"group_protocol": "consumer", "properties": {"client.rack": "a"}})
    assert changed.servers == ("host:1",)
    assert changed.session_timeout_ms == 7000
    config = changed.client_config("consumer")
    assert (config["group.protocol"], config["check.crcs"], config["client.rack"]) == ("consumer", "true", "a")
    assert "session.timeout.ms" not in config
    short = {"group_protocol": "consumer", "max_poll_interval_ms": 2000}
    assert with_options(settings, short).client_config("consumer")["max.poll.interval.ms"] == 2000
    with pytest.raises(InvalidSetting):
        with_options(settings, {"fetch_min_bytes": 0})


async def test_other_brokers_have_no_group_consumer():
    async with broker.connect("inmem:") as bus:
        with pytest.raises(Unsupported, match="Kafka only, and the backend is 'inmem'"):
            GroupConsumer(bus, "orders", group="audit")
    with pytest.raises(ConfigurationError, match="bus is 'kafka:"):
        GroupConsumer("kafka://localhost", "orders", group="audit")  # pyright: ignore[reportArgumentType]


async def test_a_consumer_that_is_not_open_raises():
    consumer = GroupConsumer(broker.connect("kafka://127.0.0.1:1"), "orders", group="audit")
    for call in (consumer.assignment, consumer.batches, consumer.partitions, consumer.positions):
        with pytest.raises(broker.Closed, match="not open"):
            call()
    await consumer.close()
    with pytest.raises(broker.Closed, match="opens once"):
        await consumer.__aenter__()


# -- releases ----------------------------------------------------------------------------------------------------


class Working:
    """A reader whose task still works on its last records."""

    def __init__(self, assigned: AssignedPartition) -> None:
        self.holding: Collection[AssignedPartition] = (assigned,)
        self.task = asyncio.current_task()


async def test_concurrent_releases_both_see_returning_readers():
    async def never(_: float) -> bool:
        return False

    readers = Readers(None, never)
    assignments = [AssignedPartition(TopicPartition("orders", number), None, 0) for number in range(2)]
    workers = [Working(assigned) for assigned in assignments]
    for worker in workers:
        readers.add(worker)
    releases = [asyncio.ensure_future(readers.settled([assigned], lambda: True, None)) for assigned in assignments]
    await asyncio.sleep(0)
    for worker in workers:
        worker.holding = ()
    assert not any(release.done() for release in releases), "nothing has woken them yet"
    readers.returned()
    _, waiting = await asyncio.wait(releases, timeout=5)
    assert not waiting
    await asyncio.gather(*releases)


# -- commits in the background ---------------------------------------------------------------------------------


class Store:
    """An offset store that answers when the test says so."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.error: BrokerError | None = None
        self.positions: list[int] = []

    async def commit(self, owner: GroupMember, positions: Any, *, rewind: bool = False) -> Any:
        await self.gate.wait()
        self.positions += [at.offset for at in positions.values()]
        return dict.fromkeys(positions, self.error)


@in_jumping_time
async def test_records_are_held_back_while_no_background_commit_succeeds() -> None:
    held: list[bool] = []
    store: Any = Store()
    assigned = AssignedPartition(ORDERS, None, 0)
    commits = MarkCommits(
        CommitAttempts(store, lambda: GroupMember("readers", 1), group="readers", timeout=30.0),
        {ORDERS: assigned},
        interval=1.0,
        every=None,
        report=lambda place, error: None,
        bounds=lambda places: asyncio.sleep(0, {}),
        hold=held.append,
    )
    commits.grew(assigned.marks.mark(5))
    await asyncio.sleep(2.9)
    assert held == []
    await asyncio.sleep(0.2)
    assert held == [True]
    # A failed commit is tried again, and changes nothing.
    store.error = ConnectionFailed("away")
    store.gate.set()
    await asyncio.sleep(2.0)
    assert held == [True]
    store.error = None
    await asyncio.sleep(1.1)
    assert held == [True, False]
    commits.close()
