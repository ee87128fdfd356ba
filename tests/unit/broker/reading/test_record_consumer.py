"""The record consumer over a scripted source: results of its calls, opening, failures and closing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.consumer_state import ConsumerState
from broker.driver.contract import RecordSubscription
from broker.errors import (
    BackendError,
    Closed,
    ConfigurationError,
    ConnectionFailed,
    NotAuthorized,
    TopicNotFound,
    Unsupported,
)
from broker.hooks import FetchFailed, Hooks
from broker.protocols import BatchedRecordIterator, BatchedRecordStream, RecordIterator, RecordStream
from broker.reading.record_consumer import RecordConsumer
from tests.unit.broker.consuming.warp import in_jumping_time
from tests.unit.broker.reading.record_bench import P0, bench, drain, turns
from tests.unit.broker.reading.record_fakes import FakeBackend


async def test_a_batch_has_the_available_records_up_to_the_maximum() -> None:
    async with bench() as b:
        b.source.append(*range(10))
        await b.buffered(10)
        assert [r.offset for r in await b.consumer.next_batch(4)] == [0, 1, 2, 3]
        assert [r.offset for r in await b.consumer.next_batch(100)] == [4, 5, 6, 7, 8, 9]
        with pytest.raises(ConfigurationError):
            await b.consumer.next_batch(0)


async def test_cancelled_waiters_lose_no_record() -> None:
    async with bench() as b:
        got: list[int] = []

        async def one() -> None:
            record = await b.consumer.next_record()
            assert record is not None
            got.append(record.offset)

        for offset in range(50):
            waiting = [asyncio.create_task(one()) for _ in range(3)]
            await asyncio.sleep(0)
            b.source.append(offset)
            waiting[offset % 3].cancel()
            await asyncio.sleep(0)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        while (record := await b.consumer.next_record(timeout=0.01)) is not None:
            got.append(record.offset)
        assert sorted(got) == list(range(50))


async def test_a_retriable_error_is_an_event_and_the_fetch_goes_on() -> None:
    async with bench() as b:
        b.source.fail(ConnectionFailed("cut"))
        b.source.append(1)
        record = await b.consumer.next_record(timeout=60)
        assert record is not None
        (event,) = b.of(FetchFailed)
        assert isinstance(event, FetchFailed)
        assert event.topic == "orders"
        assert 0 < event.pause <= 0.12
        assert b.consumer.state is ConsumerState.RUNNING


async def test_the_state_follows_the_fetches() -> None:
    async with bench() as b:
        assert b.consumer.state is ConsumerState.RUNNING
        b.source.fail(ConnectionFailed("cut"))
        await b.until(lambda: bool(b.of(FetchFailed)))
        assert b.consumer.state is ConsumerState.RETRYING
        b.source.append(1)
        assert await b.consumer.next_record(timeout=60) is not None
        assert b.consumer.state is ConsumerState.RUNNING
        await b.consumer.close()
        assert b.consumer.state is ConsumerState.STOPPED


async def test_backoff_grows_with_jitter() -> None:
    async with bench() as b:
        for _ in range(3):
            b.source.fail(ConnectionFailed("cut"))
        b.source.append(1)
        assert await b.consumer.next_record(timeout=60) is not None
        pauses = [event.pause for event in b.of(FetchFailed) if isinstance(event, FetchFailed)]
        assert 0.08 <= pauses[0] <= 0.12 < 0.16 <= pauses[1] <= 0.24 < 0.32 <= pauses[2] <= 0.48


async def test_a_fatal_error_is_raised_once_after_earlier_records() -> None:
    async with bench() as b:
        b.source.append(1, 2)
        await b.buffered(2)
        b.source.fail(NotAuthorized("no"))
        await b.until(lambda: b.consumer._fetcher.error is not None)
        assert len(await b.consumer.next_batch()) == 2
        with pytest.raises(NotAuthorized):
            await b.consumer.next_batch()
        with pytest.raises(Closed, match="no"):
            await b.consumer.next_batch()
        assert [r async for r in b.consumer] == []


async def test_a_waiting_call_raises_a_fatal_error_at_once() -> None:
    async with bench() as b:
        waiting = asyncio.create_task(b.consumer.next_record())
        await asyncio.sleep(0)
        b.source.fail(NotAuthorized("no"))
        with pytest.raises(NotAuthorized):
            await asyncio.wait_for(waiting, 60)


async def test_an_unexpected_error_of_the_backend_is_a_backend_error() -> None:
    async with bench() as b:
        b.source.fail(ZeroDivisionError("oops"))
        with pytest.raises(BackendError, match="oops") as caught:
            await b.consumer.next_record(timeout=60)
        assert isinstance(caught.value.native, ZeroDivisionError)


async def test_calls_after_close_raise_closed_and_iterations_end() -> None:
    async with bench() as b:
        waiting = asyncio.create_task(b.consumer.next_record())
        iterating = asyncio.create_task(drain(b.consumer))
        await asyncio.sleep(0)
        await b.consumer.close()
        with pytest.raises(Closed):
            await waiting
        assert await iterating == []
        for call in (b.consumer.next_record, b.consumer.next_batch, b.consumer.commit, b.consumer.committed):
            with pytest.raises(Closed):
                await call()
        with pytest.raises(Closed):
            b.consumer.pause()
        assert [batch async for batch in b.consumer.batches()] == []
        assert b.source.closed


async def test_calls_before_open_raise_with_advice() -> None:
    backend: Any = FakeBackend()
    consumer = RecordConsumer(backend, RecordSubscription(topics=["orders"], group="g"), hooks=Hooks())
    with pytest.raises(Closed, match="async with"):
        await consumer.next_record()
    with pytest.raises(Closed, match="async with"):
        _ = [r async for r in consumer]
    await consumer.close()
    with pytest.raises(Closed):
        await consumer.__aenter__()


async def test_a_close_during_the_join_leaves_the_group() -> None:
    backend: Any = FakeBackend()
    consumer = RecordConsumer(backend, RecordSubscription(topics=["orders"], group="g"), hooks=Hooks())

    async def join_and_be_closed() -> None:
        with pytest.raises(Closed, match="async with"):
            await consumer.next_record()
        await consumer.close()

    backend.joining = join_and_be_closed
    with pytest.raises(Closed):
        await consumer.__aenter__()
    assert backend.source.closed
    assert consumer.closed


async def test_a_missing_topic_or_family_raises_at_open() -> None:
    backend: Any = FakeBackend()

    async def refuse() -> None:
        raise TopicNotFound("no orders")

    backend.joining = refuse
    subscription = RecordSubscription(topics=["orders"], group="g")
    with pytest.raises(TopicNotFound):
        await RecordConsumer(backend, subscription, hooks=Hooks()).__aenter__()
    from dataclasses import replace

    backend.capabilities = replace(backend.capabilities, records=None)
    with pytest.raises(Unsupported, match="no records"):
        await RecordConsumer(backend, subscription, hooks=Hooks()).__aenter__()


async def test_the_fetch_is_interrupted_and_never_cancelled() -> None:
    async with bench() as b:
        await turns()
    assert b.source.closed
    assert not b.source.fetch_cancelled


@in_jumping_time
async def test_close_returns_in_time_if_the_source_does_not_answer() -> None:
    async with bench(close_timeout=0.05) as b:
        b.source.deaf = True
        await turns()
        loop = asyncio.get_running_loop()
        began = loop.time()
        await b.consumer.close()
        assert loop.time() - began < 1.5
        await b.consumer.close()


async def test_a_cancelled_close_continues() -> None:
    async with bench() as b:
        call, answer = await b.commit_under_way()
        closing = asyncio.create_task(b.consumer.close())
        await turns()
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        assert not b.source.closed, "it waits for the commit that is under way"
        answer.set()
        await call
        await b.until(lambda: b.source.closed)
        assert b.source.stored == {P0: 2}


async def test_the_consumer_satisfies_the_protocols() -> None:
    backend: Any = FakeBackend()
    consumer = RecordConsumer(backend, RecordSubscription(topics=["orders"], group="g"), hooks=Hooks())
    one: RecordIterator[bytes] = consumer
    many: BatchedRecordIterator[bytes] = consumer
    stream: RecordStream[bytes] = consumer
    batches: BatchedRecordStream[bytes] = consumer
    for call in (one.next_record(), many.next_batch(), anext(aiter(stream)), anext(aiter(batches.batches()))):
        with pytest.raises(Closed, match="not open"):
            await call
