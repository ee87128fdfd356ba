"""The pipeline behind `Topic.enqueue`: a bounded queue, batches that form by themselves, a future per message.

*Batching.* Nothing waits for a batch to fill: what has gathered while the loop was busy, or while `in_flight`
calls were running, goes as the next batch.

*Order.* Messages of one key leave in the order of the calls. While a batch that holds a key is in flight, later
messages of that key wait; others pass them. A backend that keeps the order of its calls gets them at once: there only
those wait whose key has a message that is sent again. Messages without a key are unordered.

*Back-pressure.* `put` waits while `max_messages` or `max_bytes` are queued or in flight; callers are let in in the
order of their calls. A call cancelled while it waits to be let in has queued nothing. One that is cancelled later, in
the turn of the loop before it goes on, has: nobody has its future, so `flush` and `close` tell its failure. Cancelling
a future withdraws nothing: its message goes all the same.

*Failure.* A retriable failure is sent again, for at most `retry_for` seconds, with the same content and id and
before any later message of its key. It is not sent again where that could duplicate or reorder: when the outcome is
unknown (OperationTimeout) and the broker would not recognise the id, and when a later message of the key went
through, or is on its way. What fails for good is in the future; `flush` and `close` raise those failures that nobody
looked at (the newest 1000 of them). One message's failure fails no other.

All calls come from one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, cast

from broker.capabilities import PublishCapabilities
from broker.driver.backoff import Backoff
from broker.driver.limits import MessageLimits, PipelineSettings
from broker.errors import BackendError, BrokerError, Closed, OperationTimeout, PublishError
from broker.outbound import OutboundMessage
from broker.publishing.entries import Burst, Caller, Entry, is_unseen
from broker.publishing.intake import Intake
from broker.publishing.order import Departures, overtaken
from broker.receipts import Receipt

__all__ = ["PipelineSettings", "PublishingPipeline"]

_KEPT_FAILURES: Final = 1000
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 2.0
_QUEUED: Final = 0
"""In place of a batch's number, of which the first is 1."""
_RECEIPTS: Final = {Receipt}


class PublishingPipeline:
    """One topic's queue of messages on their way out.

    :param publish: sends a batch; returns as many receipts or errors, or raises if nothing was tried.
    :param limits: of the backend, for messages that were not checked.
    :param able: what the backend can do.
    """

    def __init__(
        self,
        publish: Callable[[Sequence[OutboundMessage]], Awaitable[Sequence[Receipt | BrokerError]]],
        settings: PipelineSettings,
        limits: MessageLimits,
        able: PublishCapabilities,
    ) -> None:
        self._publish = publish
        self._settings = settings
        self._deduplicates = able.deduplication
        self._departures = Departures(settings, ordered_calls=able.ordered_calls)
        self._loop = asyncio.get_running_loop()
        self._intake = Intake(settings, limits, self._departures.append)
        self.put_plain: Final = self._intake.put_plain
        """Queues a plain message that nobody has checked, as most are; None leaves it to a check and `put_now`."""
        self._batches: dict[int, tuple[asyncio.Task[None], Burst]] = {}
        self._batch_number = 0
        self._callers: deque[Caller] = deque()
        self._drainers: list[asyncio.Future[None]] = []
        self._failed: deque[tuple[asyncio.Future[Receipt], BrokerError]] = deque(maxlen=_KEPT_FAILURES)
        self._pump_scheduled = False
        self._fillers = 0
        """Callers that have had a full burst leave and go on in a moment: the open one waits for what they add."""
        self._closed = False
        self._abandoned = False

    @property
    def messages(self) -> int:
        """Those queued and in flight."""
        return self._intake.messages

    def put_now(self, message: OutboundMessage, size: int) -> asyncio.Future[Receipt] | None:
        """Queue one message if nothing has to be waited for, which is the rule; None leaves it to `put`."""
        intake = self._intake
        if self._callers or self._closed or not intake.has_room(size):
            return None
        if intake.is_full:
            if len(self._batches) < self._settings.in_flight:
                return None
            intake.shut()
        if not intake.has_open:
            self._schedule_pump()
            intake.allow()
        future: asyncio.Future[Receipt] = asyncio.Future(loop=self._loop)
        intake.add(message, size, future)
        return future

    async def put(self, message: OutboundMessage, size: int) -> asyncio.Future[Receipt]:
        """Queue one message; waits while the pipeline is full.

        :raises Closed: the pipeline was closed before the message was let in.
        """
        future = self.put_now(message, size)
        if future is not None:
            return future
        if self._closed:
            raise Closed("The topic is closed", advice="Publish before you leave the bus")
        future = self._loop.create_future()
        if self._callers or not self._intake.has_room(size):
            await self._wait_for_room(message, size, future)
            return future
        # A caller that never suspends would keep the full burst from leaving.
        self._intake.shut()
        self._start_batches()
        self._intake.allow()
        self._intake.add(message, size, future)
        self._fillers += 1
        try:
            await asyncio.sleep(0)
        finally:
            self._fillers -= 1
            self._schedule_pump()
        return future

    async def drain(self) -> None:
        """Wait until everything queued by now has its receipt or its error."""
        self._intake.shut()
        outstanding = self._departures.everything()
        outstanding += [batch for _, batch in self._batches.values()]
        while True:
            while outstanding and outstanding[-1].done:
                outstanding.pop()
            if not outstanding:
                return
            drainer: asyncio.Future[None] = self._loop.create_future()
            self._drainers.append(drainer)
            await drainer

    async def flush(self) -> None:
        """Wait until everything queued by now has its receipt.

        :raises PublishError: some failed, and nobody looked at their futures.
        """
        await self.drain()
        await asyncio.sleep(0)  # a task that awaits its future gets to look at it first
        self._raise_failures()

    async def close(self, timeout: float) -> None:
        """Let nobody in any more, send what is queued for at most `timeout` seconds, then fail the rest.

        :raises PublishError: some failed, and nobody looked at their futures.
        """
        self._closed = True
        self._intake.forbid()
        while self._callers:
            admitted = self._callers.popleft().admitted
            if not admitted.done():
                admitted.set_exception(Closed("The topic was closed before the message was let in"))
        try:
            async with asyncio.timeout(timeout):
                await self.drain()
        except TimeoutError:
            pass
        finally:
            await self._abandon()
        await asyncio.sleep(0)
        self._raise_failures()

    # -- letting in ----------------------------------------------------------------------------------------

    async def _wait_for_room(self, message: OutboundMessage, size: int, future: asyncio.Future[Receipt]) -> None:
        caller = Caller(message, size, future, self._loop.create_future())
        self._callers.append(caller)
        self._intake.forbid()
        self._schedule_pump()
        try:
            await caller.admitted
        except asyncio.CancelledError:
            if caller in self._callers:
                self._callers.remove(caller)
                self._admit()
            raise

    def _admit(self) -> None:
        callers, intake = self._callers, self._intake
        while callers and intake.has_room(callers[0].size):
            caller = callers.popleft()
            if caller.admitted.done():
                continue
            if intake.is_full:
                intake.shut()
            intake.add(caller.message, caller.size, caller.future)
            caller.admitted.set_result(None)
            self._schedule_pump()
        if not callers and not self._closed:
            intake.allow()

    # -- sending -------------------------------------------------------------------------------------------

    def _schedule_pump(self) -> None:
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_scheduled = False
        if not self._fillers and len(self._batches) < self._settings.in_flight:
            self._intake.shut()
        self._start_batches()

    def _start_batches(self) -> None:
        """Send what is not in the open burst, as far as it may."""
        if self._abandoned:
            return
        while self._departures and len(self._batches) < self._settings.in_flight:
            number = self._batch_number + 1
            batch = self._departures.next_batch(number)
            if batch is None:
                return
            self._batch_number = number
            task = self._loop.create_task(self._send(number, batch))
            self._batches[number] = (task, batch)
            self._departures.left(number, batch, self._batches)

    async def _send(self, number: int, batch: Burst) -> None:
        pending, backoff, give_up = batch, None, 0.0
        try:
            while True:
                outcomes = await self._try(pending)
                if pending.entries is None and self._all_published(number, pending, outcomes):
                    break
                now = self._loop.time()
                backoff = backoff or Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
                delay = backoff.next()
                give_up = give_up or now + self._settings.retry_for
                tried = pending.apart()
                again = self._finish(number, tried, outcomes, may_retry=now + delay < give_up)
                for entry in tried if pending is not batch else ():
                    # The collector does not see entries, and an error may lead back to its batch.
                    entry.error = None if entry.done else entry.error
                if not again:
                    break
                pending = Burst.of(again)
                await asyncio.sleep(delay)
        except asyncio.CancelledError:
            # Only the close of this pipeline, or the end of the loop, cancels.
            self._fail_all(
                number,
                pending.apart(),
                OperationTimeout("Publishing was cut off; whether it took effect is unknown"),
            )
            self._abandon_queued()
            raise
        except Exception as error:
            self._fail_all(number, pending.apart(), BackendError(f"The backend failed: {error!r}", native=error))
            raise
        finally:
            del self._batches[number]
            self._departures.forget(number)
            self._schedule_pump()

    async def _try(self, batch: Burst) -> Sequence[Receipt | BrokerError]:
        try:
            return await self._publish(batch.messages)
        except BrokerError as error:
            return [error] * len(batch.messages)

    def _all_published(self, number: int, batch: Burst, outcomes: Sequence[Receipt | BrokerError]) -> bool:
        """Give each message its receipt, if that is what all have got."""
        if set(map(type, outcomes)) != _RECEIPTS:
            return False
        for future, outcome in zip(batch.futures, outcomes, strict=True):
            try:
                future.set_result(cast("Receipt", outcome))
            except asyncio.InvalidStateError:
                continue  # its caller has cancelled it
        batch.end()
        self._departures.free_whole(number, batch)
        self._gone(len(batch.messages), batch.size)
        return True

    def _finish(
        self, number: int, batch: list[Entry], outcomes: Sequence[Receipt | BrokerError], *, may_retry: bool
    ) -> list[Entry]:
        """Give each message its outcome; return those that are to be sent again, in order."""
        failed: list[tuple[Entry, BrokerError]] = []
        for entry, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, BrokerError):
                failed.append((entry, outcome))
                continue
            future = entry.future
            if not future.done():
                future.set_result(outcome)
        published = batch
        again: list[Entry] = []
        if failed:
            published = [
                entry for entry, outcome in zip(batch, outcomes, strict=True) if not isinstance(outcome, BrokerError)
            ]
            passed = overtaken(batch, outcomes, self._departures.sent_after(number))
            for entry, error in failed:
                if may_retry and error.retriable and id(entry) not in passed and self._is_harmless(entry, error):
                    entry.error = error
                    again.append(entry)
                else:
                    self._fail(entry, error)
                    published.append(entry)
        self._departures.send_again(number, again)
        self._leave(number, published, again)
        return again

    def _is_harmless(self, entry: Entry, error: BrokerError) -> bool:
        """Whether sending again cannot put the message on the broker twice."""
        return not isinstance(error, OperationTimeout) or (self._deduplicates and entry.message.id is not None)

    def _fail(self, entry: Entry, error: BrokerError) -> None:
        if not entry.future.done():
            entry.future.set_exception(error)
        self._failed.append((entry.future, error))

    def _fail_all(self, number: int, entries: list[Entry], reason: BrokerError) -> None:
        left = [entry for entry in entries if not entry.done]
        for entry in left:
            error, entry.error = entry.error or reason, None
            self._fail(entry, error)
        self._leave(number, left, [])

    def _leave(self, number: int, finished: list[Entry], again: list[Entry]) -> None:
        """These have their outcomes; keys of those that are sent again are kept."""
        for entry in finished:
            entry.done = True
        self._departures.free(number, finished, again)
        self._gone(len(finished), sum([entry.size for entry in finished]))

    def _gone(self, count: int, size: int) -> None:
        """So many are out of the pipeline: let waiting callers and drainers go on."""
        self._intake.gone(count, size)
        self._admit()
        if self._departures or self._intake.has_open:
            self._schedule_pump()
        if self._drainers:
            for drainer in self._drainers:
                if not drainer.done():
                    drainer.set_result(None)
            self._drainers.clear()

    async def _abandon(self) -> None:
        """Fail what is still here; nothing is, unless the time to close ran out."""
        self._abandon_queued()
        running = list(self._batches.items())
        for _, (task, _) in running:
            task.cancel()
        if running:
            await asyncio.wait([task for _, (task, _) in running], timeout=1.0)
        for number, (_, batch) in running:
            self._fail_all(
                number,
                batch.apart(),
                OperationTimeout("The backend did not end its call; whether it took effect is unknown"),
            )

    def _abandon_queued(self) -> None:
        self._closed = self._abandoned = True
        self._intake.shut()
        queued = self._departures.clear()
        self._fail_all(_QUEUED, queued, Closed("The topic was closed before the message was sent"))

    def _raise_failures(self) -> None:
        unseen = [(future, error) for future, error in self._failed if is_unseen(future)]
        self._failed.clear()
        if unseen:
            for future, _ in unseen:
                if not future.cancelled():
                    future.exception()
            raise PublishError([error for _, error in unseen])
