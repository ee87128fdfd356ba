"""Random keys, bounds and latencies: every enqueued message arrives once, in order by key."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import BrokerError, ConnectionFailed
from broker.outbound import OutboundMessage
from broker.publishing.pipeline import PipelineSettings
from broker.receipts import Receipt
from tests.unit.broker.consuming.scripted_target import ScriptedTarget, capabilities, topic_of
from tests.unit.broker.consuming.warp import WarpLoop

ORDERED = capabilities(ordered_calls=True)


@settings(deadline=None)
@given(
    messages=st.lists(st.tuples(st.sampled_from([None, b"a", b"b", b"c"]), st.integers(0, 9)), max_size=120),
    bounds=st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(1, 4)),
    latencies=st.lists(st.integers(0, 3), min_size=1, max_size=9),
)
def test_every_message_arrives_once_in_order_by_key(
    messages: list[tuple[bytes | None, int]], bounds: tuple[int, int, int], latencies: list[int]
) -> None:
    max_messages, max_batch, in_flight = bounds
    turns = itertools.cycle(latencies)

    class Slow(ScriptedTarget):
        async def publish(
            self, messages: Sequence[OutboundMessage], *, receipts: bool = True
        ) -> Sequence[Receipt | BrokerError]:
            for _ in range(next(turns)):
                await asyncio.sleep(0)
            return await super().publish(messages)

    async def run() -> ScriptedTarget:
        target = Slow()
        topic = topic_of(
            target, pipeline=PipelineSettings(max_messages=max_messages, max_batch=max_batch, in_flight=in_flight)
        )
        for number, (key, pauses) in enumerate(messages):
            await topic.enqueue(b"%d" % number, key=key)
            if pauses == 0:
                await asyncio.sleep(0)
        await topic.close()
        return target

    target = asyncio.run(run())
    assert sorted(int(body or b"") for body in target.bodies) == list(range(len(messages)))
    for key in (b"a", b"b", b"c"):
        numbers = [int(message.data or b"") for message in target.published if message.key == key]
        assert numbers == sorted(numbers)
    assert all(len(call) <= max_batch for call in target.calls)


async def test_messages_that_waited_for_their_key_go_before_those_that_came_later() -> None:
    target = ScriptedTarget()
    topic = topic_of(target, pipeline=PipelineSettings(max_batch=1, in_flight=2))
    gates = {b"a1": asyncio.Event(), b"b1": asyncio.Event()}

    async def publish(messages: Sequence[OutboundMessage], *, receipts: bool = True) -> Sequence[Receipt | BrokerError]:
        if (gate := gates.get(messages[0].data or b"")) is not None:
            await gate.wait()
        else:
            gates[b"b1"].set()
        return await ScriptedTarget.publish(target, messages)

    target.publish = publish
    for body in (b"a1", b"a2", b"b1"):
        await topic.enqueue(body, key=body[:1])
    await asyncio.sleep(0)
    for body in (b"a3", b"a4"):
        await topic.enqueue(body, key=body[:1])
    gates[b"a1"].set()
    await topic.flush()
    assert [body for body in target.bodies if body != b"b1"] == [b"a1", b"a2", b"a3", b"a4"]


async def test_later_messages_of_a_key_wait_while_its_batch_is_retried() -> None:
    target = ScriptedTarget()
    topic = topic_of(target)
    target.answer = lambda message: ConnectionFailed("gone") if message.data == b"2" and len(target.calls) < 3 else None
    target.gate.clear()
    for body in (b"1", b"2"):
        await topic.enqueue(body, key=b"k")
    await target.called.wait()
    await topic.enqueue(b"3", key=b"k")
    target.gate.set()
    await topic.flush()
    assert target.bodies == [b"1", b"2", b"3"]


class InOrder(ScriptedTarget):
    """Carries out concurrent calls in order; an answer takes `turns` turns of the loop."""

    def __init__(self, turns: Sequence[int] = (0,)) -> None:
        super().__init__()
        self._turns = itertools.cycle(turns)
        self._one_at_a_time = asyncio.Lock()
        self.inside = self.most = 0

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError]:
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            async with self._one_at_a_time:
                outcomes = await super().publish(messages)
            for _ in range(next(self._turns)):
                await asyncio.sleep(0)
            return outcomes
        finally:
            self.inside -= 1


@settings(deadline=None)
@given(
    messages=st.lists(st.tuples(st.sampled_from([None, b"a", b"b", b"c"]), st.integers(0, 9)), max_size=80),
    bounds=st.tuples(st.integers(1, 20), st.integers(1, 6), st.integers(1, 4)),
    latencies=st.lists(st.integers(0, 60), min_size=1, max_size=9),
    failing=st.sets(st.integers(0, 100), max_size=10),
)
def test_with_ordered_calls_a_key_does_not_wait_and_nothing_is_reordered(
    messages: list[tuple[bytes | None, int]],
    bounds: tuple[int, int, int],
    latencies: list[int],
    failing: set[int],
) -> None:
    max_messages, max_batch, in_flight = bounds

    async def run() -> tuple[ScriptedTarget, list[asyncio.Future[Receipt]]]:
        target = InOrder(latencies)
        tries = itertools.count()
        target.answer = lambda _: ConnectionFailed("away") if next(tries) in failing else None
        bounds = PipelineSettings(max_messages=max_messages, max_batch=max_batch, in_flight=in_flight)
        topic = topic_of(target, able=ORDERED, pipeline=bounds)
        futures: list[asyncio.Future[Receipt]] = []
        for number, (key, pauses) in enumerate(messages):
            futures.append(await topic.enqueue(b"%d" % number, key=key))
            if pauses in (0, 9):
                await asyncio.sleep(pauses / 100)
        await asyncio.wait(futures) if futures else None
        for future in futures:
            future.exception()
        await topic.close()
        return target, futures

    with asyncio.Runner(loop_factory=WarpLoop) as runner:
        target, futures = runner.run(run())
    arrived = [int(body or b"") for body in target.bodies]
    assert sorted(arrived) == [number for number, future in enumerate(futures) if future.exception() is None]
    for key in (b"a", b"b", b"c"):
        numbers = [int(message.data or b"") for message in target.published if message.key == key]
        assert numbers == sorted(numbers)
    # Without a key, or without later messages of it, the retry continues.
    last = {key: number for number, (key, _) in enumerate(messages)}
    given_up = {number for number, future in enumerate(futures) if future.exception() is not None}
    assert not given_up & {number for number, (key, _) in enumerate(messages) if key is None or last[key] == number}


async def test_with_ordered_calls_messages_of_a_key_are_in_flight_together() -> None:
    target = InOrder()
    topic = topic_of(target, able=ORDERED, pipeline=PipelineSettings(max_batch=1, in_flight=3))
    target.gate.clear()
    for number in range(6):
        await topic.enqueue(b"%d" % number, key=b"a")
    target.gate.set()
    await topic.flush()
    assert target.most == 3
    assert target.bodies == [b"%d" % number for number in range(6)]


@pytest.mark.parametrize("overtaken", [False, True])
async def test_an_unanswered_call_holds_back_its_keys_after_a_while(overtaken: bool) -> None:
    answered = asyncio.Event()
    target = ScriptedTarget()

    async def publish(messages: Sequence[OutboundMessage], *, receipts: bool = True) -> Sequence[Receipt | BrokerError]:
        if messages[0].data == b"stuck" and not answered.is_set():
            await answered.wait()
            return [ConnectionFailed("away")]
        return await ScriptedTarget.publish(target, messages)

    target.publish = publish
    topic = topic_of(target, able=ORDERED, pipeline=PipelineSettings(max_batch=1, in_flight=2))
    stuck = await topic.enqueue(b"stuck", key=b"a")
    if overtaken:
        await (await topic.enqueue(b"overtaking", key=b"a"))
    for number in range(20):
        await (await topic.enqueue(b"b%d" % number, key=b"b"))
    later = await topic.enqueue(b"later", key=b"a")
    await (await topic.enqueue(b"b20", key=b"b"))
    assert not later.done()
    answered.set()
    await asyncio.wait((stuck, later))
    # It is retried only if no later message of its key is on the broker, and then before later ones.
    assert (stuck.exception() is not None) is overtaken
    assert target.bodies[-2:] == [b"b20" if overtaken else b"stuck", b"later"]
