"""Keeps messages in memory until their delay is over, for delays that the broker cannot keep itself.

One timer serves all. Held messages stay outstanding and their leases renewed; the number held is bounded by
the caller. Used on one event loop.

What becomes of messages that were not simply acked: retried, dead-lettered, dropped, or brought back later.

One per consumer. Its tasks belong to the consumer: they go on when whoever asked is cancelled; a close lets writes
that are under way end, and gives back what was not written. Used on one event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Coroutine
from itertools import count
from math import inf
from typing import Any

from broker.capabilities import LeaseMode
from broker.checks import check_seconds
from broker.consuming.dead_letters import DeadLetterWriter, describe
from broker.consuming.in_flight import Host, Intake, keep
from broker.consuming.options import longest_delay
from broker.consuming.retry.policy import Drop, Retry
from broker.consuming.retry.writer import RetryWriter
from broker.driver.contract import RetryTopic, Settlement
from broker.driver.leases import TellsLeaseLeft
from broker.driver.retry_message import letter_of
from broker.errors import InvalidMessage, LeaseLost, SettleError, Unsupported
from broker.hooks import DeadLettered, HandlerFailed, Settled, SettleFailed
from broker.messages import Message, Outcome, SettleState

__all__ = ["DelayHolder", "Disposition"]


class DelayHolder:
    """:param due: called on the loop with each message whose delay is over, also if it was lost meanwhile."""

    def __init__(self, due: Callable[[Message[Any]], None]) -> None:
        self._due = due
        self._heap: list[tuple[float, int, Message[Any]]] = []
        self._order = count()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._heap)

    def hold(self, message: Message[Any], seconds: float) -> None:
        """Call `due(message)` after so many seconds."""
        heapq.heappush(self._heap, (self._loop.time() + seconds, next(self._order), message))
        self._arm()

    def close(self) -> None:
        """Forget all of them; giving them back is the owner's."""
        if self._timer is not None:
            self._timer.cancel()
        self._heap.clear()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._heap[0][0], self._fire) if self._heap else None

    def _fire(self) -> None:
        now = self._loop.time()
        while self._heap and self._heap[0][0] <= now:
            self._due(heapq.heappop(self._heap)[2])
        self._arm()


logger = logging.getLogger("broker")


class Disposition:
    """Carries out a consumer's retry policy and dead-letter choice."""

    def __init__(
        self,
        engine: Host,
        retry: Retry,
        dead_letter: DeadLetterWriter | Drop | None,
        subscription: str,
        retry_writer: RetryWriter | None = None,
    ) -> None:
        self.retry = retry
        self._engine = engine
        self._dead_letter = dead_letter
        self._retry_writer = retry_writer
        self._subscription = subscription
        self._holder = DelayHolder(self._due)
        self._intakes: dict[Message[Any], Intake] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False

    def handler_failed(self, intake: Intake, message: Message[Any], error: Exception) -> None:
        """Settle a message whose handler raised, by the policy; returns at once.

        Where the handler had settled it, or its lease was lost, there is only to tell of the failure.
        """
        if message.state is not SettleState.OPEN:
            self._failed_late(message, error)
            return
        failures = self._engine.attempts.failed(message)
        total = failures + self._failures_before(message)
        retried = self.retry.retries(error)
        target = None
        delay = None
        if retried and failures < self.retry.max_attempts:
            delay = min(self.retry.delay(failures), _kept_for(intake, message))
        elif retried and self._retry_writer is not None and (target := self._retry_writer.after_failure(message)):
            delay = target.delay
        logger.warning(
            "Handling message %r of %r failed (failure %d, %s)",
            message.id,
            message.topic,
            total,
            "given up" if delay is None else f"again in {delay:.2f} s",
            exc_info=error,
        )
        if self._engine.hooks.listening:
            self._engine.hooks.emit(HandlerFailed(message=message, error=error, failures=total, retry_in=delay))
        message.begin_settling(Outcome.REJECT if delay is None else Outcome.NACK)
        reason = f"failed {total} times" if retried else f"{type(error).__name__} is not retried"
        if target is not None:
            self._soon(self._send_on(intake, message, target, reason, error, failures))
        elif delay is not None:
            self._bring_back(intake, message, delay, error)
        else:
            self._give_up_soon(intake, message, reason, error, total)

    def _failed_late(self, message: Message[Any], error: Exception) -> None:
        attempts = self._engine.attempts
        done = message.outcome is Outcome.ACK or message.outcome is Outcome.REJECT
        if done and message.state is not SettleState.LOST:
            # Nothing is to be remembered of a message that does not come again.
            failures = attempts.failures(message) + 1
        else:
            failures = attempts.failed(message)
        logger.warning(
            "Handling message %r of %r failed (failure %d, after %s)",
            message.id,
            message.topic,
            failures,
            "it was lost" if message.outcome is None else f"its {message.outcome.name.lower()}",
            exc_info=error,
        )
        if self._engine.hooks.listening:
            self._engine.hooks.emit(HandlerFailed(message=message, error=error, failures=failures, retry_in=None))

    async def nack(self, intake: Intake, message: Message[Any], delay: float | None) -> None:
        """Bring it back after the delay; the policy's first step without one.

        With retry topics it waits on one of them, and the call returns when it is there.
        """
        if self._retry_writer is not None and delay != 0:
            check_seconds("delay", delay, optional=True)
            target = self._retry_writer.for_delay(message, delay)
            if message.begin_settling(Outcome.NACK):
                await _told(self._soon(self._send_on(intake, message, target, "nacked", None, 0)), message)
            return
        if intake.lose_over is not None:
            intake.lose_over((message,))
        if delay is None:
            delay = min(self.retry.delay(1), _kept_for(intake, message))
        else:
            self._check_delay(intake, message, delay)
        if not message.begin_settling(Outcome.NACK):
            return
        if not self._waits_here(intake, delay):
            await intake.carry_out(message, _nacked(intake, message, delay))
        elif (kept := self._hold(intake, message, delay)) is not None and intake.awaits_acks:
            await _told(kept, message)

    async def reject(self, intake: Intake, message: Message[Any], reason: str) -> None:
        """Dead-letter it; return when its letter is written and it is settled.

        :raises LeaseLost, SettleError: it comes again, or may, beside its letter.
        """
        if message.begin_settling(Outcome.REJECT):
            await _told(self._give_up_soon(intake, message, reason, None, self._tries(message)), message)

    def give_up_soon(self, intake: Intake, message: Message[Any], reason: str, error: Exception | None = None) -> None:
        """Dead-letter a message that no handler is to see."""
        if message.begin_settling(Outcome.REJECT):
            self._give_up_soon(intake, message, reason, error, self._tries(message))

    def give_up_last(self, intake: Intake, message: Message[Any], last: int) -> bool:
        """Dead-letter it if the broker drops it after this delivery, whatever becomes of that but an ack."""
        attempt = message.view.delivery_attempt(message.raw)
        if attempt is None or attempt < last:
            return False
        self.give_up_soon(intake, message, f"delivered {attempt} times, after which the broker drops it")
        return True

    def stop(self) -> None:
        """Hold nothing more, and repeat no failed write; what was held is the intake's to give back."""
        self._stopped = True
        self._holder.close()
        self._intakes.clear()
        if isinstance(self._dead_letter, DeadLetterWriter):
            self._dead_letter.close()
        if self._retry_writer is not None:
            self._retry_writer.close()

    async def close(self, deadline: float) -> None:
        """Let the writes that are under way end, until the loop time `deadline`.

        What was not written is open again, for the intake to give back.
        """
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    def _bring_back(self, intake: Intake, message: Message[Any], delay: float, error: Exception | None = None) -> None:
        """Hold it here, or have the broker do it; waits for neither."""
        if self._waits_here(intake, delay):
            self._hold(intake, message, delay)
        else:
            intake.carry_out_soon(_nacked(intake, message, delay, error))

    def _waits_here(self, intake: Intake, delay: float) -> bool:
        in_process = self._engine.options.ordered_by_key or delay > intake.capabilities.native_delay
        return in_process and self._has_room(intake)

    def _hold(self, intake: Intake, message: Message[Any], delay: float) -> asyncio.Task[None] | None:
        """Have it wait in memory; who writes that down, if anybody does."""
        # A delivery that follows at once is told of by itself.
        keeping = keep(intake, message, delay) if delay else None
        copy = intake.again(message)
        self._intakes[copy] = intake
        self._holder.hold(copy, delay)
        if self._engine.hooks.listening:
            self._engine.hooks.emit(Settled(topic=intake.topic, nacked=1))
        return None if keeping is None else self._soon(keeping)

    def _check_delay(self, intake: Intake, message: Message[Any], delay: float) -> None:
        """Whether somebody can keep such a delay.

        :raises ConfigurationError: it is not a number of seconds.
        :raises Unsupported: neither the broker nor this process can keep it.
        """
        check_seconds("delay", delay, zero=True)
        longest = longest_delay(self._engine.options, intake.capabilities)
        if message.state is SettleState.OPEN and (left := _kept_for(intake, message)) < min(delay, longest):
            raise Unsupported(
                f"A delay of {delay:,.10g} s is longer than what is left of the message's lease ({left:,.2f} s)",
                advice="Ask for a shorter delay, or for none; nobody renews this lease",
            )
        if intake.capabilities.lease is not LeaseMode.NONE and delay > longest:
            raise Unsupported(
                f"A delay of {delay:,.10g} s is longer than this consumer can keep ({longest:,.10g} s)",
                advice="Ask for a shorter delay"
                if intake.capabilities.lease is LeaseMode.FIXED
                else "Ask for a shorter delay or raise max_lease",
            )

    def _has_room(self, intake: Intake) -> bool:
        # Order needs the message here whatever it costs; otherwise half of the room stays free for others, unless the
        # broker would send it again at once, and again, until it counts as undeliverable.
        options = self._engine.options
        here = options.ordered_by_key or intake.capabilities.native_delay == 0
        return here or 2 * len(self._holder) < options.max_outstanding

    def _due(self, message: Message[Any]) -> None:
        intake = self._intakes.pop(message, None)
        if intake is None or message.state is not SettleState.OPEN:
            return
        if (keeping := keep(intake, message, 0.0)) is None:
            self._engine.deliver_again(message)
        else:
            # As its first delivery, this one counts before anybody has it, who may not live to tell.
            self._soon(keeping).add_done_callback(lambda _: self._deliver_again(message))

    def _deliver_again(self, message: Message[Any]) -> None:
        if message.state is SettleState.OPEN and not self._stopped:
            self._engine.deliver_again(message)

    def _give_up_soon(
        self, intake: Intake, message: Message[Any], reason: str, error: Exception | None, attempts: int | None
    ) -> asyncio.Task[None]:
        return self._soon(self._give_up(intake, message, reason, error, attempts))

    def _soon(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name="broker-letter")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A refused settlement was reported as SettleFailed; whoever awaits the task gets it as well.
            logger.debug("Giving up a message failed: %s", error)

    async def _send_on(
        self,
        intake: Intake,
        message: Message[Any],
        target: RetryTopic,
        reason: str,
        error: Exception | None,
        failures: int,
    ) -> None:
        """Have it wait on a retry topic; what no retry topic takes is given up."""
        assert self._retry_writer is not None
        message.lease_ends = None
        try:
            await self._retry_writer.write(message, target, reason=reason, error=error, failures=failures)
        except InvalidMessage as refused:
            logger.warning("Retry topic %r does not take message %r: %s", target.name, message.id, refused)
            reason = f"{reason}, and {target.name} does not take it: {refused.message}"
            await self._give_up(intake, message, reason, error, self._tries(message), unwritable=True)
        except BaseException as failure:
            self._not_written(intake, message, failure)
            raise
        else:
            if message.state is SettleState.SETTLING:
                await intake.carry_out(message, Settlement(message, Outcome.ACK, reason=reason))

    async def _give_up(
        self,
        intake: Intake,
        message: Message[Any],
        reason: str,
        error: Exception | None,
        attempts: int | None,
        *,
        unwritable: bool = False,
    ) -> None:
        message.lease_ends = None
        if self._dead_letter is None:
            if self._retry_writer is not None and not unwritable:
                await self._send_on(intake, message, self._retry_writer.last(message), reason, error, 0)
            else:
                self._bring_back(intake, message, self.retry.maximum)
            return
        target = None
        outcome = Outcome.REJECT
        if isinstance(self._dead_letter, DeadLetterWriter):
            target = self._dead_letter.target
            outcome = Outcome.ACK
            try:
                await self._dead_letter.write(
                    message, reason=reason, error=error, attempts=attempts, subscription=self._subscription
                )
            except BaseException as failure:
                self._not_written(intake, message, failure)
                raise
        self._engine.hooks.emit(DeadLettered(message=message, target=target, reason=reason))
        if message.state is not SettleState.SETTLING:
            raise self._lost_meanwhile(message)
        told = "" if error is None else describe(error)
        # Whoever rejects has waited for the letter, and can wait for this too: else nobody hears of a refusal.
        await intake.carry_out(message, Settlement(message, outcome, reason=reason, error=told), surely=True)

    def _lost_meanwhile(self, message: Message[Any]) -> LeaseLost:
        """It was given up, and its lease ended before it was settled; tell those who listen, too."""
        error = LeaseLost(f"Message {message.id!r} of topic {message.topic!r} was given up after its lease was lost")
        logger.warning("%s: it comes again", error.message)
        if self._engine.hooks.listening:
            self._engine.hooks.emit(SettleFailed(message=message, error=error))
        return error

    def _failures_before(self, message: Message[Any]) -> int:
        """How often it had failed when it was sent to the retry topic that it came from."""
        letter = letter_of(message)
        return 0 if letter is None else letter.failures

    def _tries(self, message: Message[Any]) -> int | None:
        failures = self._failures_before(message) + self._engine.attempts.failures(message)
        return failures or message.delivery_attempt

    def _not_written(self, intake: Intake, message: Message[Any], failure: BaseException) -> None:
        """A letter that cannot be made, or was not written before the close, leaves its original to come again."""
        if message.state is not SettleState.SETTLING:
            return
        if self._stopped or not isinstance(failure, Exception):
            message.state = SettleState.OPEN
            return
        logger.error("The letter of message %r of %r cannot be made", message.id, message.topic, exc_info=failure)
        self._bring_back(intake, message, self.retry.maximum)


def _nacked(intake: Intake, message: Message[Any], delay: float, error: Exception | None = None) -> Settlement:
    """Has the broker bring it back, as late as it can."""
    told = "" if error is None else describe(error)
    return Settlement(message, Outcome.NACK, min(delay, intake.capabilities.native_delay), error=told)


def _kept_for(intake: Intake, message: Message[Any]) -> float:
    """The seconds for which it can wait in memory; infinite where its lease is renewed, or no source tells."""
    source = intake.source
    return max(0.0, source.lease_left(message)) if isinstance(source, TellsLeaseLeft) else inf


async def _told(task: asyncio.Task[None], message: Message[Any]) -> None:
    """Wait for what was begun; that the close cuts it off is an error of it, and cancels nobody who waits.

    :raises SettleError: it was cut off.
    """
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        waiting = asyncio.current_task()
        if not task.cancelled() or (waiting is not None and waiting.cancelling()):
            raise
        raise SettleError(
            f"The consumer was closed before message {message.id!r} of {message.topic!r} was settled",
            advice="It may come again; raise close_timeout",
        ) from None
