"""Flow control: how many messages and bytes of one source may be unsettled at once. Used on one event loop.

Tells observers what came to a consumer and what was settled; called only where somebody listens.

One event for each batch. Synchronous, on the consumer's event loop; never raises, as `Hooks.emit` does not.


Enters what observers put around the handling of a message. An observer that raises is logged and changes nothing.

One source of a consumer: what it has fetched and not settled, and the pumps and keepers around that.

The intake owns every message of its source from the fetch to the settlement. Used on one event loop; a settlement
asked for is carried out whether or not its caller is cancelled.


Has a source write down what waits in the consumer's memory for its next delivery, where it can (`KeepsTries`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from time import monotonic
from typing import Any, Protocol

import msgspec

from broker.capabilities import ConfirmedAck, LeaseMode, MessageCapabilities
from broker.checks import check_seconds
from broker.consuming import in_flight as scopes
from broker.consuming.fetch_loop import FetchPump, Prefetch
from broker.consuming.leases import LeaseKeeper, tell_not_renewed
from broker.consuming.options import ConsumerOptions
from broker.consuming.ordering import Lanes, Ready
from broker.consuming.retry.policy import Attempts
from broker.consuming.settle_loop import SettlePump
from broker.consuming.transactional_acks import Transacted
from broker.driver.contract import KeepsTries, MessageSource, Settlement
from broker.driver.leases import LosesOver
from broker.errors import BackendError, BrokerError, LeaseLost, SettleError, Unsupported
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
)
from broker.messages import Message, Outcome, SettleState

__all__ = [
    "Flow",
    "Host",
    "Intake",
    "blocked",
    "enter",
    "keep",
    "leave",
    "tell_received",
    "tell_received_again",
    "tell_settled",
]


logger = logging.getLogger("broker")

_SHOWN = 5


class Flow:
    """Counts what was fetched and is not settled, buffered messages included; implements `HeldMessages`.

    The number of messages is never exceeded; the bytes may be by one message, whose size is not known before
    it is fetched.
    """

    __slots__ = ("bytes", "count", "max_bytes", "max_messages", "topic")

    def __init__(self, topic: str, max_messages: int, max_bytes: int) -> None:
        self.topic = topic
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.count = 0
        self.bytes = 0

    @property
    def room(self) -> int:
        """How many more messages may be fetched now."""
        return self.max_messages - self.count if self.bytes < self.max_bytes else 0

    @property
    def byte_room(self) -> int:
        return self.max_bytes - self.bytes

    def taken(self, count: int, size: int) -> None:
        """So many were fetched."""
        self.count += count
        self.bytes += size

    def freed(self, count: int, size: int) -> None:
        """So many are settled, or lost."""
        self.count -= count
        self.bytes -= size


def blocked(topic: str, held: Iterable[Message[Any]], flow: Flow, seconds: float) -> FlowBlocked | None:
    """Nothing was fetched for so long: who is to blame, if messages were handed over and nobody works on them."""
    # Buffered messages have not been given to anybody, so nobody forgot them.
    forgotten = (m for m in held if m.lease_ends is not None and m.state is SettleState.OPEN and not m.in_use)
    oldest = [message for message, _ in zip(forgotten, range(_SHOWN), strict=False)]
    if not oldest:
        return None
    logger.warning(
        "Nothing is fetched from %r for %.0f s: %d messages are unsettled; the oldest are %s",
        topic,
        seconds,
        flow.count,
        ", ".join(repr(message.id) for message in oldest),
    )
    return FlowBlocked(outstanding=flow.count, oldest=oldest, seconds=seconds)


# Attributes of an enum class cost a slow look-up each; these are read per message.
_ACK = Outcome.ACK
_NACK = Outcome.NACK
_RELEASE = Outcome.RELEASE


def tell_received(hooks: Hooks, topic: str, messages: Sequence[Message[Any]], size: int) -> None:
    """These were fetched, of so many bytes together."""
    now = monotonic()
    for message in messages:
        message.received_at = now
    hooks.emit(Received(topic=topic, messages=messages, bytes=size))


def tell_received_again(hooks: Hooks, topic: str, message: Message[Any]) -> None:
    """It comes again from memory; when it came first stays what it was."""
    hooks.emit(Received(topic=topic, messages=(message,), bytes=0))


def tell_settled(
    hooks: Hooks, topic: str, settlements: Sequence[Settlement], results: Sequence[BrokerError | None]
) -> None:
    """These were carried out, or refused, which is told elsewhere; nothing if all were refused."""
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
    if acked or nacked or released:
        hooks.emit(Settled(topic=topic, acked=acked, nacked=nacked, released=released, handled=handled))


def enter(
    message: Message[Any], interceptors: Sequence[Callable[[Message[Any]], AbstractContextManager[object]]]
) -> None:
    """Enter each interceptor's context for the message, to be left by `leave`."""
    message.scope = scope = ExitStack()
    for interceptor in interceptors:
        try:
            scope.enter_context(interceptor(message))
        except Exception:
            logger.exception("An interceptor failed before message %r was handled", message.id)


def leave(message: Message[Any], error: BaseException | None) -> None:
    """Leave the contexts that were entered, telling them how the handling ended."""
    scope: ExitStack | None = message.scope
    if scope is None:
        return
    message.scope = None
    try:
        scope.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)
    except Exception as raised:
        if raised is not error:
            logger.exception("An interceptor failed after message %r was handled", message.id)


# Attributes of an enum class cost a slow look-up each; these are read per message.
_OPEN = SettleState.OPEN
_SETTLING = SettleState.SETTLING
_SETTLED = SettleState.SETTLED
_LOST = SettleState.LOST


class FailurePolicy(Protocol):
    """What becomes of messages that were not simply acked."""

    def handler_failed(self, intake: Intake, message: Message[Any], error: Exception) -> None: ...
    async def nack(self, intake: Intake, message: Message[Any], delay: float | None) -> None: ...
    async def reject(self, intake: Intake, message: Message[Any], reason: str) -> None: ...


class Host(Protocol):
    """The consumer that an intake works for."""

    @property
    def hooks(self) -> Hooks: ...
    @property
    def options(self) -> ConsumerOptions: ...
    @property
    def attempts(self) -> Attempts: ...
    @property
    def disposition(self) -> FailurePolicy: ...
    @property
    def wanted(self) -> int:
        """How many messages are being waited for."""
        ...

    @property
    def concurrency(self) -> int:
        """How many messages are worked on at once, as far as is known; at least 1."""
        ...

    def deliver(self, intake: Intake, messages: Sequence[Message[Any]]) -> None: ...
    def deliver_again(self, message: Message[Any]) -> None: ...
    def active(self) -> None: ...
    def settled(self) -> None: ...
    def fail(self, error: BrokerError) -> None: ...


class Intake:
    """Implements `MessageOwner` for the messages of one source, and `SourceListener` for the source."""

    def __init__(
        self, engine: Host, topic: str, max_messages: int, max_bytes: int, prefetch: int, ready: Ready
    ) -> None:
        self.engine = engine
        self.topic = topic
        self.ready = ready
        self._lanes = ready if isinstance(ready, Lanes) else None
        self.held: dict[Message[Any], int] = {}
        """What was fetched and not settled, in order, with the bytes that flow control counts for each."""
        self._flow = Flow(topic, max_messages, max_bytes)
        self._prefetch = Prefetch(min(prefetch, max_messages))
        self._loop = asyncio.get_running_loop()
        self._hooks = engine.hooks
        self.transacted = Transacted(
            self, lambda message, error: engine.disposition.handler_failed(self, message, error)
        )

    def start(self, source: MessageSource, capabilities: MessageCapabilities, *, confirm: bool) -> None:
        """Begin to fetch from the source that was opened with this intake as its listener."""
        self.source = source
        self.lose_over = source.lose_over if isinstance(source, LosesOver) else None
        self.capabilities = capabilities
        self.awaits_acks = confirm or capabilities.confirmed_ack is ConfirmedAck.ALWAYS
        if self._lanes is not None:
            self._lanes.in_order = getattr(source, "redelivers_in_order", False)
        self._hide_held = self._hooks.show_held(self._flow)
        self._settle_pump = SettlePump(source, self.concluded)
        self._fetch_pump = FetchPump(
            source,
            demand=self._demand,
            deliver=self._deliver,
            retrying=self._retrying,
            failed=self.engine.fail,
            blocked=self._blocked,
            blocked_after=self.engine.options.blocked_after,
        )
        self._lease_keeper = (
            None
            if capabilities.lease is LeaseMode.NONE
            else LeaseKeeper(
                source,
                mode=capabilities.lease,
                lease_seconds=capabilities.lease_seconds,
                max_lease=self.engine.options.max_lease,
                held=self.held,
                expired=self._expired,
                lost=self.lost,
                hooks=self._hooks,
            )
        )

    # -- MessageOwner ------------------------------------------------------------------------------------

    async def settle(self, message: Message[Any], outcome: Outcome, delay: float | None, reason: str) -> None:
        if outcome is Outcome.NACK:
            self.transacted.check_free(message)
            await self.engine.disposition.nack(self, message, delay)
        elif outcome is Outcome.REJECT:
            self.transacted.check_free(message)
            await self.engine.disposition.reject(self, message, reason)
        elif message.begin_settling(outcome):
            await self.carry_out(message, Settlement(message, outcome))
        else:
            self.transacted.check_free(message)

    async def extend(self, message: Message[Any], seconds: float) -> None:
        check_seconds("seconds", seconds, zero=True)
        if self.capabilities.lease is LeaseMode.FIXED:
            raise Unsupported(
                f"The lease of message {message.id!r} cannot be extended: nobody renews it on this broker",
                advice="Work in less time than capabilities.messages.lease_seconds, or have the lease made longer",
            )
        if message in self.held:
            message.lease_ends = max(message.lease_ends or 0.0, self._loop.time() + seconds)

    def begin(self, message: Message[Any]) -> None:
        if self._hooks.handling:
            scopes.enter(message, self._hooks.handling)

    async def finish(self, message: Message[Any], error: BaseException | None) -> bool:
        if message.scope is not None:
            scopes.leave(message, error)
        self.returned(message)
        if error is None:
            # As after a handler: a refusal is an event, since the message comes again and the loop is to go on.
            self.ack_soon(message)
            return False
        if isinstance(error, Exception):
            self.engine.disposition.handler_failed(self, message, error)
            return True
        if message.state is _OPEN:
            self.release([message])
        return False

    # -- settling ----------------------------------------------------------------------------------------

    async def carry_out(self, message: Message[Any], settlement: Settlement, *, surely: bool = False) -> None:
        """Settle a message that is in state settling; wait for the answer where acks are confirmed, or `surely`."""
        if surely or self.awaits_acks:
            await self._settle_pump.put_and_wait((settlement,))
        else:
            self._settle_pump.put(settlement)

    def carry_out_soon(self, settlement: Settlement) -> None:
        self._settle_pump.put(settlement)

    def ack_soon(self, message: Message[Any]) -> None:
        """Ack what a handler that has returned left open; a refusal is an event, since nobody awaits it."""
        if message.state is _OPEN:
            message.state = _SETTLING
            message.outcome = _ACK
            self._settle_pump.put(Settlement(message, _ACK))
        else:
            self.returned(message)

    def returned(self, message: Message[Any]) -> None:
        """Nobody works on it any more: if it was settled before, the next of its key may follow."""
        if self._lanes is not None and self._lanes.returned(message):
            self.engine.settled()

    def ack_all(self, messages: Sequence[Message[Any]]) -> asyncio.Future[None] | None:
        """Ack these, which are open, as one batch; a future where the broker answers."""
        for message in messages:
            message.state = _SETTLING
            message.outcome = _ACK
        settlements = [Settlement(message, _ACK) for message in messages]
        if self.awaits_acks and settlements:
            return self._settle_pump.put_and_wait(settlements)
        self._settle_pump.put_all(settlements)
        return None

    def release(self, messages: Sequence[Message[Any]], delay: float | None = None) -> None:
        """Give these back unhandled."""
        for message in messages:
            if message.state is _OPEN:
                message.state = _SETTLING
                message.outcome = _RELEASE
                if not self.capabilities.release_keeps_attempt:
                    self.engine.attempts.released(message)
                self._settle_pump.put(Settlement(message, _RELEASE, delay))

    def again(self, message: Message[Any]) -> Message[Any]:
        """A fresh copy of a failed message, to be handed over from memory; it takes the old one's place."""
        copy: Message[Any] = msgspec.structs.replace(
            message, state=_OPEN, outcome=None, lease_ends=None, retries=message.retries + 1, in_use=False
        )
        if message in self.held:
            self.held[copy] = self.held.pop(message)
        self.ready.replace(message, copy)
        message.state = _SETTLED
        return copy

    def concluded(self, settlements: Sequence[Settlement], results: Sequence[BrokerError | None]) -> None:
        """These were carried out, or tried; what became of each."""
        size = count = 0
        attempts = self.engine.attempts
        forgets = bool(attempts)
        lanes, held = self._lanes, self.held
        for settlement, error in zip(settlements, results, strict=True):
            message = settlement.message
            bytes_held = held.pop(message, None)
            if bytes_held is not None:
                size += bytes_held
                count += 1
            if error is not None:
                self._refused(message, error)
            elif settlement.outcome is _RELEASE:
                message.state = _LOST
                self._give_back_followers(message)
            elif message.state is not _LOST:
                message.state = _SETTLED
                if lanes is not None:
                    lanes.done(message)
                if forgets and settlement.outcome is not Outcome.NACK:
                    attempts.forget(message)
        self._flow.freed(count, size)
        if self._hooks.listening:
            tell_settled(self._hooks, self.topic, settlements, results)
        self._refill()
        self.engine.settled()

    def _refused(self, message: Message[Any], error: BrokerError) -> None:
        if message.state is not _LOST:
            message.state = _LOST if isinstance(error, LeaseLost) else SettleState.UNKNOWN
        self._give_back_followers(message)
        logger.warning("Message %r of %r was not settled: %s", message.id, self.topic, error)
        if self._hooks.listening:
            self._hooks.emit(SettleFailed(message=message, error=error))

    # -- leases ------------------------------------------------------------------------------------------

    def lost(self, messages: Sequence[Message[Any]]) -> None:
        """These are no longer ours (`SourceListener`)."""
        replaced = {id(message.raw) for message in messages if message not in self.held}
        if replaced:
            # The source knows the originals; what waits for its next try in memory is a copy of one.
            messages = [*messages, *(message for message in self.held if id(message.raw) in replaced)]
        self._lose(messages, "the broker took it back")

    def passed_over(self, messages: Sequence[Message[Any]]) -> None:
        """These come again, and were never here (`SourceListener`)."""
        self.ready.passed_over(messages)
        for message in messages:
            self._lost(message, "it could not be handed over in time")

    def _expired(self, messages: Sequence[Message[Any]]) -> None:
        expired = [each for each in messages if each.state is _OPEN or self.transacted.waits(each)]
        for message in set(messages).difference(expired):
            # Being settled, or waiting for its dead letter: no handler overstays with it.
            message.lease_ends = None
        self._lose(expired, f"max_lease of {self.engine.options.max_lease:g} s passed")
        for message in expired:
            # A handler had it, so this delivery counts: one that always overstays is to reach its bound.
            self._settle_pump.put(Settlement(message, Outcome.NACK))

    def _lose(self, messages: Sequence[Message[Any]], reason: str) -> None:
        for message in messages:
            bytes_held = self.held.pop(message, None)
            if bytes_held is not None:
                self._flow.freed(1, bytes_held)
            if message.state is _SETTLED or message.state is _LOST:
                continue
            # Before its state is told: an ack that is on its way may be carried out yet.
            self._give_back_followers(message)
            if self.capabilities.lease is LeaseMode.NONE:
                # It went with its partition, whose new owner need not leave anything of it to us.
                self.ready.forget(message)
            self._lost(message, reason)
        self._refill()
        self.engine.settled()

    def _lost(self, message: Message[Any], reason: str) -> None:
        message.state = _LOST
        level = logging.DEBUG if message.lease_ends is None else logging.WARNING
        logger.log(level, "Message %r of %r is lost: %s", message.id, self.topic, reason)
        if self._hooks.listening:
            self._hooks.emit(LeaseExpired(message=message, reason=reason))

    def _give_back_followers(self, message: Message[Any]) -> None:
        self.release(self.ready.abandon(message))

    # -- fetching ----------------------------------------------------------------------------------------

    def event(self, event: Event) -> None:
        """Pass on what the source reports (`SourceListener`)."""
        if isinstance(event, PartitionsAssigned):
            self.engine.active()
        self._hooks.emit(event)

    def handed_over(self, count: int) -> None:
        """The consumer took so many; it may be time to fetch."""
        self._prefetch.requested(count, self.engine.concurrency)
        self._refill()

    def _refill(self) -> None:
        if self._fetch_pump.waiting and 2 * len(self.ready) <= self._prefetch.target:
            self._fetch_pump.poke()

    def poke(self) -> None:
        self._fetch_pump.poke()

    def _demand(self) -> tuple[int, int]:
        target = self._prefetch.update(self._loop.time())
        ready = len(self.ready)
        wanted = max(self.engine.wanted, target if 2 * ready <= target else 0) - ready
        return min(wanted, self._flow.room), self._flow.byte_room

    def _deliver(self, messages: Sequence[Message[Any]]) -> None:
        for message in messages:
            message.owner = self
        sizes = [message.size for message in messages]
        self.held.update(zip(messages, sizes, strict=True))
        self._flow.taken(len(messages), size := sum(sizes))
        if self._hooks.listening:
            tell_received(self._hooks, self.topic, messages, size)
        self.engine.deliver(self, messages)

    def _retrying(self, error: BrokerError, pause: float) -> None:
        logger.warning("Fetching from %r failed, next try in %.2f s: %s", self.topic, pause, error)
        self._hooks.emit(FetchFailed(topic=self.topic, error=error, pause=pause))

    def _blocked(self, seconds: float) -> None:
        if self._flow.room <= 0 and (event := blocked(self.topic, self.held, self._flow, seconds)) is not None:
            self._hooks.emit(event)

    def stop_fetching(self) -> None:
        self._fetch_pump.stop()

    async def fetching_stopped(self, timeout: float) -> None:
        """Wait until what the last fetch had was delivered."""
        await self._fetch_pump.stopped(timeout)

    async def close(self, deadline: float) -> None:
        """Settle what was asked for, then close the source; `stop_fetching` came before."""
        self.transacted.close()
        await self._settle_pump.close(deadline)
        if self._lease_keeper is not None:
            await self._lease_keeper.close()
        for message in self.held:
            if message.state is _OPEN:
                message.state = _LOST
            elif message.state is _SETTLING:
                message.state = SettleState.UNKNOWN
        self.held.clear()
        self._hide_held()
        # A source that hangs must not hold up the consumer: close returns within its deadline.
        closing = self._loop.create_task(self.source.close(), name="broker-source-close")
        _, late = await asyncio.wait({closing}, timeout=max(1.0, deadline - self._loop.time()))
        if late:
            closing.cancel()
        elif (error := closing.exception()) is not None:
            logger.warning("Closing the source of %r failed: %s", self.topic, error)


def keep(intake: Intake, message: Message[Any], delay: float) -> Coroutine[Any, Any, None] | None:
    """As `KeepsTries.keep`; None if the source writes nothing down.

    What could not be written is told to the hooks, and waits all the same.

    :raises LeaseLost: by what is returned: the message comes again to somebody, and is taken out of the intake.
    :raises SettleError: likewise: it may not be written down.
    """
    source = intake.source
    return _kept(intake, source, message, delay) if isinstance(source, KeepsTries) else None


async def _kept(intake: Intake, source: KeepsTries, message: Message[Any], delay: float) -> None:
    try:
        error = await source.keep(message, delay)
    except BrokerError as raised:
        error = raised
    except Exception as failure:
        error = BackendError(f"The backend failed to write tries down: {failure}", native=failure)
    if error is None:
        return
    if isinstance(error, LeaseLost):
        intake.lost([message])
        raise error
    tell_not_renewed(intake.engine.hooks.emit, [message], [error])
    raise SettleError(
        f"The tries and the delay of message {message.id!r} of {message.topic!r} may not be written: {error.message}",
        native=error.native,
        advice="It waits in this process and comes again; should that die, too early maybe, and with a lower count",
    ) from error
