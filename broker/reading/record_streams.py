"""Asynchronous iteration over a consumer's steps. Holds no state, so a loop can be left at any moment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Self

from typing_extensions import TypeVar

from broker.errors import Closed

__all__ = ["Steps"]

S = TypeVar("S")


class Steps(AsyncIterator[S]):
    """Iterates until a step has nothing, or the consumer was closed.

    :param step: the next item; None, or an empty one, when there is none in time.
    :param closed: whether a `Closed` raised by the step is the end, and not a mistake of the caller.
    """

    __slots__ = ("_closed", "_step")

    def __init__(self, step: Callable[[], Awaitable[S | None]], closed: Callable[[], bool]) -> None:
        self._step = step
        self._closed = closed

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> S:
        try:
            item = await self._step()
        except Closed:
            if self._closed():
                raise StopAsyncIteration from None
            raise
        if not item:
            raise StopAsyncIteration
        return item
