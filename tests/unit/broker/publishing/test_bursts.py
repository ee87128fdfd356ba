"""How `topic.enqueue` admits a burst within one turn of the loop, and how it calls the backend."""

from __future__ import annotations

import asyncio

import pytest

from broker.capabilities import Limits
from broker.errors import BrokerError, Closed, ConnectionFailed, MessageTooLarge, PublishError
from broker.outbound import OutboundMessage
from broker.publishing.pipeline import PipelineSettings
from tests.unit.broker.consuming.scripted_target import ScriptedTarget, capabilities, topic_of

LIMITS = Limits(body=10, key=4, message=12)


@pytest.mark.parametrize("body", [b"x" * 11, None, b"x" * 9])
async def test_a_message_behind_others_is_checked_like_the_first(body: bytes | None) -> None:
    target = ScriptedTarget()
    topic = topic_of(target, able=capabilities(LIMITS))
    await topic.enqueue(b"x" * 10)
    await topic.enqueue(b"x" * 8, key=b"kkkk")
    with pytest.raises(BrokerError) as raised:
        await topic.enqueue(OutboundMessage(body, b"kkkk"))
    assert isinstance(raised.value, MessageTooLarge) or body is None
    with pytest.raises(MessageTooLarge, match="Key"):
        await topic.enqueue(b"", key=b"kkkkk")
    await topic.flush()
    assert target.bodies == [b"x" * 10, b"x" * 8]


async def test_bytes_of_one_turn_are_bounded_too() -> None:
    target = ScriptedTarget()
    topic = topic_of(target, pipeline=PipelineSettings(max_bytes=100))
    target.gate.clear()
    callers = [asyncio.create_task(topic.enqueue(b"x" * 10, key=b"k")) for _ in range(25)]
    await target.called.wait()
    assert [caller.done() for caller in callers] == [True] * 9 + [False] * 16
    target.gate.set()
    await asyncio.gather(*callers)
    await topic.flush()
    assert max(sum(len(message.data or b"") + 1 for message in call) for call in target.calls) == 99
    assert len(target.published) == 25


async def test_batches_of_a_caller_that_fills_the_pipeline_are_whole() -> None:
    target = ScriptedTarget()
    topic = topic_of(target, pipeline=PipelineSettings(max_messages=20, max_batch=10, in_flight=4))
    for number in range(100):
        await topic.enqueue(b"%d" % number)
    await topic.flush()
    assert [len(call) for call in target.calls] == [10] * 10
    assert target.bodies == [b"%d" % number for number in range(100)]


async def test_messages_admitted_by_a_cancelled_caller_are_sent_at_once() -> None:
    target = ScriptedTarget()
    topic = topic_of(target, pipeline=PipelineSettings(max_bytes=10))
    target.gate.clear()
    await topic.enqueue(b"x" * 6)
    large = asyncio.create_task(topic.enqueue(b"x" * 8))
    small = asyncio.create_task(topic.enqueue(b"x" * 2))
    await target.called.wait()
    await asyncio.sleep(0)
    target.called.clear()
    large.cancel()
    await asyncio.wait_for(target.called.wait(), 60)
    assert [len(call) for call in target.calls] == [1, 1]
    target.gate.set()
    await (await small)


async def test_flush_does_not_wait_for_later_messages() -> None:
    target = ScriptedTarget()
    topic = topic_of(target, pipeline=PipelineSettings(in_flight=1))
    await topic.enqueue(b"1")
    flushing = asyncio.create_task(topic.flush())
    await asyncio.sleep(0)
    target.answer = lambda message: target.gate.clear() if message.data == b"1" else None
    later = await topic.enqueue(b"2")
    await flushing
    assert not later.done()
    target.gate.set()
    await later


async def test_nothing_is_admitted_once_the_close_has_begun() -> None:
    target = ScriptedTarget()
    topic = topic_of(target)
    await topic.enqueue(b"1")
    closing = asyncio.create_task(topic.close())
    await asyncio.sleep(0)
    with pytest.raises(Closed):
        await topic.enqueue(b"2")
    await closing
    assert target.bodies == [b"1"]


async def test_a_failed_call_does_not_affect_messages_admitted_with_it() -> None:
    target = ScriptedTarget()
    topic = topic_of(target, able=capabilities(ordered_calls=True))
    target.answer = lambda message: ConnectionFailed("gone") if message.data == b"1" and len(target.calls) < 3 else None
    futures = [await topic.enqueue(b"%d" % number, key=b"k%d" % number) for number in range(4)]
    assert [receipt.offset for receipt in await asyncio.gather(*futures)] == [1, 4, 2, 3]
    assert [[message.data for message in call] for call in target.calls] == [[b"0", b"1", b"2", b"3"], [b"1"], [b"1"]]


async def test_a_caller_cancelled_behind_a_full_batch_has_queued_its_message() -> None:
    target = ScriptedTarget()
    topic = topic_of(target, pipeline=PipelineSettings(max_batch=2))

    async def caller() -> None:
        for number in range(1, 5):
            await topic.enqueue(b"%d" % number)

    task = asyncio.create_task(caller())
    asyncio.get_running_loop().call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    await topic.flush()
    assert target.bodies == [b"1", b"2", b"3"]


async def test_the_failure_of_a_message_whose_caller_was_cancelled_is_reported() -> None:
    target = ScriptedTarget()
    topic = topic_of(target, pipeline=PipelineSettings(max_messages=1))
    target.answer = lambda message: MessageTooLarge("refused") if message.data == b"2" else None
    target.gate.clear()
    first = await topic.enqueue(b"1")
    second = asyncio.create_task(topic.enqueue(b"2"))
    first.add_done_callback(lambda _: second.cancel())
    await target.called.wait()
    target.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await second
    with pytest.raises(PublishError, match="refused"):
        await topic.flush()
    assert [[message.data for message in call] for call in target.calls] == [[b"1"], [b"2"]]
