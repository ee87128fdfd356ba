"""Layers: async functions around the handling of each message, and two that come with the library."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from broker.checks import check_count, check_rate, check_seconds
from broker.hooks import logger
from broker.messages import Message
from broker.token_bucket import TokenBucket

__all__ = ["Call", "CircuitBreaker", "Layer", "limit_rate"]

Call = Callable[[Message[Any]], Awaitable[object]]
"""What a layer is around: the next layer, or the handler, with the publishing of its result."""
Layer = Callable[[Message[Any], Call], Awaitable[object]]
"""Called with each message; `return await call(message)` handles it. Raising is a failure of the message."""


class Pausable(Protocol):
    """A `MessageConsumer`."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


def limit_rate(rate: float) -> Layer:
    """A layer that handles at most so many messages per second, of all handlers that share it; others wait.

    Waiting messages stay leased. For one consumer alone, its option `max_rate` does not even hand them over.

    :param rate: messages per second, on average.
    :raises ConfigurationError: the rate is no number above 0.
    """
    check_rate("rate", rate)
    bucket: TokenBucket | None = None

    async def limited(message: Message[Any], call: Call) -> object:
        nonlocal bucket
        time = asyncio.get_running_loop().time
        bucket = bucket or TokenBucket(rate, time())
        # Taken at once, so that the next message waits behind this one.
        now = time()
        delay = bucket.delay(now)
        bucket.take(1, now)
        if delay > 0:
            await asyncio.sleep(delay)
        return await call(message)

    return limited


class CircuitBreaker:
    """A layer that stops the intake while what handlers depend on is down, instead of failing message after message.

    After so many failures in a row, the consumers of its handlers are paused. Then one message is tried: if it fails,
    the pause begins again, and otherwise all go on. Failed messages are settled by their retry policy as usual.

    :param failures: consecutive failures that open the circuit.
    :param pause: seconds of the pause.
    :param counts: which errors are failures of a dependency; by default all.
    :raises ConfigurationError: a number is not above 0.
    """

    def __init__(
        self,
        *,
        failures: int = 5,
        pause: float = 30.0,
        counts: type[Exception] | tuple[type[Exception], ...] = Exception,
    ) -> None:
        check_count("failures", failures)
        check_seconds("pause", pause)
        self._allowed: Final = failures
        self._pause: Final = pause
        self._counts: Final = counts
        self._failures = 0
        self._consumers: list[Pausable] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Whether consumers are paused."""
        return self._timer is not None

    def guard(self, consumer: Pausable) -> None:
        """Pause this consumer, too. The app calls this for each consumer whose handler has the layer."""
        self._consumers.append(consumer)
        if self.is_open:
            consumer.pause()

    def release(self, consumer: Pausable) -> None:
        """Undo `guard`."""
        self._consumers.remove(consumer)
        if self._timer is not None and not self._consumers:
            self._timer.cancel()
            self._timer = None

    async def __call__(self, message: Message[Any], call: Call) -> object:
        try:
            result = await call(message)
        except self._counts as error:
            self._failures += 1
            if self._failures >= self._allowed and self._timer is None:
                self._open(error)
            raise
        self._failures = 0
        return result

    def _open(self, error: Exception) -> None:
        logger.warning(
            "%d handlers failed in a row; %d consumers pause for %.3g s: %s",
            self._failures,
            len(self._consumers),
            self._pause,
            error,
        )
        for consumer in self._consumers:
            consumer.pause()
        self._timer = asyncio.get_running_loop().call_later(self._pause, self._try_again)

    def _try_again(self) -> None:
        self._timer = None
        # The next failure opens the circuit again.
        self._failures = self._allowed - 1
        for consumer in self._consumers:
            consumer.resume()
