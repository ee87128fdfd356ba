"""X1 to X14 of goka's list: what a callback does, and what of it is on the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from broker import BrokerError, Json, OutboundMessage
from broker_streams.context import Context
from broker_streams.failures import StreamFailed
from broker_streams.graph import Group, Input, Join, Lookup, Loop, Output, Visitor
from tests.streams.support import PARTITIONS, SECONDS, Stream, until


class Mistakes:
    """A callback that does what is wrong, and goes on.

    :ivar errors: what was raised.
    """

    def __init__(self, *acts: Callable[[Context], object]) -> None:
        self._acts = acts
        self.errors: list[str] = []

    def __call__(self, ctx: Context, value: int) -> None:
        for act in self._acts:
            try:
                act(ctx)
            except BrokerError as error:
                self.errors.append(str(error))
            else:
                self.errors.append("none")


async def test_x1_a_message_is_committed_with_all_that_its_callback_wrote(stream: Stream) -> None:
    gate = asyncio.Event()

    async def slow(ctx: Context, value: int) -> None:
        stream.count(ctx, value)
        if value == 100:
            await gate.wait()

    await stream.bus.topic(stream.clicks).publish(OutboundMessage(b"100", "slow", partition=0))
    await stream.publish_to_each(1)
    async with stream.processing(stream.group(slow)) as processor, stream.viewing() as view:
        # By then there was a checkpoint, and the message in partition 0 is at work.
        await until(lambda: len(view) == PARTITIONS - 1)
        assert view.get("slow") is None
        assert len(await stream.outputs()) == PARTITIONS - 1
        assert await stream.waiting() >= 2
        gate.set()
        await until(lambda: (view.get("slow"), view.get("key-0")) == (100, 1))
        assert processor.stats().failed_checkpoints == 0
    assert len(await stream.outputs()) == PARTITIONS + 1
    # The last offset of a partition may be that of a transaction.
    assert await stream.waiting() <= PARTITIONS


async def test_x2_an_output_that_is_refused_commits_nothing_and_names_its_topic(stream: Stream) -> None:
    large = "x" * ((stream.bus.capabilities.publish.limits.body or 10_000_000) + 1)
    text = Output(stream.alerts.topic, Json(str))
    seen: list[int] = []

    def emit(ctx: Context, value: int) -> None:
        seen.append(value)
        ctx[stream.counts] = value
        ctx.emit(text, key="a", value=large if value == 2 and seen.count(2) == 1 else "small")

    group = Group(stream.name, Input(stream.clicks, Json(int), emit), stream.counts, text)
    await stream.publish([("a", 2)])
    with pytest.raises(BrokerError) as raised:
        await stream.handle(group, lambda: False)
    assert stream.alerts.topic in str(raised.value)
    async with stream.viewing() as view:
        assert view.get("a") is None
        await stream.handle(group, lambda: view.get("a") == 2)
    assert seen == [2, 2]
    assert [record.data for record in await stream.records(stream.alerts.topic)] == [b'"small"']


async def test_x3_a_deferred_message_is_committed_when_it_is_done(stream: Stream) -> None:
    seen: list[Any] = []

    def defer(ctx: Context, value: int) -> None:
        stream.count(ctx, value)
        seen.append(ctx.defer(timeout=SECONDS))

    await stream.publish([("a", 1)])

    def failed() -> bool:
        if seen:
            seen[0](ValueError("the work failed"))
        return False

    with pytest.raises(StreamFailed, match="the work failed"):
        await stream.handle(stream.group(defer), failed)
    async with stream.viewing() as view, stream.processing(stream.group(defer)):
        assert view.get("a") is None
        await until(lambda: len(seen) == 2)
        for _ in range(2):
            seen[1]()
        await until(lambda: view.get("a") == 1)


async def test_x4_what_is_no_output_is_refused(stream: Stream) -> None:
    def emit(topic: str) -> Callable[[Context], object]:
        return lambda ctx: ctx.emit(Output(topic, Json(int)), key="k", value=1)

    loop = Loop(Json(int), stream.count)
    mistakes = Mistakes(
        emit(f"{stream.name}-loop"),
        emit(stream.table),
        emit(""),
        emit("other"),
        lambda ctx: ctx.loop(loop, key="k", value=1),
    )
    await stream.publish([("a", 1)])
    await stream.handle(stream.group(mistakes), lambda: mistakes.errors)
    texts = (
        "use ctx.loop",
        "It is the table of the group",
        "Output('') is not",
        "Output('other') is not",
        "Loop is not an edge",
    )
    assert len(mistakes.errors) == len(texts)
    for error, text in zip(mistakes.errors, texts, strict=True):
        assert text in error
    assert await stream.outputs() == []


async def test_x5_without_a_persist_there_are_no_rows(stream: Stream) -> None:
    row = stream.counts
    mistakes = Mistakes(lambda ctx: ctx[row], lambda ctx: ctx.__setitem__(row, 1), lambda ctx: ctx.__delitem__(row))
    await stream.publish([("a", 1)])
    await stream.handle(Group(stream.name, Input(stream.clicks, Json(int), mistakes)), lambda: mistakes.errors)
    assert len(mistakes.errors) == 3
    assert all("Persist is not an edge" in error for error in mistakes.errors)


async def test_x6_none_and_what_the_codec_refuses_are_no_rows(stream: Stream) -> None:
    row: Any = stream.counts
    mistakes = Mistakes(lambda ctx: ctx.__setitem__(row, None), lambda ctx: ctx.__setitem__(row, object()))
    await stream.publish([("a", 1)])
    await stream.handle(stream.group(mistakes), lambda: mistakes.errors)
    assert "set to None. Delete it" in mistakes.errors[0]
    assert "cannot be written" in mistakes.errors[1]
    assert [record for record in await stream.records(stream.table) if record.key == b"a"] == []


async def test_x7_a_callback_sees_what_it_has_set(stream: Stream) -> None:
    seen: list[int | None] = []

    def twice(ctx: Context, value: int) -> None:
        for _ in range(2):
            ctx[stream.counts] = (ctx[stream.counts] or 0) + value
            seen.append(ctx[stream.counts])

    await stream.publish([("a", 1), ("a", 1)])
    await stream.handle(stream.group(twice), lambda: len(seen) == 4)
    assert seen == [1, 2, 3, 4]


async def test_x8_a_deleted_row_is_none_and_a_tombstone_of_the_table(stream: Stream) -> None:
    seen: list[int | None] = []

    def delete(ctx: Context, value: int) -> None:
        if value == 0:
            del ctx[stream.counts]
        else:
            ctx[stream.counts] = value
        seen.append(ctx[stream.counts])

    await stream.publish([("a", 5), ("b", 6)])
    async with stream.viewing() as view:
        await stream.handle(stream.group(delete), lambda: (view.get("a"), view.get("b")) == (5, 6))
        await stream.publish([("a", 0)])
        await stream.handle(stream.group(delete), lambda: view.get("a") is None)
        assert "a" not in view
        assert view.get("b") == 6
    assert (seen[-1], len(seen)) == (None, 3)
    assert [record.data for record in await stream.records(stream.table) if record.key == b"a"][-1] is None


async def test_x9_joins_and_lookups_are_read(stream: Stream) -> None:
    users = Join(await stream.topic("users", compacted=True), Json(int))
    prices = Lookup(await stream.topic("prices", partitions=1, compacted=True), Json(int))
    seen: list[tuple[int | None, int | None]] = []
    mistakes = Mistakes(
        lambda ctx: ctx[Join("other", Json(int))], lambda ctx: ctx.lookup(Lookup("other", Json(int)), "a")
    )

    def read(ctx: Context, value: int) -> None:
        seen.append((ctx[users], ctx.lookup(prices, "hat" if value == 1 else "none")))
        mistakes(ctx, value)

    await stream.publish([("a", 10)], users.table)
    await stream.publish([("hat", 100)], prices.table)
    await stream.publish([("a", 1)])
    group = stream.group(read, users, prices)
    await stream.handle(group, lambda: len(mistakes.errors) == 2)
    await stream.publish([("b", 2)])
    await stream.handle(group, lambda: len(mistakes.errors) == 4)
    assert seen == [(10, 100), (None, None)]
    assert [error.partition("(")[0] for error in mistakes.errors] == ["Join", "Lookup"] * 2
    assert all("is not an edge" in error for error in mistakes.errors)


async def test_x10_attributes_are_never_none(stream: Stream) -> None:
    seen: list[dict[str, str]] = []
    for attributes in (None, {"kind": "click"}):
        await stream.bus.topic(stream.clicks).publish(OutboundMessage(b"1", "a", attributes or {}))
    await stream.handle(stream.group(lambda ctx, value: seen.append(dict(ctx.attributes))), lambda: len(seen) == 2)
    assert seen == [{}, {"kind": "click"}]


async def test_x11_attributes_of_a_call_come_on_top_of_those_of_the_processor(stream: Stream) -> None:
    def emit(ctx: Context, value: int) -> None:
        ctx[stream.counts] = value
        ctx.emit(stream.alerts, key="a", value=1)
        ctx.emit(stream.alerts, key="a", value=2, attributes={"kind": "alert", "n": "2"})

    await stream.publish([("a", 1)])
    async with stream.viewing() as view:
        await stream.handle(stream.group(emit), lambda: view.get("a") == 1, attributes={"from": "here", "kind": "any"})
    assert [dict(record.attributes) for record in await stream.records(stream.alerts.topic)] == [
        {"from": "here", "kind": "any"},
        {"from": "here", "kind": "alert", "n": "2"},
    ]


async def test_x12_the_time_of_a_message_passes_through(stream: Stream) -> None:
    # Not so old that the retention of the topic removes it.
    moment = datetime.now(UTC).replace(microsecond=678_000) - timedelta(hours=1)
    seen: list[datetime | None] = []
    await stream.bus.topic(stream.clicks).publish(OutboundMessage(b"1", "a", publish_time=moment))
    await stream.handle(stream.group(lambda ctx, value: seen.append(ctx.timestamp)), lambda: seen)
    assert seen == [moment]


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"1", "user_code failed: ZeroDivisionError"), (b"2", "user_code failed: ValueError: given"), (b"{", "decoded")],
    ids=["exception", "fail", "undecodable"],
)
async def test_x13_a_message_that_fails_stops_with_an_error_that_names_it(
    stream: Stream, data: bytes, text: str
) -> None:
    def user_code(ctx: Context, value: int) -> None:
        if value == 2:
            ctx.fail(ValueError("given"))
        _ = 1 // (value - 1)

    receipt = await stream.bus.topic(stream.clicks).publish(OutboundMessage(data, "the key"))
    with pytest.raises(StreamFailed) as raised:
        await stream.handle(stream.group(user_code), lambda: False)
    for part in (stream.name, f"'{stream.clicks}'[{receipt.partition}]@{receipt.offset}", "'the key'", text):
        assert part in str(raised.value)


async def test_x14_a_wrapped_context_sees_what_callbacks_and_visitors_do(stream: Stream) -> None:
    class Doubling(Context):
        def __setitem__(self, edge: Any, value: Any) -> None:
            super().__setitem__(edge, 2 * value)

    visitor = Visitor("set", lambda ctx, meta: ctx.__setitem__(stream.counts, meta))
    await stream.publish([("a", 1)])
    async with (
        stream.processing(stream.group(None, visitor), wrap=Doubling.of) as processor,
        stream.viewing() as view,
    ):
        await processor.ready()
        await until(lambda: view.get("a") == 2)
        assert await processor.visit("set", 7) == 1
        await until(lambda: view.get("a") == 14)
