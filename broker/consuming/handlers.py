"""The workers behind `receive` and `receive_batches`: take messages, run the handler, settle what it leaves open.

One worker handles one message, or one batch, at a time. The handler runs in a copy of the context (`Isolated`), without
a task of its own, so that one handler's context variables are not seen by the next. A plain function runs in a thread
(`ThreadedHandler`), for which its worker waits.

*Cancellation.* Cancellation and `timeout` act on the handler as on any awaited call; the messages of a cancelled
handler are released. *Failure.* A handler may raise any `Exception`: the retry policy settles the message. Any other
error ends all workers, after at most `close_timeout` seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextvars import copy_context
from typing import Any

from broker.consuming.engine import Engine, policy_of
from broker.errors import BrokerError, Closed, ConfigurationError
from broker.hooks import Scope, logger
from broker.messages import Message, MessageBatch
from broker.protocols import AsyncBatchHandler, AsyncHandler
from broker.threads.plain_handlers import ReturnedAwaitable

__all__ = ["LAST_CHANCE", "Isolated", "conclude", "handle_batches", "handle_each", "within", "work"]


class Isolated:
    """`await Isolated(awaitable)` is `await awaitable` in a copy of the current context."""

    __slots__ = ("_awaitable",)

    def __init__(self, awaitable: Awaitable[Any]) -> None:
        self._awaitable = awaitable

    def __await__(self) -> Generator[Any, Any, Any]:
        run = copy_context().run
        steps: Generator[Any, Any, Any] = run(self._awaitable.__await__)
        try:
            waits_for = run(next, steps)
            while True:
                try:
                    sent = yield waits_for
                except GeneratorExit:
                    run(steps.close)
                    raise
                except BaseException as error:
                    waits_for = run(steps.throw, error)
                else:
                    waits_for = run(steps.send, sent)
        except StopIteration as stop:
            return stop.value


async def within(timeout: float | None, handling: Awaitable[Any]) -> Any:
    """Run a handler in a copy of the context, for at most `timeout` seconds."""
    if timeout is None:
        return await Isolated(handling)
    bound = asyncio.timeout(timeout)
    try:
        async with bound:
            return await Isolated(handling)
    except TimeoutError:
        if bound.expired():
            raise TimeoutError(f"the handler ran for more than {timeout:g} s") from None
        raise


def conclude(message: Message[Any], error: BaseException | None) -> BaseException | None:
    """Settle what a handler left open; return the error to raise, such as a cancellation."""
    policy = policy_of(message)
    in_flight = policy.in_flight
    message.in_use = False
    if message.scope is not None:
        message.scope.leave(error)
        message.scope = None
    in_flight.returned(message)
    if error is None:
        in_flight.ack_soon(message)
        return None
    if isinstance(error, asyncio.CancelledError) and not _is_being_cancelled():
        error = BrokerError(f"The handler of message {message.id!r} was cancelled from inside", native=error)
    of_handler = isinstance(error, ReturnedAwaitable | _NoResults)
    if isinstance(error, Exception) and not of_handler and not policy.raises(error):
        policy.handler_failed(message, error)
        return None
    in_flight.release([message])
    return error


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


LAST_CHANCE = 1.0
"""Seconds for a cancelled handler to clean up; then `receive` returns, even if the handler still runs."""


async def work(
    engine: Engine, name: str, handler: str, concurrency: int, worker: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Run so many workers until they or the engine end; raise their first error.

    :param handler: the name of what the workers call.

    Cancelling the call cancels the workers, which get `LAST_CHANCE` seconds to clean up.
    """
    engine.check()
    cancelled = True
    workers = {asyncio.create_task(worker(), name=f"broker-worker-{name}") for _ in range(concurrency)}
    engine.receivers.workers |= workers
    engine.watch.named(workers, handler)
    ended = asyncio.create_task(engine.ended.wait(), name=f"broker-end-{name}")
    try:
        running = workers
        while running and not ended.done() and not _first_error(workers):
            _, left = await asyncio.wait({*running, ended}, return_when=asyncio.FIRST_COMPLETED)
            running = left & workers
        if running:
            engine.end()
            await asyncio.wait(running, timeout=engine.options.close_timeout)
        cancelled = False
    finally:
        ended.cancel()
        late = [task for task in workers if not task.done()]
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=LAST_CHANCE)
        engine.receivers.workers -= workers
        engine.watch.forget(workers)
        error = _first_error(workers)
        if error is not None and cancelled:
            logger.warning("A cancelled receive hides the error that ended a handler", exc_info=error)
    if error is not None:
        raise error


async def handle_each(engine: Engine, handler: AsyncHandler[Any]) -> None:
    """One worker that handles message by message, until the engine ends."""
    handling = engine.hooks.handling
    timeout = engine.retry.timeout
    watch, time = engine.watch, engine.time
    while True:
        now = time()
        if now > watch.turn_due:
            now = await engine.turn()
        message = engine.take(now)
        if message is None:
            if not _still_runs(engine):
                return
            await engine.wait(1, None)
            continue
        policy = policy_of(message)
        message.in_use = True
        if handling:
            policy.begin(message)
        error: BaseException | None = None
        try:
            await within(timeout, handler(message))
        except BaseException as raised:
            error = raised
        if error is None and message.scope is None:
            message.in_use = False
            policy.in_flight.ack_soon(message)
        else:
            _raise(conclude(message, error))


async def handle_batches(
    engine: Engine, handler: AsyncBatchHandler[Any], max_messages: int, max_wait: float | None = None
) -> None:
    """One worker that handles batch by batch, until the engine ends."""
    interceptors = engine.hooks.batches
    timeout = engine.retry.timeout
    watch, time = engine.watch, engine.time
    while True:
        if max_wait is not None:
            await engine.fill(max_messages, max_wait, None)
        now = time()
        if now > watch.turn_due:
            now = await engine.turn()
        messages = engine.take_batch(max_messages, now)
        if not messages:
            if not _still_runs(engine):
                return
            await engine.wait(max_messages, None)
            continue
        for message in messages:
            message.in_use = True
        scope = Scope(interceptors, messages, "handling") if interceptors else None
        results: Sequence[BaseException | None] | None = None
        try:
            results = _checked(await within(timeout, handler(MessageBatch(messages, engine))))
            if results is not None and len(results) != len(messages):
                raise ValueError(f"The batch handler returned {len(results)} results for {len(messages)} messages")
        except BaseException as raised:
            results = [raised] * len(messages)
        if scope is not None:
            scope.leave(next((error for error in results or () if error is not None), None))
        # Settle all messages of the batch before raising.
        ends = [
            conclude(message, error) for message, error in zip(messages, results or [None] * len(messages), strict=True)
        ]
        _raise(next((end for end in ends if end is not None), None))


class _NoResults(ConfigurationError):
    """A batch handler returned what says nothing of its messages. This does not count as a failure of them."""


def _checked(results: object) -> Sequence[BaseException | None] | None:
    """:raises _NoResults: these are no results of a batch."""
    if results is None:
        return None
    wrong = f"an object of type {type(results).__name__}"
    if isinstance(results, Sequence) and not isinstance(results, str | bytes):
        each_of: Sequence[Any] = results  # pyright: ignore[reportUnknownVariableType]
        odd = next((each for each in each_of if each is not None and not isinstance(each, BaseException)), None)
        if odd is None:
            return each_of
        wrong = f"a list with an object of type {type(odd).__name__}"
    raise _NoResults(
        f"The batch handler returned {wrong}",
        advice="Return None to ack all messages, or a list that has None or an exception for each message",
    )


def _still_runs(engine: Engine) -> bool:
    try:
        return engine.check()
    except Closed as closed:
        # The consumer was closed, or another worker raised the fatal error: either ends this worker.
        if closed.__cause__ is None or engine.receivers.workers:
            return False
        raise


def _first_error(workers: set[asyncio.Task[None]]) -> BaseException | None:
    # Retrieve all exceptions: asyncio logs those that were never retrieved.
    errors = [worker.exception() for worker in workers if worker.done() and not worker.cancelled()]
    return next((error for error in errors if error is not None), None)


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error
