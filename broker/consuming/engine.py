"""The core of a message consumer: hand-over, waiters, and the order of events when it ends.

*Concurrency.* Everything runs on the loop that opened the engine. *Cancellation.* A waiter is woken, then takes
messages without suspending; if it was cancelled, the next waiter is woken. *Failure.* A consumer ends in one of three
ways: closed, idle (`stop_when_idle`), or with a fatal error, which is raised once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from broker.capabilities import MessageCapabilities
from broker.codecs.envelopes import Preparation, decoder_of, preparation_of
from broker.consumer_state import ConsumerState
from broker.consuming.dead_letters import DeadLetterWriter, describe
from broker.consuming.failure_policy import FailurePolicy
from broker.consuming.in_flight import InFlight, Receivers
from broker.consuming.options import ConsumerOptions
from broker.consuming.ordering import ArrivalOrder, Lanes, Ready
from broker.consuming.retry.policy import Attempts, Drop, Retry
from broker.consuming.retry.writer import RetryWriter
from broker.driver.concurrency import Backoff, TaskSet, check_loop, pause
from broker.driver.contract import MessageSource, SourceListener
from broker.driver.loop_watch import LoopWatch
from broker.driver.optional import ReportsIdle
from broker.errors import (
    BackendError,
    BrokerError,
    Closed,
    ConfigurationError,
    DecodeError,
    NotFound,
    SubscriptionNotFound,
    TopicNotFound,
)
from broker.hooks import HandedOver, Hooks, Warned, logger
from broker.messages import Message, Outcome, SettleState
from broker.names import known_name
from broker.protocols import AnyCodec
from broker.token_bucket import TokenBucket
from broker.topic_patterns import TopicPattern

__all__ = ["Engine", "FollowedTopics", "OpenSource", "policy_of"]

OpenSource = Callable[[SourceListener], Awaitable[MessageSource]]


@dataclass(frozen=True, slots=True)
class FollowedTopics:
    """The topics of a pattern, each of which gets a source of its own.

    :ivar list_topics: returns the topics of the broker.
    :ivar open_topic: opens the source of a topic; `new` is whether the topic was created after the consumer opened.
    :ivar interval: seconds between two looks for new topics.
    """

    pattern: TopicPattern
    list_topics: Callable[[], Awaitable[Sequence[str]]]
    open_topic: Callable[[str, bool, SourceListener], Awaitable[MessageSource]]
    interval: float = 10.0

    async def find(self) -> list[str]:
        """The topics that match now, sorted."""
        return sorted(known_name(name) for name in await self.list_topics() if self.pattern.matches(name))

    def opener(self, topic: str, *, new: bool) -> OpenSource:
        """Opens the source of a topic."""
        return lambda listener: self.open_topic(topic, new, listener)


_OPEN = SettleState.OPEN
_IDLE_RECHECK: Final = 0.5
_ROOM_SECONDS: Final = 0.25
_LAST_LOOK: Final = 1.0
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 10.0


class Engine:
    """Runs one consumer: hands messages over, waits and ends.

    :param sources: topic and opener of each source.
    :param followed: the topics of a pattern, in place of `sources`.
    """

    def __init__(
        self,
        sources: Sequence[tuple[str, OpenSource]],
        capabilities: MessageCapabilities,
        options: ConsumerOptions,
        *,
        retry: Retry,
        dead_letter: DeadLetterWriter | Drop | None,
        codec: AnyCodec[Any] | None,
        subscription: str | None,
        group: str | None,
        hooks: Hooks,
        retry_writer: RetryWriter | None = None,
        followed: FollowedTopics | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.time = self._loop.time
        self.hooks = hooks
        self.options = options
        self.attempts = Attempts()
        self.capabilities = capabilities
        self.retry = retry
        self._dead_letter = dead_letter
        self._subscription = subscription
        self._group = group
        self._name = subscription or group or ""
        self._retry_writer = retry_writer
        self.receivers = Receivers()
        self._decode, self._takes_messages = decoder_of(codec)
        self._prepare = preparation_of(codec)
        self._unprepared: list[Message[Any]] = []
        """Fetched messages for which `prepare` of the codec was not called."""
        self._preparing: asyncio.Task[None] | None = None
        """Runs while there are unprepared messages; meanwhile nothing is handed over."""
        self._delivery_bound = retry.delivery_bound
        self._last_delivery = capabilities.delivery_limit if isinstance(dead_letter, DeadLetterWriter) else None
        self._sources = sources
        self._followed = followed
        self._following: asyncio.Task[None] | None = None
        self._vanished: dict[str, BrokerError] = {}
        """Topics of the pattern whose source has ended, because topic or subscription do not exist any more."""
        self._topic_tasks = TaskSet("broker-consumer-topics", self._following_failed)
        self.policies: list[FailurePolicy] = []
        self._in_flight: deque[InFlight] = deque()
        self._ended = False
        self._paused = False
        self._halted = False
        """Nothing is handed over: the consumer has ended, is paused, or waits for its rate or its codec."""
        self._bucket = None if options.max_rate is None else TokenBucket(options.max_rate, self._loop.time())
        self._rate_timer: asyncio.TimerHandle | None = None
        """Set while the consumer waits for its rate."""
        self._idle = False
        self._fatal: BrokerError | None = None
        self.fatal_cause: BrokerError | None = None
        self.ended = asyncio.Event()
        self._winding_down: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self.owner: object | None = None
        """Keeps the consumer alive, for its bus, as long as a task of this engine runs."""
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_sources: dict[FailurePolicy, ReportsIdle] = {}
        self._idle_check: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Open all sources, or none."""
        sources = self._sources
        if self._followed is not None:
            names = await self._followed.find()
            sources = [(name, self._followed.opener(name, new=False)) for name in names]
            if len(names) > self.options.max_outstanding:
                raise ConfigurationError(
                    f"max_outstanding is {self.options.max_outstanding}, and {len(names)} topics match "
                    f"{self._followed.pattern}",
                    advice="Allow one message per topic",
                )
        opened: list[tuple[FailurePolicy, MessageSource]] = []
        try:
            for topic, open_source in sources:
                try:
                    opened.append(await self._open_source(topic, open_source, len(sources)))
                except TopicNotFound:
                    # Deleted since it was found.
                    if self._followed is None:
                        raise
        except BaseException:
            for _, source in opened:
                await source.close()
            raise
        for policy, source in opened:
            self._start(policy, source)
        if self._followed is not None:
            self._following = self._topic_tasks.spawn(self._follow(self._followed))
        self.receivers.active()
        self.watch = LoopWatch.join(self.capabilities.lease_seconds)
        self._opened_at = self._loop.time()
        logger.info(
            "Consuming %s as %s: at most %d messages at once; attempts: %d, then %s",
            self._topics,
            self._name,
            self.options.max_outstanding,
            self.retry.max_attempts,
            self._last_step(),
        )
        if self._decode is not None and self._dead_letter is None:
            self._warn(
                f"Subscription {self._name!r} of {self._topics} has a codec and no dead_letter: a message that "
                "the codec cannot decode comes again and again; give dead_letter= a topic, or DROP"
            )
        if self.options.stop_when_idle is not None:
            self._arm_idle_timer(self.options.stop_when_idle)

    def _shares(self, sources: int) -> tuple[int, int]:
        """The messages and bytes that each of so many sources may have in flight."""
        options = self.options
        return options.max_outstanding // sources, max(1, options.max_outstanding_bytes // sources)

    async def _open_source(
        self, topic: str, open_source: OpenSource, sources: int
    ) -> tuple[FailurePolicy, MessageSource]:
        max_messages, max_bytes = self._shares(sources)
        in_flight = InFlight(
            topic,
            subscription=self._subscription,
            group=self._group,
            receivers=self.receivers,
            ready=self._make_ready(max_messages),
            options=self.options,
            hooks=self.hooks,
            attempts=self.attempts,
            max_messages=max_messages,
            max_bytes=max_bytes,
            prepare=None if self._prepare is None else partial(self._prepare_soon, self._prepare),
            failed=self.fail if self._followed is None else partial(self._source_failed, topic),
        )
        policy = FailurePolicy(in_flight, self.retry, self._dead_letter, self._retry_writer)
        return policy, await open_source(in_flight)

    def _start(self, policy: FailurePolicy, source: MessageSource) -> None:
        self.policies.append(policy)
        self._in_flight.append(policy.in_flight)
        policy.start(source, self.capabilities)
        if isinstance(source, ReportsIdle):
            self._idle_sources[policy] = source

    # -- the topics of a pattern -------------------------------------------------------------------------

    async def _follow(self, followed: FollowedTopics) -> None:
        """Open a source for each new topic, and close that of a deleted one, until the end."""
        skipped: set[str] = set()
        while True:
            await pause(followed.interval, self.ended)
            if self._ended:
                return
            try:
                names = await followed.find()
            except BrokerError as error:
                logger.warning("The topics of %s could not be listed: %s", followed.pattern, error)
                continue
            vanished, self._vanished = self._vanished, {}
            for policy in list(self.policies):
                topic = policy.in_flight.topic
                if topic in names and isinstance(error := vanished.get(topic), SubscriptionNotFound):
                    self.fail(error)
                    return
                if topic not in names or topic in vanished:
                    # Not cancelled with this task: the source must be closed.
                    await asyncio.shield(self._topic_tasks.spawn(self._remove(policy)))
            have = {policy.in_flight.topic for policy in self.policies}
            for name in names:
                if name in have:
                    continue
                try:
                    await self._add(name, followed.opener(name, new=True))
                    skipped.discard(name)
                except BrokerError as error:
                    if name not in skipped:
                        skipped.add(name)
                        self._warn(f"Topic {name!r} matches {followed.pattern} and is not consumed: {error}")

    async def _add(self, topic: str, open_source: OpenSource) -> None:
        sources = len(self.policies) + 1
        if sources > self.options.max_outstanding:
            raise ConfigurationError(
                f"max_outstanding is {self.options.max_outstanding} for {sources} topics",
                advice="Allow one message per topic",
            )
        self._share_out(sources)
        # Fetches that began with the larger shares must not fill the room of the new source.
        await asyncio.gather(*(policy.in_flight.fetch_loop.interrupted() for policy in self.policies))
        while not self._ended and not all(policy.in_flight.within_bounds for policy in self.policies):
            await pause(_ROOM_SECONDS, self.ended)
        if self._ended:
            return
        try:
            policy, source = await self._open_source(topic, open_source, sources)
        except BaseException:
            self._share_out(sources - 1)
            raise
        self._start(policy, source)
        self.receivers.active()
        logger.info("Consuming %s as %s, too: a new topic", topic, self._name)

    async def _remove(self, policy: FailurePolicy) -> None:
        in_flight = policy.in_flight
        self.policies.remove(policy)
        self._in_flight.remove(in_flight)
        self._idle_sources.pop(policy, None)
        in_flight.stop_fetching()
        await in_flight.fetching_stopped(self.options.close_timeout)
        policy.stop_delaying()
        in_flight.lost(list(in_flight.messages))
        deadline = self._loop.time() + self.options.close_timeout
        await policy.close(deadline)
        await in_flight.close(deadline)
        self._share_out(len(self.policies))
        logger.info("Topic %s does not exist any more; it is no longer consumed", in_flight.topic)

    def _share_out(self, sources: int) -> None:
        if sources:
            max_messages, max_bytes = self._shares(sources)
            for policy in self.policies:
                policy.in_flight.limit(max_messages, max_bytes)

    def _source_failed(self, topic: str, error: BrokerError) -> None:
        if isinstance(error, NotFound):
            self._vanished[topic] = error
        else:
            self.fail(error)

    def _following_failed(self, error: Exception) -> None:
        self.fail(BackendError(f"New topics cannot be looked for any more: {error}", native=error))

    def _warn(self, text: str) -> None:
        logger.warning(text)
        self.hooks.emit(Warned(text=text))

    @property
    def state(self) -> ConsumerState:
        if self._ended:
            return ConsumerState.STOPPED if self.fatal_cause is None else ConsumerState.FAILED
        if self._paused:
            return ConsumerState.PAUSED
        if any(in_flight.fetch_loop.failing for in_flight in self._in_flight):
            return ConsumerState.RETRYING
        return ConsumerState.RUNNING

    # -- handing over ------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return not self._ended

    async def turn(self) -> float:
        """Let the loop run what waits, before the next message is taken; returns the loop time.

        Called when `watch.turn_due` has passed. If there is nothing to take, the wait for it is a turn.
        """
        if any(len(in_flight.ready) for in_flight in self._in_flight):
            return await self.watch.turn()
        return self._loop.time()

    def take(self, now: float) -> Message[Any] | None:
        """The next message, if there is one at the loop time `now`; sources take turns."""
        for _ in range(len(self._in_flight)):
            in_flight = self._in_flight[0]
            self._in_flight.rotate(-1)
            while not self._halted and (message := in_flight.ready.take()) is not None:
                if self._admitted(in_flight, (message,), now):
                    in_flight.handed_over(1)
                    if self._bucket is not None:
                        self._spend(self._bucket, 1)
                    return message
        return None

    def take_batch(self, most: int, now: float) -> list[Message[Any]]:
        """The available messages at the loop time `now`, at most `most`; sources take turns to be first."""
        batch: list[Message[Any]] = []
        for _ in range(len(self._in_flight)):
            if len(batch) == most:
                break
            in_flight = self._in_flight[0]
            self._in_flight.rotate(-1)
            before = len(batch)
            while not self._halted and len(batch) < most and (some := in_flight.ready.take_some(most - len(batch))):
                batch += self._admitted(in_flight, some, now)
            if len(batch) > before:
                in_flight.handed_over(len(batch) - before)
        if self._bucket is not None and batch:
            self._spend(self._bucket, len(batch))
        return batch

    def report_handed_over(self, messages: Sequence[Message[Any]], began: float) -> None:
        """Report messages that a call returns which began at this loop time."""
        first = messages[0]
        self.hooks.emit(
            HandedOver(
                topic=policy_of(first).topic,
                subscription=self._subscription,
                group=self._group,
                messages=messages,
                seconds=self._loop.time() - began,
            )
        )

    def pause(self) -> None:
        """Hand nothing over until `resume`. What is buffered stays ours; the fetch ends where the buffer is full."""
        self._paused = self._halted = True

    def resume(self) -> None:
        """Undo `pause`."""
        if self._paused:
            self._paused = False
            self.receivers.active()
            self._go_on()

    def _spend(self, bucket: TokenBucket, count: int) -> None:
        """So many messages were handed over; halt if the rate allows no further one now."""
        now = self._loop.time()
        bucket.take(count, now)
        delay = bucket.delay(now)
        if delay > 0:
            self._halted = True
            self._rate_timer = self._loop.call_later(delay, self._rate_allows)

    def _rate_allows(self) -> None:
        self._rate_timer = None
        self._go_on()

    def _prepare_soon(self, prepare: Preparation, messages: Sequence[Message[Any]]) -> None:
        """Hand nothing over until the codec has prepared these."""
        self._unprepared += messages
        if self._preparing is None and not self._ended:
            self._halted = True
            self._preparing = self._loop.create_task(self._prepare_all(prepare), name="broker-codec-prepare")

    async def _prepare_all(self, prepare: Preparation) -> None:
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        while self._unprepared:
            batch, self._unprepared = self._unprepared, []
            try:
                await prepare(batch)
            except Exception as error:
                delay = backoff.next()
                self._warn(
                    f"Nothing of {self._topics} is handed over: the codec failed to prepare {len(batch)} messages, "
                    f"next try in {delay:.2f} s: {describe(error)}"
                )
                await asyncio.sleep(delay)
                self._unprepared = [message for message in batch if message.state is _OPEN] + self._unprepared
            else:
                backoff.reset()
        self._preparing = None
        self._go_on()

    def _go_on(self) -> None:
        """Hand over again, unless there is another reason not to."""
        self._halted = self._ended or self._paused or self._rate_timer is not None or self._preparing is not None
        if not self._halted:
            self.receivers.wake(sum(len(in_flight.ready) for in_flight in self._in_flight))

    async def wait(self, wanted: int, timeout: float | None) -> bool:
        """Wait until something may be there to take, or the consumer ends; False when `timeout` passed first."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self.receivers.waiters.append(waiter)
        self.receivers.wanted += wanted
        timer = None if timeout is None else self._loop.call_later(timeout, _resolve, waiter, TimeoutError())
        for in_flight in self._in_flight:
            in_flight.fetch_loop.poke()
        try:
            await waiter
        except TimeoutError:
            return False
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.receivers.wake(1)
            raise
        finally:
            self.receivers.wanted -= wanted
            if timer is not None:
                timer.cancel()
            # A wake takes waiters out, also those that turn out to be cancelled.
            with suppress(ValueError):
                self.receivers.waiters.remove(waiter)
        return True

    async def fill(self, wanted: int, max_wait: float, timeout: float | None) -> bool:
        """Wait until a batch is due, or the consumer ends; False when `timeout` passed first.

        A batch is due when `wanted` messages are ready, when some have been ready for `max_wait` seconds, or when the
        bounds let no more be fetched.
        """
        began = self._loop.time()
        since: float | None = None
        handed_over = 0
        while not self._ended:
            now = self._loop.time()
            ready = sum(len(in_flight.ready) for in_flight in self._in_flight)
            if since is None or not ready or handed_over != self.receivers.counts.handed_over:
                # What was waited for went to another caller.
                handed_over = self.receivers.counts.handed_over
                since = now if ready else None
            waits: list[float] = [] if timeout is None else [began + timeout - now]
            if since is not None and not self._halted:
                if ready >= wanted or all(in_flight.full for in_flight in self._in_flight):
                    return True
                waits.append(since + max_wait - now)
                if waits[-1] <= 0:
                    return True
            if waits and waits[0] <= 0:
                return False
            try:
                await self.wait(wanted, min(waits, default=None))
            except asyncio.CancelledError:
                self.receivers.wake(ready)
                raise
        return True

    def check(self) -> bool:
        """Whether the consumer still runs; False after an idle end.

        :raises BrokerError: the fatal error, once.
        :raises Closed: the consumer was closed, or its fatal error was raised before.
        """
        if self._fatal is not None:
            fatal, self._fatal = self._fatal, None
            raise fatal
        if not self._ended:
            return True
        if self._idle:
            return False
        raise Closed("The consumer is closed", advice="Open a new one") from self.fatal_cause

    async def settle_batch(self, messages: Sequence[Message[Any]], outcome: Outcome, delay: float | None) -> None:
        """Settle the open messages of a batch, then raise the first failure (`BatchOwner`)."""
        check_loop(self._loop)
        still_open = [message for message in messages if message.state is _OPEN]
        if outcome is not Outcome.ACK:
            await _all([message.nack(delay) for message in still_open])
            return
        parts: dict[InFlight, list[Message[Any]]] = {}
        if len(self._in_flight) == 1 and self._followed is None:
            parts[self._in_flight[0]] = still_open
        else:
            for message in still_open:
                parts.setdefault(policy_of(message).in_flight, []).append(message)
        await _all([answer for in_flight, part in parts.items() if (answer := in_flight.ack_all(part)) is not None])
        if len(still_open) < len(messages):
            lost = next(
                (
                    m
                    for m in messages
                    if m.outcome is Outcome.RELEASE or (m.outcome is None and m.state is SettleState.LOST)
                ),
                None,
            )
            if lost is not None:
                lost.begin_settling(Outcome.ACK)

    # -- ending ------------------------------------------------------------------------------------------

    def fail(self, error: BrokerError) -> None:
        """A source ended with this error."""
        if not self._ended:
            self._fatal = self.fatal_cause = error
            self.end()

    def end(self) -> None:
        """Stop the hand-over, release undelivered messages, and wake all waiters."""
        if self._ended:
            return
        self._ended = self._halted = True
        self.ended.set()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._idle_check is not None:
            self._idle_check.cancel()
        if self._rate_timer is not None:
            self._rate_timer.cancel()
        if self._following is not None:
            self._following.cancel()
        if self._preparing is not None:
            self._preparing.cancel()
        for in_flight in self._in_flight:
            in_flight.stop_fetching()
        self.receivers.wake(len(self.receivers.waiters))
        self._winding_down = self._loop.create_task(self._wind_down(), name="broker-consumer-wind-down")

    async def close(self) -> None:
        """End, wait for handlers until the deadline, release all other messages at once, and close the sources."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(), name="broker-consumer-close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        deadline = self._loop.time() + self.options.close_timeout
        self.end()
        if self._following is not None:
            await asyncio.wait((self._following,), timeout=_LAST_LOOK)
            await self._topic_tasks.wait(deadline - self._loop.time())
        if self._winding_down is not None:
            await self._winding_down
        for in_flight in self._in_flight:
            in_flight.release([m for m in in_flight.messages if m.state is _OPEN and not m.in_use])
        while (busy := self._busy()) is not None and (left := deadline - self._loop.time()) > 0:
            self.receivers.quiet = self._loop.create_future()
            await asyncio.wait({self.receivers.quiet, *busy}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        late = [worker for worker in self.receivers.workers if not worker.done()]
        for worker in late:
            worker.cancel()
        if late:
            await asyncio.wait(late, timeout=0.1)
        self.watch.leave(self.capabilities.lease_seconds)
        await asyncio.gather(*(policy.close(deadline) for policy in self.policies))
        for in_flight in self._in_flight:
            in_flight.release([message for message in in_flight.messages if message.state is _OPEN])
        await asyncio.gather(*(in_flight.close(deadline + 0.5) for in_flight in self._in_flight))
        counts = self.receivers.counts
        logger.info(
            "Stopped consuming %s as %s after %.1f s: %d messages handed over, %d acked, %d failures, %d given up%s",
            self._topics,
            self._name,
            self._loop.time() - self._opened_at,
            counts.handed_over,
            counts.acked,
            counts.failed,
            counts.given_up,
            "" if self.fatal_cause is None else f"; ended by an error: {self.fatal_cause.message}",
        )

    @property
    def _topics(self) -> str:
        topics = ", ".join(policy.in_flight.topic for policy in self.policies)
        return topics if self._followed is None else f"{topics or 'no topic yet'} ({self._followed.pattern})"

    def _last_step(self) -> str:
        """What happens to a message that is given up, in words."""
        if self._retry_writer is not None:
            return "the retry topics"
        if isinstance(self._dead_letter, DeadLetterWriter):
            return f"the dead-letter topic {self._dead_letter.target}"
        return "more at the longest delay" if self._dead_letter is None else "dropped"

    def _busy(self) -> set[asyncio.Task[None]] | None:
        """The workers that still run, perhaps none, if anything is still being handled; else None."""
        workers = {worker for worker in self.receivers.workers if not worker.done()}
        if workers or any(message.in_use for in_flight in self._in_flight for message in in_flight.messages):
            return workers
        return None

    async def _wind_down(self) -> None:
        await asyncio.gather(*(in_flight.fetching_stopped(self.options.close_timeout) for in_flight in self._in_flight))
        for policy in self.policies:
            policy.stop()
        for in_flight in self._in_flight:
            in_flight.ready.drain()
            # Messages without `lease_ends` were not handed over, or wait in memory to be handed over again.
            in_flight.release([m for m in in_flight.messages if m.state is _OPEN and m.lease_ends is None])

    def _admitted(self, in_flight: InFlight, messages: Sequence[Message[Any]], now: float) -> list[Message[Any]]:
        """Those that are still ours and may go to a handler, decoded and with `lease_ends`; dead-letters the others."""
        if in_flight.expire_leases is not None:
            in_flight.expire_leases(messages)
        admitted: list[Message[Any]] = []
        lease_ends = now + self.options.max_lease
        bound, decode, takes_messages = self._delivery_bound, self._decode, self._takes_messages
        last = self._last_delivery
        for message in messages:
            if message.state is not _OPEN:
                continue
            # Deliveries from memory count as those of the broker do.
            tries = message.delivery_attempt or 0
            if tries > bound and tries - self.attempts.releases(message) > bound:
                policy_of(message).give_up_soon(message, f"delivered {tries - 1} times without being settled")
                continue
            if last is not None and policy_of(message).give_up_last(message):
                continue
            if decode is not None:
                try:
                    message.decoded = decode(message if takes_messages else message.data)
                except Exception as error:
                    text = error.message if isinstance(error, DecodeError) else describe(error)
                    policy_of(message).give_up_soon(message, f"cannot be decoded: {text}", error)
                    continue
            message.lease_ends = lease_ends
            admitted.append(message)
        return admitted

    def _make_ready(self, most: int) -> Ready:
        if not self.options.ordered_by_key:
            return ArrivalOrder()
        share = max(1, most // 4) if self.capabilities.native_delay > 0 else None
        return Lanes(share, self._loop.time, self.capabilities.lease_seconds)

    def _arm_idle_timer(self, seconds: float) -> None:
        self._idle_timer = self._loop.call_later(seconds, self._check_idle)

    def _check_idle(self) -> None:
        allowed = self.options.stop_when_idle
        if allowed is None or self._ended:
            return
        if self._paused or any(in_flight.messages for in_flight in self._in_flight):
            self._arm_idle_timer(allowed)
            return
        idle = self._loop.time() - self.receivers.active_at
        if idle < allowed:
            self._arm_idle_timer(allowed - idle)
        elif self._idle_sources:
            self._idle_check = self._loop.create_task(self._check_sources_idle(idle), name="broker-consumer-idle")
        else:
            self._end_idle()

    async def _check_sources_idle(self, seconds: float) -> None:
        """End if all sources are idle, and nothing arrives meanwhile."""
        active_at = self.receivers.active_at
        try:
            idle = True
            for source in tuple(self._idle_sources.values()):
                idle = idle and await source.is_idle(seconds)
        except BrokerError as error:
            self._idle_check = None
            self.fail(error)
            return
        self._idle_check = None
        if idle and not self._paused and active_at == self.receivers.active_at:
            self._end_idle()
        else:
            self._arm_idle_timer(_IDLE_RECHECK)

    def _end_idle(self) -> None:
        self._idle = True
        self.end()


def policy_of(message: Message[Any]) -> FailurePolicy:
    """The failure policy of the source that a consumer's message came from."""
    assert isinstance(message.owner, FailurePolicy)
    return message.owner


def _resolve(waiter: asyncio.Future[None], error: Exception) -> None:
    if not waiter.done():
        waiter.set_exception(error)


async def _all(settlements: Sequence[Awaitable[None]]) -> None:
    """Wait for all, then raise the first failure."""
    for result in await asyncio.gather(*settlements, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
