"""`ThreadedHandler`: a plain function as the handler of messages or batches; each call runs in a thread.

The function gets the messages of `broker.threads.messages`, and runs in a copy of the context of its worker.

*Cancellation.* A thread cannot be stopped. When a call is cancelled, by `Retry(timeout=)`, a close or the cancellation
of `receive`, its handler is abandoned: a warning names it, `lease_lost` of its messages is True, and its outcome is
ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Generic

from typing_extensions import TypeVar

from broker.checks import name_of
from broker.errors import ConfigurationError
from broker.hooks import Hooks, logger
from broker.messages import Message, MessageBatch
from broker.threads.handler_threads import HandlerExit, HandlerThreads
from broker.threads.messages import Abandonment, BlockingMessage, BlockingMessageBatch
from broker.threads.portal import Portal

__all__ = ["Late", "ReturnedAwaitable", "ThreadedHandler"]

T = TypeVar("T", default=bytes)
Late = Callable[[Sequence[BaseException | None]], Awaitable[object]]
"""Awaited with the error, or None, of each message."""


class ReturnedAwaitable(ConfigurationError):
    """A plain handler returned an awaitable, which nothing awaits. This does not count as a failure of the message."""


class ThreadedHandler(Generic[T]):
    """Runs one handler, as `handle` or `handle_batch`, which are awaited on the loop of the portal.

    :param advice: of the error for a function that returns an awaitable.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        portal: Portal,
        hooks: Hooks,
        *,
        advice: str = "Write the handler with `async def`",
    ) -> None:
        self.threads = HandlerThreads("broker-handler")
        self._function = function
        self._portal = portal
        self._hooks = hooks
        self._advice = advice

    def close(self) -> None:
        """End the threads: idle ones now, others after their call."""
        self.threads.close()

    async def handle(self, message: Message[T]) -> Any:
        """Returns what the function returned.

        :raises Exception: what the function raised.
        """
        abandonment = Abandonment()
        argument = BlockingMessage(message, self._portal, self._hooks, abandonment)
        return await self._run(argument, (message,), abandonment)

    async def handle_batch(self, batch: MessageBatch[T]) -> Sequence[BaseException | None] | None:
        """:raises Exception: what the function raised."""
        abandonment = Abandonment()
        argument = BlockingMessageBatch(batch, self._portal, self._hooks, abandonment)
        return await self._run(argument, batch, abandonment, by_message=True)

    async def exited(self, error: BaseException) -> None:
        """The function raised an exception, such as SystemExit, that is no `Exception`."""
        raise error

    def late(self, messages: Sequence[Message[T]]) -> Late | None:
        """Finishes a handler that ended after its call was cancelled, if `threads.finish` is set; None abandons it."""
        return None

    async def _run(
        self, argument: object, messages: Sequence[Message[T]], abandonment: Abandonment, *, by_message: bool = False
    ) -> Any:
        """:param by_message: whether the function returns an error, or None, for each message."""

        finish = self.late(messages)

        async def late(result: Any, error: BaseException | None) -> None:
            if finish is not None:
                await finish(result if by_message and result else [error] * len(messages))

        def abandoned() -> None:
            abandonment.happened = True
            first = messages[0]
            logger.warning(
                "Handler %s still runs in its thread with message %r of %r%s, which was taken from it: a thread cannot "
                "be stopped. Its outcome is ignored",
                name_of(self._function),
                first.id,
                first.topic,
                "" if len(messages) == 1 else f" and {len(messages) - 1} more",
            )

        try:
            result = await self.threads.run(
                partial(self._function, argument), late=None if finish is None else late, abandoned=abandoned
            )
        except HandlerExit as raised:
            await self.exited(raised.error)
            return None
        if inspect.isawaitable(result):
            # Acking the message of a handler that never ran would lose it.
            if inspect.iscoroutine(result):
                result.close()
            raise ReturnedAwaitable(
                f"Handler {name_of(self._function)} is a plain function, which runs in a thread, and returned "
                f"a {type(result).__name__}, which nothing awaits",
                advice=self._advice,
            )
        return result
