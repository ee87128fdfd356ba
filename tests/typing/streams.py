"""Checked by pyright, never run: handles, callbacks and contexts of `broker_streams` are typed by their codecs.

`assert_type` pins what inference gives. A line with `pyright: ignore` is a mistake that pyright has to find: an
ignore that is not needed is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

import broker
from broker import Bus, Codec, Json, Receipt, Record, Service, Text
from broker_streams import (
    Context,
    DeadLetter,
    Done,
    Edge,
    Emitter,
    Group,
    Hopping,
    Input,
    Int64,
    Join,
    Lookup,
    Loop,
    MsgPack,
    Output,
    Persist,
    Processor,
    Published,
    Retrying,
    Session,
    Tester,
    Timer,
    Tumbling,
    View,
    Visitor,
    Window,
)


@dataclass
class Click:
    item: str


@dataclass
class User:
    name: str


@dataclass
class Alert:
    user: User | None
    price: float | None


clicks = Persist(Json(int))
users = Join("users", Json(User))
prices = Lookup("prices", Json(float))
alerts = Output("alerts", Json(Alert))
hourly = Tumbling("hourly", Json(int), size=timedelta(hours=1))


def on_click(ctx: Context, click: Click) -> None:
    count = ctx[clicks] = (ctx[clicks] or 0) + 1
    assert_type(count, int)
    if count % 100 == 0:
        ctx.emit(alerts, key=ctx.key, value=Alert(ctx[users], ctx.lookup(prices, click.item)))


async def on_click_async(ctx: Context, click: Click) -> None: ...


def on_text(ctx: Context, text: str) -> None: ...


def on_anything(ctx: Context, message: object) -> None: ...


def on_optional(ctx: Context, click: Click | None) -> None: ...


def on_timer(ctx: Context) -> None: ...


async def on_timer_async(ctx: Context) -> None: ...


def on_close(ctx: Context, window: Window[int]) -> None: ...


async def on_close_text(ctx: Context, window: Window[str]) -> None: ...


def join_texts(earlier: str, later: str) -> str:
    return earlier + later


def handles_are_typed_by_their_codecs() -> None:
    assert_type(clicks, Persist[int])
    assert_type(users, Join[User])
    assert_type(prices, Lookup[float])
    assert_type(alerts, Output[Alert])
    assert_type(hourly, Tumbling[int])
    assert_type(Persist(Json(dict[str, int])), Persist[dict[str, int]])
    assert_type(Persist(Json(Click | None)), Persist[Click | None])
    assert_type(Persist(Text()), Persist[str])
    assert_type(Persist(Int64()), Persist[int])
    assert_type(Persist(MsgPack(User)), Persist[User])
    assert_type(Hopping("h", Text(), size=10, advance=5), Hopping[str])
    assert_type(Session("s", Text(), gap=30, merge=join_texts), Session[str])
    assert_type(Loop(Json(Click), on_click), Loop[Click])


def codecs_satisfy_the_protocol() -> tuple[Codec[int], Codec[User]]:
    return Int64(), MsgPack(User)


def callbacks_take_what_the_codec_gives() -> None:
    assert_type(Input("clicks", Json(Click), on_click), Input[Click])
    Input("clicks", Json(Click), on_click_async)
    Input(["one", "two"], Json(Click), on_click)
    Input("clicks", Json(Click), on_anything)
    Input("clicks", Json(Click), on_optional, tombstones="pass")
    Input("clicks", Json(Click), lambda ctx, click: on_text(ctx, click.item))
    Input("clicks", Json(Click), on_text)  # pyright: ignore[reportArgumentType]
    Input("clicks", Text(), on_click)  # pyright: ignore[reportArgumentType]
    Input("clicks", Text(), on_click_async)  # pyright: ignore[reportArgumentType]
    Input("clicks", Json(Click | None), on_click)  # pyright: ignore[reportArgumentType]
    Input("clicks", Json(Click), on_timer)  # pyright: ignore[reportArgumentType]
    Input("clicks", Json, on_click)  # pyright: ignore[reportArgumentType]
    Input("clicks", Json(Click), on_click, on_error="skip")  # pyright: ignore[reportArgumentType]
    Input("clicks", Json(Click), on_click, tombstones="drop")  # pyright: ignore[reportArgumentType]
    Loop(Text(), on_click)  # pyright: ignore[reportArgumentType]
    Timer("remind", on_timer)
    Timer("remind", on_timer_async, clock="wall")
    Timer("remind", on_click)  # pyright: ignore[reportArgumentType]
    Timer("remind", on_timer, clock="cpu")  # pyright: ignore[reportArgumentType]
    Visitor("rebuild", on_text)
    Visitor("rebuild", on_timer)  # pyright: ignore[reportArgumentType]
    Tumbling("hourly", Json(int), size=60, on_close=on_close, on_late=on_close)
    Tumbling("hourly", Text(), size=60, on_close=on_close_text)
    Tumbling("hourly", Text(), size=60, on_close=on_close)  # pyright: ignore[reportArgumentType]
    Tumbling("hourly", Json(int))  # pyright: ignore[reportCallIssue]
    Session("visits", Json(int), gap=30, merge=join_texts)  # pyright: ignore[reportArgumentType]
    Retrying(DeadLetter("letters"))  # pyright: ignore[reportArgumentType]


def contexts_are_typed_by_handles(ctx: Context) -> None:
    assert_type(ctx[clicks], int | None)
    assert_type(ctx[users], User | None)
    assert_type(ctx.lookup(prices, "apple"), float | None)
    ctx[clicks] = 5
    del ctx[clicks]
    ctx[clicks] = "x"  # pyright: ignore[reportArgumentType]
    ctx[clicks] = None  # pyright: ignore[reportArgumentType]
    ctx[users] = User("ann")  # pyright: ignore[reportArgumentType]
    del ctx[users]  # pyright: ignore[reportArgumentType]
    ctx[prices]  # pyright: ignore[reportArgumentType, reportCallIssue]
    ctx[alerts]  # pyright: ignore[reportArgumentType, reportCallIssue]
    ctx.lookup(users, "ann")  # pyright: ignore[reportArgumentType]
    ctx.lookup(prices, b"apple")  # pyright: ignore[reportArgumentType]


def what_is_sent_is_typed(ctx: Context, loop: Loop[Click]) -> None:
    ctx.emit(alerts, key="ann", value=Alert(None, None), attributes={"a": "b"})
    ctx.emit(alerts, key=None, value=None)
    ctx.emit(alerts, key="ann", value=5)  # pyright: ignore[reportArgumentType]
    ctx.emit(alerts, key=b"ann", value=None)  # pyright: ignore[reportArgumentType]
    ctx.emit(clicks, key="ann", value=5)  # pyright: ignore[reportArgumentType]
    ctx.emit("alerts", key="ann", value=5)  # pyright: ignore[reportArgumentType]
    ctx.loop(loop, key="bob", value=Click("apple"))
    ctx.loop(loop, key="bob", value="apple")  # pyright: ignore[reportArgumentType]
    ctx.loop(loop, key=None, value=Click("apple"))  # pyright: ignore[reportArgumentType]


def windows_and_timers_are_typed(ctx: Context, remind: Timer) -> None:
    for window in ctx.windows(hourly):
        assert_type(window, Window[int])
        assert_type(window.value, int | None)
        window.value = (window.value or 0) + 1
        window.value = "x"  # pyright: ignore[reportAttributeAccessIssue]
        window.start = datetime.now(UTC)  # pyright: ignore[reportAttributeAccessIssue]
    ctx.windows(clicks)  # pyright: ignore[reportArgumentType]
    ctx.set_timer(remind, at=datetime.now(UTC))
    ctx.set_timer(remind, after=5)
    ctx.set_timer(remind, after=timedelta(minutes=5))
    ctx.set_timer("remind", after=5)  # pyright: ignore[reportArgumentType]
    ctx.cancel_timer(remind)
    ctx.cancel_timer(hourly)  # pyright: ignore[reportArgumentType]


def facts_are_typed(ctx: Context) -> None:
    assert_type(ctx.key, str)
    assert_type(ctx.offset, int)
    assert_type(ctx.timestamp, datetime | None)
    assert_type(ctx.now, datetime)
    assert_type(ctx.attributes, Mapping[str, str])
    assert_type(ctx.record, Record[Any] | None)
    done: Done = ctx.defer(timeout=5)
    done()
    done(ValueError("no"))
    done("no")  # pyright: ignore[reportArgumentType]
    ctx.key = "bob"  # pyright: ignore[reportAttributeAccessIssue]


def groups_are_typed() -> None:
    group = Group("clicks", Input("clicks-in", Json(Click), on_click), clicks, users, prices, alerts, hourly)
    assert_type(group.table, str)
    assert_type(group.edges, tuple[Edge, ...])
    assert_type(group.persist, Persist[Any] | None)
    assert_type(group.inputs, tuple[Input[Any], ...])
    assert_type(group.loop, Loop[Any] | None)
    assert_type(group.replace(edges=group.edges), Group)
    Group("clicks", "clicks-in")  # pyright: ignore[reportArgumentType]
    Group("clicks", partitioner="java")  # pyright: ignore[reportArgumentType]
    Group("clicks", order="random")  # pyright: ignore[reportArgumentType]


async def views_and_emitters_are_typed(bus: Bus, group: Group, receipt: Receipt) -> None:
    async with View(bus, group.table, Json(int)) as view:
        await view.ready()
        assert_type(view, View[int])
        assert_type(view.get("ann"), int | None)
        assert_type(await view.get("ann", at_least=receipt), int | None)
        assert_type(view.items(prefix="a"), Iterator[tuple[str, int]])
        assert_type("ann" in view, bool)
        async for change in view.changes():
            assert_type(change.old, int | None)
            assert_type(change.new, int | None)
        view.get(b"ann")  # pyright: ignore[reportArgumentType]
    async with Emitter(bus, "clicks-in", Json(Click)) as emitter:
        assert_type(await emitter.emit("ann", Click("apple")), Receipt)
        await emitter.emit("ann", "apple")  # pyright: ignore[reportArgumentType]


async def processors_are_services(bus: Bus, group: Group) -> None:
    service: Service = Processor(bus, group)
    await broker.serve(service)
    Processor(bus, group, guarantee="twice")  # pyright: ignore[reportArgumentType]


def tests_are_typed(group: Group) -> None:
    with Tester(group, partitions=4) as test:
        test.publish("clicks-in", key="ann", value=Click("apple"))
        assert_type(test.published(alerts), list[Published[Alert]])
