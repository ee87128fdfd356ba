"""Handlers of messages and batches: timeouts, results, cancellation and interceptors."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from broker.consuming.retry.policy import Retry
from broker.errors import ConfigurationError
from broker.hooks import Hooks
from broker.messages import Message, MessageBatch, Outcome
from tests.unit.broker.consuming.scripted_source import Letters, ScriptedSource, consuming, until


async def test_a_handler_that_exceeds_its_timeout_fails() -> None:
    source = ScriptedSource()
    letters = Letters()
    source.add("1")
    retry = Retry(max_attempts=1, timeout=0.01, initial=0, maximum=0)
    async with consuming(source, retry=retry, letters=letters, stop_when_idle=0.05) as consumer:

        async def handle(message: Message) -> None:
            await asyncio.Event().wait()

        await consumer.receive(handle)
    error = letters.written[0].attributes["dead-letter-error"]
    assert error == "TimeoutError: the handler ran for more than 0.01 s"


async def test_a_cancelled_receive_reports_the_handler_error(caplog: pytest.LogCaptureFixture) -> None:
    class Boom(BaseException):
        pass

    source = ScriptedSource()
    source.add("1", "2", "3")
    complaints: list[object] = []
    raised: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with consuming(source) as consumer:

        async def handle(message: Message) -> None:
            if message.id != "1":
                raised.append(message.id)
                raise Boom(message.id)
            await asyncio.Event().wait()

        receiving = asyncio.create_task(consumer.receive(handle, concurrency=3))
        await until(lambda: len(raised) == 2)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        del receiving
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []
    assert "Boom" in caplog.text


@pytest.mark.parametrize("result", [2, True, "ok", [True, False], {"1": None}])
@pytest.mark.parametrize("plain", [False, True])
async def test_a_batch_handler_that_returns_no_results_ends_receive_and_fails_no_message(
    result: Any, plain: bool
) -> None:
    source = ScriptedSource(redelivers=False)
    source.add("1", "2")
    async with consuming(source, drop=True, retry=Retry(max_attempts=1)) as consumer:

        async def handle(batch: MessageBatch) -> Any:
            return result

        handler: Any = (lambda batch: result) if plain else handle
        with pytest.raises(ConfigurationError, match="The batch handler returned a"):
            await consumer.receive_batches(handler)
    assert source.outcomes(Outcome.RELEASE) == ["1", "2"]
    assert source.outcomes(Outcome.REJECT) == []


async def test_a_cancelled_batch_handler_releases_the_batch() -> None:
    source = ScriptedSource(redelivers=False)
    source.add("1", "2", "3", "4")
    async with consuming(source) as consumer:
        held: list[str] = []

        async def handle(batch: MessageBatch) -> None:
            held.extend(message.id for message in batch)
            await asyncio.Event().wait()

        async def receive() -> None:
            await consumer.receive_batches(handle, max_messages=4, concurrency=4)

        receiving = asyncio.create_task(receive())
        await until(lambda: len(held) == 4)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        await until(lambda: len(source.outcomes(Outcome.RELEASE)) == 4)


async def test_a_batch_handler_that_exceeds_its_timeout_fails() -> None:
    source = ScriptedSource()
    letters = Letters()
    source.add("1", "2")
    retry = Retry(max_attempts=1, timeout=0.01, initial=0, maximum=0)
    async with consuming(source, retry=retry, letters=letters, stop_when_idle=0.05) as consumer:

        async def handle(batch: MessageBatch) -> None:
            await asyncio.Event().wait()

        await consumer.receive_batches(handle)
    assert sorted(letter.attributes["dead-letter-id"] for letter in letters.written) == ["1", "2"]


async def test_interceptors_wrap_handlers_and_blocks_and_batches_as_a_whole() -> None:
    source = ScriptedSource()
    hooks = Hooks()
    seen: list[str] = []

    @contextmanager
    def around(message: Message) -> Generator[None]:
        seen.append(f"begin {message.id}")
        yield
        seen.append(f"end {message.id}")

    @contextmanager
    def around_batch(messages: Sequence[Message]) -> Generator[None]:
        seen.append(f"begin batch of {len(messages)}")
        try:
            yield
        except ValueError as error:
            seen.append(f"failed: {error}")
            raise

    hooks.around_handling(around)
    hooks.around_batch(around_batch)
    source.add("1")
    async with consuming(source, hooks=hooks) as consumer:

        async def handle(message: Message) -> None:
            seen.append("handler")
            consumer.stop()

        await consumer.receive(handle)
    source.add("2")
    async with consuming(source, hooks=hooks) as consumer:
        message = await consumer.next_message(timeout=60)
        assert message is not None
        async with message:
            seen.append("block")
    source.add("3")
    async with consuming(source, hooks=hooks) as consumer:

        async def handle_batch(batch: MessageBatch) -> None:
            seen.append("batch")
            consumer.stop()
            raise ValueError("bad")

        await consumer.receive_batches(handle_batch)
    assert seen == [
        *("begin 1", "handler", "end 1"),
        *("begin 2", "block", "end 2"),
        *("begin batch of 1", "batch", "failed: bad"),
    ]


async def test_an_interceptor_that_raises_changes_nothing() -> None:
    source = ScriptedSource()
    hooks = Hooks()

    @contextmanager
    def fails_before(message: Message) -> Generator[None]:
        raise RuntimeError("before")
        yield

    @contextmanager
    def fails_after(message: Message) -> Generator[None]:
        yield
        raise RuntimeError("after")

    hooks.around_handling(fails_before)
    hooks.around_handling(fails_after)
    source.add("1")
    async with consuming(source, hooks=hooks) as consumer:

        async def handle(message: Message) -> None:
            consumer.stop()

        await consumer.receive(handle)
    assert source.outcomes(Outcome.ACK) == ["1"]
