"""Timers of both clocks, and the expiry of rows."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import Json
from broker_streams.context import Context, Incoming
from broker_streams.edges import Timer
from broker_streams.effects import SENDER
from broker_streams.failures import SKIP, StreamFailed
from broker_streams.graph import Loop, Output, Persist
from tests.unit.broker_streams.engines import IN, Rig, drive, group_of

COUNT: Persist[int] = Persist(Json(int))
OUT: Output[Any] = Output("out-topic", Json())


def ringing(*, clock: Any = "event", on_error: Any = SKIP) -> Rig:
    """A message of n sets a timer in n seconds; 0 cancels it."""

    def ring(ctx: Context) -> None:
        ctx[COUNT] = (ctx[COUNT] or 0) + 1
        ctx.emit(OUT, key=ctx.key, value=[ctx.timestamp_ms, ctx.now.timestamp() * 1000])

    timer = Timer("ring", ring, clock=clock)

    def callback(ctx: Context, value: float) -> None:
        if value:
            ctx.set_timer(timer, after=value)
        else:
            ctx.cancel_timer(timer)

    return Rig(group_of(callback, COUNT, OUT, timer, on_error=on_error))


def test_a_timer_is_called_when_event_time_has_come():
    rig = ringing()
    rig.send("a", 5, at=1000)
    rig.send("b", 60, at=5999)
    assert rig.checkpoint().outputs == []
    rig.send("b", 60, at=6000)
    rig.checkpoint()
    assert rig.values("out-topic") == [[6000, 6000]]
    assert rig.rows() == {"a": 1}
    assert rig.ids()[0].startswith("group/timer:ring/0/6000/")


def test_timers_are_called_in_the_order_of_time_before_the_message():
    rig = ringing()
    rig.send("a", 3, at=0)
    rig.send("b", 1, at=0)
    rig.send("c", 2, at=0)
    rig.send("d", 1, at=100_000)
    rig.checkpoint()
    assert [message.key for _, message in rig.published] == [b"b", b"c", b"a"]
    assert [value[1] for value in rig.values("out-topic")] == [1000, 2000, 3000]


def test_a_timer_may_be_moved_and_cancelled():
    rig = ringing()
    rig.send("a", 5, at=0)
    rig.send("a", 9, at=0)
    rig.send("b", 5, at=0)
    rig.send("b", 0, at=0)
    rig.checkpoint()
    assert len(rig.due()) == 1
    rig.send("c", 60, at=8999)
    assert rig.checkpoint().outputs == []
    rig.send("c", 60, at=9000)
    rig.checkpoint()
    assert rig.rows() == {"a": 1}


def test_timers_survive_a_restart_and_a_rollback():
    rig = ringing()
    rig.send("a", 5, at=0)
    rig.checkpoint()
    rig.restart()
    message = rig.message("b", 60, at=5000)
    rig.handle([message])
    rig.engine.take()
    rig.engine.rollback()
    rig.handle([message])
    rig.checkpoint()
    assert rig.values("out-topic") == [[5000, 5000]]
    rig.restart()
    rig.send("b", 60, at=6000)
    rig.checkpoint()
    assert rig.rows() == {"a": 1}
    assert len(rig.agendas()) == len(rig.due()) == 1


def test_timers_are_called_while_their_checkpoint_is_written():
    rig = ringing()
    rig.send("a", 5, at=0)
    first = rig.engine.take()
    rig.send("b", 5, at=0)
    second = rig.engine.take()
    rig.write(first)
    rig.send("c", 60, at=5000)
    rig.write(second)
    rig.checkpoint()
    assert rig.rows() == {"a": 1, "b": 1}
    assert len(rig.due()) == len(rig.agendas()) == 1


def test_a_timer_that_sets_itself_goes_on():
    def tick(ctx: Context) -> None:
        ctx.emit(OUT, key=ctx.key, value=ctx.timestamp_ms)
        ctx.set_timer(timer, after=10)

    timer = Timer("tick", tick)
    rig = Rig(group_of(lambda ctx, value: ctx.set_timer(timer, after=10), OUT, timer))
    rig.send("a", at=0)
    rig.send("b", at=35_000)
    rig.checkpoint()
    assert rig.values("out-topic") == [10_000, 20_000, 30_000]


def test_a_timer_in_the_past_is_called_at_once_and_not_for_ever():
    called: list[int] = []

    def tick(ctx: Context) -> None:
        called.append(ctx.timestamp_ms)
        ctx.set_timer(timer, at=datetime(1970, 1, 1, tzinfo=UTC))

    timer = Timer("tick", tick)
    rig = Rig(group_of(lambda ctx, value: ctx.set_timer(timer, after=0), timer))
    rig.send("a", at=1000)
    assert called == [1000]
    rig.send("a", at=1003)
    assert called == [1000, 1001, 1002, 1003, 1003]


def test_a_timer_that_is_due_twice_at_one_time_has_two_ids():
    timer = Timer("ring", lambda ctx: ctx.emit(OUT, key=ctx.key, value=1))
    rig = Rig(group_of(lambda ctx, value: ctx.set_timer(timer, after=0), OUT, timer))
    rig.send("a", at=1000)
    rig.checkpoint()
    rig.restart()
    rig.send("a", at=1000)
    rig.checkpoint()
    assert len(set(rig.ids())) == len(rig.ids()) == 2


def test_wall_timers_go_by_the_clock_of_the_machine():
    rig = ringing(clock="wall")
    rig.send("a", 5, at=0)
    rig.send("b", 7, at=10**9)
    assert rig.engine.next_due() == rig.time + 5
    rig.advance(4.9)
    assert rig.checkpoint().outputs == []
    rig.restart()
    assert rig.engine.next_due() == pytest.approx(rig.time + 0.1)
    rig.advance(0.1)
    rig.checkpoint()
    assert rig.rows() == {"a": 1}
    rig.advance(10)
    rig.checkpoint()
    assert rig.rows() == {"a": 1, "b": 1}
    assert rig.engine.next_due() is None
    assert rig.due() == []


def test_a_timer_that_fails_stops_whatever_the_policy_and_stays_set():
    fails = [True]

    def ring(ctx: Context) -> None:
        ctx[COUNT] = 1
        if fails:
            raise ValueError("of the timer")

    timer = Timer("ring", ring)
    rig = Rig(group_of(lambda ctx, value: ctx.set_timer(timer, after=5), COUNT, timer, on_error=SKIP))
    rig.send("a", at=0)
    message = rig.message("b", 1, at=5000)
    with pytest.raises(StreamFailed, match=r"Timer\('ring'\) failed for key 'a': ValueError: of the timer"):
        rig.handle([message])
    rig.checkpoint()
    assert rig.rows() == {}
    assert rig.engine.positions == {IN: 1}
    fails.clear()
    rig.restart()
    rig.handle([message])
    rig.checkpoint()
    assert rig.rows() == {"a": 1}


def test_a_timer_that_the_group_no_longer_has_is_dropped():
    rig = ringing()
    rig.send("a", 5, at=0)
    rig.checkpoint()
    rig.group = group_of(lambda ctx, value: None)
    rig.restart()
    rig.send("b", at=5000)
    rig.checkpoint()
    assert rig.agendas() == {}
    assert rig.due() == []


def test_several_timers_of_a_key():
    called: list[tuple[str, int]] = []
    timers = [Timer(name, lambda ctx, name=name: called.append((name, ctx.timestamp_ms))) for name in ("b", "a", "c")]
    rig = Rig(
        group_of(lambda ctx, value: [ctx.set_timer(t, after=n) for t, n in zip(timers, value, strict=True)], *timers)
    )
    rig.send("k", [3, 3, 1], at=0)
    rig.checkpoint()
    rig.send("other", [100, 100, 100], at=50_000)
    assert called == [("c", 1000), ("a", 3000), ("b", 3000)]


async def test_timers_may_be_async():
    called: list[str] = []

    async def ring(ctx: Context) -> None:
        await asyncio.sleep(0)
        called.append(ctx.key)

    timer = Timer("ring", ring)
    rig = Rig(group_of(lambda ctx, value: ctx.set_timer(timer, after=1), timer))
    await rig.engine.handle([rig.message("a", 1, at=0), rig.message("b", 1, at=1000)])
    assert called == ["a"]


def test_what_timers_send_to_the_loop_has_growing_places():
    loop: Loop[Any] = Loop(Json(), lambda ctx, value: None)

    def ring(ctx: Context) -> None:
        ctx.loop(loop, key="x", value=1)
        ctx.loop(loop, key="y", value=2)

    timer = Timer("ring", ring)
    rig = Rig(group_of(lambda ctx, value: ctx.set_timer(timer, after=value), loop, timer))
    for key, after in (("a", 5), ("b", 5), ("c", 6)):
        rig.send(key, after, at=0)
    rig.send("d", 60, at=5500)
    rig.checkpoint()
    rig.restart()
    rig.send("d", 60, at=6000)
    rig.checkpoint()
    senders = [message.attributes[SENDER] for _, message in rig.published]
    assert senders == [f"~/0/{place}" for place in ("5000/0", "5000/1", "5000/2", "5000/3", "6000/0", "6000/1")]
    assert len(set(rig.ids())) == 6


def test_what_a_failed_timer_sent_to_the_loop_takes_no_place():
    loop: Loop[Any] = Loop(Json(), lambda ctx, value: None)
    fails = [True]

    def ring(ctx: Context) -> None:
        ctx.loop(loop, key="x", value=1)
        if fails:
            raise ValueError("after the loop")

    timer = Timer("ring", ring)
    rig = Rig(group_of(lambda ctx, value: ctx.set_timer(timer, after=5), loop, timer))
    rig.send("a", at=0)
    message = rig.message("b", 1, at=5000)
    with pytest.raises(StreamFailed):
        rig.handle([message])
    fails.clear()
    rig.handle([message])
    rig.checkpoint()
    assert [message.attributes[SENDER] for _, message in rig.published] == ["~/0/5000/0"]


# Expiry


EXPIRING: Persist[int] = Persist(Json(int), ttl=10)


def expiring() -> Rig:
    def callback(ctx: Context, value: int | None) -> None:
        if value is None:
            del ctx[EXPIRING]
        elif value:
            ctx[EXPIRING] = (ctx[EXPIRING] or 0) + value

    return Rig(group_of(callback, EXPIRING, codec=Json(), tombstones="pass"))


def test_a_row_expires_when_event_time_passes():
    rig = expiring()
    rig.send("a", 1, at=0)
    rig.send("b", 0, at=9999)
    rig.checkpoint()
    assert rig.rows() == {"a": 1}
    rig.send("b", 0, at=10_000)
    effects = rig.checkpoint()
    assert effects.rows[b"a"] is None
    assert effects.counts == {"expired": 1}
    assert (rig.rows(), rig.agendas(), rig.due()) == ({}, {}, [])


def test_a_row_that_is_set_again_lives_on():
    rig = expiring()
    rig.send("a", 1, at=0)
    rig.send("a", 1, at=9000)
    rig.send("a", 1, at=18_000)
    rig.send("b", 0, at=27_999)
    rig.checkpoint()
    assert rig.rows() == {"a": 3}
    rig.send("a", 1, at=28_000)
    rig.checkpoint()
    assert rig.rows() == {"a": 1}


def test_a_row_that_an_old_message_sets_lives_as_long_as_others():
    rig = expiring()
    rig.send("a", 0, at=50_000)
    rig.send("a", 1, at=1000)
    rig.send("b", 0, at=59_999)
    rig.checkpoint()
    assert rig.rows() == {"a": 1}
    rig.send("b", 0, at=60_000)
    rig.checkpoint()
    assert rig.rows() == {}


def test_rows_stay_when_the_table_no_longer_has_a_ttl():
    rig = expiring()
    rig.send("a", 1, at=0)
    rig.checkpoint()
    rig.group = group_of(lambda ctx, value: None, COUNT)
    rig.restart()
    rig.send("b", 1, at=20_000)
    rig.checkpoint()
    assert (rig.rows(), rig.agendas(), rig.due()) == ({"a": 1}, {}, [])


def test_a_deleted_row_does_not_expire():
    rig = expiring()
    rig.send("a", 1, at=0)
    rig.send("a", None, at=1)
    rig.checkpoint()
    assert (rig.rows(), rig.agendas(), rig.due()) == ({}, {}, [])


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from([0, 1, 2, None]),
            st.integers(0, 12_000),
            st.sampled_from(["", "checkpoint", "restart", "rollback"]),
        ),
        max_size=25,
    )
)
def test_expiry_is_that_of_a_plain_dict(steps):
    """Rows, expiry and the index agree with a fold, whatever checkpoints and crashes there are."""
    rig = expiring()
    messages: list[Incoming] = []
    time = 0
    for key, value, later, then in steps:
        time += later
        messages.append(rig.message(key, value, at=time))
        rig.handle(messages)
        if then == "checkpoint":
            rig.checkpoint()
        elif then == "restart":
            rig.restart()
        elif then == "rollback":
            rig.engine.rollback()
    rig.handle(messages)
    rig.checkpoint()

    rows: dict[str, tuple[int, int]] = {}
    time = 0
    for key, value, later, _ in steps:
        time += later
        rows = {k: (v, set_at) for k, (v, set_at) in rows.items() if time < set_at + 10_000}
        if value is None:
            rows.pop(key, None)
        elif value:
            rows[key] = rows.get(key, (0, 0))[0] + value, time
    assert rig.rows() == {key: value for key, (value, _) in rows.items()}
    assert len(rig.agendas()) == len(rig.due()) == len(rows)


def test_many_rows_expire_within_checkpoints_of_few_rows():
    rig = expiring()
    rig.handle([rig.message(f"k{n}", 1, at=n) for n in range(600)])
    rig.checkpoint()
    rig.options["most_rows"] = 100
    rig.restart()
    message = rig.message("new", 1, at=10**6)
    rounds = 0
    while not rig.handle([message]):
        assert len(rig.checkpoint().rows) <= 100
        rounds += 1
    rig.checkpoint()
    assert rounds >= 11
    assert rig.rows() == {"new": 1}
    assert len(rig.due()) == 1


def test_wall_timers_within_checkpoints_of_few_rows():
    rig = ringing(clock="wall")
    rig.handle([rig.message(f"k{n}", 5, at=0) for n in range(50)])
    rig.checkpoint()
    rig.options["most_rows"] = 10
    rig.restart()
    rig.time += 5
    while (due := rig.engine.next_due()) is not None and due <= rig.time:
        drive(rig.engine.advance())
        assert len(rig.checkpoint().rows) <= 10
    assert rig.rows() == {f"k{n}": 1 for n in range(50)}


def test_what_a_full_checkpoint_had_no_room_for_is_due_at_once():
    rig = ringing()
    rig.options["most_rows"] = 4
    rig.restart()
    rig.send("z", 0, at=60_000)
    rig.checkpoint()
    assert rig.handle([rig.message(key, 5, at=1000) for key in "ab"]) == 2
    rig.checkpoint()
    assert rig.rows() == {"a": 1}
    assert rig.engine.next_due() == rig.time
    rig.advance(0)
    rig.checkpoint()
    assert rig.rows() == {"a": 1, "b": 1}
    assert rig.engine.next_due() is None


def test_a_new_owner_has_nothing_to_do_unless_something_is_due():
    rig = ringing()
    rig.send("k", 5, at=1000)
    rig.checkpoint()
    rig.restart()
    assert rig.engine.next_due() is None


def test_what_a_wall_timer_publishes_when_it_is_set_to_the_same_past_time_again_has_another_id():
    timer = Timer("ring", lambda ctx: ctx.emit(OUT, key=ctx.key, value=1), clock="wall")
    past = datetime(1970, 1, 2, tzinfo=UTC)
    rig = Rig(group_of(lambda ctx, value: ctx.set_timer(timer, at=past), OUT, timer))
    for _ in range(2):
        rig.send("k")
        assert rig.engine.next_due() == rig.time
        rig.advance(1)
    rig.checkpoint()
    assert len(set(rig.ids())) == 2
