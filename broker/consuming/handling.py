"""Runs one handler and settles what it leaves open. It may raise anything; only cancellation and the like go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from broker.consuming import scopes
from broker.consuming.engine import intake_of
from broker.consuming.isolation import Isolated
from broker.errors import BrokerError, ConfigurationError
from broker.messages import Message

__all__ = ["check_handler", "conclude", "within"]


class NotAsync(ConfigurationError):
    """The handler is no coroutine function: no message is to be blamed for that."""


def check_handler(handler: object) -> None:
    if not callable(handler):
        raise ConfigurationError(f"The handler is {handler!r}", advice="It takes an `async def` function")


async def within(timeout: float | None, handling: Awaitable[Any]) -> Any:
    """Run a handler in a context of its own, for so many seconds at most."""
    if not hasattr(handling, "__await__"):
        raise NotAsync(
            f"The handler returned {handling!r} instead of an awaitable",
            advice="Write it with `async def`, or use broker.blocking for handlers that are plain functions",
        )
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
    """Settle what a handler left open; the error that is to go on, such as a cancellation."""
    intake = intake_of(message)
    message.in_use = False
    scopes.leave(message, error)
    intake.returned(message)
    if error is None:
        intake.ack_soon(message)
        return None
    if isinstance(error, asyncio.CancelledError) and not _is_being_cancelled():
        error = BrokerError(f"The handler of message {message.id!r} was cancelled from inside", native=error)
    if isinstance(error, Exception) and not isinstance(error, NotAsync):
        intake.engine.disposition.handler_failed(intake, message, error)
        return None
    intake.release([message])
    return error


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
