"""Random keys, bounds and latencies: every enqueued message arrives once, and in the order of its key."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import BrokerError, ConnectionFailed
from broker.outbound import OutboundMessage
from broker.publishing.pipeline import PipelineSettings
from broker.receipts import Receipt
from tests.unit.scripted_target import ScriptedTarget, topic_of


@settings(max_examples=60, deadline=None)
@given(
    messages=st.lists(st.tuples(st.sampled_from([None, b"a", b"b", b"c"]), st.integers(0, 9)), max_size=120),
    bounds=st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(1, 4)),
    latencies=st.lists(st.integers(0, 3), min_size=1, max_size=9),
)
def test_every_message_arrives_once_and_in_the_order_of_its_key(
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


async def test_key_stays_closed_to_later_messages_while_one_of_its_batch_is_sent_again() -> None:
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
