"""Random histories of an engine, with failures, checkpoints under way, rollbacks and crashes, against plain folds."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from broker import Json
from broker_streams.context import Context, Incoming, Window
from broker_streams.edges import Timer, Tumbling
from broker_streams.effects import SENDER, Effects
from broker_streams.failures import SKIP, DeadLetter
from broker_streams.graph import Group, Input, Loop, Output, Persist
from tests.unit.broker_streams.engines import Rig

TOPICS = ("a-topic", "b-topic")


class Step(NamedTuple):
    """A message, and what happens after it."""

    topic: str
    key: str
    value: Any
    later: int
    then: str


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(TOPICS),
        st.sampled_from("xyz"),
        st.sampled_from([1, 2, 3, 0, -1, -2, "undecodable", None]),
        st.sampled_from([0, 1, 400, 3000]),
        st.sampled_from(["", "", "", "take", "settle", "checkpoint", "rollback", "restart"]),
    ),
    max_size=40,
)


class History:
    """Runs steps on an engine.

    :ivar attempts: all that was ever to be published, by id: also what never came into a written checkpoint.
    """

    def __init__(self, group: Group) -> None:
        self.rig = Rig(group)
        self.taken: list[Effects] = []
        self.attempts: dict[str, set[tuple[str, bytes | None, bytes | None, str | None]]] = {}

    def run(self, steps: list[Step], *, quietly: bool = False) -> Rig:
        messages: list[Incoming] = []
        time = 0
        for step in steps:
            time += step.later
            value = b"{" if step.value == "undecodable" else step.value
            messages.append(self.rig.message(step.key, value, topic=step.topic, at=time))
            self.rig.handle(messages)
            if not quietly:
                self.happen(step.then)
        self.rig.handle(messages)
        self.happen("checkpoint")
        return self.rig

    def happen(self, what: str) -> None:
        rig = self.rig
        if what in ("take", "checkpoint", "rollback"):
            effects = rig.engine.take()
            self.taken.append(effects)
            for topic, message in effects.outputs:
                assert message.id is not None
                content = topic, message.key, message.data, message.attributes.get(SENDER)
                self.attempts.setdefault(message.id, set()).add(content)
        if what == "checkpoint":
            while self.taken:
                rig.write(self.taken.pop(0))
        elif what == "settle" and self.taken:
            rig.write(self.taken.pop(0))
        elif what == "rollback":
            self.taken.clear()
            rig.engine.rollback()
        elif what == "restart":
            self.taken.clear()
            rig.restart()


# Rows and outputs against a fold that knows nothing of engines.

COUNT: Persist[int] = Persist(Json(int))
OUT: Output[Any] = Output("out-topic", Json())


def add(ctx: Context, value: int) -> None:
    if value == 0:
        del ctx[COUNT]
        return
    ctx[COUNT] = (ctx[COUNT] or 0) + value
    ctx.emit(OUT, key=ctx.key, value=ctx[COUNT])
    if value < 0:
        ctx.emit(OUT, key="never", value=0)
        raise ValueError(f"{value} is below 0")


ADDING = Group(
    "group",
    Input("a-topic", Json(int), add, on_error=SKIP, on_undecodable=SKIP),
    Input("b-topic", Json(int), add, on_error=DeadLetter("letters"), on_undecodable=DeadLetter("letters")),
    COUNT,
    OUT,
)


@given(STEPS)
def test_rows_and_outputs_are_those_of_a_plain_fold(steps):
    history = History(ADDING)
    rig = history.run(steps)

    rows: dict[str, int] = {}
    outputs: list[tuple[str, str, Any]] = []
    offsets = dict.fromkeys(TOPICS, 0)
    for topic, key, value, _, _ in steps:
        place = f"group/{topic}/0/{offsets[topic]}"
        offsets[topic] += 1
        if value == "undecodable" or (value is not None and value < 0):
            if topic == "b-topic":
                outputs.append(("letters", f"{place}/letter", value))
        elif value == 0:
            rows.pop(key, None)
        elif value is not None:
            rows[key] = rows.get(key, 0) + value
            outputs.append(("out-topic", f"{place}/0", rows[key]))
    assert rig.rows() == rows
    assert [(topic, message.id) for topic, message in rig.published] == [each[:2] for each in outputs]
    assert rig.values("out-topic") == [value for topic, _, value in outputs if topic == "out-topic"]
    assert rig.engine.positions == {topic: offset for topic, offset in offsets.items() if offset}
    assert all(len(contents) == 1 for contents in history.attempts.values())
    handled = sum(value is not None and value != "undecodable" and value < 0 for _, _, value, _, _ in steps)
    assert rig.counts.get("failed", 0) == handled


# Timers, windows and the loop against the same engine without any of what disturbs it.


def ring(ctx: Context) -> None:
    ctx[TIMED] = (ctx[TIMED] or 0) + 10
    ctx.emit(OUT, key=ctx.key, value=["rung", ctx.timestamp_ms, ctx.random.random()])
    ctx.loop(LOOP, key="z", value=1)


def close(ctx: Context, window: Window[int]) -> None:
    ctx.emit(OUT, key=ctx.key, value=["closed", window.start_ms, window.value])
    ctx.loop(LOOP, key=ctx.key, value=2)


def late(ctx: Context, window: Window[int]) -> None:
    ctx.emit(OUT, key=ctx.key, value=["late", window.start_ms])


def timed(ctx: Context, value: int) -> None:
    for window in ctx.windows(SECONDS):
        window.value = (window.value or 0) + value
    ctx[TIMED] = (ctx[TIMED] or 0) + value
    if value == 2:
        ctx.set_timer(RING, after=0.5)
        ctx.loop(LOOP, key=ctx.key, value=value)
    elif value == 3:
        ctx.cancel_timer(RING)
    elif value == 0:
        del ctx[TIMED]
    elif value < 0:
        ctx.set_timer(RING, after=2)
        raise ValueError("below 0")


TIMED: Persist[int] = Persist(Json(int), ttl=2)
LOOP: Loop[int] = Loop(Json(int), lambda ctx, value: ctx.__setitem__(TIMED, value))
RING = Timer("ring", ring)
SECONDS: Tumbling[int] = Tumbling("seconds", Json(int), size=1, grace=0.2, on_close=close, on_late=late)
TIMING = Group(
    "group", Input(TOPICS, Json(int), timed, on_error=SKIP, on_undecodable=SKIP), TIMED, LOOP, RING, SECONDS, OUT
)


@given(STEPS)
def test_repetitions_give_the_same_rows_outputs_and_ids(steps):
    history = History(TIMING)
    rig = history.run(steps)
    expected = History(TIMING).run(steps, quietly=True)
    assert rig.rows() == expected.rows()
    assert rig.agendas() == expected.agendas()
    assert rig.due() == expected.due()
    assert rig.ids() == expected.ids()
    assert len(set(rig.ids())) == len(rig.ids())
    assert [message.data for _, message in rig.published] == [message.data for _, message in expected.published]
    assert all(len(contents) == 1 for contents in history.attempts.values())
    assert rig.counts == expected.counts


@given(STEPS)
def test_the_loop_drops_what_it_has_seen(steps):
    """What the loop receives, with every repetition that crashes cause, is handled as if each came once."""
    history = History(TIMING)
    history.run(steps)
    sent = {
        emit_id: Incoming("group-loop", 0, key, data, None, {SENDER: sender})
        for emit_id, contents in history.attempts.items()
        for topic, key, data, sender in contents
        if topic == "group-loop" and sender is not None
    }
    once = [sent[each] for each in history.rig.ids() if each in sent]
    receiver = Rig(TIMING)
    # A crash repeats all since a checkpoint: here from the start, each time one message further.
    repeated = [message for n in range(1, len(once) + 1) for message in once[:n]]
    receiver.handle([message._replace(offset=n) for n, message in enumerate(repeated)])
    receiver.checkpoint()
    assert receiver.counts.get("duplicates", 0) == len(repeated) - len(once)
