"""`Message` and `MessageBatch`: messages that are settled one by one.

Use them on the event loop that created them; `broker.blocking` has thread-safe ones. Cancelling a call that settles
does not cancel the settlement, which the consumer carries out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import IntEnum
from types import TracebackType
from typing import Any, Generic, Protocol, Self

import msgspec
from typing_extensions import TypeVar

from broker.checks import refused
from broker.envelopes import UNSET, Batch, View, brief, given_id
from broker.errors import AlreadySettled, LeaseLost

__all__ = ["BatchOwner", "Message", "MessageBatch", "MessageOwner", "Outcome", "SettleState"]

T = TypeVar("T", default=bytes)


class SettleState(IntEnum):
    """The state of a message."""

    OPEN = 0
    SETTLING = 1
    SETTLED = 2
    UNKNOWN = 3
    """The broker did not answer: the message may be redelivered."""
    LOST = 4
    """The lease ended before the message was settled: the message is redelivered."""


class Outcome(IntEnum):
    """How a message was, or is being, settled."""

    ACK = 0
    NACK = 1
    """Failed: redeliver the message after the delay."""
    REJECT = 2
    """Dead-letter the message; do not redeliver it."""
    RELEASE = 3
    """Not handled: redeliver the message at once. Counts as an attempt if the broker cannot avoid that."""


class MessageOwner(Protocol):
    """The consumer that delivered a message; it settles the message and extends its lease."""

    @property
    def topic(self) -> str:
        """The topic of the consumer, as in events of the hooks."""
        ...

    @property
    def subscription(self) -> str | None:
        """The subscription of the consumer; None for a group."""
        ...

    @property
    def group(self) -> str | None:
        """The group whose records the consumer serves as messages; else None."""
        ...

    async def settle(self, message: Message[Any], outcome: Outcome, delay: float | None, reason: str) -> None: ...
    async def extend(self, message: Message[Any], seconds: float) -> None: ...
    def lease_over(self, message: Message[Any]) -> bool:
        """Whether the lease of an open message has ended by the clock. May be called from any thread."""
        ...

    def begin(self, message: Message[Any]) -> None:
        """An `async with message` block begins."""
        ...

    async def finish(self, message: Message[Any], error: BaseException | None) -> bool:
        """The block ends; True swallows the error."""
        ...


class BatchOwner(Protocol):
    """The consumer that delivered a batch."""

    async def settle_batch(self, messages: Sequence[Message[Any]], outcome: Outcome, delay: float | None) -> None: ...


class Message(msgspec.Struct, Generic[T], eq=False, gc=False):
    """A delivered message, settled on its own.

    The backend and the core set the fields. Applications read `topic`, `key`, `data`, `payload`, `attributes`, `id`,
    `delivery_attempt`, `publish_time`, `broker_time`, `native`, `state` and `lease_lost`.

    How an `async with message:` block ends:

    | the block | the message | raised |
    |---|---|---|
    | ends | is acked | nothing; a refused ack is an event, and the message is redelivered |
    | raises an `Exception` | is settled by the retry policy | nothing; the exception is an event |
    | is cancelled, or raises another `BaseException` | is released | the same exception |
    """

    topic: str
    data: bytes | None
    raw: Any
    view: View
    lease: Any = None
    """The backend's lease handle; messages may share one."""
    size: int = 0
    """Size in bytes for flow control."""
    owner: MessageOwner | None = None
    state: SettleState = SettleState.OPEN
    outcome: Outcome | None = None
    decoded: Any = UNSET
    lease_ends: float | None = None
    """Loop time at which renewal stops; None before delivery, or without a limit."""
    in_use: bool = False
    """A handler or an `async with` block is working on the message; a close waits for it."""
    retries: int = 0
    """Number of redeliveries from the consumer's memory, without the broker."""
    scope: Any = None
    """The context manager of the interceptors around its handling."""
    received_at: float | None = None
    """`time.monotonic()` at the fetch; None if the hooks had no listener."""

    @property
    def id(self) -> str:
        """The publisher's id, otherwise the broker's; the same on every redelivery."""
        return self.view.id(self.raw)

    @property
    def given_id(self) -> str | None:
        """The publisher's id; None if the SDK or the broker made the id. `OutboundMessage.from_message` copies it."""
        return given_id(self.view, self.raw)

    @property
    def key(self) -> bytes | None:
        return self.view.key(self.raw)

    @property
    def attributes(self) -> Mapping[str, str]:
        return self.view.attributes(self.raw)

    @property
    def publish_time(self) -> datetime | None:
        """The producer's clock, UTC."""
        return self.view.publish_time(self.raw)

    @property
    def broker_time(self) -> datetime | None:
        """The broker's clock, UTC."""
        return self.view.broker_time(self.raw)

    @property
    def delivery_attempt(self) -> int | None:
        """Number of deliveries, including this one and retries from memory; None if the broker does not count."""
        attempt = self.view.delivery_attempt(self.raw)
        return None if attempt is None else attempt + self.retries

    @property
    def native(self) -> Any:
        """The client library's own object."""
        return self.view.native(self.raw)

    @property
    def payload(self) -> T:
        """The body, decoded by the consumer's codec; without a codec the bytes themselves."""
        decoded = self.decoded
        return self.data if decoded is UNSET else decoded  # pyright: ignore[reportReturnType]

    @property
    def subscription(self) -> str | None:
        """The subscription that delivered the message; None for a group, and for a message without a consumer."""
        return None if self.owner is None else self.owner.subscription

    @property
    def group(self) -> str | None:
        """The consumer group that delivered the message, if its records are served as messages; else None."""
        return None if self.owner is None else self.owner.group

    @property
    def lease_lost(self) -> bool:
        """Whether another consumer may have the message: stop the work, an ack will fail.

        Tells by the clock too: True once the lease has ended without a renewal, even if the event loop was blocked.
        """
        if self.state is SettleState.OPEN:
            return self.owner is not None and self.owner.lease_over(self)
        return self.state is SettleState.LOST

    async def ack(self) -> None:
        """Acknowledge the message as handled. A second ack does nothing.

        :raises LeaseLost: the lease ended, or the broker refused the ack; the message is redelivered.
        :raises AlreadySettled: the message was settled differently.
        :raises SettleError: the broker did not confirm the ack (only with confirmed acks).
        """
        await self._settle(Outcome.ACK, None, "")

    async def nack(self, delay: float | None = None) -> None:
        """Have the message redelivered.

        :param delay: seconds until redelivery; None is the first delay of the retry policy.
        :raises Unsupported: the delay exceeds the longest one that the broker or the lease supports.
        :raises LeaseLost, AlreadySettled, SettleError: as for `ack`.
        """
        await self._settle(Outcome.NACK, delay, "")

    async def reject(self, reason: str = "rejected") -> None:
        """Dead-letter the message with this reason. Returns when the letter is written and the message settled.

        :raises ConfigurationError: the reason is not a str.
        :raises LeaseLost: the lease ended; the message is redelivered, even if its letter was already written.
        :raises AlreadySettled: the message was settled differently.
        :raises SettleError: the letter is written but the message may be redelivered, or the consumer closed first.
        """
        if not isinstance(reason, str):
            raise refused("reason", reason, "a str, such as str(error)")
        await self._settle(Outcome.REJECT, None, reason)

    async def extend(self, seconds: float) -> None:
        """Renew the lease until `seconds` from now, even beyond `max_lease`.

        :raises LeaseLost: the lease has already ended.
        :raises Unsupported: leases cannot be renewed (`capabilities.messages.lease` is "fixed").
        """
        if self.state is SettleState.LOST or self.outcome is Outcome.RELEASE:
            raise self._lost("extended")
        if self.owner is not None:
            await self.owner.extend(self, seconds)

    async def _settle(self, outcome: Outcome, delay: float | None, reason: str) -> None:
        if self.owner is not None:
            await self.owner.settle(self, outcome, delay, reason)
        else:
            self.begin_settling(outcome)
            self.state = SettleState.SETTLED

    def begin_settling(self, outcome: Outcome) -> bool:
        """Change the state from open to settling; False if the message is already settled, or settling, the same way.

        :raises LeaseLost: the lease ended.
        :raises AlreadySettled: the message was settled differently.
        """
        if self.state is SettleState.OPEN:
            self.state = SettleState.SETTLING
            self.outcome = outcome
            return True
        if self.state is SettleState.LOST or self.outcome is Outcome.RELEASE:
            raise self._lost("settled")
        if self.outcome is not outcome:
            how = "differently" if self.outcome is None else f"with {self.outcome.name.lower()}"
            raise AlreadySettled(
                f"Message {self.id!r} of topic {self.topic!r} was settled {how} before {outcome.name.lower()}"
            )
        return False

    def _lost(self, what: str) -> LeaseLost:
        if self.outcome is not Outcome.RELEASE:
            return LeaseLost(f"Message {self.id!r} of topic {self.topic!r} was lost before it was {what}")
        return LeaseLost(
            f"Message {self.id!r} of topic {self.topic!r} was given back before it was {what}: its consumer closed, or "
            "its block or handler was cancelled",
            advice="Settle messages before the consumer closes, or in `async with message`, for which it waits; make "
            "the work idempotent, because the message is delivered again",
        )

    async def __aenter__(self) -> Self:
        if self.owner is not None:
            self.owner.begin(self)
        self.in_use = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.in_use = False
        if self.owner is not None:
            return await self.owner.finish(self, error)
        if self.state is SettleState.OPEN:
            await self._settle(Outcome.ACK if error is None else Outcome.NACK, None, "")
        # A message without a consumer is made by a test, which its failed assertions must fail.
        return isinstance(error, Exception) and not isinstance(error, AssertionError)

    def __repr__(self) -> str:
        state = self.state.name.lower()
        return f"<Message {self.id!r} of {self.topic!r}, key={self.key!r}, data={brief(self.data)}, {state}>"


class MessageBatch(Batch[Message[T]], Generic[T]):
    """Messages delivered together, to be settled together or one by one."""

    __slots__ = ("_owner",)

    def __init__(self, messages: list[Message[T]], owner: BatchOwner | None = None) -> None:
        super().__init__(messages)
        self._owner = owner

    async def ack(self) -> None:
        """Ack the messages that are still open.

        :raises SettleError: the first failure, after all messages were tried; `state` has the result of each.
        """
        await self._settle(Outcome.ACK, None)

    async def nack(self, delay: float | None = None) -> None:
        """Have the messages that are still open redelivered after `delay` seconds.

        :raises SettleError: the first failure, after all messages were tried.
        """
        await self._settle(Outcome.NACK, delay)

    async def _settle(self, outcome: Outcome, delay: float | None) -> None:
        if self._owner is not None:
            await self._owner.settle_batch(self._items, outcome, delay)
            return
        for message in self._items:
            if message.state is SettleState.OPEN:
                await (message.ack() if outcome is Outcome.ACK else message.nack(delay))
