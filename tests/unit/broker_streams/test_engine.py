"""The engine: rows, outputs, failures, deferrals, checkpoints. X1 to X14 are numbers of goka's conformance list."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pytest

from broker import (
    CHECKPOINT_KEY,
    ConfigurationError,
    DecodeError,
    InvalidMessage,
    Json,
    Limits,
    Retry,
    StorageFailed,
    Text,
)
from broker_streams import keys
from broker_streams.context import Context, Incoming
from broker_streams.edges import Timer, Visitor
from broker_streams.effects import SENDER, SenderPlace, sender_of
from broker_streams.engine import PartitionEngine
from broker_streams.failures import SKIP, STOP, DeadLetter, Retrying, StreamFailed
from broker_streams.graph import Group, Input, Join, Lookup, Loop, Output, Persist
from tests.unit.broker_streams.engines import IN, Rig, Table, drive, group_of

COUNT: Persist[int] = Persist(Json(int))
OUT: Output[Any] = Output("out-topic", Json())


def count(ctx: Context, value: Any) -> None:
    ctx[COUNT] = (ctx[COUNT] or 0) + value
    ctx.emit(OUT, key=ctx.key, value=ctx[COUNT])


COUNTING = group_of(count, COUNT, OUT, codec=Json(int))


# X1 to X3: a message is done when its callback has returned and its deferrals are done.


def test_x1_a_checkpoint_has_rows_outputs_and_positions_of_the_same_messages():
    rig = Rig(COUNTING)
    rig.send("a", 2)
    rig.send("b", 3)
    rig.send("a", 4)
    effects = rig.checkpoint()
    assert effects.checkpoint.positions == {IN: 3}
    assert rig.rows() == {"a": 6, "b": 3}
    assert [(m.key, m.data) for _, m in effects.outputs] == [(b"a", b"2"), (b"b", b"3"), (b"a", b"6")]
    assert rig.ids() == ["group/in-topic/0/0/0", "group/in-topic/0/1/0", "group/in-topic/0/2/0"]
    assert effects.topics == {IN: (3, 3)}
    assert not rig.engine.has_effects


def test_x2_a_checkpoint_that_cannot_be_written_is_rolled_back():
    rig = Rig(COUNTING)
    rig.send("a", 2)
    rig.checkpoint()
    rig.send("a", 5)
    rig.engine.take()
    rig.send("a", 7)
    rig.engine.rollback()
    assert rig.engine.positions == {IN: 1}
    assert not rig.engine.has_effects
    rig.handle([Incoming(IN, 1, b"a", b"5", None), Incoming(IN, 2, b"a", b"7", None)])
    rig.checkpoint()
    assert rig.rows() == {"a": 14}
    assert rig.values("out-topic") == [2, 7, 14]


def deferring() -> tuple[Rig, list[Any]]:
    held: list[Any] = []

    def hold(ctx: Context, value: int) -> None:
        count(ctx, value)
        if value < 0:
            held.append(ctx.defer(timeout=10))

    return Rig(group_of(hold, COUNT, OUT, codec=Json(int))), held


def test_x3_a_deferred_message_holds_the_checkpoint():
    rig, held = deferring()
    rig.send("a", -1)
    rig.send("b", 1)
    assert rig.engine.pending == 1
    with pytest.raises(RuntimeError, match="drained"):
        rig.engine.take()
    held[0]()
    held[0]()
    held[0](ValueError("too late to count"))
    assert rig.engine.pending == 0
    assert rig.checkpoint().checkpoint.positions == {IN: 2}


async def test_x3_drained_waits_for_done():
    rig, held = deferring()
    await rig.engine.handle([rig.message("a", -1)])

    async def sleep(seconds: float) -> None:
        await asyncio.Event().wait()

    rig.engine._deferrals._sleep = sleep
    waiting = asyncio.ensure_future(rig.engine.drained())
    await asyncio.sleep(0)
    assert not waiting.done()
    held[0]()
    await waiting


def test_x3_a_deferral_that_fails_stops_and_nothing_is_committed():
    rig, held = deferring()
    rig.send("a", -1)
    held[0](ValueError("no answer"))
    with pytest.raises(StreamFailed, match="no answer") as raised:
        rig.send("b", 1)
    assert (raised.value.topic, raised.value.offset, raised.value.key) == (IN, 0, "a")
    with pytest.raises(StreamFailed):
        rig.engine.take()
    rig.engine.rollback()
    assert rig.engine.positions == {}
    assert rig.checkpoint().rows == {}


def test_x3_a_deadline_fails_the_deferral():
    rig, held = deferring()
    rig.send("a", -1)
    assert rig.engine.next_due() == rig.time + 10
    rig.advance(9.5)
    assert rig.engine.pending == 1
    with pytest.raises(StreamFailed, match="within 10 s"):
        rig.advance(0.5)
    held[0]()


async def test_x3_drained_ends_at_the_deadline():
    rig, _ = deferring()
    await rig.engine.handle([rig.message("a", -1)])
    with pytest.raises(StreamFailed, match="within 10 s"):
        await rig.engine.drained()
    assert rig.slept == [10]


def test_a_failed_deferral_may_go_to_the_dead_letters():
    held: list[Any] = []
    rig = Rig(group_of(lambda ctx, value: held.append(ctx.defer()), on_error=DeadLetter("letters")))
    rig.send("a", 1)
    held[0](ValueError("no answer"))
    rig.checkpoint()
    assert [topic for topic, _ in rig.published] == ["letters"]


def test_a_deferral_of_a_callback_that_fails_counts_no_more():
    held: list[Any] = []

    def fail(ctx: Context, value: int) -> None:
        held.append(ctx.defer())
        raise ValueError("after the deferral")

    rig = Rig(group_of(fail, on_error=SKIP))
    rig.send("a", 1)
    assert rig.engine.pending == 0
    held[0](ValueError("of no message"))
    assert rig.checkpoint().checkpoint.positions == {IN: 1}


# X4 to X6: mistakes in callbacks have errors of their own.

LOOP: Loop[Any] = Loop(Json(), lambda ctx, value: None)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda ctx: ctx.emit(Output("group-loop", Json()), key="k", value=1), "use ctx.loop"),
        (lambda ctx: ctx.emit(Output("group-table", Json()), key="k", value=1), r"use ctx\[\.\.\.\] = value"),
        (
            lambda ctx: ctx.emit(Output("other", Json()), key="k", value=1),
            "Output\\('other'\\) is not an edge of group",
        ),
        (lambda ctx: ctx.loop(LOOP, key="k", value=1), "Loop is not an edge of group 'group'"),
    ],
)
def test_x4_emit_to_what_is_no_output(act, text):
    rig = Rig(group_of(lambda ctx, value: act(ctx), OUT))
    with pytest.raises(StreamFailed, match=text) as raised:
        rig.send("k")
    assert isinstance(raised.value.native, ConfigurationError)


@pytest.mark.parametrize(
    "act", [lambda ctx: ctx[COUNT], lambda ctx: ctx.__setitem__(COUNT, 1), lambda ctx: ctx.__delitem__(COUNT)]
)
def test_x5_a_group_without_a_table(act):
    rig = Rig(group_of(lambda ctx, value: act(ctx)))
    with pytest.raises(StreamFailed, match="Persist is not an edge of group 'group'"):
        rig.send("k")


def test_x6_none_is_no_row():
    rig = Rig(group_of(lambda ctx, value: ctx.__setitem__(COUNT, cast("int", None)), COUNT))
    with pytest.raises(StreamFailed, match="set to None"):
        rig.send("k")


def test_x6_a_value_that_does_not_fit_the_codec():
    rig = Rig(group_of(lambda ctx, value: ctx.__setitem__(COUNT, cast("int", "text")), COUNT))
    with pytest.raises(StreamFailed, match="cannot be written") as raised:
        rig.send("k")
    assert isinstance(raised.value.native, InvalidMessage)


class _Sum(msgspec.Struct):
    cents: int


@dataclass
class _Total:
    cents: int


@pytest.mark.parametrize(
    ("type", "valid", "wrong"),
    [(int, 5, "text"), (_Sum, _Sum(5), _Sum(cast("int", "5"))), (_Total, _Total(5), {"cents": "5"})],
)
def test_a_value_that_is_not_of_its_outputs_type_is_not_published(type: Any, valid: Any, wrong: Any):
    typed: Output[Any] = Output("typed-out", Json(type))
    rig = Rig(group_of(lambda ctx, value: ctx.emit(typed, key="k", value=wrong), typed))
    with pytest.raises(StreamFailed, match="The message for topic 'typed-out' cannot be written: Json") as raised:
        rig.send("k")
    assert isinstance(raised.value.native, InvalidMessage)
    assert raised.value.native.advice == "Emit a value of the codec's type"
    rig = Rig(group_of(lambda ctx, value: ctx.emit(typed, key="k", value=valid), typed))
    rig.send("k")
    ((_, message),) = rig.checkpoint().outputs
    assert Json(type).decode(message.data) == valid


def test_x6_an_error_of_the_store_has_its_cause_and_no_policy():
    rig = Rig(group_of(count, COUNT, OUT, codec=Json(int), on_error=SKIP))
    engine = PartitionEngine(rig.group, 0, _Broken(), now=lambda: 0.0, sleep=rig._sleep)
    with pytest.raises(StorageFailed, match="disk"):
        drive(engine.handle([rig.message("k", 1)]))
    assert engine.positions == {}


def test_x6_an_error_of_a_copy_of_a_table_is_not_skipped():
    users = Join("users", Json())
    table = Table()
    table.error = StorageFailed("the disk fails")
    rig = Rig(group_of(lambda ctx, value: ctx[users], users, on_error=SKIP), joins={"users": table})
    with pytest.raises(StorageFailed):
        rig.send("k")


def test_x6_an_error_of_a_store_that_a_callback_catches_stops_all_the_same():
    users = Join("users", Json())
    table = Table()
    table.error = StorageFailed("the disk fails")

    def callback(ctx: Context, value: int) -> None:
        try:
            ctx[users]
        except Exception:
            ctx.emit(OUT, key="k", value="no user")

    rig = Rig(group_of(callback, users, OUT), joins={"users": table})
    message = rig.message("k", 1)
    with pytest.raises(StorageFailed):
        rig.handle([message])
    table.error = None
    rig.handle([message])
    rig.checkpoint()
    assert rig.values("out-topic") == []


class _Broken:
    def get(self, namespace: str, key: bytes) -> bytes | None:
        raise StorageFailed("the disk fails")

    def get_many(self, namespace, keys):
        raise StorageFailed("the disk fails")

    def items(self, namespace, *, start=None, stop=None):
        return iter(())


# X7 to X9: rows of the own table, and of others.


def test_x7_a_callback_sees_what_it_has_set():
    seen: list[Any] = []

    def callback(ctx: Context, value: int) -> None:
        seen.append(ctx[COUNT])
        ctx[COUNT] = value
        seen.append(ctx[COUNT])

    rig = Rig(group_of(callback, COUNT))
    rig.send("k", 5)
    rig.send("k", 6)
    assert seen == [None, 5, 5, 6]


def test_values_are_copies():
    class Row(msgspec.Struct):
        items: list[int]

    rows = Persist(Json(Row))

    def callback(ctx: Context, value: int) -> None:
        row = ctx[rows] or Row([])
        row.items.append(value)
        if value < 3:
            ctx[rows] = row
        row.items.append(99)

    rig = Rig(group_of(callback, rows))
    for value in (1, 2, 3):
        rig.send("k", value)
    rig.checkpoint()
    assert rig.rows() == {"k": {"items": [1, 2]}}


def test_x8_delete_writes_a_tombstone():
    seen: list[Any] = []

    def callback(ctx: Context, value: int) -> None:
        if value:
            ctx[COUNT] = value
        else:
            del ctx[COUNT]
            seen.append(ctx[COUNT])

    rig = Rig(group_of(callback, COUNT))
    rig.send("a", 1)
    rig.checkpoint()
    rig.send("a", 0)
    rig.send("never there", 0)
    assert rig.checkpoint().rows == {b"a": None}
    assert seen == [None, None]
    assert rig.rows() == {}


def test_x9_joins_and_lookups():
    users, prices = Join("users", Text()), Lookup("prices", Json(int))
    seen: list[Any] = []
    rig = Rig(
        group_of(lambda ctx, value: seen.append((ctx[users], ctx.lookup(prices, value))), users, prices),
        joins={"users": Table({b"ann": b"Ann"})},
        lookups={"prices": Table({b"hat": b"12", b"\xff": b"13"})},
    )
    rig.send("ann", "hat")
    rig.send("ben", "shoe")
    assert seen == [("Ann", 12), (None, None)]
    undeclared = Rig(group_of(lambda ctx, value: ctx[Join("others", Text())]))
    with pytest.raises(StreamFailed, match="'others'"):
        undeclared.send("ann")


# X10 to X12: attributes and time.


def test_x10_to_x12_attributes_and_time_pass_through():
    seen: list[Any] = []

    def callback(ctx: Context, value: Any) -> None:
        seen.append((dict(ctx.attributes), ctx.timestamp_ms, ctx.timestamp, ctx.offset, ctx.topic, ctx.partition))
        ctx.emit(OUT, key=None, value=None, attributes={"b": "2", "c": "3"})

    rig = Rig(group_of(callback, OUT), partition=3, attributes={"a": "1", "b": "1"})
    rig.send("k", at=5000, attributes={"trace": "7"})
    rig.send("k")
    rig.checkpoint()
    assert seen[0][:2] == ({"trace": "7"}, 5000)
    assert seen[0][2].timestamp() == 5
    assert seen[1] == ({}, 5000, None, 1, IN, 3)
    message = rig.published[0][1]
    assert (message.key, message.data, dict(message.attributes)) == (None, None, {"a": "1", "b": "2", "c": "3"})
    assert message.publish_time.timestamp() == 5


def test_a_time_that_no_calendar_has_is_left_out():
    rig = Rig(group_of(lambda ctx, value: ctx.emit(OUT, key="k", value=1), OUT))
    rig.send("k", at=1 << 60)
    rig.checkpoint()
    assert rig.published[0][1].publish_time is None


def test_wrong_attributes_fail_in_the_callback():
    rig = Rig(group_of(lambda ctx, value: ctx.emit(OUT, key="k", value=1, attributes=cast("Any", {"n": 1})), OUT))
    with pytest.raises(StreamFailed, match="attributes"):
        rig.send("k")


# X13: every failure names the message and the callback.


@pytest.mark.parametrize(
    "fail",
    [
        lambda: cast("Any", None).nothing,
        lambda: 1 // 0,
        lambda: __import__("re").compile("("),
        lambda: {}["key"],
        lambda: (_ for _ in ()).throw(ValueError("thrown")),
    ],
)
def test_x13_a_callback_that_raises_stops_with_an_error_that_names_it(fail):
    def user_code(ctx: Context, value: Any) -> None:
        fail()

    rig = Rig(group_of(user_code), partition=4)
    with pytest.raises(StreamFailed) as raised:
        rig.send("the key")
    text = str(raised.value)
    for part in ("'group'", "'in-topic'[4]@0", "'the key'", "user_code", type(raised.value.native).__name__):
        assert part in text
    assert (raised.value.topic, raised.value.partition, raised.value.offset) == (IN, 4, 0)
    assert raised.value.key == "the key"


def test_x13_fail_raises_what_it_is_given():
    rig = Rig(group_of(lambda ctx, value: ctx.fail(ValueError("given"))))
    with pytest.raises(StreamFailed, match="given"):
        rig.send("k")


def test_x13_an_undecodable_message_stops():
    rig = Rig(COUNTING)
    rig.send("a", 1)
    with pytest.raises(StreamFailed, match="cannot be decoded") as raised:
        rig.send("b", b"{")
    assert isinstance(raised.value.native, DecodeError)
    effects = rig.checkpoint()
    assert effects.checkpoint.positions == {IN: 1}
    assert rig.rows() == {"a": 1}


# X14: a wrapper of the context.


def test_x14_a_wrapper_sees_what_callbacks_and_visits_write():
    written: list[Any] = []

    class Spy(Context):
        __slots__ = ()

        def __setitem__(self, handle: Any, value: Any) -> None:
            written.append((self.key, value))
            super().__setitem__(handle, value + 100)

    visitor = Visitor("touch", lambda ctx, meta: ctx.__setitem__(COUNT, meta))
    rig = Rig(group_of(lambda ctx, value: ctx.__setitem__(COUNT, value), COUNT, visitor), wrap=Spy.of)
    rig.send("k", 1)
    drive(rig.engine.visit("touch", 7, [b"k"]))
    rig.checkpoint()
    assert written == [("k", 1), ("k", 7)]
    assert rig.rows() == {"k": 107}


# What a callback that fails leaves behind: nothing.


def failing(policy: Any, *edges: Any) -> Rig:
    timer = Timer("later", lambda ctx: None)

    def callback(ctx: Context, value: int) -> None:
        ctx[COUNT] = (ctx[COUNT] or 0) + value
        ctx.set_timer(timer, after=value)
        ctx.emit(OUT, key=ctx.key, value=value)
        if value > 99:
            ctx.defer()
            raise ValueError(f"{value} is too much")

    return Rig(group_of(callback, COUNT, OUT, timer, *edges, codec=Json(int), on_error=policy))


@pytest.mark.parametrize("policy", [STOP, SKIP, DeadLetter("letters"), Retrying(Retry(max_attempts=2), then=SKIP)])
async def test_a_callback_that_fails_leaves_nothing_behind(policy):
    rig, other = failing(policy), failing(policy)
    for each in (rig, other):
        await each.engine.handle([each.message("a", 1, at=10), each.message("b", 2, at=20)])
    try:
        await rig.engine.handle([rig.message("a", 100, at=20)])
    except StreamFailed:
        assert policy is STOP
    effects, expected = rig.engine.take(), other.engine.take()
    assert effects.rows == expected.rows
    assert effects.due == expected.due
    outputs = [(topic, message.id) for topic, message in effects.outputs if topic != "letters"]
    assert outputs == [(topic, message.id) for topic, message in expected.outputs]
    assert effects.checkpoint.positions == {IN: 2 if policy is STOP else 3}
    assert rig.engine.pending == 0


def test_a_callback_that_fails_writes_nothing_with_the_next_message():
    def callback(ctx: Context, value: int) -> None:
        if value:
            ctx[COUNT] = value
            raise ValueError("after the row was set")

    rig = Rig(group_of(callback, COUNT, on_error=SKIP))
    rig.send("a", 1)
    rig.send("a", 0)
    assert rig.checkpoint().rows == {}


def test_a_skipped_message_is_counted():
    rig = failing(SKIP)
    rig.send("a", 100)
    rig.send("a", 1)
    effects = rig.checkpoint()
    assert (effects.counts["failed"], effects.counts["skipped"]) == (1, 1)
    assert rig.rows() == {"a": 1}


def test_a_dead_letter_has_the_message_the_reason_and_the_origin():
    rig = failing(DeadLetter("letters"))
    rig.send("a", 100, at=7000, attributes={"trace": "7", "dead-letter-old": "of an earlier letter"})
    rig.checkpoint()
    [(topic, letter)] = rig.published
    attributes = letter.attributes
    assert (topic, letter.key, letter.data, letter.id) == ("letters", b"a", b"100", "group/in-topic/0/0/letter")
    assert attributes["trace"] == "7"
    assert "dead-letter-old" not in attributes
    assert attributes["dead-letter-error"] == "ValueError: 100 is too much"
    assert "callback failed" in attributes["dead-letter-reason"]
    assert attributes["dead-letter-attempts"] == "1"
    assert (attributes["dead-letter-topic"], attributes["dead-letter-partition"]) == (IN, "0")
    assert (attributes["dead-letter-offset"], attributes["dead-letter-subscription"]) == ("0", "group")
    assert letter.publish_time.timestamp() == 7


async def test_retries_wait_and_end_with_the_last_policy():
    rig = failing(Retrying(Retry(max_attempts=3, initial=1, jitter=0), then=DeadLetter("letters")))
    await rig.engine.handle([rig.message("a", 100), rig.message("a", 1)])
    effects = rig.checkpoint()
    assert rig.slept == [1, 2]
    assert effects.counts == {"failed": 3, "retried": 2, "dead_lettered": 1}
    assert rig.published[0][1].attributes["dead-letter-attempts"] == "3"
    assert rig.rows() == {"a": 1}


async def test_a_retry_that_succeeds_has_a_fresh_payload_and_the_same_ids():
    tries: list[Any] = []

    def callback(ctx: Context, value: list[int]) -> None:
        tries.append((list(value), ctx.random.random()))
        value.append(9)
        ctx.emit(OUT, key="k", value=len(tries))
        if len(tries) < 3:
            raise OSError("not yet")

    rig = Rig(group_of(callback, OUT, on_error=Retrying(Retry(jitter=0))))
    await rig.engine.handle([rig.message("a", [1])])
    rig.checkpoint()
    assert [value for value, _ in tries] == [[1], [1], [1]]
    assert len({chance for _, chance in tries}) == 1
    assert (rig.values("out-topic"), rig.ids()) == ([3], ["group/in-topic/0/0/0"])


async def test_an_error_that_is_not_retried_is_given_up_at_once():
    rig = failing(Retrying(Retry(on=(OSError,))))
    with pytest.raises(StreamFailed):
        await rig.engine.handle([rig.message("a", 100)])
    assert rig.slept == []


async def test_a_callback_that_takes_too_long_is_cancelled_and_tried_again():
    tries: list[int] = []

    async def callback(ctx: Context, value: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            await asyncio.Event().wait()

    rig = Rig(group_of(callback, on_error=Retrying(Retry(timeout=0.01, jitter=0))))
    await rig.engine.handle([rig.message("a", 1)])
    assert len(tries) == 2


async def test_a_cancelled_callback_is_undone():
    started = asyncio.Event()

    async def callback(ctx: Context, value: Any) -> None:
        ctx[COUNT] = 5
        ctx.emit(OUT, key="k", value=1)
        started.set()
        await asyncio.Event().wait()

    rig = Rig(group_of(callback, COUNT, OUT, on_error=SKIP))
    task = asyncio.ensure_future(rig.engine.handle([rig.message("a", 1)]))
    await started.wait()
    with pytest.raises(RuntimeError, match="within a call"):
        rig.engine.take()
    with pytest.raises(RuntimeError, match="one thing"):
        await rig.engine.advance()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not rig.engine.has_effects


def test_errors_that_a_tester_wants_to_see_leave_as_they_are():
    def callback(ctx: Context, value: Any) -> None:
        raise AssertionError("of the test")

    rig = Rig(group_of(callback, on_error=SKIP))
    rig.engine.raises = lambda error: isinstance(error, AssertionError)
    with pytest.raises(AssertionError, match="of the test"):
        rig.send("k")


async def test_async_and_plain_callbacks_are_alike():
    async def callback(ctx: Context, value: int) -> None:
        await asyncio.sleep(0)
        count(ctx, value)

    rig = Rig(group_of(callback, COUNT, OUT))
    assert await rig.engine.handle([rig.message("a", 1), rig.message("a", 2)]) == 2
    rig.checkpoint()
    assert rig.rows() == {"a": 3}


# Inputs.


def test_undecodable_and_failing_have_policies_of_their_own():
    def callback(ctx: Context, value: int) -> None:
        raise ValueError("of the callback")

    rig = Rig(group_of(callback, codec=Json(int), on_error=SKIP, on_undecodable=DeadLetter("letters")))
    rig.send("a", b"{")
    rig.send(None, 1)
    rig.send("\x00anybroker\x00t", 1)
    rig.send(CHECKPOINT_KEY.decode(), 1)
    rig.send("a", 1)
    effects = rig.checkpoint()
    errors = [letter.attributes["dead-letter-error"] for _, letter in rig.published]
    assert ["cannot decode" in errors[0], "no key" in errors[1], "reserved" in errors[2], "reserved" in errors[3]] == [
        True
    ] * 4
    assert effects.counts == {"undecodable": 4, "dead_lettered": 4, "failed": 1, "skipped": 1}
    assert effects.checkpoint.positions == {IN: 5}


@pytest.mark.parametrize(("tombstones", "seen"), [("skip", []), ("pass", [None]), ("decode", ["decoded"])])
def test_tombstones(tombstones, seen):
    class Codec:
        def encode(self, payload):
            return b""

        def decode(self, data):
            assert data is None
            return "decoded"

    got: list[Any] = []
    rig = Rig(group_of(lambda ctx, value: got.append(value), codec=Codec(), tombstones=tombstones))
    rig.send("a", None)
    assert got == seen
    assert rig.checkpoint().checkpoint.positions == {IN: 1}


def test_messages_below_the_position_are_dropped():
    rig = Rig(COUNTING)
    messages = [rig.message("a", 1), rig.message("a", 1)]
    rig.handle(messages)
    rig.handle([*messages, rig.message("a", 1)])
    rig.checkpoint()
    rig.restart()
    rig.handle(messages)
    rig.checkpoint()
    assert rig.rows() == {"a": 3}


def test_a_topic_that_is_not_consumed():
    with pytest.raises(ConfigurationError, match="'other'"):
        Rig(COUNTING).send("a", 1, topic="other")


def test_keys_that_are_not_utf8_round_trip():
    rig = Rig(COUNTING)
    rig.handle([Incoming(IN, 0, b"\xff\x00", b"1", None), Incoming(IN, 1, b"", b"1", None)])
    effects = rig.checkpoint()
    assert set(effects.rows) == {b"\xff\x00", b""}
    assert [message.key for _, message in effects.outputs] == [b"\xff\x00", b""]


def test_several_inputs_have_positions_and_ids_of_their_own():
    group = Group(
        "group", Input(("a-topic", "b-topic"), Json(int), count), Input("c-topic", Json(int), count), COUNT, OUT
    )
    rig = Rig(group)
    for topic in ("a-topic", "b-topic", "c-topic", "a-topic"):
        rig.send("k", 1, topic=topic)
    assert rig.checkpoint().checkpoint.positions == {"a-topic": 2, "b-topic": 1, "c-topic": 1}
    assert len(set(rig.ids())) == 4


# The loop.


def looping() -> Rig:
    loop: Loop[Any] = Loop(Json(int), lambda ctx, value: count(ctx, value))

    def callback(ctx: Context, value: int) -> None:
        for n in range(value):
            ctx.loop(loop, key=f"k{n}", value=1)

    return Rig(group_of(callback, loop, COUNT, OUT), partition=2)


def test_loop_messages_name_their_sender_and_are_handled_once():
    rig = looping()
    rig.send("a", 2)
    rig.send("a", 1)
    rig.checkpoint()
    sent = [message for topic, message in rig.published if topic == "group-loop"]
    assert [message.attributes[SENDER] for message in sent] == ["in-topic/2/0/0", "in-topic/2/0/1", "in-topic/2/1/0"]
    twice = [*sent[:2], sent[0], sent[1], sent[2], sent[2]]
    rig.handle([Incoming("group-loop", n, m.key, m.data, None, m.attributes) for n, m in enumerate(twice)])
    effects = rig.checkpoint()
    assert effects.counts == {"duplicates": 3}
    assert effects.checkpoint.senders == {"in-topic/2": (1, 0)}
    assert rig.rows() == {"k0": 2, "k1": 1}
    rig.restart()
    rig.handle([Incoming("group-loop", 6, sent[2].key, sent[2].data, None, sent[2].attributes)])
    assert rig.checkpoint().counts == {"duplicates": 1}


def test_loop_messages_without_a_sender_are_handled():
    rig = looping()
    rig.send("a", 1, topic="group-loop")
    rig.send("a", 1, topic="group-loop", attributes={SENDER: "nonsense"})
    rig.checkpoint()
    assert rig.rows() == {"a": 2}


@pytest.mark.parametrize(
    ("text", "sender"),
    [
        ("a-topic/3/17/2", SenderPlace("a-topic/3", (17, 2))),
        ("with/slashes/0/5/0", SenderPlace("with/slashes/0", (5, 0))),
        ("", None),
        ("topic/1/x/0", None),
        ("1/2", None),
    ],
)
def test_senders(text, sender):
    assert sender_of({SENDER: text}) == sender
    assert sender is None or str(sender) == text


def test_a_loop_value_that_the_loop_cannot_read_fails_in_the_callback():
    loop: Loop[Any] = Loop(Json(int), lambda ctx, value: None)
    rig = Rig(group_of(lambda ctx, value: ctx.loop(loop, key="k", value="text"), loop))
    with pytest.raises(StreamFailed, match="cannot be written"):
        rig.send("k")


# Visits.


def test_a_visit_calls_for_rows_that_exist():
    visited: list[Any] = []

    def visit(ctx: Context, meta: Any) -> None:
        visited.append((ctx.key, ctx[COUNT], meta, ctx.offset))
        ctx.emit(OUT, key=ctx.key, value=meta)
        ctx[COUNT] = 0

    rig = Rig(group_of(count, COUNT, OUT, Visitor("reset", visit), codec=Json(int)))
    for key in ("a", "b"):
        rig.send(key, 3)
    rig.checkpoint()
    stored = [key for key, _ in rig.store.items(keys.ROWS)]
    assert drive(rig.engine.visit("reset", "m", [*stored, b"gone", keys.agenda_key(b"a")])) == 2
    assert drive(rig.engine.visit("reset", "m", stored)) == 2
    rig.checkpoint()
    assert visited[:2] == [("a", 3, "m", -1), ("b", 3, "m", -1)]
    assert rig.rows() == {"a": 0, "b": 0}
    assert len(set(rig.ids())) == len(rig.ids())


def test_a_visit_that_fails_stops_and_is_undone():
    def visit(ctx: Context, meta: Any) -> None:
        ctx[COUNT] = 0
        raise ValueError("of the visitor")

    rig = Rig(group_of(count, COUNT, OUT, Visitor("reset", visit), codec=Json(int)))
    rig.send("a", 3)
    with pytest.raises(StreamFailed, match="Visitor\\('reset'\\) failed for key 'a'"):
        drive(rig.engine.visit("reset", None, [b"a"]))
    rig.checkpoint()
    assert rig.rows() == {"a": 3}
    with pytest.raises(ConfigurationError, match="'other'"):
        drive(rig.engine.visit("other", None, []))


# Checkpoints.


def test_messages_are_handled_while_a_checkpoint_is_written():
    rig = Rig(COUNTING)
    rig.send("a", 1)
    first = rig.engine.take()
    rig.send("a", 2)
    rig.send("b", 5)
    second = rig.engine.take()
    rig.send("a", 4)
    with pytest.raises(RuntimeError, match="in the order"):
        rig.engine.settled(second)
    rig.write(first)
    rig.send("b", 1)
    rig.write(second)
    rig.send("a", 8)
    third = rig.checkpoint()
    assert (first.rows, second.rows, third.rows) == ({b"a": b"1"}, {b"a": b"3", b"b": b"5"}, {b"a": b"15", b"b": b"6"})
    assert [e.checkpoint.number for e in (first, second, third)] == [1, 2, 3]
    assert rig.rows() == {"a": 15, "b": 6}


def test_a_rollback_keeps_what_was_settled():
    rig = Rig(COUNTING, epoch=7)
    rig.send("a", 1)
    first, _ = rig.engine.take(), rig.send("a", 2)
    rig.engine.take()
    rig.write(first)
    rig.engine.rollback()
    assert rig.engine.positions == {IN: 1}
    rig.handle([Incoming(IN, 1, b"a", b"2", None)])
    effects = rig.checkpoint()
    assert (effects.checkpoint.number, effects.checkpoint.epoch) == (2, 7)
    assert rig.rows() == {"a": 3}


def test_a_rollback_forgets_counts():
    rig = failing(SKIP)
    rig.send("a", 100)
    rig.engine.rollback()
    effects = rig.checkpoint()
    assert (effects.counts, effects.topics) == ({}, {})


def test_rows_are_read_again_once_a_checkpoint_without_them_is_settled():
    rig = Rig(COUNTING)
    rig.send("a", 1)
    rig.checkpoint()
    rig.store.write({keys.ROWS: {b"a": b"40"}})
    rig.send("a", 2)
    rig.checkpoint()
    assert rig.rows() == {"a": 3}
    rig.store.write({keys.ROWS: {b"a": b"40"}})
    rig.send("b", 1)
    rig.checkpoint()
    rig.send("a", 2)
    rig.checkpoint()
    assert rig.rows() == {"a": 42, "b": 1}


def test_a_rollback_reads_rows_again():
    rig = Rig(COUNTING)
    rig.send("a", 1)
    rig.checkpoint()
    rig.store.write({keys.ROWS: {b"a": b"40"}})
    rig.engine.rollback()
    rig.send("a", 2)
    rig.checkpoint()
    assert rig.rows() == {"a": 42}


def test_dirty_counts_changed_rows():
    rig = Rig(COUNTING)
    assert rig.engine.dirty == 0
    rig.send("a", 1)
    rig.send("a", 1)
    rig.send("b", 1)
    assert rig.engine.dirty == 2
    rig.engine.take()
    assert rig.engine.dirty == 0


def test_a_checkpoint_has_at_most_so_many_rows():
    rig = Rig(COUNTING, most_rows=4)
    messages = [rig.message(f"k{n}", 1) for n in range(10)]
    rounds = 0
    while rig.handle(messages) < len(messages):
        assert len(rig.checkpoint().rows) <= 4
        rounds += 1
    rig.checkpoint()
    assert rounds >= 3
    assert rig.rows() == {f"k{n}": 1 for n in range(10)}
    assert len(rig.values("out-topic")) == 10


def test_rows_of_an_older_version_are_upgraded():
    old = Rig(COUNTING)
    old.send("a", 3)
    old.checkpoint()

    class Row(msgspec.Struct):
        count: int

    versions: list[int] = []

    def upgrade(version: int, data: bytes) -> bytes:
        versions.append(version)
        return b'{"count":%s}' % data

    new = Persist(Json(Row), version=2, upgrade=upgrade)

    def callback(ctx: Context, value: int) -> None:
        row = ctx[new]
        assert row is not None
        ctx[new] = Row(row.count + 1)

    rig = Rig(group_of(callback, new))
    rig.store, rig.saved = old.store, old.saved
    rig.restart()
    assert rig.engine.needs_upgrade
    assert rig.engine.upgrade(rig.store.items(keys.ROWS)) == 1
    rig.handle([Incoming(IN, 1, b"a", b"1", None)])
    assert rig.checkpoint().checkpoint.version == 2
    assert (rig.rows(), versions) == ({"a": {"count": 4}}, [1])
    assert not rig.engine.needs_upgrade

    rig.group = group_of(lambda ctx, value: None, Persist(Json(int)))
    rig.restart()
    with pytest.raises(ConfigurationError, match="version 2"):
        _ = rig.engine.needs_upgrade


def late_users(rig: Rig, ctx: Context) -> list[Callable[[], object]]:
    rows, out, timer = rig.group.persist, rig.group.outputs[0], rig.group.timers[0]
    assert rows is not None

    def write() -> None:
        ctx[rows] = 1

    def delete() -> None:
        del ctx[rows]

    return [
        write,
        delete,
        lambda: ctx.emit(out, key=ctx.key, value=1),
        lambda: ctx.set_timer(timer, after=1),
        lambda: ctx.defer(),
    ]


@pytest.mark.parametrize("use", range(5))
@pytest.mark.parametrize("deferred", [True, False])
def test_a_context_that_is_used_after_its_callback_is_refused(use: int, deferred: bool):
    contexts: list[Context] = []
    rows, out, timer = Persist(Json(int)), Output("out", Json(int)), Timer("timer", lambda ctx: None)

    def handle(ctx: Context, value: int) -> None:
        contexts.append(ctx)
        if deferred and value == 1:
            ctx.defer()()
        ctx[rows] = value

    rig = Rig(group_of(handle, rows, out, timer))
    rig.send("ann", 1)
    if deferred:
        # The context of a deferred message stays its own while others are handled.
        rig.send("bob", 2)
        assert (contexts[0].key, contexts[0].payload, contexts[0].topic) == ("ann", 1, IN)
        assert contexts[1] is not contexts[0]
    with pytest.raises(ConfigurationError, match="The context of key 'ann' is used after its callback") as raised:
        late_users(rig, contexts[0])[use]()
    assert "within the callback" in raised.value.advice
    rig.send("bob", 3)
    rig.checkpoint()
    assert rig.rows() == {"ann": 1, "bob": 3}
    assert rig.values("out") == []


async def test_a_callback_that_was_not_cancelled_and_raises_cancelled_error_has_failed():
    async def handle(ctx: Context, value: int) -> None:
        if value == 0:
            task = asyncio.ensure_future(asyncio.Event().wait())
            await asyncio.sleep(0)
            task.cancel()
            await task
        ctx[rows] = value

    rows = Persist(Json(int))
    rig = Rig(group_of(handle, rows, on_error=SKIP))
    await rig.engine.handle([rig.message("a", 1), rig.message("b", 0), rig.message("c", 2)])
    rig.checkpoint()
    assert rig.rows() == {"a": 1, "c": 2}
    assert rig.counts["skipped"] == 1


@pytest.mark.parametrize(
    ("upgrade", "reason"),
    [
        (lambda version, data: None, "it returned None, not bytes"),
        (lambda version, data: b"no json", "DecodeError"),
        (lambda version, data: 1 // 0, "ZeroDivisionError"),
    ],
)
def test_an_upgrade_that_gives_no_row_is_named_and_writes_nothing(upgrade: Any, reason: str):
    rows = Persist(Json(int))

    def handle(ctx: Context, value: int) -> None:
        ctx[rows] = value

    rig = Rig(group_of(handle, rows))
    rig.send("a", 1)
    rig.checkpoint()
    rig.group = group_of(handle, Persist(Json(int), version=2, upgrade=upgrade))
    rig.restart()
    with pytest.raises(StreamFailed, match=f"upgrade= of the row of 'a' from version 1 failed: .*{reason}") as raised:
        rig.engine.upgrade(rig.store.items(keys.ROWS))
    assert raised.value.key == "a"
    assert rig.engine.dirty == 0


def test_what_the_broker_cannot_take_fails_within_the_callback():
    rows, out, timer = Persist(Json(str)), Output("out", Json(str)), Timer("timer", lambda ctx: None)

    def handle(ctx: Context, value: str) -> None:
        if value == "row":
            ctx[rows] = "x" * 100
        elif value == "output":
            ctx.emit(out, key="a", value="x" * 100)
        elif value == "timer":
            ctx.set_timer(timer, after=1)
        else:
            ctx[rows] = value

    limits = Limits(body=100, key=20)
    rig = Rig(group_of(handle, rows, out, timer, on_error=DeadLetter("letters")), limits=limits)
    for number, value in enumerate(["row", "output", "timer", "fits"]):
        rig.send(f"key-{number}-{'x' * 14}", value)
    rig.checkpoint()
    assert list(rig.rows().values()) == ["fits"]
    letters = [message for topic, message in rig.published if topic == "letters"]
    errors = [letter.attributes["dead-letter-error"] for letter in letters]
    assert "The row of 'key-0-xxx" in errors[0]
    assert "The message for topic 'out'" in errors[1]
    assert "with its timers and windows; this broker takes 20" in errors[2]
