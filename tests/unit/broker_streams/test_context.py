"""`Context`, over a scope that writes down what it is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from broker import ConfigurationError, InvalidMessage, Json, Record, Text
from broker.testing import make_record
from broker_streams import Context, Group, Input, Join, Lookup, Loop, Output, Persist, Timer, Tumbling, Window
from broker_streams.context import Done, Incoming, Scope, attributes_of, moment_of, record_of
from broker_streams.handles import TimerHandle, WindowHandle

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
NOON_MS = 1_767_268_800_000


def on_message(ctx, message): ...


def on_timer(ctx): ...


COUNTS = Persist(Json(int))
USERS = Join("users", Text())
PRICES = Lookup("prices", Json(float))
ALERTS = Output("alerts", Text())
LOOP = Loop(Text(), on_message)
REMIND = Timer("remind", on_timer)
WAKE = Timer("wake", on_timer, clock="wall")
HOURLY = Tumbling("hourly", Json(int), size=3600)
GROUP = Group("clicks", Input("in.x", Text(), on_message), COUNTS, USERS, PRICES, ALERTS, LOOP, REMIND, WAKE, HOURLY)


class FakeScope:
    def __init__(self) -> None:
        self.partition = 3
        self.key = "ann"
        self.message: Incoming | None = Incoming("in.x", 17, b"ann", b"x", NOON_MS, {"trace": "1"})
        self.payload: Any = "x"
        self.timestamp_ms = NOON_MS
        self.stream_time = NOON_MS + 5000
        self.turn = 0
        self.asked: list[tuple[Any, ...]] = []
        self.values: dict[Window[Any], Any] = {}

    def place(self) -> str:
        return f"clicks/in.x/3/{-1 if self.message is None else self.message.offset}"

    def wall_ms(self) -> int:
        return 1000

    def get_row(self) -> Any:
        return 7

    def set_row(self, value: Any) -> None:
        self.asked.append(("set", value))

    def delete_row(self) -> None:
        self.asked.append(("delete",))

    def joined(self, join: Join[Any]) -> Any:
        self.asked.append(("join", join))
        return "Ann"

    def looked_up(self, lookup: Lookup[Any], key: str) -> Any:
        self.asked.append(("lookup", lookup, key))
        return 1.5

    def emit(self, output: Output[Any], key: str | None, value: Any, attributes: Mapping[str, str] | None) -> None:
        self.asked.append(("emit", output, key, value, attributes))

    def send_loop(self, key: str, value: Any, attributes: Mapping[str, str] | None) -> None:
        self.asked.append(("loop", key, value, attributes))

    def defer(self, timeout: float) -> Done:
        self.asked.append(("defer", timeout))
        return lambda error=None: self.asked.append(("done", error))

    def set_timer(self, timer: TimerHandle, due_ms: int) -> None:
        self.asked.append(("timer", timer, due_ms))

    def cancel_timer(self, timer: TimerHandle) -> None:
        self.asked.append(("cancel", timer))

    def windows(self, edge: WindowHandle[Any]) -> Iterable[Window[Any]]:
        return [Window(self, edge, NOON_MS, NOON_MS + 3_600_000)]

    def get_window(self, window: Window[Any]) -> Any:
        return self.values.get(window)

    def set_window(self, window: Window[Any], value: Any) -> None:
        self.values[window] = value


@pytest.fixture
def scope() -> FakeScope:
    return FakeScope()


@pytest.fixture
def ctx(scope: FakeScope) -> Context:
    as_protocol: Scope = scope
    return Context(as_protocol, GROUP)


class TestFacts:
    def test_of_a_message(self, ctx: Context):
        assert (ctx.group, ctx.key, ctx.topic, ctx.partition, ctx.offset) == ("clicks", "ann", "in.x", 3, 17)
        assert (ctx.payload, dict(ctx.attributes)) == ("x", {"trace": "1"})
        assert (ctx.timestamp, ctx.timestamp_ms) == (NOON, NOON_MS)
        assert ctx.now == NOON + timedelta(seconds=5)
        assert ctx.record is None

    def test_without_a_message(self, ctx: Context, scope: FakeScope):
        scope.message = scope.payload = None
        assert (ctx.topic, ctx.offset, ctx.record, ctx.payload) == ("", -1, None, None)
        assert ctx.attributes == {}, "X10: never None"
        assert ctx.timestamp == NOON, "when a timer was due"

    def test_a_message_without_time_has_that_of_the_partition(self, ctx: Context, scope: FakeScope):
        scope.message = Incoming("in.x", 1, b"ann", b"x", None)
        scope.timestamp_ms = scope.stream_time
        assert ctx.timestamp is None
        assert ctx.timestamp_ms == scope.stream_time
        assert ctx.attributes == {}

    @pytest.mark.parametrize("as_batch", [False, True])
    def test_of_a_record(self, ctx: Context, scope: FakeScope, as_batch: bool):
        record: Record[Any] = make_record(b"x", topic="in.x", offset=17, attributes={"a": "b"})
        source: Any = ([make_record(b"other"), record], 1) if as_batch else record
        scope.message = Incoming("in.x", 17, b"ann", b"x", NOON_MS, source)
        assert ctx.record is record
        assert ctx.attributes == {"a": "b"}
        assert record_of(scope.message) is record
        assert attributes_of(None) == {}

    def test_times_are_exact_to_the_millisecond(self):
        assert moment_of(NOON_MS + 1) == NOON + timedelta(milliseconds=1)
        assert moment_of(-1) == datetime(1969, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)


class TestRandom:
    def test_it_is_the_same_when_a_message_is_repeated(self, ctx: Context, scope: FakeScope):
        first = [ctx.random.random() for _ in range(3)]
        assert len(set(first)) == 3
        scope.turn += 1
        assert [ctx.random.random() for _ in range(3)] == first
        assert Context(scope, GROUP).random.random() == first[0], "another process"

    def test_it_differs_between_messages(self, ctx: Context, scope: FakeScope):
        first = ctx.random.random()
        scope.message = Incoming("in.x", 18, b"ann", b"x", NOON_MS)
        scope.turn += 1
        assert ctx.random.random() != first


class TestRows:
    def test_the_row_is_read_set_and_deleted(self, ctx: Context, scope: FakeScope):
        count = ctx[COUNTS] = (ctx[COUNTS] or 0) + 1
        del ctx[COUNTS]
        assert count == 8
        assert scope.asked == [("set", 8), ("delete",)]

    def test_an_equal_handle_is_the_same(self, ctx: Context, scope: FakeScope):
        assert ctx[Persist(Json(int))] == 7
        ctx[Persist(Json(int))] = 5
        assert ctx[Join("users", Text())] == "Ann"
        assert scope.asked[0] == ("set", 5)
        assert scope.asked[1][1] is USERS, "the engine gets the group's own edge"

    def test_x6_none_is_no_value(self, ctx: Context, scope: FakeScope):
        with pytest.raises(InvalidMessage, match=r"row of 'ann' is set to None. Delete it: `del ctx\[...\]`"):
            ctx[COUNTS] = None  # pyright: ignore[reportArgumentType]
        assert scope.asked == []

    def test_x5_without_a_table_there_are_no_rows(self, scope: FakeScope):
        ctx = Context(scope, Group("clicks", Input("in.x", Text(), on_message)))
        for use in (lambda: ctx[COUNTS], lambda: ctx.__setitem__(COUNTS, 1), lambda: ctx.__delitem__(COUNTS)):
            with pytest.raises(ConfigurationError, match="Persist is not an edge of group 'clicks'"):
                use()
        assert scope.asked == []

    def test_x9_joins_and_lookups_are_read(self, ctx: Context, scope: FakeScope):
        assert ctx[USERS] == "Ann"
        assert ctx.lookup(PRICES, "apple") == 1.5
        assert scope.asked == [("join", USERS), ("lookup", PRICES, "apple")]

    def test_x9_what_is_not_declared_is_refused(self, ctx: Context):
        with pytest.raises(ConfigurationError, match=r"Join\('other'\) is not an edge of group 'clicks'"):
            ctx[Join("other", Text())]
        with pytest.raises(ConfigurationError, match=r"Lookup\('other'\) is not an edge"):
            ctx.lookup(Lookup("other", Text()), "a")
        with pytest.raises(ConfigurationError, match=r"Lookup\('users'\) is not an edge"):
            ctx.lookup(Lookup("users", Text()), "a")

    def test_wrong_handles_say_what_is_right(self, ctx: Context):
        untyped: Any = ctx
        with pytest.raises(ConfigurationError, match=r"use ctx|with ctx\.lookup"):
            untyped[PRICES]
        with pytest.raises(ConfigurationError, match=r"ctx\.windows"):
            untyped[HOURLY]
        with pytest.raises(ConfigurationError, match="reads a Persist or a Join"):
            untyped["clicks"]
        with pytest.raises(ConfigurationError, match=r"Join\('users'\) is written"):
            untyped[USERS] = "x"
        with pytest.raises(ConfigurationError, match=r"Join\('users'\) is deleted"):
            del untyped[USERS]
        with pytest.raises(InvalidMessage, match="key is b'a' of type bytes"):
            untyped.lookup(PRICES, b"a")


class TestSending:
    def test_emit(self, ctx: Context, scope: FakeScope):
        ctx.emit(ALERTS, key="bob", value="x", attributes={"a": "b"})
        ctx.emit(ALERTS, key=None, value=None)
        assert scope.asked == [("emit", ALERTS, "bob", "x", {"a": "b"}), ("emit", ALERTS, None, None, None)]

    @pytest.mark.parametrize(
        ("topic", "advice"),
        [
            ("clicks-loop", "It is the loop of the group: use ctx.loop"),
            ("clicks-table", "It is the table of the group: use ctx"),
            ("", "Pass it to Group"),
            ("other", "Pass it to Group"),
        ],
    )
    def test_x4_emit_to_what_is_no_output(self, ctx: Context, topic: str, advice: str):
        with pytest.raises(ConfigurationError, match=advice):
            ctx.emit(Output(topic, Text()), key="a", value="b")

    def test_loop(self, ctx: Context, scope: FakeScope):
        ctx.loop(LOOP, key="bob", value="x")
        assert scope.asked == [("loop", "bob", "x", None)]
        with pytest.raises(ConfigurationError, match="Loop is not an edge"):
            ctx.loop(Loop(Text(), on_timer), key="bob", value="x")  # pyright: ignore[reportArgumentType]
        with pytest.raises(InvalidMessage, match="key is None of type NoneType"):
            ctx.loop(LOOP, key=None, value="x")  # pyright: ignore[reportArgumentType]

    def test_fail_raises_the_error(self, ctx: Context):
        error = ValueError("no")
        with pytest.raises(ValueError, match="no") as raised:
            ctx.fail(error)
        assert raised.value is error

    def test_defer(self, ctx: Context, scope: FakeScope):
        done = ctx.defer(timeout=5)
        done()
        error = ValueError("no")
        done(error)
        assert scope.asked == [("defer", 5), ("done", None), ("done", error)]

    @pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), "5", None, True])
    def test_defer_has_an_end(self, ctx: Context, timeout: Any):
        with pytest.raises(ConfigurationError, match="timeout is"):
            ctx.defer(timeout=timeout)


class TestTimers:
    def test_times_are_of_the_timers_clock(self, ctx: Context, scope: FakeScope):
        ctx.set_timer(REMIND, at=NOON)
        ctx.set_timer(REMIND, after=1.5)
        ctx.set_timer(WAKE, after=timedelta(seconds=2))
        ctx.cancel_timer(REMIND)
        assert scope.asked == [
            ("timer", REMIND, NOON_MS),
            ("timer", REMIND, NOON_MS + 1500),
            ("timer", WAKE, 3000),
            ("cancel", REMIND),
        ]

    def test_any_whole_number_of_seconds_is_a_time(self, ctx: Context, scope: FakeScope):
        ctx.set_timer(REMIND, after=10**400)
        assert scope.asked == [("timer", REMIND, NOON_MS + 10**403)]

    def test_a_timer_is_never_early(self, ctx: Context, scope: FakeScope):
        ctx.set_timer(REMIND, at=NOON + timedelta(microseconds=1))
        assert scope.asked == [("timer", REMIND, NOON_MS + 1)]

    @pytest.mark.parametrize(
        "when",
        [
            {},
            {"at": NOON, "after": 1},
            {"at": NOON.replace(tzinfo=None)},
            {"at": 5},
            *({"after": after} for after in (-1, float("nan"), float("inf"), "1", True, timedelta(-1))),
        ],
    )
    def test_wrong_times_are_refused(self, ctx: Context, scope: FakeScope, when: Any):
        with pytest.raises(ConfigurationError, match=r"^Timer\('remind'\) is set"):
            ctx.set_timer(REMIND, **when)
        assert scope.asked == []

    def test_a_timer_of_another_group_is_refused(self, ctx: Context):
        with pytest.raises(ConfigurationError, match=r"Timer\('other'\) is not an edge"):
            ctx.set_timer(Timer("other", on_timer), after=1)


class TestWindows:
    def test_values_are_read_and_set(self, ctx: Context):
        for window in ctx.windows(HOURLY):
            assert window.value is None
            window.value = (window.value or 0) + 1
            assert window.value == 1
            assert (window.start, window.end) == (NOON, NOON + timedelta(hours=1))
            assert (window.edge, window.closed) == (HOURLY, False)
            assert repr(window) == "<Window 'hourly' 2026-01-01T12:00:00+00:00/2026-01-01T13:00:00+00:00>"

    def test_none_is_no_value(self, ctx: Context):
        (window,) = ctx.windows(HOURLY)
        with pytest.raises(InvalidMessage, match="is set to None"):
            window.value = None  # pyright: ignore[reportAttributeAccessIssue]

    def test_a_closed_window_is_read_only(self, scope: FakeScope):
        window = Window(scope, HOURLY, 0, 1, closed=True)
        with pytest.raises(InvalidMessage, match="is closed"):
            window.value = 1
        assert window.value is None

    def test_windows_of_another_group_are_refused(self, ctx: Context):
        with pytest.raises(ConfigurationError, match=r"Tumbling\('other'\) is not an edge"):
            ctx.windows(Tumbling("other", Text(), size=1))


def test_x14_a_subclass_sees_what_callbacks_do(ctx: Context, scope: FakeScope):
    class Audited(Context):
        __slots__ = ()

        def __setitem__(self, handle: Persist[Any], value: Any) -> None:
            scope.asked.append(("audited", value))
            super().__setitem__(handle, value)

    audited = Audited.of(ctx)
    assert isinstance(audited, Audited)
    audited[COUNTS] = 5
    assert scope.asked == [("audited", 5), ("set", 5)]


def test_a_context_has_no_state_of_its_own_to_set(ctx: Context):
    with pytest.raises(AttributeError):
        ctx.key = "bob"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError):
        ctx.other = 1  # pyright: ignore[reportAttributeAccessIssue]
