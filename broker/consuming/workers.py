"""The workers behind `receive` and `receive_batches`: tasks that take from an engine, run the handler and settle.

One worker handles one message, or one batch, at a time. A worker that ends by an error ends the others, after
`close_timeout` seconds at the latest; what a cancelled handler held is given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from broker.consuming.engine import Engine, intake_of
from broker.consuming.handling import conclude, within
from broker.errors import Closed
from broker.messages import MessageBatch
from broker.protocols import BatchHandler, Handler

__all__ = ["LAST_CHANCE", "handle_batches", "handle_each", "work"]

logger = logging.getLogger("broker")

LAST_CHANCE = 1.0
"""Seconds for a cancelled handler to clean up; `receive` returns then, whatever the handler does."""


async def work(engine: Engine, name: str, concurrency: int, worker: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Let so many workers work until they end or the engine does, and raise the first error of theirs.

    Cancelling it cancels them, and gives them `LAST_CHANCE`.
    """
    engine.check()
    cancelled = True
    workers = {asyncio.create_task(worker(), name=f"broker-worker-{name}") for _ in range(concurrency)}
    engine.workers |= workers
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
        engine.workers -= workers
        error = _first_error(workers)
        if error is not None and cancelled:
            logger.warning("A cancelled receive hides the error that ended a handler", exc_info=error)
    if error is not None:
        raise error


async def handle_each(engine: Engine, handler: Handler[Any]) -> None:
    """One worker that handles message by message, until the engine has no more to give."""
    handling = engine.hooks.handling
    timeout = engine.disposition.retry.timeout
    while True:
        message = engine.take()
        if message is None:
            if not _still(engine):
                return
            await engine.wait(1, None)
            continue
        intake = intake_of(message)
        message.in_use = True
        if handling:
            intake.begin(message)
        error: BaseException | None = None
        try:
            await within(timeout, handler(message))
        except BaseException as raised:
            error = raised
        if error is None and message.scope is None:
            message.in_use = False
            intake.ack_soon(message)
        else:
            _raise(conclude(message, error))


async def handle_batches(engine: Engine, handler: BatchHandler[Any], max_messages: int) -> None:
    """One worker that handles batch by batch, likewise."""
    handling = engine.hooks.handling
    timeout = engine.disposition.retry.timeout
    while True:
        messages = engine.take_batch(max_messages)
        if not messages:
            if not _still(engine):
                return
            await engine.wait(max_messages, None)
            continue
        for message in messages:
            message.in_use = True
            if handling:
                intake_of(message).begin(message)
        results: Sequence[BaseException | None] | None = None
        try:
            results = await within(timeout, handler(MessageBatch(messages, engine)))
            if results is not None and len(results) != len(messages):
                raise ValueError(f"The batch handler returned {len(results)} results for {len(messages)} messages")
        except BaseException as raised:
            results = [raised] * len(messages)
        # All are settled before anything is raised, so that none of the batch is forgotten.
        ends = [
            conclude(message, error) for message, error in zip(messages, results or [None] * len(messages), strict=True)
        ]
        _raise(next((end for end in ends if end is not None), None))


def _still(engine: Engine) -> bool:
    try:
        return engine.check()
    except Closed as closed:
        # Another worker has raised the fatal error, or somebody closed the consumer: both end this one.
        if closed.__cause__ is None or engine.workers:
            return False
        raise


def _first_error(workers: set[asyncio.Task[None]]) -> BaseException | None:
    # All are asked, since asyncio complains of those that nobody asked.
    errors = [worker.exception() for worker in workers if worker.done() and not worker.cancelled()]
    return next((error for error in errors if error is not None), None)


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error
