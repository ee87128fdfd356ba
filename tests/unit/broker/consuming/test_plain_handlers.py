"""Handlers that are not `async def`: they run in threads, and work that cannot be stopped is reported."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest

import broker
from broker import AlreadySettled, BlockingMessage, BlockingMessageBatch, Closed, Message, Outcome, SettleState
from broker.hooks import Hooks
from broker.testing import call_handler, make_message
from broker.threads.portal import Portal
from tests.unit.broker.consuming.scripted_source import Letters, ScriptedSource, consuming, until

current: ContextVar[str] = ContextVar("current", default="none")
PATIENCE = 60.0


class Gate:
    """Blocks handlers in their threads until it is opened."""

    def __init__(self) -> None:
        self.begun: list[BlockingMessage[Any]] = []
        self.ended: list[BlockingMessage[Any]] = []
        self._open = threading.Event()

    def handle(self, message: BlockingMessage[Any]) -> None:
        self.begun.append(message)
        assert self._open.wait(PATIENCE)
        self.ended.append(message)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


def source_of(*ids: str) -> ScriptedSource:
    source = ScriptedSource(redelivers=False)
    source.add(*ids)
    return source


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "broker-handler"}


async def test_returning_acks_and_raising_fails() -> None:
    source, letters = source_of("1", "2"), Letters()
    async with consuming(source, letters=letters, retry=broker.Retry(max_attempts=1), stop_when_idle=0.01) as consumer:

        def handle(message: BlockingMessage[Any]) -> str:
            if message.id == "2":
                raise ValueError("no use")
            return "a result is ignored"

        await consumer.receive(handle)
    assert source.outcomes(Outcome.ACK) == ["1", "2"]
    assert [letter.attributes["dead-letter-error"] for letter in letters.written] == ["ValueError: no use"]


async def test_every_way_to_settle_blocks_the_thread_and_works() -> None:
    source, letters = source_of("1", "2", "3", "4"), Letters()
    states: dict[str, SettleState] = {}
    async with consuming(source, letters=letters, stop_when_idle=0.01) as consumer:

        def handle(message: BlockingMessage[Any]) -> None:
            message.extend(60)
            if message.id == "1":
                message.ack()
            elif message.id == "2":
                message.nack(delay=900)
            elif message.id == "3":
                message.reject("no use")
            else:
                with message:
                    assert message.state is SettleState.OPEN
            states[message.id] = message.state

        await consumer.receive(handle)
    # The ack at the end of a block is not waited for.
    assert [states[each] for each in "123"] == [SettleState.SETTLED] * 3
    assert source.outcomes(Outcome.ACK) == ["1", "3", "4"]
    assert source.outcomes(Outcome.NACK) == ["2"]
    assert [letter.attributes["dead-letter-reason"] for letter in letters.written] == ["no use"]


async def test_a_handler_runs_in_a_copy_of_the_context_with_its_interceptors() -> None:
    hooks = Hooks()

    @contextmanager
    def around(message: Message[Any]) -> Generator[None]:
        token = current.set(f"around {message.id}")
        yield
        current.reset(token)

    hooks.around_handling(around)
    seen: list[str] = []
    async with consuming(source_of("1", "2"), hooks=hooks, stop_when_idle=0.01) as consumer:

        def handle(message: BlockingMessage[Any]) -> None:
            seen.append(current.get())
            current.set("the handler")

        await consumer.receive(handle)
    assert seen == ["around 1", "around 2"]


async def test_threads_are_as_many_as_the_concurrency_and_end_with_the_call(gate: Gate) -> None:
    before = threads()
    async with consuming(source_of("1", "2", "3", "4"), stop_when_idle=0.01) as consumer:
        receiving = asyncio.create_task(consumer.receive(gate.handle, concurrency=3))
        await until(lambda: len(gate.begun) == 3)
        assert len(threads() - before) == 3
        gate.open()
        await receiving
    assert len(gate.ended) == 4
    await until(lambda: threads() <= before)


class Callables:
    def __init__(self, called: Callable[[threading.Thread], object]) -> None:
        self._called = called

    async def method(self, message: Message[Any]) -> None:
        await asyncio.sleep(0)
        self._called(threading.current_thread())

    def plain_method(self, message: BlockingMessage[Any]) -> None:
        self._called(threading.current_thread())

    async def with_more(self, more: object, message: Message[Any]) -> None:
        await self.method(message)


class AsyncCallable(Callables):
    async def __call__(self, message: Message[Any]) -> None:
        await self.method(message)


class PlainCallable(Callables):
    def __call__(self, message: BlockingMessage[Any]) -> None:
        self.plain_method(message)


@pytest.mark.parametrize(
    ("make", "in_thread"),
    [
        (lambda called: Callables(called).method, False),
        (lambda called: partial(Callables(called).with_more, 1), False),
        (AsyncCallable, False),
        (lambda called: partial(AsyncCallable(called)), False),
        (lambda called: Callables(called).plain_method, True),
        (PlainCallable, True),
        (lambda called: partial(PlainCallable(called)), True),
        (lambda called: lambda message: Callables(called).plain_method(message), True),
    ],
)
async def test_what_is_not_async_runs_in_a_thread(make: Callable[[Any], Any], in_thread: bool) -> None:
    called: list[threading.Thread] = []
    async with consuming(source_of("1"), stop_when_idle=0.01) as consumer:
        await consumer.receive(make(called.append))
    assert [thread is not threading.current_thread() for thread in called] == [in_thread]


async def test_a_handler_that_exceeds_its_timeout_fails_and_is_told(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    source, letters = source_of("1"), Letters()
    retry = broker.Retry(max_attempts=1, timeout=0.01)
    raised: list[BaseException] = []

    def handle(message: BlockingMessage[Any]) -> None:
        gate.handle(message)
        assert message.lease_lost
        try:
            message.nack()
        except AlreadySettled as error:
            raised.append(error)

    async with consuming(source, letters=letters, retry=retry) as consumer:
        receiving = asyncio.create_task(consumer.receive(handle))
        await until(lambda: source.outcomes(Outcome.ACK) == ["1"])
        assert letters.written[0].attributes["dead-letter-error"] == (
            "TimeoutError: the handler ran for more than 0.01 s"
        )
        assert "handle still runs in its thread with message '1' of 'orders'" in caplog.text
        gate.open()
        await until(lambda: raised)
        consumer.stop()
        await receiving


async def test_a_close_waits_for_threads(gate: Gate) -> None:
    source = source_of("1")
    async with consuming(source) as consumer:
        receiving = asyncio.create_task(consumer.receive(gate.handle))
        await until(lambda: gate.begun)
        closing = asyncio.create_task(consumer.close())
        await asyncio.sleep(0.01)
        assert not closing.done()
        gate.open()
        await closing
        await receiving
    assert source.outcomes(Outcome.ACK) == ["1"]


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_a_thread_that_is_left_behind_is_told_and_its_message_is_released(
    gate: Gate, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    source = source_of("1")
    async with consuming(source, close_timeout=0.01) as consumer:
        receiving = asyncio.create_task(consumer.receive(gate.handle))
        await until(lambda: gate.begun)
        if how == "close":
            await consumer.close()
            await receiving
        else:
            receiving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await receiving
        await until(lambda: source.outcomes(Outcome.RELEASE) == ["1"])
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.getMessage() == (
        "Handler Gate.handle still runs in its thread with message '1' of 'orders', which was taken from it: a thread "
        "cannot be stopped. Its outcome is ignored"
    )
    assert gate.begun[0].lease_lost
    gate.open()
    await until(lambda: gate.ended)
    assert source.outcomes(Outcome.ACK) == []


async def test_batches_are_handled_in_a_thread_with_a_result_for_each_message() -> None:
    source = source_of("1", "2", "3")
    letters = Letters()
    async with consuming(source, letters=letters, retry=broker.Retry(max_attempts=1), stop_when_idle=0.01) as consumer:

        def handle(batch: BlockingMessageBatch[Any]) -> Sequence[BaseException | None]:
            assert threading.current_thread() is not threading.main_thread()
            assert [message.id for message in batch[:1]] == [batch[0].id]
            return [ValueError("no use") if message.id == "2" else None for message in batch]

        await consumer.receive_batches(handle, max_messages=3)
    assert [letter.attributes["dead-letter-id"] for letter in letters.written] == ["2"]
    assert sorted(source.outcomes(Outcome.ACK)) == ["1", "2", "3"]


async def test_a_batch_that_is_left_behind_is_told(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    batches: list[BlockingMessageBatch[Any]] = []

    def handle(batch: BlockingMessageBatch[Any]) -> None:
        batches.append(batch)
        gate.handle(batch[0])

    batch = broker.MessageBatch([make_message(b"body") for _ in range(3)])
    handling = asyncio.create_task(call_handler(handle, batch))
    await until(lambda: gate.begun)
    assert not any(message.lease_lost for message in batches[0])
    handling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handling
    assert all(message.lease_lost for message in batches[0])
    assert all(message.lease_lost for message in batches[0][1:])
    assert "and 2 more, which was taken from it" in caplog.text


class Exit(BaseException):
    pass


async def test_an_exit_in_a_thread_ends_receive_and_releases_the_message() -> None:
    source = source_of("1")
    async with consuming(source) as consumer:

        def handle(message: BlockingMessage[Any]) -> None:
            raise Exit

        with pytest.raises(Exit):
            await consumer.receive(handle)
        await until(lambda: source.outcomes(Outcome.RELEASE) == ["1"])


@pytest.mark.parametrize("by", ["receive", "receive_batches"])
async def test_a_plain_handler_that_returns_an_awaitable_ends_receive(by: str) -> None:
    source, letters = source_of("1"), Letters()
    async with consuming(source, letters=letters) as consumer:
        with pytest.raises(broker.ConfigurationError) as raised:
            await getattr(consumer, by)(lambda given: asyncio.sleep(0))
        await until(lambda: source.outcomes(Outcome.RELEASE) == ["1"])
    assert "is a plain function, which runs in a thread, and returned a coroutine" in raised.value.message
    assert raised.value.advice == "Write the handler with `async def`"
    assert letters.written == []


async def test_a_message_that_leaves_its_thread_for_the_loop_says_so() -> None:
    async with consuming(source_of("1"), stop_when_idle=0.01) as consumer:
        kept: list[BlockingMessage[Any]] = []
        await consumer.receive(kept.append)
    with pytest.raises(broker.BrokerError, match="on the event loop of the bus"):
        kept[0].ack()


def test_a_thread_whose_loop_has_ended_is_told() -> None:
    async def main() -> Portal:
        return Portal.to_running_loop()

    portal = asyncio.run(main())
    raised: list[BaseException] = []

    def call() -> None:
        try:
            portal.call(asyncio.sleep, 0)
        except Closed as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(PATIENCE)
    assert "its event loop ended" in str(raised[0])


async def test_run_and_serve_take_plain_handlers(broker_bus: broker.Bus) -> None:
    await broker_bus.admin.ensure_topic("orders")
    await broker_bus.topic("orders").publish_batch([b"1", b"2"])
    handled: list[bytes | None] = []

    def handle(message: BlockingMessage[bytes]) -> None:
        handled.append(message.data)

    inbox = broker_bus.messages("orders", subscription="billing", stop_when_idle=0.01)
    await broker.serve(inbox.handled_by(handle, concurrency=2))
    assert {*handled} == {b"1", b"2"}


async def test_call_handler_calls_both_kinds() -> None:
    before = threads()
    on_loop: list[bool] = []

    async def handle(message: Message[bytes]) -> str:
        on_loop.append(threading.current_thread() is threading.main_thread())
        await message.ack()
        return "ignored"

    def handle_plain(message: BlockingMessage[bytes]) -> str:
        on_loop.append(threading.current_thread() is threading.main_thread())
        message.reject("no use")
        return "ignored"

    def fail(message: BlockingMessage[bytes]) -> None:
        raise ValueError("no use")

    def handle_batch(batch: BlockingMessageBatch[bytes]) -> Sequence[BaseException | None]:
        return [None for _ in batch]

    first, second = make_message(b"1"), make_message(b"2")
    await call_handler(handle, first)
    await call_handler(handle_plain, second)
    assert on_loop == [True, False]
    assert (first.outcome, second.outcome) == (Outcome.ACK, Outcome.REJECT)
    with pytest.raises(ValueError, match="no use"):
        await call_handler(fail, make_message(b"3"))
    assert await call_handler(handle_batch, broker.MessageBatch([make_message(b"4")])) == [None]
    await until(lambda: threads() <= before)
