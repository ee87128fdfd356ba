"""`RetryWriter`: sends failed messages to their retry topics. Used on one event loop.

A failed write is repeated until it succeeds or the consumer closes. The original stays unsettled until its copy is on
the broker, so that a crash may repeat a message and loses none.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from broker.consuming.dead_letters import LetterWriter, describe, one_line, placed
from broker.consuming.retry.topics import RetryRoutes
from broker.driver.contract import RetryTopic
from broker.driver.record_messages import letter_of, make_retry_letter, place_of
from broker.errors import BrokerError, InvalidMessage
from broker.hooks import Hooks, RetryScheduled, RetryWriteFailed, logger
from broker.messages import Message
from broker.outbound import OutboundMessage

__all__ = ["RetryWriter"]


class RetryWriter:
    """Writes to the retry topics of one consumer.

    :param publish: puts one message on a topic, or raises.
    """

    def __init__(
        self,
        routes: RetryRoutes,
        publish: Callable[[str, OutboundMessage], Awaitable[object]],
        hooks: Hooks,
        subscription: str,
    ) -> None:
        self._routes = routes
        self._publish = publish
        self._hooks = hooks
        self._subscription = subscription
        self._writer = LetterWriter()

    def after_failure(self, message: Message[Any]) -> RetryTopic | None:
        """The retry topic of a message after another round of failures; None after the last round."""
        letter = letter_of(message)
        return self._routes.after_failure(message.topic, 0 if letter is None else letter.step)

    def for_delay(self, message: Message[Any], delay: float | None) -> RetryTopic:
        """The first retry topic with at least this delay; the first of all if `delay` is None.

        :raises Unsupported: the delays of all retry topics are shorter.
        """
        return self._routes.for_delay(message.topic, delay)

    def last(self, message: Message[Any]) -> RetryTopic:
        """The retry topic with the longest delay."""
        return self._routes.last(message.topic)

    def close(self) -> None:
        """Repeat no failed write from now on; a running one may still succeed."""
        self._writer.close()

    async def write(
        self, message: Message[Any], target: RetryTopic, *, reason: str, error: BaseException | None, failures: int
    ) -> None:
        """Return when the message is on its retry topic; failed writes are repeated until `close`.

        :param failures: how often the handler failed in this round; 0 if it did not.
        :raises InvalidMessage: the broker refuses the message on the retry topic.
        :raises BrokerError: the write failed, and the writer is closed.
        """
        letter = letter_of(message)
        make = partial(
            make_retry_letter,
            message,
            id=message.id,
            id_given=message.given_id is not None,
            target=target,
            due=time.time() + target.delay,
            attempts=message.delivery_attempt or 1,
            failures=failures + (0 if letter is None else letter.failures),
            step=(failures > 0) + (0 if letter is None else letter.step),
            place=place_of(message),
            subscription=self._subscription,
            reason=reason if error is None else f"{reason}: {describe(error)}",
        )

        def shape(_: InvalidMessage | None, *, brief: bool) -> OutboundMessage:
            return make(brief=brief)

        def failed(failure: BrokerError, pause: float) -> None:
            logger.warning(
                "Retry topic %r did not take %s, again in %.2f s: %s",
                target.name,
                placed(message),
                pause,
                one_line(failure.message),
            )
            self._hooks.emit(RetryWriteFailed(message=message, target=target.name, error=failure, pause=pause))

        shapes = [partial(shape, brief=False), partial(shape, brief=True)]
        await self._writer.write(shapes, partial(self._publish, target.name), failed, stubborn=False)
        if self._hooks.listening:
            self._hooks.emit(RetryScheduled(message=message, target=target.name, delay=target.delay, reason=reason))
