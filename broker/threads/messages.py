"""Messages for code that runs in threads: their settling waits for the event loop.

*Concurrency.* One thread at a time uses a message. Reading an attribute is direct; settling is a round trip to the loop
of the bus. *Cancellation.* Interrupting a call that settles does not stop the settlement.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Generic, Self, overload

from typing_extensions import TypeVar

from broker.hooks import Hooks
from broker.messages import Message, MessageBatch, SettleState
from broker.threads.portal import Call, Portal

__all__ = ["Abandonment", "BlockingMessage", "BlockingMessageBatch"]

T = TypeVar("T", default=bytes)

_MISSING: Final = object()


class Abandonment:
    """Whether a handler was abandoned: its thread runs on, and its outcome is ignored. Of one message or batch."""

    __slots__ = ("happened",)

    def __init__(self) -> None:
        self.happened = False


class BlockingMessage(Generic[T]):
    """A delivered message, settled on its own; see `broker.Message`.

    A `with message:` block acks the message at its end. If the block raises an `Exception`, the retry policy settles
    the message, and the exception is an event, not raised. KeyboardInterrupt and the like release the message and are
    raised.
    """

    __slots__ = ("_abandonment", "_context", "_hooks", "_message", "_portal", "_tokens")

    def __init__(
        self, message: Message[T], portal: Portal, hooks: Hooks, abandonment: Abandonment | None = None
    ) -> None:
        self._message = message
        self._abandonment = abandonment
        self._portal = portal
        self._hooks = hooks
        self._context: contextvars.Context | None = None
        self._tokens: list[contextvars.Token[Any]] = []

    @property
    def topic(self) -> str:
        return self._message.topic

    @property
    def data(self) -> bytes | None:
        return self._message.data

    @property
    def payload(self) -> T:
        """The body, decoded by the consumer's codec; without a codec the bytes themselves."""
        return self._message.payload

    @property
    def id(self) -> str:
        """The publisher's id, otherwise the broker's; the same on every redelivery."""
        return self._message.id

    @property
    def given_id(self) -> str | None:
        """The publisher's id; None if the SDK or the broker made the id. `OutboundMessage.from_message` copies it."""
        return self._message.given_id

    @property
    def key(self) -> bytes | None:
        return self._message.key

    @property
    def attributes(self) -> Mapping[str, str]:
        return self._message.attributes

    @property
    def publish_time(self) -> datetime | None:
        """The producer's clock, UTC."""
        return self._message.publish_time

    @property
    def broker_time(self) -> datetime | None:
        """The broker's clock, UTC."""
        return self._message.broker_time

    @property
    def delivery_attempt(self) -> int | None:
        """Number of deliveries, including this one and retries from memory; None if the broker does not count."""
        return self._message.delivery_attempt

    @property
    def subscription(self) -> str | None:
        """The subscription that delivered the message; None for a group, and for a message without a consumer."""
        return self._message.subscription

    @property
    def group(self) -> str | None:
        """The consumer group that delivered the message, if its records are served as messages; else None."""
        return self._message.group

    @property
    def native(self) -> Any:
        """The client library's own object; it belongs to the loop of the bus."""
        return self._message.native

    @property
    def asynchronous(self) -> Message[T]:
        """The `broker.Message`, to be used only on the loop of the bus."""
        return self._message

    @property
    def state(self) -> SettleState:
        """The state of the message."""
        return self._message.state

    @property
    def lease_lost(self) -> bool:
        """Whether another consumer may have the message: stop the work, an ack will fail.

        Also True in a handler that exceeded `Retry(timeout=)`, or that a close or a cancellation left behind.
        """
        return self._message.lease_lost or (self._abandonment is not None and self._abandonment.happened)

    def ack(self) -> None:
        """Acknowledge the message as handled. A second ack does nothing.

        :raises LeaseLost: the lease ended, or the broker refused the ack; the message is redelivered.
        :raises AlreadySettled: the message was settled differently.
        :raises SettleError: the broker did not confirm the ack (only with confirmed acks).
        """
        self._portal.call(self._message.ack)

    def nack(self, delay: float | None = None) -> None:
        """Have the message redelivered.

        :param delay: seconds until redelivery; None is the first delay of the retry policy.
        :raises Unsupported: the delay exceeds the longest one that the broker or the lease supports.
        :raises LeaseLost, AlreadySettled, SettleError: as for `ack`.
        """
        self._portal.call(self._message.nack, delay)

    def reject(self, reason: str = "rejected") -> None:
        """Dead-letter the message with this reason. Returns when the letter is written and the message settled.

        :raises ConfigurationError: the reason is not a str.
        :raises LeaseLost: the lease ended; the message is redelivered, even if its letter was already written.
        :raises AlreadySettled: the message was settled differently.
        :raises SettleError: the letter is written but the message may be redelivered, or the consumer closed first.
        """
        self._portal.call(self._message.reject, reason)

    def extend(self, seconds: float) -> None:
        """Renew the lease until `seconds` from now, even beyond `max_lease`.

        :raises LeaseLost: the lease has already ended.
        :raises Unsupported: leases cannot be renewed (`capabilities.messages.lease` is "fixed").
        """
        self._portal.call(self._message.extend, seconds)

    def __enter__(self) -> Self:
        if not self._hooks.handling:
            # Without interceptors this only sets a flag, which needs no round trip.
            self._message.in_use = True
            return self
        self._context = contextvars.copy_context()
        self._portal.wait(Call(self._message.__aenter__, context=self._context))
        # Context variables that interceptors set, such as the current trace, apply to the block in this thread.
        for variable, value in self._context.items():
            if variable.get(_MISSING) is not value:
                self._tokens.append(variable.set(value))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        tokens, self._tokens = self._tokens, []
        for token in reversed(tokens):
            token.var.reset(token)
        context, self._context = self._context, None
        return self._portal.wait(Call(self._message.__aexit__, (kind, error, trace), context=context))

    def __repr__(self) -> str:
        return repr(self._message)


class BlockingMessageBatch(Sequence[BlockingMessage[T]], Generic[T]):
    """Messages delivered together, to be settled together or one by one."""

    __slots__ = ("_abandonment", "_batch", "_hooks", "_portal")

    def __init__(
        self, batch: MessageBatch[T], portal: Portal, hooks: Hooks, abandonment: Abandonment | None = None
    ) -> None:
        self._batch = batch
        self._abandonment = abandonment
        self._portal = portal
        self._hooks = hooks

    @overload
    def __getitem__(self, index: int) -> BlockingMessage[T]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[BlockingMessage[T]]: ...
    def __getitem__(self, index: int | slice) -> BlockingMessage[T] | Sequence[BlockingMessage[T]]:
        if isinstance(index, slice):
            return [self._show(message) for message in self._batch[index]]
        return self._show(self._batch[index])

    def __len__(self) -> int:
        return len(self._batch)

    def __iter__(self) -> Iterator[BlockingMessage[T]]:
        return map(self._show, self._batch)

    def ack(self) -> None:
        """Ack the messages that are still open.

        :raises SettleError: the first failure, after all messages were tried; `state` has the result of each.
        """
        self._portal.call(self._batch.ack)

    def nack(self, delay: float | None = None) -> None:
        """Have the messages that are still open redelivered after `delay` seconds.

        :raises SettleError: the first failure, after all messages were tried.
        """
        self._portal.call(self._batch.nack, delay)

    def __repr__(self) -> str:
        return repr(self._batch)

    def _show(self, message: Message[T]) -> BlockingMessage[T]:
        return BlockingMessage(message, self._portal, self._hooks, self._abandonment)
