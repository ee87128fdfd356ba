"""One source of a consumer: the messages that were fetched and not settled.

`InFlight` owns every message of its source from the fetch to the settlement. It runs the loops that fetch, settle and
renew leases; bounds messages and bytes (`Flow`); and wakes the callers that wait (`Receivers`). Calls go in one
direction: the engine calls the failure policy, which calls `InFlight`.

*Concurrency.* One event loop. *Cancellation.* A settlement that was requested is carried out, also if its caller is
cancelled. *Failure.* A refused settlement is a `SettleFailed` event; a fatal fetch error goes to the engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from logging import DEBUG, WARNING
from time import monotonic
from typing import Any, Final

import msgspec

from broker.capabilities import ConfirmedAck, LeaseMode, MessageCapabilities
from broker.consuming.fetch_loop import FetchLoop, Prefetch
from broker.consuming.leases import LeaseKeeper
from broker.consuming.options import ConsumerOptions
from broker.consuming.ordering import Lanes, Ready
from broker.consuming.retry.policy import Attempts
from broker.consuming.settle_loop import SettleLoop
from broker.consuming.transactional_acks import TransactedMessages
from broker.driver.concurrency import Backoff
from broker.driver.contract import MessageSource, Settlement
from broker.driver.optional import ExpiresLeases, RedeliversInOrder, ReportsLeaseLeft
from broker.errors import BrokerError, LeaseLost
from broker.hooks import (
    Event,
    FetchFailed,
    FlowBlocked,
    Hooks,
    LeaseExpired,
    PartitionsAssigned,
    Received,
    Settled,
    SettleFailed,
    logger,
)
from broker.messages import Message, MessageOwner, Outcome, SettleState

__all__ = ["Counts", "Flow", "InFlight", "Receivers"]

# Attributes of an enum class cost a slow look-up each; these are read per message.
_ACK = Outcome.ACK
_NACK = Outcome.NACK
_RELEASE = Outcome.RELEASE
_OPEN = SettleState.OPEN
_SETTLING = SettleState.SETTLING
_SETTLED = SettleState.SETTLED
_LOST = SettleState.LOST

_SHOWN: Final = 5
_FETCH_SECONDS: Final = 5.0
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 5.0


class Flow:
    """Counts fetched and unsettled messages, buffered ones included; implements `InFlightMessages`.

    The number of messages never exceeds `max_messages`; the bytes may exceed `max_bytes` by one message, whose size is
    unknown before the fetch.
    """

    __slots__ = ("bytes", "count", "max_bytes", "max_messages", "topic")

    def __init__(self, topic: str, max_messages: int, max_bytes: int) -> None:
        self.topic = topic
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.count = 0
        self.bytes = 0

    def room(self) -> tuple[int, int]:
        """How many more messages and bytes may be fetched now."""
        left = self.max_bytes - self.bytes
        return (self.max_messages - self.count if left > 0 else 0), left


def _settled(settlements: Sequence[Settlement], results: Sequence[BrokerError | None]) -> dict[str, Any]:
    """The fields of `Settled` for the settlements that were carried out; refused ones are reported elsewhere."""
    nacked = released = refused = 0
    handled: list[Message[Any]] = []
    for settlement, error in zip(settlements, results, strict=True):
        outcome = settlement.outcome
        if error is not None:
            refused += 1
        elif outcome is _NACK:
            nacked += 1
        elif outcome is _RELEASE:
            released += 1
        elif settlement.message.outcome is _ACK:
            handled.append(settlement.message)
    acked = len(settlements) - refused - nacked - released
    return {"acked": acked, "nacked": nacked, "released": released, "handled": handled}


class Counts:
    """What a consumer has done, for the line that it logs when it closes; shared by its sources.

    :ivar handed_over: deliveries to handlers and callers.
    :ivar acked: messages that they acked.
    :ivar failed: failures of handlers.
    :ivar given_up: messages that were dead-lettered or dropped.
    """

    __slots__ = ("acked", "failed", "given_up", "handed_over")

    def __init__(self) -> None:
        self.handed_over = self.acked = self.failed = self.given_up = 0


class Receivers:
    """The callers that wait for messages of one consumer, and its workers; shared by all sources of the consumer.

    :ivar wanted: how many messages the waiting callers want.
    :ivar active_at: the loop time of the last activity; idleness counts from then.
    """

    __slots__ = ("_loop", "active_at", "counts", "quiet", "waiters", "wanted", "workers")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.counts = Counts()
        self.wanted = 0
        self.workers: set[asyncio.Task[None]] = set()
        self.waiters: deque[asyncio.Future[None]] = deque()
        self.active_at = self._loop.time()
        self.quiet: asyncio.Future[None] | None = None
        """Set while a close waits for handlers; resolved by each settlement."""

    def active(self) -> None:
        """Restart the idle time."""
        self.active_at = self._loop.time()

    def wake(self, count: int) -> None:
        """Wake up to `count` waiting callers, the longest waiting first."""
        waiters = self.waiters
        while count > 0 and waiters:
            waiter = waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    def settled(self, ready: int) -> None:
        """A message was settled or lost: `ready` other messages may be handed over now, and a close may continue."""
        self.active_at = self._loop.time()
        if self.waiters:
            self.wake(ready)
        if self.quiet is not None and not self.quiet.done():
            self.quiet.set_result(None)


class InFlight:
    """The messages of one source from the fetch to the settlement; implements `SourceListener` for the source.

    :param prepare: called with fetched messages before they are ready; None where the codec prepares nothing.
    :param failed: called with the fatal error that ended the fetch loop.
    """

    def __init__(
        self,
        topic: str,
        *,
        subscription: str | None,
        group: str | None,
        receivers: Receivers,
        ready: Ready,
        options: ConsumerOptions,
        hooks: Hooks,
        attempts: Attempts,
        max_messages: int,
        max_bytes: int,
        prepare: Callable[[Sequence[Message[Any]]], None] | None,
        failed: Callable[[BrokerError], None],
    ) -> None:
        self.topic = topic
        self.subscription = subscription
        self.group = group
        self.ready = ready
        self.options = options
        self.hooks = hooks
        self.attempts = attempts
        self.max_messages = max_messages
        self._receivers = receivers
        self.counts = receivers.counts
        self._prepare = prepare
        self._failed = failed
        self._lanes = ready if isinstance(ready, Lanes) else None
        self.messages: dict[Message[Any], int] = {}
        """Fetched and unsettled messages, in order, with the size of each for flow control."""
        self._flow = Flow(topic, max_messages, max_bytes)
        self._prefetch = Prefetch(min(options.prefetch or max_messages, max_messages))
        self._loop = asyncio.get_running_loop()

    def start(
        self,
        source: MessageSource,
        capabilities: MessageCapabilities,
        *,
        owner: MessageOwner,
        admit: Callable[[Sequence[Message[Any]]], Sequence[Message[Any]]] | None,
        handler_failed: Callable[[Message[Any], Exception], None],
    ) -> None:
        """Begin to fetch from the source that was opened with this object as its listener.

        :param owner: the owner of each fetched message.
        :param admit: returns those of the fetched messages that a handler may see.
        :param handler_failed: applies the retry policy after a transaction that failed.
        """
        self.source = source
        self._owner = owner
        self._admit = admit
        self.transacted = TransactedMessages(self, handler_failed)
        self.expire_leases = source.expire_leases if isinstance(source, ExpiresLeases) else None
        self.lease_left = source.lease_left if isinstance(source, ReportsLeaseLeft) else None
        self.capabilities = capabilities
        self.awaits_acks = bool(self.options.confirm_acks) or capabilities.confirmed_ack is ConfirmedAck.ALWAYS
        if self._lanes is not None:
            self._lanes.in_order = isinstance(source, RedeliversInOrder) and source.redelivers_in_order
        self._hide = self.hooks.show_in_flight(self._flow)
        self.settle_loop = SettleLoop(source, self.concluded)
        self.fetch_loop = FetchLoop(
            source.fetch,
            source.interrupt,
            demand=self._demand,
            deliver=self._deliver,
            retrying=self._retrying,
            failed=self._failed,
            backoff=Backoff(_FIRST_PAUSE, _LONGEST_PAUSE),
            wait=_FETCH_SECONDS,
        )
        self._watch = self._loop.call_later(self.options.blocked_after / 4, self._check_blocked)
        self._lease_keeper = (
            None
            if capabilities.lease is LeaseMode.NONE
            else LeaseKeeper(
                source,
                mode=capabilities.lease,
                lease_seconds=capabilities.lease_seconds,
                max_lease=self.options.max_lease,
                messages=self.messages,
                expired=self._expired,
                lost=self.lost,
                hooks=self.hooks,
            )
        )

    def limit(self, max_messages: int, max_bytes: int) -> None:
        """Change the bounds; messages beyond smaller ones stay until they are settled."""
        self.max_messages = self._flow.max_messages = max_messages
        self._flow.max_bytes = max_bytes
        self._prefetch.limit = min(self.options.prefetch or max_messages, max_messages)

    @property
    def within_bounds(self) -> bool:
        """Whether no more messages are in flight than the bounds allow."""
        return self._flow.count <= self.max_messages

    @property
    def full(self) -> bool:
        """Whether the bounds let nothing more be fetched."""
        return self._flow.room()[0] <= 0

    # -- settling ----------------------------------------------------------------------------------------

    async def carry_out(self, settlement: Settlement, *, wait: bool = False) -> None:
        """Settle a message that is in state settling; wait for the answer where acks are confirmed, or with `wait`."""
        if wait or self.awaits_acks:
            await self.settle_loop.put_and_wait((settlement,))
        else:
            self.settle_loop.put(settlement)

    def ack_soon(self, message: Message[Any]) -> None:
        """Ack what a handler that has returned left open; a refusal is an event, since no caller awaits it."""
        if message.state is _OPEN:
            message.state = _SETTLING
            message.outcome = _ACK
            self.settle_loop.put(Settlement(message, _ACK))
        else:
            self.returned(message)

    def returned(self, message: Message[Any]) -> None:
        """The handler has returned: if the message was settled before, the next message of its key may follow."""
        if self._lanes is not None and self._lanes.returned(message):
            self._receivers.settled(len(self.ready))

    def ack_all(self, messages: Sequence[Message[Any]]) -> asyncio.Future[None] | None:
        """Ack these open messages as one batch; returns a future where acks are confirmed."""
        for message in messages:
            message.state = _SETTLING
            message.outcome = _ACK
        settlements = [Settlement(message, _ACK) for message in messages]
        if self.awaits_acks and settlements:
            return self.settle_loop.put_and_wait(settlements)
        self.settle_loop.put(*settlements)
        return None

    def release(self, messages: Sequence[Message[Any]], delay: float | None = None) -> None:
        """Release those of these messages that are open."""
        for message in messages:
            if message.state is _OPEN:
                message.state = _SETTLING
                message.outcome = _RELEASE
                if not self.capabilities.release_keeps_attempt:
                    self.attempts.released(message)
                self.settle_loop.put(Settlement(message, _RELEASE, delay))

    def again(self, message: Message[Any]) -> Message[Any]:
        """Replace a failed message by a fresh copy, to be handed over from memory; returns the copy."""
        copy: Message[Any] = msgspec.structs.replace(
            message, state=_OPEN, outcome=None, lease_ends=None, retries=message.retries + 1, in_use=False
        )
        if message in self.messages:
            self.messages[copy] = self.messages.pop(message)
        self.ready.replace(message, copy)
        message.state = _SETTLED
        return copy

    def concluded(
        self, settlements: Sequence[Settlement], results: Sequence[BrokerError | None], seconds: float = 0.0
    ) -> None:
        """Apply the results of settlements, which took so many seconds."""
        size = count = acked = 0
        attempts = self.attempts
        forgets = bool(attempts)
        lanes, in_flight = self._lanes, self.messages
        for settlement, error in zip(settlements, results, strict=True):
            message = settlement.message
            size_counted = in_flight.pop(message, None)
            if size_counted is not None:
                size += size_counted
                count += 1
            if error is not None:
                self._refused(message, error)
            elif settlement.outcome is _RELEASE:
                message.state = _LOST
                self._give_back_followers(message)
            elif message.state is not _LOST:
                message.state = _SETTLED
                if message.outcome is _ACK:
                    acked += 1
                if lanes is not None:
                    lanes.done(message)
                if forgets and settlement.outcome is not Outcome.NACK:
                    attempts.forget(message)
        self._flow.count -= count
        self._flow.bytes -= size
        self.counts.acked += acked
        if self.hooks.listening:
            counts = _settled(settlements, results)
            if any(counts.values()):
                self.emit_settled(**counts, seconds=seconds)
        self._refill()
        self._receivers.settled(len(self.ready))

    def _refused(self, message: Message[Any], error: BrokerError) -> None:
        if message.state is not _LOST:
            message.state = _LOST if isinstance(error, LeaseLost) else SettleState.UNKNOWN
        self._give_back_followers(message)
        logger.warning("Message %r of %r was not settled: %s", message.id, self.topic, error)
        if self.hooks.listening:
            self.hooks.emit(SettleFailed(message=message, error=error))

    # -- leases ------------------------------------------------------------------------------------------

    def lost(self, messages: Sequence[Message[Any]]) -> None:
        """These are no longer ours (`SourceListener`)."""
        replaced = {id(message.raw) for message in messages if message not in self.messages}
        if replaced:
            # The source knows the originals; messages that wait in memory for a retry are copies.
            messages = [*messages, *(message for message in self.messages if id(message.raw) in replaced)]
        self._lose(messages, "the broker took it back")

    def expired(self, messages: Sequence[Message[Any]]) -> None:
        """The leases of these expired before hand-over (`SourceListener`)."""
        self.ready.expired(messages)
        for message in messages:
            self._lost(message, "its lease expired before hand-over")

    def _expired(self, messages: Sequence[Message[Any]]) -> None:
        expired = [each for each in messages if each.state is _OPEN or self.transacted.waits(each)]
        for message in set(messages).difference(expired):
            # It is being settled, or waits for its dead letter: no handler has it.
            message.lease_ends = None
        self._lose(expired, f"max_lease of {self.options.max_lease:g} s passed")
        for message in expired:
            # A handler had it, so this delivery counts: a message that always exceeds max_lease must reach its bound.
            self.settle_loop.put(Settlement(message, Outcome.NACK))

    def _lose(self, messages: Sequence[Message[Any]], reason: str) -> None:
        for message in messages:
            size_counted = self.messages.pop(message, None)
            if size_counted is not None:
                self._flow.count -= 1
                self._flow.bytes -= size_counted
            if message.state is _SETTLED or message.state is _LOST:
                continue
            # Before the state changes: an ack in flight may still be carried out.
            self._give_back_followers(message)
            if self.capabilities.lease is LeaseMode.NONE:
                # Its partition was revoked: the new owner may settle any message of the key.
                self.ready.forget(message)
            self._lost(message, reason)
        self._refill()
        self._receivers.settled(len(self.ready))

    def _lost(self, message: Message[Any], reason: str) -> None:
        leased = self.capabilities.lease is not LeaseMode.NONE
        if leased and message.state is _OPEN and message.lease_ends is None and not message.retries:
            # The broker counts this delivery, and no handler has seen it.
            self.attempts.released(message)
        message.state = _LOST
        level = DEBUG if message.lease_ends is None else WARNING
        logger.log(level, "Message %r of %r is lost: %s", message.id, self.topic, reason)
        if self.hooks.listening:
            self.hooks.emit(LeaseExpired(message=message, reason=reason))

    def _give_back_followers(self, message: Message[Any]) -> None:
        self.release(self.ready.abandon(message))

    # -- fetching ----------------------------------------------------------------------------------------

    def event(self, event: Event) -> None:
        """Pass on an event of the source (`SourceListener`)."""
        if isinstance(event, PartitionsAssigned):
            self._receivers.active()
        self.hooks.emit(event)

    def handed_over(self, count: int) -> None:
        """The consumer took so many messages; fetch if the buffer is half empty."""
        self.counts.handed_over += count
        self._prefetch.requested(count, len(self._receivers.workers) or 1)
        self._refill()

    def _refill(self) -> None:
        """Fetch again if the buffer is half empty."""
        if self.fetch_loop.waiting and 2 * len(self.ready) <= self._prefetch.target:
            self.fetch_loop.poke()

    def _demand(self) -> tuple[int, int]:
        target = self._prefetch.update(self._loop.time())
        ready = len(self.ready)
        wanted = max(self._receivers.wanted, target if 2 * ready <= target else 0) - ready
        room, byte_room = self._flow.room()
        return min(wanted, room), byte_room

    def _deliver(self, messages: Sequence[Message[Any]]) -> None:
        if not messages:
            return
        owner = self._owner
        for message in messages:
            message.owner = owner
        sizes = [message.size for message in messages]
        self.messages.update(zip(messages, sizes, strict=True))
        size = sum(sizes)
        self._flow.count += len(messages)
        self._flow.bytes += size
        if self.hooks.listening:
            now = monotonic()
            for message in messages:
                message.received_at = now
            self._emit_received(messages, size)
        self._receivers.active()
        if self._admit is not None:
            messages = self._admit(messages)
        if self._prepare is not None and messages:
            self._prepare(messages)
        refused = self.ready.put_all(messages)
        for message, delay in refused:
            self.release((message,), min(delay, self.capabilities.native_delay))
        if self._receivers.waiters:
            self._receivers.wake(len(messages) - len(refused))

    def deliver_again(self, message: Message[Any]) -> None:
        """Hand over a message that waited in memory."""
        self.ready.put_again(message)
        if self.hooks.listening:
            # `received_at` stays the time of the first delivery.
            self._emit_received((message,), 0)
        self._receivers.wake(1)

    def _emit_received(self, messages: Sequence[Message[Any]], size: int) -> None:
        """Report messages; `size` is what the broker sent, in bytes."""
        self.hooks.emit(
            Received(topic=self.topic, subscription=self.subscription, group=self.group, messages=messages, bytes=size)
        )

    def emit_settled(self, **counts: Any) -> None:
        """Report settlements; `counts` are fields of `Settled`."""
        self.hooks.emit(Settled(topic=self.topic, subscription=self.subscription, group=self.group, **counts))

    def _retrying(self, error: BrokerError, pause: float) -> None:
        logger.warning("Fetching from %r failed, next try in %.2f s: %s", self.topic, pause, error)
        self.hooks.emit(FetchFailed(topic=self.topic, error=error, pause=pause))

    def _check_blocked(self) -> None:
        """Warn if flow control stops the fetch and no handler works on the oldest messages; runs periodically."""
        blocked_after = self.options.blocked_after
        self._watch = self._loop.call_later(blocked_after / 4, self._check_blocked)
        since = self.fetch_loop.no_demand_since
        if since is None or (seconds := self._loop.time() - since) < blocked_after:
            return
        self.fetch_loop.no_demand_since = self._loop.time()
        if self._flow.room()[0] > 0:
            return
        # A handler cannot have forgotten a buffered message.
        forgotten = (m for m in self.messages if m.lease_ends is not None and m.state is _OPEN and not m.in_use)
        oldest = list(islice(forgotten, _SHOWN))
        if not oldest:
            return
        outstanding = self._flow.count
        logger.warning(
            "Nothing is fetched from %r for %.3g s: %d unsettled messages; the oldest are %s",
            self.topic,
            seconds,
            outstanding,
            ", ".join(repr(message.id) for message in oldest),
        )
        self.hooks.emit(FlowBlocked(outstanding=outstanding, oldest=oldest, seconds=seconds))

    def stop_fetching(self) -> None:
        self._watch.cancel()
        self.fetch_loop.stop()

    async def fetching_stopped(self, timeout: float) -> None:
        """Wait until the result of the last fetch is delivered; cancel a fetch that ignores `interrupt`."""
        await self.fetch_loop.stopped(timeout)
        self.fetch_loop.cancel()

    async def close(self, deadline: float) -> None:
        """Carry out the requested settlements, then close the source; call `stop_fetching` before."""
        self.transacted.close()
        await self.settle_loop.close(deadline)
        if self._lease_keeper is not None:
            await self._lease_keeper.close()
        for message in self.messages:
            if message.state is _OPEN:
                message.state = _LOST
            elif message.state is _SETTLING:
                message.state = SettleState.UNKNOWN
        self.messages.clear()
        self._hide()
        # A source that hangs must not delay the close beyond its deadline.
        closing = self._loop.create_task(self.source.close(), name="broker-source-close")
        _, late = await asyncio.wait({closing}, timeout=max(1.0, deadline - self._loop.time()))
        if late:
            closing.cancel()
        elif (error := closing.exception()) is not None:
            logger.warning("Closing the source of %r failed: %s", self.topic, error)
