"""Windows: which ones a message belongs to, when they close, and what comes too late; against brute force."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import Json
from broker_streams.agenda import OpenWindow
from broker_streams.context import Context, Incoming, Window
from broker_streams.edges import Hopping, Session, Timer, Tumbling, Windowed
from broker_streams.failures import SKIP, StreamFailed
from broker_streams.graph import Output
from broker_streams.windows import assigner, is_closed
from tests.unit.broker_streams.engines import Rig, group_of

OUT: Output[Any] = Output("out-topic", Json())
LATE: Output[Any] = Output("late-topic", Json())


def final(ctx: Context, window: Window[Any]) -> None:
    assert window.closed
    assert ctx.timestamp_ms == window.end_ms
    ctx.emit(OUT, key=ctx.key, value=[window.start_ms, window.end_ms, window.value])


def late(ctx: Context, window: Window[Any]) -> None:
    assert window.closed
    assert window.value is None
    ctx.emit(LATE, key=ctx.key, value=[window.start_ms, window.end_ms, ctx.payload])


def counting(edge: Windowed[int], **options: Any) -> Rig:
    def callback(ctx: Context, value: int) -> None:
        for window in ctx.windows(edge):
            window.value = (window.value or 0) + value

    return Rig(group_of(callback, edge, OUT, LATE, **options))


def tumbling(**options: Any) -> Tumbling[int]:
    return Tumbling("window", Json(int), size=0.010, on_close=final, on_late=late, **options)


# Arithmetic


@given(st.integers(-1000, 1000), st.integers(1, 50))
def test_tumbling_windows_by_brute_force(time, size):
    edge = Tumbling("w", Json(int), size=size / 1000)
    expected = [
        (start, start + size) for start in range(-2000, 2000) if start % size == 0 and start <= time < start + size
    ]
    assert assigner(edge)(time, ()) == expected


@given(st.integers(-200, 200), st.integers(1, 30), st.integers(1, 40))
def test_hopping_windows_by_brute_force(time, size, advance):
    edge = Hopping("w", Json(int), size=size / 1000, advance=advance / 1000)
    expected = [
        (start, start + size) for start in range(-400, 400) if start % advance == 0 and start <= time < start + size
    ]
    assert assigner(edge)(time, ()) == expected


@given(st.lists(st.integers(0, 100), min_size=1, max_size=20), st.integers(1, 20))
def test_sessions_by_brute_force(times, gap):
    """However messages are ordered, their sessions are the runs without a gap."""
    edge = Session("w", Json(int), gap=gap / 1000, merge=lambda a, b: a + b)
    opened: list[OpenWindow] = []
    for time in times:
        [(start, end)] = assigner(edge)(time, opened)
        opened = [each for each in opened if not (each.start < end and start < each.end)]
        opened.append(OpenWindow(start, end, end, b""))
    expected: list[list[int]] = []
    for time in sorted(times):
        if expected and time < expected[-1][1]:
            expected[-1][1] = time + gap
        else:
            expected.append([time, time + gap])
    assert sorted([each.start, each.end] for each in opened) == expected


@pytest.mark.parametrize(
    ("end", "grace", "stream_time", "closed_until", "closed"),
    [
        (10, 0, 9, None, False),
        (10, 0, 10, None, True),
        (10, 5, 14, None, False),
        (10, 5, 15, None, True),
        (10, 5, 0, 9, False),
        (10, 5, 0, 10, True),
    ],
)
def test_is_closed(end, grace, stream_time, closed_until, closed):
    assert is_closed(end, grace, stream_time, closed_until) is closed


# In the engine


def test_a_tumbling_window_closes_with_its_value():
    rig = counting(tumbling())
    for key, at in (("a", 0), ("a", 9), ("b", 5), ("a", 10)):
        rig.send(key, 1, at=at)
    rig.checkpoint()
    assert rig.values("out-topic") == [[0, 10, 2], [0, 10, 1]]
    assert [message.key for _, message in rig.published] == [b"a", b"b"]
    assert rig.ids()[0].startswith("group/window:window/0/0/")
    assert len(rig.agendas()) == len(rig.due()) == 1


def test_grace_keeps_a_window_open_and_late_messages_are_reported():
    rig = counting(tumbling(grace=0.005))
    for at in (0, 14, 9, 15, 9, 16):
        rig.send("a", 1, at=at)
    effects = rig.checkpoint()
    assert rig.values("out-topic") == [[0, 10, 2]]
    assert rig.values("late-topic") == [[0, 10, 1]]
    assert effects.counts == {"closed": 1, "late": 1}


def test_late_messages_are_counted_without_on_late():
    rig = counting(Tumbling("window", Json(int), size=0.010))
    rig.send("a", 1, at=50)
    rig.send("a", 1, at=9)
    assert rig.checkpoint().counts == {"late": 1}


def test_a_failing_on_late_fails_the_message():
    def fail(ctx: Context, window: Window[Any]) -> None:
        raise ValueError("of on_late")

    rig = counting(Tumbling("window", Json(int), size=0.010, on_late=fail), on_error=SKIP)
    rig.send("a", 1, at=50)
    rig.send("a", 1, at=9)
    assert rig.checkpoint().counts == {"failed": 1, "skipped": 1}


def test_windows_survive_restarts_and_rollbacks():
    rig = counting(tumbling())
    rig.send("a", 1, at=3)
    rig.checkpoint()
    rig.restart()
    messages = [rig.message("a", 1, at=4), rig.message("a", 1, at=12)]
    rig.handle(messages)
    rig.engine.rollback()
    rig.handle(messages)
    rig.checkpoint()
    assert rig.values("out-topic") == [[0, 10, 2]]


def test_hopping_windows():
    rig = counting(Hopping("window", Json(int), size=0.010, advance=0.005, on_close=final))
    for at in (0, 5, 7, 100):
        rig.send("a", 1, at=at)
    rig.checkpoint()
    assert rig.values("out-topic") == [[-5, 5, 1], [0, 10, 3], [5, 15, 2]]


def sessions(**options: Any) -> Session[list[int]]:
    return Session(
        "window", Json(list[int]), gap=0.010, merge=lambda a, b: [*a, *b], on_close=final, on_late=late, **options
    )


def collecting(edge: Session[list[int]]) -> Rig:
    def callback(ctx: Context, value: int) -> None:
        [window] = ctx.windows(edge) or [None]
        if window is not None:
            window.value = [*(window.value or []), value]
            assert [each.value for each in ctx.windows(edge)] == [window.value]

    return Rig(group_of(callback, edge, OUT, LATE))


def test_a_message_between_two_sessions_makes_one_of_them():
    rig = collecting(sessions(grace=0.020))
    for at in (0, 15, 8, 100):
        rig.send("a", at, at=at)
    rig.checkpoint()
    assert rig.values("out-topic") == [[0, 25, [0, 15, 8]]]


def test_sessions_end_after_the_gap():
    rig = collecting(sessions())
    for at in (0, 9, 19, 5, 30):
        rig.send("a", at, at=at)
    effects = rig.checkpoint()
    assert rig.values("out-topic") == [[0, 19, [0, 9]], [19, 29, [19]]]
    assert rig.values("late-topic") == [[5, 15, 5]]
    assert effects.counts == {"late": 1, "closed": 2}


def test_a_session_that_is_not_set_is_not_there():
    edge = sessions()
    seen: list[Any] = []
    rig = Rig(group_of(lambda ctx, value: seen.extend(window.value for window in ctx.windows(edge)), edge, OUT, LATE))
    rig.send("a", at=0)
    rig.send("a", at=5)
    assert seen == [None, None]
    assert rig.checkpoint().rows == {}


def test_a_value_that_does_not_fit_the_codec_is_refused():
    edge = tumbling()

    def callback(ctx: Context, value: Any) -> None:
        for window in ctx.windows(edge):
            window.value = value

    rig = Rig(group_of(callback, edge, OUT, LATE))
    for value in ("text", None):
        with pytest.raises(StreamFailed):
            rig.send("a", value or b"null", at=0)
        rig.next_offsets.clear()
    assert rig.checkpoint().rows == {}


def test_a_callback_that_fails_leaves_windows_as_they_were():
    edge = tumbling()

    def callback(ctx: Context, value: int) -> None:
        for window in ctx.windows(edge):
            window.value = (window.value or 0) + value
        if value > 1:
            raise ValueError("too much")

    rig = Rig(group_of(callback, edge, OUT, LATE, on_error=SKIP))
    for value, at in ((1, 0), (7, 1), (1, 2), (7, 30), (7, 3)):
        rig.send("a", value, at=at)
    rig.checkpoint()
    assert rig.values("out-topic") == [[0, 10, 2]]
    assert rig.values("late-topic") == []


def test_a_window_whose_edge_is_gone_is_dropped():
    rig = counting(tumbling())
    rig.send("a", 1, at=0)
    rig.checkpoint()
    rig.group = group_of(lambda ctx, value: None)
    rig.restart()
    rig.send("a", 1, at=50)
    assert rig.checkpoint().outputs == []
    assert (rig.agendas(), rig.due()) == ({}, [])


def test_a_failing_on_close_stops_and_the_window_stays():
    fails = [True]

    def close(ctx: Context, window: Window[Any]) -> None:
        final(ctx, window)
        if fails:
            raise ValueError("of on_close")

    edge = Tumbling("window", Json(int), size=0.010, on_close=close)
    rig = counting(edge, on_error=SKIP)
    rig.send("a", 1, at=0)
    message = rig.message("a", 1, at=20)
    with pytest.raises(StreamFailed, match="on_close failed for key 'a': ValueError: of on_close"):
        rig.handle([message])
    assert rig.checkpoint().outputs == []
    fails.clear()
    rig.handle([message])
    rig.checkpoint()
    assert rig.values("out-topic") == [[0, 10, 1]]


# Idle partitions


def test_windows_of_an_idle_partition_close_and_what_comes_later_is_late():
    rig = counting(tumbling(close_after_idle=30))
    rig.send("a", 1, at=3)
    rig.send("b", 1, at=12)
    assert rig.engine.next_due() == rig.time + 30
    rig.advance(29)
    assert rig.checkpoint().counts == {"closed": 1}
    rig.advance(1)
    rig.checkpoint()
    assert rig.values("out-topic") == [[0, 10, 1], [10, 20, 1]]
    assert rig.engine.next_due() is None
    rig.restart()
    rig.send("a", 1, at=13)
    rig.send("a", 1, at=21)
    rig.checkpoint()
    assert rig.values("late-topic") == [[10, 20, 1]]
    assert rig.engine.next_due() == rig.time + 30


def test_a_window_that_has_grown_since_the_checkpoint_closes_once():
    rig = collecting(sessions(close_after_idle=30))
    rig.send("a", 1, at=0)
    rig.checkpoint()
    rig.send("a", 2, at=5)
    rig.advance(30)
    rig.checkpoint()
    assert rig.values("out-topic") == [[0, 15, [1, 2]]]
    rig.send("a", 3, at=50)
    assert rig.engine.next_due() == rig.time + 30
    rig.advance(30)
    rig.checkpoint()
    assert rig.values("out-topic") == [[0, 15, [1, 2]], [50, 60, [3]]]


def test_windows_and_timers_take_turns_in_the_order_of_time():
    order: list[Any] = []
    edge: Tumbling[int] = Tumbling(
        "window", Json(int), size=0.010, on_close=lambda ctx, window: order.append(("window", ctx.timestamp_ms))
    )
    timer = Timer("timer", lambda ctx: order.append(("timer", ctx.timestamp_ms)))

    def callback(ctx: Context, value: int) -> None:
        for window in ctx.windows(edge):
            window.value = value
        ctx.set_timer(timer, after=0.008)

    rig = Rig(group_of(callback, edge, timer))
    for key, at in (("a", 0), ("b", 2), ("c", 7), ("d", 100)):
        rig.send(key, at=at)
    assert order == [("timer", 8), ("window", 10), ("window", 10), ("window", 10), ("timer", 10), ("timer", 15)]


def test_messages_keep_a_partition_busy():
    rig = counting(tumbling(close_after_idle=30))
    for _ in range(5):
        rig.send("a", 1, at=3)
        rig.advance(29)
    assert rig.checkpoint().counts == {}
    rig.advance(1)
    rig.checkpoint()
    assert rig.values("out-topic") == [[0, 10, 5]]


def test_a_partition_is_not_idle_while_messages_wait_to_be_handled():
    rig = counting(tumbling(close_after_idle=30))
    rig.send("a", 1, at=3)
    rig.time += 60
    rig.engine.awake()
    rig.advance(0)
    assert rig.engine.next_due() == rig.time + 30
    rig.send("a", 1, at=4)
    rig.advance(30)
    rig.checkpoint()
    assert rig.values("out-topic") == [[0, 10, 2]]
    assert rig.values("late-topic") == []


def test_idleness_closes_windows_of_its_edge_only():
    first, second = tumbling(close_after_idle=30), Tumbling("other", Json(int), size=0.010, on_close=final)

    def callback(ctx: Context, value: int) -> None:
        for window in [*ctx.windows(first), *ctx.windows(second)]:
            window.value = value

    rig = Rig(group_of(callback, first, second, OUT, LATE))
    rig.send("a", 7, at=0)
    rig.advance(30)
    rig.checkpoint()
    assert rig.values("out-topic") == [[0, 10, 7]]
    rig.send("a", 8, at=10)
    rig.checkpoint()
    assert rig.values("out-topic") == [[0, 10, 7]] * 2


# Against a plain fold


STEPS = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.integers(0, 60),
        st.sampled_from(["", "", "checkpoint", "restart", "rollback"]),
    ),
    max_size=30,
)


def run(rig: Rig, steps: list[tuple[str, int, str]]) -> None:
    messages: list[Incoming] = []
    for key, at, then in steps:
        messages.append(rig.message(key, 1, at=at))
        rig.handle(messages)
        if then == "checkpoint":
            rig.checkpoint()
        elif then == "restart":
            rig.restart()
        elif then == "rollback":
            rig.engine.rollback()
    messages.append(rig.message("end", 1, at=1000))
    rig.handle(messages)
    rig.checkpoint()


@given(STEPS, st.integers(1, 20), st.integers(1, 20), st.integers(0, 10))
def test_aligned_windows_are_those_of_a_plain_fold(steps, size, advance, grace):
    edge: Hopping[int] = Hopping(
        "window",
        Json(int),
        size=max(size, advance) / 1000,
        advance=advance / 1000,
        grace=grace / 1000,
        on_close=final,
        on_late=late,
    )
    rig = counting(edge)
    run(rig, steps)

    windows: Counter[tuple[str, int, int]] = Counter()
    too_late = 0
    stream_time = 0
    for key, at, _ in steps:
        stream_time = max(stream_time, at)
        for start in range(-100, 100):
            end = start + max(size, advance)
            if start % advance == 0 and start <= at < end:
                if end + grace <= stream_time:
                    too_late += 1
                else:
                    windows[key, start, end] += 1
    found = {
        (message.key.decode(), *value[:2]): value[2]
        for (_, message), value in zip(
            [each for each in rig.published if each[0] == "out-topic"], rig.values("out-topic"), strict=True
        )
    }
    assert {each: n for each, n in found.items() if each[0] != "end"} == dict(windows)
    assert len(rig.values("late-topic")) == too_late
    ends = [value[1] for value in rig.values("out-topic")]
    assert ends == sorted(ends)
    assert len(set(rig.ids())) == len(rig.ids())


@given(STEPS, st.integers(0, 15))
def test_sessions_are_those_of_a_plain_fold(steps, grace):
    rig = collecting(sessions(grace=grace / 1000))
    run(rig, steps)

    opened: dict[str, list[list[int]]] = {"a": [], "b": []}
    closed: Counter[tuple[Any, ...]] = Counter()
    too_late = stream_time = 0
    for key, at, _ in steps:
        stream_time = max(stream_time, at)
        for each, windows in opened.items():
            for window in [w for w in windows if w[1] + grace <= stream_time]:
                windows.remove(window)
                closed[each, *window] += 1
        met = [w for w in opened[key] if w[0] < at + 10 and at < w[1]]
        new = [min([at, *(w[0] for w in met)]), max([at + 10, *(w[1] for w in met)]), 1 + sum(w[2] for w in met)]
        if new[1] + grace <= stream_time:
            too_late += 1
        else:
            opened[key] = [w for w in opened[key] if w not in met] + [new]
    for each, windows in opened.items():
        for window in windows:
            closed[each, *window] += 1
    found = Counter(
        (message.key.decode(), value[0], value[1], len(value[2]))
        for (_, message), value in zip(
            [each for each in rig.published if each[0] == "out-topic"], rig.values("out-topic"), strict=True
        )
    )
    assert found == closed
    assert len(rig.values("late-topic")) == too_late
