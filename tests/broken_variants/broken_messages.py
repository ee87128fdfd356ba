"""Variants that deliver or settle wrongly."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

from msgspec.structs import replace

from broker.bus import Bus
from broker.driver.contract import MessageSubscription, Settlement, View
from broker.errors import BackendError, BrokerError
from broker.messages import Message, Outcome
from broker.names import Ephemeral
from broker.testing.faults import Wrapped
from tests.broken_variants.breaking import (
    BrokenBackend,
    BrokenBus,
    BrokenHarness,
    BrokenSource,
    BrokenView,
    CarelessBus,
    LossyConsumer,
    StandingBus,
)
from tests.broken_variants.registry import breaks


@breaks("messages.nack-redelivers")
class AcksOnError(BrokenSource):
    """A nacked message is acked."""

    def change(self, settlement: Settlement) -> Settlement:
        if settlement.outcome is Outcome.NACK:
            return replace(settlement, outcome=Outcome.ACK, delay=None)
        return settlement


@breaks("messages.nack-delay-is-kept")
class IgnoresNackDelay(BrokenSource):
    """A nacked message is redelivered at once, without its delay."""

    def change(self, settlement: Settlement) -> Settlement:
        return replace(settlement, delay=0.0) if settlement.outcome is Outcome.NACK else settlement


@breaks("messages.ack-is-final")
class DeliversTwiceAfterAnAck(BrokenSource):
    """The first delivery of an acked message is redelivered."""

    def change(self, settlement: Settlement) -> Settlement:
        if settlement.outcome is Outcome.ACK and settlement.message.delivery_attempt == 1:
            return replace(settlement, outcome=Outcome.NACK, delay=0.0)
        return settlement


@breaks("close.releases-the-buffer")
class CloseLosesTheBuffer(BrokenSource):
    """Released messages are acked."""

    def change(self, settlement: Settlement) -> Settlement:
        if settlement.outcome is Outcome.RELEASE:
            return replace(settlement, outcome=Outcome.ACK, delay=None)
        return settlement


@breaks("cancel.receive-releases")
class CancelDropsMessages(BrokenSource):
    """The message of a cancelled handler is dropped."""

    def change(self, settlement: Settlement) -> Settlement:
        if settlement.outcome is Outcome.RELEASE and settlement.message.lease_ends is not None:
            return replace(settlement, outcome=Outcome.ACK, delay=None)
        return settlement


@breaks("retry.release-is-no-attempt")
class ReleaseCountsAsAttempt(BrokenSource):
    """Releasing an unhandled message counts as a failed delivery."""

    def change(self, settlement: Settlement) -> Settlement:
        if settlement.outcome is Outcome.RELEASE:
            return replace(settlement, outcome=Outcome.NACK, delay=0.0)
        return settlement


@breaks("retry.restarts-count-no-deliveries")
class ReleaseBeforeCloseCountsAsDelivery(BrokenSource):
    """Messages that a connection released before its close count as delivered for the next one."""

    def change(self, settlement: Settlement) -> Settlement:
        if settlement.outcome is Outcome.RELEASE and settlement.message.lease_ends is not None:
            return replace(settlement, outcome=Outcome.NACK, delay=0.0)
        return settlement


@breaks("leases.refused-ack-raises")
class HidesRefusedAcks(BrokenBackend):
    """Refused acks are reported as successful, and lost leases are not reported."""

    async def subscribe(self, subscription: MessageSubscription, listener: Any) -> Any:
        return _Swallowing(await self.inner.subscribe(subscription, _Deaf(listener)), self, subscription)


class _Swallowing(BrokenSource):
    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        await self.inner.settle(settlements)
        return [None] * len(settlements)


class _Deaf(Wrapped):
    def lost(self, messages: Sequence[Message[Any]]) -> None:
        """Keep it from the core."""


@breaks("close.deletes-nothing")
class CloseDeletesTheSubscription(BrokenSource):
    """Closing a consumer deletes its subscription."""

    async def close(self) -> None:
        await self.inner.close()
        admin = self.backend.inner.admin()
        await admin.delete_subscription(self.subscription.topic, self.subscription.subscription)


@breaks("flow.never-more-than-n-unsettled")
class ExceedsTheBound(BrokenSource):
    """A fetch returns four times as many messages as requested."""

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        return await self.inner.fetch(4 * max_messages, max_bytes, wait)


@breaks("flow.bytes-are-bounded")
class IgnoresBytes(BrokenSource):
    """The bound on bytes is ignored: every message has the size 0."""

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        messages = await self.inner.fetch(max_messages, 1 << 40, wait)
        for message in messages:
            message.size = 0
        return messages


@breaks("flow.bytes-are-bounded")
class HoardsBytes(BrokenSource):
    """Messages beyond the requested bytes are fetched, too, and wait in the source."""

    def __init__(self, inner: Any, backend: BrokenBackend, subscription: MessageSubscription) -> None:
        super().__init__(inner, backend, subscription)
        self.hoard: list[Message[Any]] = []

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        if not self.hoard:
            self.hoard += await self.inner.fetch(max_messages, 1 << 40, wait)
        taken: list[Message[Any]] = []
        while self.hoard and len(taken) < max_messages and sum(message.size for message in taken) < max_bytes:
            taken.append(self.hoard.pop(0))
        return taken


@breaks("order.survives-a-cut")
class CutReordersMessages(BrokenHarness):
    """Messages in flight when a connection is cut are redelivered after newer ones."""

    async def cut(self, bus: Bus) -> None:
        backend = cast("_LateBackend", bus.backend)
        backend.was_cut = True
        self.broker.faults.isolate(backend.inner)
        self.broker.faults.heal(backend.inner)


class _LateBackend(BrokenBackend):
    was_cut = False


class _LateSource(BrokenSource):
    def __init__(self, inner: Any, backend: _LateBackend, subscription: MessageSubscription) -> None:
        super().__init__(inner, backend, subscription)
        self.cuts = backend
        self.late: list[Message[Any]] = []
        self.newer = 0

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        messages = list(await self.inner.fetch(max_messages, max_bytes, 0.1))
        if messages and self.cuts.was_cut:
            self.cuts.was_cut, self.newer = False, 0
            self.late.append(messages.pop(0))
        self.newer += len(messages)
        if self.newer >= 20 or not messages:
            messages += self.late
            self.late.clear()
        return messages


_LateBackend.source_class = _LateSource
CutReordersMessages.backend_class = _LateBackend


class _StuckAttempt(BrokenView):
    def delivery_attempt(self, raw: Any) -> int | None:
        return 1


@breaks("messages.attempts-are-counted")
class AttemptStuckAtOne(BrokenSource):
    """`delivery_attempt` is always 1."""

    def show(self, message: Message[Any]) -> Message[Any]:
        message.view = cast("View", _StuckAttempt(message.view))
        return message


class _ChangingId(BrokenView):
    def id(self, raw: Any) -> str:
        return f"{self.inner.id(raw)}-{self.inner.delivery_attempt(raw)}"


@breaks("messages.nack-redelivers", healthy="messages.shape-next-message")
class ChangesTheIdOnRedelivery(BrokenSource):
    """Each delivery of a message has a new id."""

    def show(self, message: Message[Any]) -> Message[Any]:
        message.view = cast("View", _ChangingId(message.view))
        return message


class _MadeIdAsGiven(BrokenView):
    def given_id(self, raw: Any) -> str | None:
        return self.inner.id(raw)


@breaks("fidelity.copies-to-the-same-topic-arrive")
class MadeIdPassesForGiven(BrokenSource):
    """An id that was made for a message passes for one that the publisher gave."""

    def show(self, message: Message[Any]) -> Message[Any]:
        message.view = cast("View", _MadeIdAsGiven(message.view))
        return message


@breaks("outcomes.idle-returns-none", healthy="")
class IdleRaises(BrokenSource):
    """An idle fetch raises."""

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        messages = await self.inner.fetch(max_messages, max_bytes, min(wait, 0.02))
        if not messages:
            raise BackendError("nothing came in time")
        return messages


@breaks("leases.lost-by-the-clock")
class KnowsNoClock(BrokenSource):
    """A lease is reported as valid after its end."""

    def lease_left(self, message: Message[Any]) -> float:
        return 1.0


@breaks("leases.held-is-renewed")
class IgnoresLeaseExtension(BrokenSource):
    """Lease renewals are reported as successful but not made."""

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        return [None] * len(messages)


@breaks("messages.each-subscription-gets-all")
class SubscriptionsShareMessages(BrokenBackend):
    """All subscriptions of a topic are the same one."""

    async def subscribe(self, subscription: MessageSubscription, listener: Any) -> Any:
        shared = MessageSubscription(topic=subscription.topic, subscription="everybody", start=subscription.start)
        return await self.inner.subscribe(shared, listener)


@breaks("messages.latest-skips-history")
class AlwaysStartsAtTheEarliest(BrokenBackend):
    """A new subscription ignores `start` and begins at the earliest message."""

    async def subscribe(self, subscription: MessageSubscription, listener: Any) -> Any:
        early = MessageSubscription(topic=subscription.topic, subscription=subscription.subscription)
        return await self.inner.subscribe(early, listener)


@breaks("messages.ephemeral-begins-at-start")
class EphemeralStartsAtTheLatest(BrokenBackend):
    """An ephemeral subscription ignores `start` and begins at the latest message."""

    async def subscribe(self, subscription: MessageSubscription, listener: Any) -> Any:
        if isinstance(subscription.subscription, Ephemeral):
            subscription = dataclasses.replace(subscription, start="latest")
        return await super().subscribe(subscription, listener)


@breaks("cancel.waiters-lose-nothing")
class CancelLosesAMessage(BrokenBus):
    """A consumer suspends once more between taking a message and delivering it."""


class _Unstoppable(LossyConsumer):
    async def next_message(self, timeout: float | None = None) -> Any:
        return await self.inner.next_message(timeout)

    def pause(self) -> None:
        """Hand over as before."""


@breaks("flow.paused-hands-nothing-over")
class IgnoresThePause(BrokenBus):
    """`pause` of a consumer does nothing."""

    consumer_class = _Unstoppable


@breaks("leases.paused-is-renewed")
class PausedLeasesEnd(BrokenSource):
    """Renewals of leases are reported as successful but not made, also while the consumer is paused."""

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        return [None] * len(messages)


@breaks("flow.rate-is-bounded")
class IgnoresTheRate(Bus):
    """`max_rate` is ignored."""

    def messages(self, *args: Any, **options: Any) -> Any:
        options.pop("max_rate", None)
        return super().messages(*args, **options)


class _Hasty(LossyConsumer):
    async def receive_batches(self, handler: Any, *, max_wait: float | None = None, **options: Any) -> None:
        await self.inner.receive_batches(handler, **options)


@breaks("messages.batch-waits-to-fill")
class HandsBatchesOverAtOnce(BrokenBus):
    """`max_wait` of a handler of batches is ignored."""

    consumer_class = _Hasty


@breaks("messages.plain-handlers-run-in-threads")
class PlainHandlersStopTheLoop(StandingBus):
    """Plain handlers run on the event loop."""


@breaks("cancel.ack-completes")
class CancelStopsTheAck(CarelessBus):
    """Cancelling the caller of `ack` cancels the ack."""
