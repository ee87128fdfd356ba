"""`topic.enqueue`: order per key, bounds, futures, reported failures, isolated callers."""

from __future__ import annotations

import asyncio

import pytest

from broker.errors import (
    BackendError,
    BrokerError,
    Closed,
    ConnectionFailed,
    InvalidMessage,
    OperationTimeout,
    PublishError,
)
from broker.outbound import OutboundMessage
from broker.publishing.pipeline import PipelineSettings
from broker.receipts import Receipt
from tests.unit.broker.consuming.scripted_target import ScriptedTarget, capabilities, topic_of


async def test_messages_of_one_turn_of_the_loop_are_one_batch() -> None:
    target = ScriptedTarget()
    topic = topic_of(target)
    futures = [await topic.enqueue(b"%d" % n) for n in range(100)]
    assert not target.calls
    receipts = await asyncio.gather(*futures)
    assert [receipt.offset for receipt in receipts] == list(range(1, 101))
    assert [len(call) for call in target.calls] == [100]


async def test_messages_that_arrive_while_calls_run_are_the_next_batch() -> None:
    target = ScriptedTarget()
    topic = topic_of(target, pipeline=PipelineSettings(in_flight=2))
    target.gate.clear()
    for n in range(10):
        await topic.enqueue(b"%d" % n)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [len(call) for call in target.calls] == [1, 1]
    target.gate.set()
    await topic.flush()
    assert [len(call) for call in target.calls] == [1, 1, 8]


async def test_batches_are_bounded_by_messages_and_by_bytes() -> None:
    target = ScriptedTarget()
    topic = topic_of(target, pipeline=PipelineSettings(max_batch=4, max_batch_bytes=25))
    for _ in range(10):
        await topic.enqueue(b"")
    await topic.flush()
    assert [len(call) for call in target.calls] == [4, 4, 2]
    target.calls.clear()
    for _ in range(7):
        await topic.enqueue(b"x" * 10)
    await topic.flush()
    assert sorted(len(call) for call in target.calls) == [1, 3, 3]


async def test_full_batches_are_sent_although_the_caller_never_suspends() -> None:
    target = ScriptedTarget()
    topic = topic_of(target, pipeline=PipelineSettings(max_batch=10, max_messages=1000))
    for n in range(100):
        await topic.enqueue(b"%d" % n)
    assert len(target.published) >= 80


async def test_later_messages_of_a_key_in_flight_wait_and_other_keys_pass() -> None:
    target = ScriptedTarget()
    topic = topic_of(target)
    target.gate.clear()
    await topic.enqueue(b"a1", key=b"a")
    await target.called.wait()
    target.called.clear()
    for body, key in ((b"a2", b"a"), (b"b1", b"b"), (b"n1", None), (b"a3", b"a")):
        await topic.enqueue(body, key=key)
    await target.called.wait()
    assert [[message.data for message in call] for call in target.calls] == [[b"a1"], [b"b1", b"n1"]]
    target.gate.set()
    await topic.flush()
    assert [message.data for message in target.published if message.key == b"a"] == [b"a1", b"a2", b"a3"]
    assert len(target.published) == 5


async def test_full_pipeline_admits_waiting_callers_in_turn() -> None:
    target = ScriptedTarget()
    topic = topic_of(target, pipeline=PipelineSettings(max_messages=3))
    target.gate.clear()
    for n in range(3):
        await topic.enqueue(b"%d" % n, key=b"k")
    waiting = [asyncio.create_task(topic.enqueue(b"%d" % n, key=b"k")) for n in range(3, 9)]
    await target.called.wait()
    assert not any(task.done() for task in waiting)
    target.gate.set()
    receipts = await asyncio.gather(*[await task for task in waiting])
    assert [receipt.offset for receipt in receipts] == [4, 5, 6, 7, 8, 9]
    assert target.bodies == [b"%d" % n for n in range(9)]


async def test_bytes_bound_the_pipeline_and_a_larger_message_goes_alone() -> None:
    target = ScriptedTarget()
    topic = topic_of(target, pipeline=PipelineSettings(max_bytes=10))
    target.gate.clear()
    await topic.enqueue(b"x" * 6)
    second = asyncio.create_task(topic.enqueue(b"x" * 100))
    third = asyncio.create_task(topic.enqueue(b"x"))
    await target.called.wait()
    await asyncio.sleep(0)
    assert not second.done()
    assert not third.done(), "a smaller message must not overtake"
    target.gate.set()
    await (await second)
    await (await third)
    assert [[len(message.data or b"") for message in call] for call in target.calls] == [[6], [100], [1]]


async def test_caller_cancelled_while_it_waits_has_queued_nothing() -> None:
    target = ScriptedTarget()
    topic = topic_of(target, pipeline=PipelineSettings(max_messages=1))
    target.gate.clear()
    first = await topic.enqueue(b"1")
    second = asyncio.create_task(topic.enqueue(b"2"))
    third = asyncio.create_task(topic.enqueue(b"3"))
    await target.called.wait()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    target.gate.set()
    await first
    await (await third)
    assert target.bodies == [b"1", b"3"]


async def test_cancelling_the_first_waiting_caller_admits_the_next() -> None:
    target = ScriptedTarget()
    topic = topic_of(target, pipeline=PipelineSettings(max_bytes=10))
    target.gate.clear()
    await topic.enqueue(b"x" * 6)
    large = asyncio.create_task(topic.enqueue(b"x" * 8))
    small = asyncio.create_task(topic.enqueue(b"x" * 2))
    await target.called.wait()
    await asyncio.sleep(0)
    assert not small.done()
    large.cancel()
    await small
    target.gate.set()
    await topic.flush()
    assert sorted(len(body or b"") for body in target.bodies) == [2, 6]


async def test_cancelled_future_withdraws_nothing() -> None:
    target = ScriptedTarget()
    topic = topic_of(target)
    first, second = await topic.enqueue(b"1"), await topic.enqueue(b"2")
    first.cancel()
    assert (await second).offset == 2
    await topic.flush()
    assert target.bodies == [b"1", b"2"]


async def test_flush_waits_only_for_what_was_enqueued_before_it() -> None:
    target = ScriptedTarget()
    topic = topic_of(target, pipeline=PipelineSettings(in_flight=1, max_batch=1))
    first = await topic.enqueue(b"1")
    flushing = asyncio.create_task(topic.flush())
    await asyncio.sleep(0)
    target.answer = lambda message: target.gate.clear() if message.data == b"1" else None
    second = await topic.enqueue(b"2")
    await flushing
    assert first.done()
    assert not second.done()
    target.gate.set()
    await second


async def test_retrieved_failure_is_not_raised_again() -> None:
    target = ScriptedTarget()
    topic = topic_of(target)
    target.answer = lambda _: InvalidMessage("refused")
    awaited, looked_at, gathered = [await topic.enqueue(b"") for _ in range(3)]
    with pytest.raises(InvalidMessage):
        await awaited
    assert isinstance(looked_at.exception(), InvalidMessage)
    assert isinstance((await asyncio.gather(gathered, return_exceptions=True))[0], InvalidMessage)
    await topic.flush()
    await topic.close()


async def test_task_that_awaits_its_future_retrieves_the_failure_before_flush() -> None:
    target = ScriptedTarget()
    topic = topic_of(target)
    target.answer = lambda _: InvalidMessage("refused")

    async def produce() -> None:
        with pytest.raises(InvalidMessage):
            await (await topic.enqueue(b""))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(20):
            tasks.create_task(produce())
        await asyncio.sleep(0)
        tasks.create_task(topic.flush())


async def test_task_that_is_about_to_await_retrieves_the_failure_before_flush() -> None:
    target = ScriptedTarget()
    topic = topic_of(target)
    target.answer = lambda _: InvalidMessage("refused")
    target.gate.clear()
    future = await topic.enqueue(b"")

    async def look() -> None:
        with pytest.raises(InvalidMessage):
            await future

    looking = asyncio.create_task(look())
    await target.called.wait()
    target.gate.set()
    await asyncio.create_task(topic.flush())
    await looking


@pytest.mark.parametrize("how", ["flush", "close"])
async def test_unretrieved_failure_is_raised_once(how: str) -> None:
    target = ScriptedTarget()
    topic = topic_of(target)
    target.answer = lambda message: InvalidMessage("refused") if message.data != b"good" else None
    for body in (b"bad", b"good", b"worse"):
        await topic.enqueue(body)
    (await topic.enqueue(b"given up")).cancel()
    with pytest.raises(PublishError, match="3 of 3") as raised:
        await (topic.flush() if how == "flush" else topic.close())
    assert all(isinstance(outcome, InvalidMessage) for outcome in raised.value.outcomes)
    await topic.flush()
    await topic.close()
    assert target.closed == 1


async def test_one_failure_does_not_fail_others() -> None:
    target = ScriptedTarget()
    topic = topic_of(target)
    target.answer = lambda message: InvalidMessage("refused") if message.data == b"1" else None
    results = await asyncio.gather(*[await topic.enqueue(b"%d" % n) for n in range(3)], return_exceptions=True)
    assert [type(result) for result in results] == [Receipt, InvalidMessage, Receipt]


async def test_retriable_failure_is_retried_before_later_messages_of_its_key() -> None:
    target = ScriptedTarget()
    topic = topic_of(target)
    failures = 2
    tried: list[OutboundMessage] = []

    def answer(message: OutboundMessage) -> BrokerError | None:
        nonlocal failures
        tried.append(message)
        if message.key == b"a" and failures:
            failures -= 1
            return ConnectionFailed("gone")
        return None

    target.answer = answer
    head = OutboundMessage(b"a1", b"a", id="a1")
    first = await topic.enqueue(head)
    await topic.enqueue(b"b1", key=b"b")
    await target.called.wait()
    await topic.enqueue(b"a2", key=b"a")
    await topic.enqueue(b"b2", key=b"b")
    await topic.flush()
    assert (await first).id == "a1"
    assert [message for message in tried if message.data == b"a1"] == [head] * 3
    assert [message.data for message in target.published if message.key == b"a"] == [b"a1", b"a2"]
    assert target.bodies.index(b"b2") < target.bodies.index(b"a1"), "another key must not wait for the retry"


async def test_failed_call_is_retried_as_a_whole() -> None:
    target = ScriptedTarget()
    topic = topic_of(target)
    target.error = ConnectionFailed("gone")
    target.gate.clear()
    futures = [await topic.enqueue(b"%d" % n, key=b"k") for n in range(3)]
    target.gate.set()
    while len(target.calls) < 2:
        target.called.clear()
        await target.called.wait()
        target.error = None
    await asyncio.gather(*futures)
    assert target.bodies == [b"0", b"1", b"2"]


async def test_retrying_ends_with_the_last_error() -> None:
    target = ScriptedTarget()
    topic = topic_of(target, pipeline=PipelineSettings(retry_for=0.06))
    target.answer = lambda _: ConnectionFailed(f"gone {len(target.calls)}")
    with pytest.raises(ConnectionFailed, match="gone 2"):
        await (await topic.enqueue(b""))
    assert len(target.calls) == 2


@pytest.mark.parametrize(
    ("deduplication", "id", "calls"), [(False, None, 1), (False, "x", 1), (True, None, 1), (True, "x", 2)]
)
async def test_unknown_outcome_is_retried_only_with_deduplication(
    deduplication: bool, id: str | None, calls: int
) -> None:
    target = ScriptedTarget()
    topic = topic_of(target, able=capabilities(deduplication=deduplication))
    target.answer = lambda _: OperationTimeout("no answer") if len(target.calls) == 1 else None
    future = await topic.enqueue(OutboundMessage(b"", id=id))
    await asyncio.wait([future])
    assert len(target.calls) == calls
    assert isinstance(future.exception(), OperationTimeout) is (calls == 1)


async def test_the_copy_of_its_own_first_attempt_is_no_duplicate() -> None:
    target = ScriptedTarget()
    topic = topic_of(target, able=capabilities(deduplication=True))
    answers = iter([OperationTimeout("no answer"), Receipt("x", duplicate=True), Receipt("y", duplicate=True)])
    target.answer = lambda _: next(answers)
    assert not (await (await topic.enqueue(OutboundMessage(b"", id="x")))).duplicate
    assert (await (await topic.enqueue(OutboundMessage(b"", id="y")))).duplicate


async def test_failure_overtaken_by_a_later_message_of_its_key_is_not_retried() -> None:
    target = ScriptedTarget()
    topic = topic_of(target)
    target.answer = lambda message: (
        ConnectionFailed("gone") if message.data == b"2" and len(target.calls) == 1 else None
    )
    messages = [(b"1", b"k"), (b"2", b"k"), (b"3", b"k"), (b"2", b"other")]
    results = await asyncio.gather(*[await topic.enqueue(b, key=k) for b, k in messages], return_exceptions=True)
    assert [type(result) for result in results] == [Receipt, ConnectionFailed, Receipt, Receipt]
    assert target.bodies == [b"1", b"3", b"2"]


async def test_close_sends_what_is_queued_and_refuses_callers_that_wait() -> None:
    target = ScriptedTarget()
    topic = topic_of(target, pipeline=PipelineSettings(max_messages=2, in_flight=1, max_batch=1))
    target.gate.clear()
    futures = [await topic.enqueue(b"1"), await topic.enqueue(b"2")]
    waiting = asyncio.create_task(topic.enqueue(b"3"))
    await target.called.wait()
    closing = asyncio.create_task(topic.close())
    with pytest.raises(Closed):
        await waiting
    target.gate.set()
    await closing
    assert [future.result().offset for future in futures] == [1, 2]
    assert target.bodies == [b"1", b"2"]


async def test_close_fails_what_it_could_not_send_in_time() -> None:
    target = ScriptedTarget()
    topic = topic_of(target, pipeline=PipelineSettings(in_flight=1))
    target.gate.clear()
    sent = await topic.enqueue(b"1", key=b"k")
    await target.called.wait()
    behind, queued = await topic.enqueue(b"2", key=b"k"), await topic.enqueue(b"3")
    with pytest.raises(PublishError, match="3 of 3"):
        await topic.close(timeout=0.01)
    assert isinstance(sent.exception(), OperationTimeout)
    assert isinstance(behind.exception(), Closed)
    assert isinstance(queued.exception(), Closed)
    assert not target.running
    assert target.closed == 1


async def test_close_during_retries_reports_the_last_error() -> None:
    target = ScriptedTarget()
    topic = topic_of(target)
    target.answer = lambda _: ConnectionFailed("gone")
    future = await topic.enqueue(b"1")
    with pytest.raises(PublishError, match="gone"):
        await topic.close(timeout=0.01)
    assert isinstance(future.exception(), ConnectionFailed)


async def test_error_outside_the_contract_fails_only_its_batch() -> None:
    target = ScriptedTarget()
    topic = topic_of(target)
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    target.error = ZeroDivisionError("bug")
    with pytest.raises(BackendError, match="bug"):
        await (await topic.enqueue(b"1", key=b"k"))
    target.error = None
    assert (await (await topic.enqueue(b"2", key=b"k"))).offset == 1
    await topic.close()
