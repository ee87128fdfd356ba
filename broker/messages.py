"""Messages that are settled one by one.

Objects here hold no lock: use them from the event loop that made them (`broker.blocking` crosses threads for
you). Awaiting a settlement may be cancelled; the settlement itself goes on, because it belongs to the consumer
from the moment of the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import IntEnum
from types import TracebackType
from typing import Any, Generic, Protocol, Self

import msgspec
from typing_extensions import TypeVar

from broker.batches import Batch
from broker.checks import refused
from broker.envelopes import UNSET, View, brief
from broker.errors import AlreadySettled, LeaseLost

__all__ = ["BatchOwner", "Message", "MessageBatch", "MessageOwner", "Outcome", "SettleState"]

T = TypeVar("T", default=bytes)


class SettleState(IntEnum):
    """Where a message stands."""

    OPEN = 0
    SETTLING = 1
    SETTLED = 2
    UNKNOWN = 3
    """Asked for, but the answer was lost: it may come again."""
    LOST = 4
    """Its lease ended first: it comes again."""


class Outcome(IntEnum):
    """How a message was, or is being, settled."""

    ACK = 0
    NACK = 1
    """Handled and failed: deliver again, after the delay."""
    REJECT = 2
    """Never deliver again: dead-letter it."""
    RELEASE = 3
    """Not handled at all: deliver again at once; counts as an attempt only where the broker cannot help it."""


class MessageOwner(Protocol):
    """The consumer that handed a message over; it carries out what the message is asked to do."""

    @property
    def topic(self) -> str:
        """What it was opened for, as events of the hooks name it."""
        ...

    async def settle(self, message: Message[Any], outcome: Outcome, delay: float | None, reason: str) -> None: ...
    async def extend(self, message: Message[Any], seconds: float) -> None: ...
    def begin(self, message: Message[Any]) -> None:
        """An `async with message` block begins."""
        ...

    async def finish(self, message: Message[Any], error: BaseException | None) -> bool:
        """It ends; True swallows the error."""
        ...


class BatchOwner(Protocol):
    """The consumer that handed a batch over."""

    async def settle_batch(self, messages: Sequence[Message[Any]], outcome: Outcome, delay: float | None) -> None: ...


class Message(msgspec.Struct, Generic[T], eq=False, gc=False):
    """A unit that is settled on its own.

    The fields are set by the backend and the core; applications read `topic`, `key`, `data`, `payload`,
    `attributes`, `id`, `delivery_attempt`, `publish_time`, `broker_time`, `native`, `state` and `lease_lost`.

    Used as `async with message:` its ack is sent when the block ends; it is settled by the consumer's retry
    policy when the block raises an `Exception`, which is reported to the hooks and not raised further; so is an
    ack that the broker refuses, since the message comes again and the loop around the block is to go on.
    Cancellation gives the message back and goes on.
    """

    topic: str
    data: bytes | None
    raw: Any
    view: View
    lease: Any = None
    """The backend's lease handle; messages may share one."""
    size: int = 0
    """Bytes counted by flow control."""
    owner: MessageOwner | None = None
    state: SettleState = SettleState.OPEN
    outcome: Outcome | None = None
    decoded: Any = UNSET
    lease_ends: float | None = None
    """Loop time at which renewal stops; None before hand-over or where there is no bound."""
    in_use: bool = False
    """A handler, or an `async with` block, is working on it: a close waits for that."""
    retries: int = 0
    """How often it was handed over again from memory, without the broker."""
    scope: Any = None
    """What the hooks entered around its handling."""
    received_at: float | None = None
    """The reading of `time.monotonic` when it came; None where nobody listened to the hooks then."""

    @property
    def id(self) -> str:
        """The publisher's id if it gave one, else the broker's; the same on every redelivery."""
        return self.view.id(self.raw)

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
        """How many times it was delivered, this time and retries from memory included; None where nobody counts."""
        attempt = self.view.delivery_attempt(self.raw)
        return None if attempt is None else attempt + self.retries

    @property
    def native(self) -> Any:
        """The client library's own object."""
        return self.view.native(self.raw)

    @property
    def payload(self) -> T:
        """The body as the consumer's codec decoded it; the bytes themselves without a codec."""
        decoded = self.decoded
        return self.data if decoded is UNSET else decoded  # pyright: ignore[reportReturnType]

    @property
    def lease_lost(self) -> bool:
        """Whether somebody else may have it by now: stop the work, an ack will be refused."""
        return self.state is SettleState.LOST

    async def ack(self) -> None:
        """Say that it was handled. Harmless when it was acked before.

        :raises LeaseLost: its lease ended, or the broker refused the ack; it comes again.
        :raises AlreadySettled: it was settled another way.
        :raises SettleError: the broker did not confirm (only where acks are confirmed).
        """
        await self._settle(Outcome.ACK, None, "")

    async def nack(self, delay: float | None = None) -> None:
        """Have it delivered again.

        :param delay: seconds to wait first; None leaves that to the retry policy's first step.
        :raises Unsupported: nobody can keep a delay that long.
        :raises LeaseLost, AlreadySettled, SettleError: as for `ack`.
        """
        await self._settle(Outcome.NACK, delay, "")

    async def reject(self, reason: str = "rejected") -> None:
        """Give up on it: it goes to the dead letters with this reason. Returns when it is there, and settled.

        :raises ConfigurationError: the reason is no str.
        :raises LeaseLost: its lease ended; it comes again, beside its letter if that was written by then.
        :raises AlreadySettled: it was settled another way.
        :raises SettleError: its letter is written, and it may come again beside it; or the consumer was closed first.
        """
        if not isinstance(reason, str):
            raise refused("reason", reason, "a str, such as str(error)")
        await self._settle(Outcome.REJECT, None, reason)

    async def extend(self, seconds: float) -> None:
        """Keep the lease renewed until `seconds` from now, beyond `max_lease` if need be.

        :raises LeaseLost: it was lost before.
        :raises Unsupported: nobody can renew it here (`capabilities.messages.lease` is "fixed").
        """
        if self.state is SettleState.LOST:
            raise LeaseLost(f"Message {self.id!r} of topic {self.topic!r} was lost before it was extended")
        if self.owner is not None:
            await self.owner.extend(self, seconds)

    async def _settle(self, outcome: Outcome, delay: float | None, reason: str) -> None:
        if self.owner is not None:
            await self.owner.settle(self, outcome, delay, reason)
        else:
            self.begin_settling(outcome)
            self.state = SettleState.SETTLED

    def begin_settling(self, outcome: Outcome) -> bool:
        """Move from open to settling; False if it is being, or was, settled the same way before.

        :raises LeaseLost: its lease ended.
        :raises AlreadySettled: it was settled another way.
        """
        if self.state is SettleState.OPEN:
            self.state = SettleState.SETTLING
            self.outcome = outcome
            return True
        if self.state is SettleState.LOST:
            raise LeaseLost(f"Message {self.id!r} of topic {self.topic!r} was lost before it was settled")
        if self.outcome is not outcome:
            was = "another way" if self.outcome is None else f"with {self.outcome.name.lower()}"
            raise AlreadySettled(
                f"Message {self.id!r} of topic {self.topic!r} was settled {was} before {outcome.name.lower()}"
            )
        return False

    async def __aenter__(self) -> Self:
        self.in_use = True
        if self.owner is not None:
            self.owner.begin(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.in_use = False
        if self.owner is not None:
            return await self.owner.finish(self, error)
        if self.state is SettleState.OPEN:
            await self._settle(Outcome.ACK if error is None else Outcome.NACK, None, "")
        return isinstance(error, Exception)

    def __repr__(self) -> str:
        state = self.state.name.lower()
        return f"<Message {self.id!r} of {self.topic!r}, key={self.key!r}, data={brief(self.data)}, {state}>"


class MessageBatch(Batch[Message[T]], Generic[T]):
    """Messages handed over together, to be settled together or one by one."""

    __slots__ = ("_owner",)

    def __init__(self, messages: list[Message[T]], owner: BatchOwner | None = None) -> None:
        super().__init__(messages)
        self._owner = owner

    async def ack(self) -> None:
        """Ack those that are still open.

        :raises SettleError: the first failure, after all were tried; each message's `state` tells its own.
        """
        await self._settle(Outcome.ACK, None)

    async def nack(self, delay: float | None = None) -> None:
        """Have those that are still open delivered again, after `delay` seconds.

        :raises SettleError: the first failure, after all were tried.
        """
        await self._settle(Outcome.NACK, delay)

    async def _settle(self, outcome: Outcome, delay: float | None) -> None:
        if self._owner is not None:
            await self._owner.settle_batch(self._items, outcome, delay)
            return
        for message in self._items:
            if message.state is SettleState.OPEN:
                await (message.ack() if outcome is Outcome.ACK else message.nack(delay))
