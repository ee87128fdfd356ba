"""Random keys, bounds and latencies: every enqueued message arrives once, and in the order of its key."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import (
    BrokerError,
)
from broker.messages import OutboundMessage, Receipt
from broker.publishing_pipeline import PipelineSettings
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
        async def publish(self, messages: Sequence[OutboundMessage]) -> Sequence[Receipt | BrokerError]:
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
