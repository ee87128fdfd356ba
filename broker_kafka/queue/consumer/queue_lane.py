"""`QueueLane`: the messages of one queue, which a reader takes from a topic together with those of others.

*Concurrency.* One event loop; `settle` and `extend` may run beside `fetch`. *Failure.* What went wrong for the reader
is raised by the next `fetch` of each lane that has nothing to hand over before. *Close.* What waits here comes again
at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol

from broker import BrokerError, Closed, Message
from broker.driver import Event, Settlement, SourceListener, Waker
from broker_kafka.queue.consumer.lease_manager import over_of
from broker_kafka.queue.consumer.transacted_ends import TransactedEnds

__all__ = ["LaneReader", "QueueLane"]


class LaneReader(Protocol):
    """Who reads for the lane."""

    @property
    def failure(self) -> BrokerError | None:
        """Why nothing comes any more."""
        ...

    @property
    def transacted(self) -> TransactedEnds:
        """Writes ENDs in transactions of others."""
        ...

    def take(self, queue: bytes, max_messages: int, max_bytes: int) -> list[Message[Any]]: ...
    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]: ...
    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]: ...
    async def keep(self, message: Message[Any], delay: float) -> BrokerError | None: ...
    async def is_idle(self, queue: bytes, seconds: float) -> bool: ...


class QueueLane:
    """Implements `MessageSource`, `KeepsTries`, `LosesOver` and `TellsIdle`.

    :param queue: the key of its records.
    :param left: awaited at the close.
    """

    def __init__(
        self,
        queue: bytes,
        listener: SourceListener,
        reader: LaneReader,
        left: Callable[[QueueLane], Coroutine[Any, Any, None]],
    ) -> None:
        self.queue: Final = queue
        self._listener = listener
        self._reader = reader
        self._left = left
        self._loop = asyncio.get_running_loop()
        self._waker = Waker()
        self._troubles: list[BrokerError] = []
        self._interrupted = self._fetching = self._closed = False

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        self._check_open()
        self._fetching = True
        until = self._loop.time() + wait
        try:
            while True:
                while found := self._reader.take(self.queue, max_messages, max_bytes):
                    if ours := self._ours(found):
                        return ours
                if self._troubles:
                    raise self._troubles.pop()
                if self._reader.failure is not None:
                    raise self._reader.failure
                left = until - self._loop.time()
                if self._interrupted or left <= 0:
                    return []
                await self._waker.wait(left)
                if self._closed:
                    return []
        finally:
            self._fetching = self._interrupted = False

    def interrupt(self) -> None:
        self._interrupted = self._fetching
        self._waker.wake()

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        self._check_open()
        return await self._reader.settle(settlements)

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        self._check_open()
        return await self._reader.extend(messages)

    async def keep(self, message: Message[Any], delay: float) -> BrokerError | None:
        self._check_open()
        return await self._reader.keep(message, delay)

    def lose_over(self, messages: Sequence[Message[Any]]) -> None:
        if over := over_of(messages):
            self._listener.lost(over)

    async def is_idle(self, seconds: float) -> bool:
        """As of the reader, once what was deferred for lack of room here has come again."""
        return self._closed or await self._reader.is_idle(self.queue, seconds)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._waker.wake()
        await self._left(self)

    @property
    def transacted(self) -> TransactedEnds:
        """Writes ENDs in transactions of others."""
        return self._reader.transacted

    def _ours(self, messages: list[Message[Any]]) -> list[Message[Any]]:
        if not (over := over_of(messages)):
            return messages
        # This process stood still, and a tracker may have sent them again.
        self.passed_over(over)
        gone = set(over)
        return [message for message in messages if message not in gone]

    # -- the reader's --------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something is there, or the reader has failed."""
        self._waker.wake()

    def trouble(self, error: BrokerError) -> None:
        """The reader goes on after this, which each of its lanes is to tell once."""
        self._troubles = [error]
        self._waker.wake()

    def passed_over(self, messages: Sequence[Message[Any]]) -> None:
        """These come again, and were never handed over."""
        if messages:
            self._listener.passed_over(messages)

    def event(self, event: Event) -> None:
        self._listener.event(event)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("The source is closed")
