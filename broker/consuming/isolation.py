"""Runs a handler in a context of its own, without the price of a task per message.

A worker task handles many messages; context variables set by one handler must not be seen by the next. The
steps of the handler's coroutine are run in a copied context, while it stays part of the worker's task, so
that cancellation and timeouts act on it as usual.
"""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from contextvars import copy_context
from typing import Any

__all__ = ["Isolated"]


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
