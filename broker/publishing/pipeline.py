"""The pipeline behind `Topic.enqueue`: a bounded queue, automatic batches, and one future per message.

*Batching.* No message waits for a batch to fill. Messages that were queued while the loop was busy, or while
`in_flight` calls were running, form the next batch.

*Order.* See `broker.publishing.order`. Messages without a key are unordered.

*Back-pressure.* `put` waits while `max_messages` or `max_bytes` are queued or in flight; callers are admitted in the
order of their calls. Cancelling a waiting `put` queues nothing. A `put` that is cancelled after its admission, before
its task resumes, has queued its message: the caller has no future, so `flush` and `close` raise the failure. Cancelling
a future does not withdraw its message.

*Failure.* A retriable failure is retried for at most `retry_for` seconds, with the same content and id and before any
later message of its key. A message is not retried if

- the outcome is unknown (OperationTimeout) and the broker does not deduplicate by id: it could be duplicated;
- a later message of its key was published or is in flight: the two could be reordered.

The future gets the final failure. `flush` and `close` raise the failures whose futures were not looked at (the newest
1000). A failed message fails no other message.

All calls come from one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, cast

import msgspec

from broker.capabilities import PublishCapabilities
from broker.driver.concurrency import Backoff
from broker.driver.limits import MessageLimits, PipelineSettings
from broker.errors import BackendError, BrokerError, Closed, OperationTimeout, PublishError
from broker.outbound import OutboundMessage
from broker.publishing.order import UnsentMessages, overtaken
from broker.publishing.outgoing import Caller, Entry, OutgoingBatch, OutgoingQueue, is_unseen
from broker.receipts import Receipt

__all__ = ["PipelineSettings", "PublishingPipeline"]

_KEPT_FAILURES: Final = 1000
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 2.0
_QUEUED: Final = 0
"""In place of a batch's number, of which the first is 1."""
_RECEIPTS: Final = {Receipt}


class PublishingPipeline:
    """The pipeline of one topic.

    :param publish: sends a batch; returns as many receipts or errors, or raises if nothing was tried.
    :param limits: of the backend, for messages that were not checked.
    :param able: the publish capabilities of the backend.
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
        self._unsent = UnsentMessages(settings, ordered_calls=able.ordered_calls)
        self._loop = asyncio.get_running_loop()
        self._queue = OutgoingQueue(settings, limits, self._unsent.append)
        self.put_plain: Final = self._queue.put_plain
        """Queues a plain message without a check, the common case. None: check the message, then call `put_now`."""
        self._batches: dict[int, tuple[asyncio.Task[None], OutgoingBatch]] = {}
        self._batch_number = 0
        self._callers: deque[Caller] = deque()
        self._drainers: list[asyncio.Future[None]] = []
        self._failed: deque[tuple[asyncio.Future[Receipt], BrokerError]] = deque(maxlen=_KEPT_FAILURES)
        self._pump_scheduled = False
        self._fillers = 0
        """Callers that closed a full batch and resume in a moment: the open batch waits for their next messages."""
        self._closed = False
        self._abandoned = False

    @property
    def messages(self) -> int:
        """The number of messages queued and in flight."""
        return self._queue.messages

    def put_now(self, message: OutboundMessage, size: int) -> asyncio.Future[Receipt] | None:
        """Queue one message if there is room at once, the common case. None: await `put`."""
        queue = self._queue
        if self._callers or self._closed or not queue.has_room(size):
            return None
        if queue.batch_is_full:
            if len(self._batches) < self._settings.in_flight:
                return None
            queue.close_batch()
        if not queue.batch_has_messages:
            self._schedule_pump()
            queue.open_fast_path()
        future: asyncio.Future[Receipt] = asyncio.Future(loop=self._loop)
        queue.add(message, size, future)
        return future

    async def put(self, message: OutboundMessage, size: int) -> asyncio.Future[Receipt]:
        """Queue one message; waits while the pipeline is full.

        :raises Closed: the pipeline was closed before the message was admitted.
        """
        future = self.put_now(message, size)
        if future is not None:
            return future
        if self._closed:
            raise Closed("The topic is closed", advice="Publish before you leave the bus")
        future = self._loop.create_future()
        if self._callers or not self._queue.has_room(size):
            await self._wait_for_room(message, size, future)
            return future
        # A caller that never suspends would keep the full batch from leaving.
        self._queue.close_batch()
        self._start_batches()
        self._queue.open_fast_path()
        self._queue.add(message, size, future)
        self._fillers += 1
        try:
            await asyncio.sleep(0)
        finally:
            self._fillers -= 1
            self._schedule_pump()
        return future

    async def drain(self) -> None:
        """Wait until all messages queued so far have their receipts or errors."""
        self._queue.close_batch()
        outstanding = self._unsent.everything()
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
        """Wait until all messages queued so far are published.

        :raises PublishError: some messages failed, and their futures were not looked at.
        """
        await self.drain()
        await asyncio.sleep(0)  # Tasks that await their futures look at them first.
        self._raise_failures()

    async def close(self, timeout: float) -> None:
        """Admit no more messages, send the queued ones for at most `timeout` seconds, then fail the rest.

        :raises PublishError: some messages failed, and their futures were not looked at.
        """
        self._closed = True
        self._queue.close_fast_path()
        while self._callers:
            admitted = self._callers.popleft().admitted
            if not admitted.done():
                admitted.set_exception(Closed("The topic was closed before the message was admitted to the queue"))
        try:
            async with asyncio.timeout(timeout):
                await self.drain()
        except TimeoutError:
            pass
        finally:
            await self._abandon()
        await asyncio.sleep(0)
        self._raise_failures()

    # -- admission ----------------------------------------------------------------------------------------

    async def _wait_for_room(self, message: OutboundMessage, size: int, future: asyncio.Future[Receipt]) -> None:
        caller = Caller(message, size, future, self._loop.create_future())
        self._callers.append(caller)
        self._queue.close_fast_path()
        self._schedule_pump()
        try:
            await caller.admitted
        except asyncio.CancelledError:
            if caller in self._callers:
                self._callers.remove(caller)
                self._admit()
            raise

    def _admit(self) -> None:
        callers, queue = self._callers, self._queue
        while callers and queue.has_room(callers[0].size):
            caller = callers.popleft()
            if caller.admitted.done():
                continue
            if queue.batch_is_full:
                queue.close_batch()
            queue.add(caller.message, caller.size, caller.future)
            caller.admitted.set_result(None)
            self._schedule_pump()
        if not callers and not self._closed:
            queue.open_fast_path()

    # -- sending -------------------------------------------------------------------------------------------

    def _schedule_pump(self) -> None:
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_scheduled = False
        if not self._fillers and len(self._batches) < self._settings.in_flight:
            self._queue.close_batch()
        self._start_batches()

    def _start_batches(self) -> None:
        """Send the closed batches whose messages may leave."""
        if self._abandoned:
            return
        while self._unsent and len(self._batches) < self._settings.in_flight:
            number = self._batch_number + 1
            batch = self._unsent.next_batch(number)
            if batch is None:
                return
            self._batch_number = number
            task = self._loop.create_task(self._send(number, batch))
            self._batches[number] = (task, batch)
            self._unsent.left(number, batch, self._batches)

    async def _send(self, number: int, batch: OutgoingBatch) -> None:
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
                    # The garbage collector ignores entries, and an error may refer back to its batch.
                    entry.error = None if entry.done else entry.error
                if not again:
                    break
                pending = OutgoingBatch.of(again)
                await asyncio.sleep(delay)
        except asyncio.CancelledError:
            # Only the close of this pipeline or the end of the loop cancels the task.
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
            self._unsent.forget(number)
            self._schedule_pump()

    async def _try(self, batch: OutgoingBatch) -> Sequence[Receipt | BrokerError]:
        try:
            return await self._publish(batch.messages)
        except BrokerError as error:
            return [error] * len(batch.messages)

    def _all_published(self, number: int, batch: OutgoingBatch, outcomes: Sequence[Receipt | BrokerError]) -> bool:
        """Give each message its receipt, if all messages got one."""
        if set(map(type, outcomes)) != _RECEIPTS:
            return False
        for future, outcome in zip(batch.futures, outcomes, strict=True):
            try:
                future.set_result(cast("Receipt", outcome))
            except asyncio.InvalidStateError:
                continue  # The caller has cancelled it.
        batch.end()
        self._unsent.free_whole(number, batch)
        self._remove(len(batch.messages), batch.size)
        return True

    def _finish(
        self, number: int, batch: list[Entry], outcomes: Sequence[Receipt | BrokerError], *, may_retry: bool
    ) -> list[Entry]:
        """Give each message its outcome; return the messages to retry, in order."""
        failed: list[tuple[Entry, BrokerError]] = []
        for entry, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, BrokerError):
                failed.append((entry, outcome))
                continue
            if outcome.duplicate and entry.error is not None:
                # Of its own first attempt, which had no answer.
                outcome = msgspec.structs.replace(outcome, duplicate=False)
            future = entry.future
            if not future.done():
                future.set_result(outcome)
        published = batch
        again: list[Entry] = []
        if failed:
            published = [
                entry for entry, outcome in zip(batch, outcomes, strict=True) if not isinstance(outcome, BrokerError)
            ]
            passed = overtaken(batch, outcomes, self._unsent.sent_after(number))
            for entry, error in failed:
                if may_retry and error.retriable and id(entry) not in passed and self._is_harmless(entry, error):
                    entry.error = error
                    again.append(entry)
                else:
                    self._fail(entry, error)
                    published.append(entry)
        self._unsent.send_again(number, again)
        self._leave(number, published, again)
        return again

    def _is_harmless(self, entry: Entry, error: BrokerError) -> bool:
        """Whether a retry cannot put the message on the broker twice."""
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
        """`finished` messages have their outcomes; the keys of those in `again` stay busy."""
        for entry in finished:
            entry.done = True
        self._unsent.free(number, finished, again)
        self._remove(len(finished), sum([entry.size for entry in finished]))

    def _remove(self, count: int, size: int) -> None:
        """Messages have left the pipeline: admit waiting callers and wake drainers."""
        self._queue.remove(count, size)
        self._admit()
        if self._unsent or self._queue.batch_has_messages:
            self._schedule_pump()
        if self._drainers:
            for drainer in self._drainers:
                if not drainer.done():
                    drainer.set_result(None)
            self._drainers.clear()

    async def _abandon(self) -> None:
        """Fail the remaining messages; there are none unless the close timed out."""
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
        self._queue.close_batch()
        queued = self._unsent.clear()
        self._fail_all(_QUEUED, queued, Closed("The topic was closed before the message was sent"))

    def _raise_failures(self) -> None:
        unseen = [(future, error) for future, error in self._failed if is_unseen(future)]
        self._failed.clear()
        if unseen:
            for future, _ in unseen:
                if not future.cancelled():
                    future.exception()
            raise PublishError([error for _, error in unseen])
