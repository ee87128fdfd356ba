"""What happens to messages that are not acked: retries, delays, retry topics, dead letters.

`DelayHolder` keeps messages in memory for delays that the broker cannot keep; they stay outstanding, and their leases
are renewed.

*Concurrency.* One event loop. *Cancellation.* A running write goes on when its caller is cancelled; a close waits for
writes until its deadline, then releases the messages. *Failure.* The writers repeat failed writes.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from logging import DEBUG, WARNING
from math import inf
from typing import Any

from broker.capabilities import LeaseMode, MessageCapabilities
from broker.checks import check_seconds
from broker.consuming.dead_letters import DeadLetterWriter, describe, log_dead_lettered, one_line, placed
from broker.consuming.in_flight import InFlight
from broker.consuming.leases import emit_not_renewed
from broker.consuming.options import longest_delay
from broker.consuming.retry.policy import Drop, Retry
from broker.consuming.retry.writer import RetryWriter
from broker.driver.concurrency import TaskSet, check_loop
from broker.driver.contract import MessageSource, RetryTopic, Settlement
from broker.driver.optional import StoresAttempts
from broker.driver.record_messages import letter_of
from broker.errors import BackendError, BrokerError, InvalidMessage, LeaseLost, SettleError, Unsupported
from broker.hooks import DeadLettered, HandlerFailed, NoDeadLetter, Scope, SettleFailed, logger
from broker.messages import Message, Outcome, SettleState

__all__ = ["DelayHolder", "FailurePolicy"]


class DelayHolder:
    """Keeps messages for a delay.

    :param due: called on the loop with each message whose delay is over, also if it was lost meanwhile.
    """

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
        """Forget all messages; the owner releases them."""
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


class FailurePolicy:
    """Carries out the retry policy and the dead-letter choice of a consumer for one source.

    Implements `MessageOwner`: acks go straight to `in_flight`; nacks, rejections and failures are decided here.
    """

    def __init__(
        self,
        in_flight: InFlight,
        retry: Retry,
        dead_letter: DeadLetterWriter | Drop | None,
        retry_writer: RetryWriter | None = None,
    ) -> None:
        self.in_flight = in_flight
        self.topic = in_flight.topic
        self.subscription = in_flight.subscription
        self.group = in_flight.group
        self.retry = retry
        self._hooks = in_flight.hooks
        self._attempts = in_flight.attempts
        self._dead_letter = dead_letter
        self._retry_writer = retry_writer
        self._name = in_flight.subscription or in_flight.group or ""
        self._holder = DelayHolder(self._due)
        # A refused settlement was reported as SettleFailed; the caller that awaits the task gets it as well.
        self._tasks = TaskSet("broker-letter", lambda error: logger.debug("Giving up a message failed: %s", error))
        self._last_delivery: int | None = None
        self._stopped = False
        self._loop = asyncio.get_running_loop()

    def start(self, source: MessageSource, capabilities: MessageCapabilities) -> None:
        """Begin to fetch from the source that was opened with `in_flight` as its listener."""
        if isinstance(self._dead_letter, DeadLetterWriter):
            # Without dead letters the handler may as well have the last delivery.
            self._last_delivery = capabilities.delivery_limit
        # A message that waits for a handler may lose its lease or be released, which would waste its last delivery.
        admits = self._last_delivery is not None and not self.in_flight.options.ordered_by_key
        self.in_flight.start(
            source,
            capabilities,
            owner=self,
            admit=self._admit if admits else None,
            handler_failed=self.handler_failed,
        )

    # -- MessageOwner ------------------------------------------------------------------------------------

    async def settle(self, message: Message[Any], outcome: Outcome, delay: float | None, reason: str) -> None:
        check_loop(self._loop)
        if outcome is Outcome.NACK:
            self.in_flight.transacted.check_free(message)
            await self.nack(message, delay)
        elif outcome is Outcome.REJECT:
            self.in_flight.transacted.check_free(message)
            await self.reject(message, reason)
        elif message.begin_settling(outcome):
            await self.in_flight.carry_out(Settlement(message, outcome))
        else:
            self.in_flight.transacted.check_free(message)

    async def extend(self, message: Message[Any], seconds: float) -> None:
        check_loop(self._loop)
        check_seconds("seconds", seconds, zero=True)
        if self.in_flight.capabilities.lease is LeaseMode.FIXED:
            raise Unsupported(
                f"The lease of message {message.id!r} cannot be extended: this broker has no lease renewal",
                advice="Finish within capabilities.messages.lease_seconds, or configure a longer lease on the broker",
            )
        if message.lease_lost:
            # By the clock: nothing has told this consumer yet.
            raise LeaseLost(f"Message {message.id!r} of topic {message.topic!r} was lost before it was extended")
        if message in self.in_flight.messages:
            message.lease_ends = max(message.lease_ends or 0.0, asyncio.get_running_loop().time() + seconds)

    def lease_over(self, message: Message[Any]) -> bool:
        left = self.in_flight.lease_left
        return left is not None and left(message) <= 0

    def begin(self, message: Message[Any]) -> None:
        check_loop(self._loop)
        if self._hooks.handling:
            message.scope = Scope(self._hooks.handling, message, "handling")

    async def finish(self, message: Message[Any], error: BaseException | None) -> bool:
        check_loop(self._loop)
        if message.scope is not None:
            message.scope.leave(error)
            message.scope = None
        self.in_flight.returned(message)
        if error is None:
            # A refused ack is an event and does not raise: the message is redelivered, and the loop goes on.
            self.in_flight.ack_soon(message)
            return False
        if isinstance(error, Exception) and not self.raises(error):
            self.handler_failed(message, error)
            return True
        if message.state is SettleState.OPEN:
            self.in_flight.release([message])
        return False

    def raises(self, error: Exception) -> bool:
        """Whether the error of a handler is raised; the message is then released (`Hooks.raises`)."""
        return self._hooks.raises is not None and self._hooks.raises(error)

    # -- deciding ----------------------------------------------------------------------------------------

    def handler_failed(self, message: Message[Any], error: Exception) -> None:
        """Settle a message whose handler raised, by the policy; returns at once.

        If the handler had settled it, or its lease was lost, the failure is only reported.
        """
        if message.state is not SettleState.OPEN:
            self._failed_late(message, error)
            return
        self.in_flight.counts.failed += 1
        failures = self._attempts.failed(message)
        total = failures + self._failures_before(message)
        retried = self.retry.retries(error)
        target = None
        delay = None
        fate = "given up"
        if retried and failures < self.retry.max_attempts:
            delay = min(self.retry.delay(failures), self._lease_left(message))
        elif retried and self._retry_writer is not None and (target := self._retry_writer.after_failure(message)):
            delay = target.delay
        last = delay is None
        reason = f"failed {total} times" if retried else f"{type(error).__name__} is not retried"
        if delay is not None:
            fate = f"again in {delay:.2f} s"
        elif self._dead_letter is None:
            delay = self._longest_delay(message, self._last_topic(message))
            fate = f"again in {delay:.2f} s, since there is no dead_letter"
        logger.warning(
            "Handling message %r of %r failed (failure %d, %s): %s",
            message.id,
            message.topic,
            total,
            fate,
            one_line(describe(error)),
            exc_info=_traceback(error, last=last and not self._attempts.was_given_up(message)),
        )
        if self._hooks.listening:
            self._hooks.emit(HandlerFailed(message=message, error=error, failures=total, retry_in=delay))
        message.begin_settling(Outcome.REJECT if last else Outcome.NACK)
        if last:
            self._give_up_soon(message, reason, error, total, logged=True)
        elif target is not None:
            self._tasks.spawn(self._send_on(message, target, reason, error, failures))
        elif delay is not None:
            self._redeliver(message, delay, error)

    def _failed_late(self, message: Message[Any], error: Exception) -> None:
        attempts = self._attempts
        done = message.outcome is Outcome.ACK or message.outcome is Outcome.REJECT
        if done and message.state is not SettleState.LOST:
            # A message that is not redelivered needs no memory of its failures.
            failures = attempts.failures(message) + 1
        else:
            failures = attempts.failed(message)
        self.in_flight.counts.failed += 1
        logger.warning(
            "Handling message %r of %r failed (failure %d, after %s): %s",
            message.id,
            message.topic,
            failures,
            "it was lost" if message.outcome is None else f"its {message.outcome.name.lower()}",
            one_line(describe(error)),
            exc_info=_traceback(error, last=done),
        )
        if self._hooks.listening:
            self._hooks.emit(HandlerFailed(message=message, error=error, failures=failures, retry_in=None))

    async def nack(self, message: Message[Any], delay: float | None) -> None:
        """Redeliver the message after the delay; None is the first delay of the policy.

        With retry topics the message waits on one of them; the call returns when it is there.
        """
        if self._retry_writer is not None and delay != 0:
            check_seconds("delay", delay, optional=True)
            target = self._retry_writer.for_delay(message, delay)
            if message.begin_settling(Outcome.NACK):
                await _wait_for(self._tasks.spawn(self._send_on(message, target, "nacked", None, 0)), message)
            return
        if self.in_flight.expire_leases is not None:
            self.in_flight.expire_leases((message,))
        if delay is None:
            delay = min(self.retry.delay(1), self._lease_left(message))
        else:
            self._check_delay(message, delay)
        if not message.begin_settling(Outcome.NACK):
            return
        if not self._waits_here(delay):
            await self.in_flight.carry_out(self._nacked(message, delay))
        elif (storing := self._hold(message, delay)) is not None and self.in_flight.awaits_acks:
            await _wait_for(storing, message)

    async def reject(self, message: Message[Any], reason: str) -> None:
        """Dead-letter the message; return when its letter is written and the message settled.

        :raises LeaseLost, SettleError: the message is, or may be, redelivered although its letter is written.
        """
        if message.begin_settling(Outcome.REJECT):
            await _wait_for(self._give_up_soon(message, reason, None, self._failure_count(message)), message)

    def give_up_soon(self, message: Message[Any], reason: str, error: Exception | None = None) -> None:
        """Dead-letter a message before a handler gets it; returns at once."""
        if message.begin_settling(Outcome.REJECT):
            self._give_up_soon(message, reason, error, self._failure_count(message))

    def give_up_last(self, message: Message[Any]) -> bool:
        """Dead-letter the message if the broker drops it after this delivery unless it is acked."""
        last = self._last_delivery
        if last is None or (attempt := message.view.delivery_attempt(message.raw)) is None or attempt < last:
            return False
        self.give_up_soon(message, f"delivered {attempt} times, after which the broker drops it")
        return True

    def _admit(self, messages: Sequence[Message[Any]]) -> Sequence[Message[Any]]:
        return [message for message in messages if not self.give_up_last(message)]

    def stop_delaying(self) -> None:
        """Keep no message for a retry any more; the caller releases them."""
        self._stopped = True
        self._holder.close()

    def stop(self) -> None:
        """Stop delaying messages and repeating writes; the caller releases the messages."""
        self.stop_delaying()
        if isinstance(self._dead_letter, DeadLetterWriter):
            self._dead_letter.close()
        if self._retry_writer is not None:
            self._retry_writer.close()

    async def close(self, deadline: float) -> None:
        """Wait for running writes, at most until the loop time `deadline`.

        Messages whose letter was not written are open again; the caller releases them.
        """
        await self._tasks.wait(deadline - asyncio.get_running_loop().time())

    def _redeliver(self, message: Message[Any], delay: float, error: Exception | None = None) -> None:
        """Redeliver the message after the delay, from memory or by the broker; returns at once."""
        if self._waits_here(delay):
            self._hold(message, delay)
        else:
            self.in_flight.settle_loop.put(self._nacked(message, delay, error))

    def _waits_here(self, delay: float) -> bool:
        in_process = self.in_flight.options.ordered_by_key or delay > self.in_flight.capabilities.native_delay
        return in_process and self._has_room()

    def _hold(self, message: Message[Any], delay: float) -> asyncio.Task[None] | None:
        """Keep the message in memory for the delay; return the task that stores the delay, if any."""
        # Without a delay, `_due` follows at once and stores the attempt.
        storing = self._store_attempt(message, delay) if delay else None
        copy = self.in_flight.again(message)
        self._holder.hold(copy, delay)
        if self._hooks.listening:
            self.in_flight.emit_settled(nacked=1)
        return None if storing is None else self._tasks.spawn(storing)

    def _check_delay(self, message: Message[Any], delay: float) -> None:
        """Refuse a delay that cannot be kept.

        :raises ConfigurationError: the delay is not a number of seconds.
        :raises Unsupported: neither the broker nor this process can keep the message that long.
        """
        check_seconds("delay", delay, zero=True)
        longest = longest_delay(self.in_flight.options, self.in_flight.capabilities)
        if message.state is SettleState.OPEN and (left := self._lease_left(message)) < min(delay, longest):
            raise Unsupported(
                f"A delay of {delay:,.10g} s exceeds the rest of the message's lease ({left:,.2f} s)",
                advice="Use a shorter delay, or none; this lease is not renewed",
            )
        if self.in_flight.capabilities.lease is not LeaseMode.NONE and delay > longest:
            raise Unsupported(
                f"A delay of {delay:,.10g} s exceeds the longest delay of this consumer ({longest:,.10g} s)",
                advice="Use a shorter delay"
                if self.in_flight.capabilities.lease is LeaseMode.FIXED
                else "Use a shorter delay or raise max_lease",
            )

    def _has_room(self) -> bool:
        # Order needs the message in this process. Otherwise half of the room stays free for other messages, unless the
        # broker has no delays: it would redeliver the message at once, until the message counts as undeliverable.
        options = self.in_flight.options
        here = options.ordered_by_key or self.in_flight.capabilities.native_delay == 0
        return here or 2 * len(self._holder) < self.in_flight.max_messages

    def _due(self, message: Message[Any]) -> None:
        if message.state is not SettleState.OPEN:
            return
        if (storing := self._store_attempt(message, 0.0)) is None:
            self.in_flight.deliver_again(message)
        else:
            # Like a first delivery, this one counts before the handler gets it, which may kill the process.
            self._tasks.spawn(storing).add_done_callback(lambda _: self._deliver_again(message))

    def _deliver_again(self, message: Message[Any]) -> None:
        if message.state is SettleState.OPEN and not self._stopped:
            self.in_flight.deliver_again(message)

    def _give_up_soon(
        self,
        message: Message[Any],
        reason: str,
        error: Exception | None,
        attempts: int | None,
        *,
        logged: bool = False,
    ) -> asyncio.Task[None]:
        return self._tasks.spawn(self._give_up(message, reason, error, attempts, logged=logged))

    async def _send_on(
        self,
        message: Message[Any],
        target: RetryTopic,
        reason: str,
        error: Exception | None,
        failures: int,
    ) -> None:
        """Send the message to a retry topic; give it up if the topic refuses it."""
        assert self._retry_writer is not None
        message.lease_ends = None
        try:
            await self._retry_writer.write(message, target, reason=reason, error=error, failures=failures)
        except InvalidMessage as refused:
            logger.warning("Retry topic %r does not take message %r: %s", target.name, message.id, refused)
            reason = f"{reason}, and {target.name} does not take it: {refused.message}"
            await self._give_up(message, reason, error, self._failure_count(message), unwritable=True)
        except BaseException as failure:
            self._not_written(message, failure)
            raise
        else:
            if message.state is SettleState.SETTLING:
                await self.in_flight.carry_out(Settlement(message, Outcome.ACK, reason=reason))

    async def _give_up(
        self,
        message: Message[Any],
        reason: str,
        error: Exception | None,
        attempts: int | None,
        *,
        unwritable: bool = False,
        logged: bool = False,
    ) -> None:
        """Dead-letter the message, drop it, or redeliver it late.

        :param unwritable: no retry topic takes it.
        :param logged: the log has the reason, and says what follows.
        """
        message.lease_ends = None
        if self._dead_letter is None:
            target = None if unwritable else self._last_topic(message)
            delay = self._longest_delay(message, target)
            self._report_no_dead_letter(message, reason, delay, here=target is None, logged=logged)
            if target is not None:
                await self._send_on(message, target, reason, error, 0)
            else:
                self._redeliver(message, delay)
            return
        target = None
        outcome = Outcome.REJECT
        if isinstance(self._dead_letter, DeadLetterWriter):
            target = self._dead_letter.target
            outcome = Outcome.ACK
            try:
                await self._dead_letter.write(
                    message, reason=reason, error=error, attempts=attempts, subscription=self._name
                )
            except BaseException as failure:
                self._not_written(message, failure)
                raise
        self.in_flight.counts.given_up += 1
        log_dead_lettered(message, target, self._name, reason)
        self._hooks.emit(DeadLettered(message=message, target=target, reason=reason))
        if message.state is not SettleState.SETTLING:
            raise self._lost_meanwhile(message)
        text = "" if error is None else describe(error)
        # The caller has waited for the letter and waits for this too: otherwise a refusal would be lost.
        await self.in_flight.carry_out(Settlement(message, outcome, reason=reason, error=text), wait=True)

    def _last_topic(self, message: Message[Any]) -> RetryTopic | None:
        return None if self._retry_writer is None else self._retry_writer.last(message)

    def _longest_delay(self, message: Message[Any], target: RetryTopic | None) -> float:
        """The seconds until a message without a dead letter is redelivered, by a retry topic if there is one."""
        return min(self.retry.maximum, self._lease_left(message)) if target is None else target.delay

    def _report_no_dead_letter(
        self, message: Message[Any], reason: str, delay: float, *, here: bool, logged: bool
    ) -> None:
        """Warn once of each message that is given up and has no dead-letter topic.

        :param here: the message stays in its topic.
        """
        first = self._attempts.given_up(message) == 1
        if not logged:
            holds = here and self.in_flight.capabilities.lease is LeaseMode.NONE
            logger.log(
                WARNING if first else DEBUG,
                "Subscription %r has no dead_letter for %s, which comes again in %.2f s: %s%s",
                self._name,
                placed(message),
                delay,
                one_line(reason),
                "; until it is acked, the position of its partition stays here" if holds else "",
            )
        if self._hooks.listening:
            self._hooks.emit(NoDeadLetter(message=message, reason=reason, retry_in=delay))

    def _lost_meanwhile(self, message: Message[Any]) -> LeaseLost:
        """Report that the message was given up, and that its lease ended before it was settled."""
        error = LeaseLost(f"Message {message.id!r} of topic {message.topic!r} was given up after its lease was lost")
        logger.warning("%s: it is redelivered", error.message)
        if self._hooks.listening:
            self._hooks.emit(SettleFailed(message=message, error=error))
        return error

    def _failures_before(self, message: Message[Any]) -> int:
        """How often the message had failed when it was sent to the retry topic that it came from."""
        letter = letter_of(message)
        return 0 if letter is None else letter.failures

    def _failure_count(self, message: Message[Any]) -> int | None:
        failures = self._failures_before(message) + self._attempts.failures(message)
        return failures or message.delivery_attempt

    def _not_written(self, message: Message[Any], failure: BaseException) -> None:
        """Redeliver a message whose letter cannot be made, or was not written before the close."""
        if message.state is not SettleState.SETTLING:
            return
        if self._stopped or not isinstance(failure, Exception):
            message.state = SettleState.OPEN
            return
        logger.error("The letter of message %r of %r cannot be made", message.id, message.topic, exc_info=failure)
        self._redeliver(message, self.retry.maximum)

    def _nacked(self, message: Message[Any], delay: float, error: Exception | None = None) -> Settlement:
        """The settlement with which the broker redelivers the message, at most as late as the broker can."""
        text = "" if error is None else describe(error)
        return Settlement(message, Outcome.NACK, min(delay, self.in_flight.capabilities.native_delay), error=text)

    def _lease_left(self, message: Message[Any]) -> float:
        """The seconds for which the message can wait in memory; infinite where leases are renewed, or unknown."""
        left = self.in_flight.lease_left
        fixed = self.in_flight.capabilities.lease is LeaseMode.FIXED
        return max(0.0, left(message)) if fixed and left is not None else inf

    def _store_attempt(self, message: Message[Any], delay: float) -> Coroutine[Any, Any, None] | None:
        """Has the source store the attempts and the delay (`StoresAttempts`); None if the source cannot.

        Awaiting the result raises LeaseLost if the message was lost, and SettleError if the write failed: the message
        waits in memory all the same.
        """
        source = self.in_flight.source
        return self._store(source, message, delay) if isinstance(source, StoresAttempts) else None

    async def _store(self, source: StoresAttempts, message: Message[Any], delay: float) -> None:
        try:
            error = await source.store_attempt(message, delay)
        except BrokerError as raised:
            error = raised
        except Exception as failure:
            error = BackendError(f"The backend failed to store attempts: {failure}", native=failure)
        if error is None:
            return
        if isinstance(error, LeaseLost):
            self.in_flight.lost([message])
            raise error
        emit_not_renewed(self._hooks.emit, [message], [error])
        raise SettleError(
            f"The attempts and the delay of message {message.id!r} of {message.topic!r} may not be stored: "
            f"{error.message}",
            native=error.native,
            advice="The message waits in this process; if this process dies, it may be redelivered early and with a "
            "lower attempt count",
        ) from error


def _traceback(error: Exception, *, last: bool) -> Exception | None:
    """The error if its traceback is logged: with the last attempt, once without a dead letter, or always at DEBUG."""
    return error if last or logger.isEnabledFor(DEBUG) else None


async def _wait_for(task: asyncio.Task[None], message: Message[Any]) -> None:
    """Wait for a task that goes on if the caller is cancelled.

    :raises SettleError: a close cancelled the task.
    """
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        waiting = asyncio.current_task()
        if not task.cancelled() or (waiting is not None and waiting.cancelling()):
            raise
        raise SettleError(
            f"The consumer was closed before message {message.id!r} of {message.topic!r} was settled",
            advice="It may be redelivered; raise close_timeout",
        ) from None
