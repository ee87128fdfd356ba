"""The pipeline behind `Topic.enqueue`: a bounded queue, batches that form by themselves, a future per message.

*Batching.* Nothing waits for a batch to fill: what has gathered while the loop was busy, or while `in_flight`
calls were running, goes as the next batch.

*Order.* Messages of one key leave in the order of the calls. While a batch that holds a key is in flight, later
messages of that key wait; others pass them. A backend that keeps the order of its calls gets them at once: there only
those wait whose key has a message that is sent again. Messages without a key are unordered.

*Back-pressure.* `put` waits while `max_messages` or `max_bytes` are queued or in flight; callers are let in in the
order of their calls. A call cancelled while it waits has queued nothing. Cancelling a future withdraws
nothing: its message goes all the same.

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
from typing import Final

from broker.capabilities import PublishCapabilities
from broker.errors import BackendError, BrokerError, Closed, OperationTimeout, PublishError
from broker.outbound import OutboundMessage
from broker.publishing.entries import Caller, Entry, LaterKeys, is_unseen, overtaken
from broker.publishing.limits import PipelineSettings
from broker.receipts import Receipt

__all__ = ["PipelineSettings", "PublishingPipeline"]

_KEPT_FAILURES: Final = 1000
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 2.0
_QUEUED: Final = 0
"""In place of a batch's number, of which the first is 1."""


class PublishingPipeline:
    """One topic's queue of messages on their way out.

    :param publish: sends a batch; returns as many receipts or errors, or raises if nothing was tried.
    :param able: what the backend can do.
    """

    def __init__(
        self,
        publish: Callable[[Sequence[OutboundMessage]], Awaitable[Sequence[Receipt | BrokerError]]],
        settings: PipelineSettings,
        able: PublishCapabilities,
    ) -> None:
        self._publish = publish
        self._settings = settings
        self._max_messages = settings.max_messages
        self._max_bytes = settings.max_bytes
        self._max_batch = settings.max_batch
        self._deduplicates = able.deduplication
        self._later = LaterKeys(self._hold, 4 * settings.in_flight) if able.ordered_calls else None
        self._loop = asyncio.get_running_loop()
        self._ready: deque[Entry] = deque()
        self._busy: dict[bytes, int] = {}
        """Keys that later messages wait for, each with its batch."""
        self._waiting: dict[bytes, list[Entry]] = {}
        """Later messages of such keys."""
        self._batches: dict[int, tuple[asyncio.Task[None], list[Entry]]] = {}
        self._batch_number = 0
        self._callers: deque[Caller] = deque()
        self._drainers: list[asyncio.Future[None]] = []
        self._failed: deque[tuple[asyncio.Future[Receipt], BrokerError]] = deque(maxlen=_KEPT_FAILURES)
        self._pump_scheduled = False
        self._closed = False
        self._abandoned = False
        self.messages = 0
        self.bytes = 0

    def put_now(self, message: OutboundMessage, size: int) -> asyncio.Future[Receipt] | None:
        """Queue one message if nothing has to be waited for, which is the rule; None leaves it to `put`."""
        messages, ready = self.messages, self._ready
        if self._callers or self._closed or messages >= self._max_messages:
            return None
        if messages and self.bytes + size > self._max_bytes:
            return None
        if not self._pump_scheduled:
            self._schedule_pump()
        elif len(ready) + 1 >= self._max_batch and len(self._batches) < self._settings.in_flight:
            return None
        future: asyncio.Future[Receipt] = self._loop.create_future()
        self.messages = messages + 1
        self.bytes += size
        ready.append(Entry(message, size, future))
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
        entry = Entry(message, size, future)
        if self._callers or not self._has_room(size):
            await self._wait_for_room(entry)
            return future
        self.messages += 1
        self.bytes += size
        self._ready.append(entry)
        # A caller that never suspends would keep the full batch from leaving.
        self._start_batches()
        await asyncio.sleep(0)
        return future

    async def drain(self) -> None:
        """Wait until everything queued by now has its receipt or its error."""
        outstanding = [*self._ready]
        for waiting in self._waiting.values():
            outstanding += waiting
        for _, batch in self._batches.values():
            outstanding += batch
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

    def _has_room(self, size: int) -> bool:
        messages = self.messages
        return messages < self._max_messages and (self.bytes + size <= self._max_bytes or not messages)

    async def _wait_for_room(self, entry: Entry) -> None:
        caller = Caller(entry, self._loop.create_future())
        self._callers.append(caller)
        self._schedule_pump()
        try:
            await caller.admitted
        except asyncio.CancelledError:
            if caller in self._callers:
                self._callers.remove(caller)
                self._admit()
            raise

    def _admit(self) -> None:
        callers = self._callers
        while callers and self._has_room(callers[0].entry.size):
            caller = callers.popleft()
            if caller.admitted.done():
                continue
            self.messages += 1
            self.bytes += caller.entry.size
            self._ready.append(caller.entry)
            caller.admitted.set_result(None)

    def _schedule_pump(self) -> None:
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_scheduled = False
        self._start_batches()

    def _start_batches(self) -> None:
        if self._abandoned:
            return
        while self._ready and len(self._batches) < self._settings.in_flight:
            number = self._batch_number + 1
            batch = self._gather(number)
            if not batch:
                return
            self._batch_number = number
            task = self._loop.create_task(self._send(number, batch))
            self._batches[number] = (task, batch)
            if self._later is not None:
                self._later.note(number, batch, self._batches)

    def _gather(self, number: int) -> list[Entry]:
        batch: list[Entry] = []
        ready, busy, max_batch = self._ready, self._busy, self._max_batch
        # With ordered calls a key is only noted while something of it is sent again.
        notes = self._later is None
        looks = notes or bool(busy)
        space = self._settings.max_batch_bytes
        while ready and space > 0 and len(batch) < max_batch:
            entry = ready.popleft()
            if looks and (key := entry.message.key) is not None:
                holder = busy.setdefault(key, number) if notes else busy.get(key, number)
                if holder != number:
                    self._waiting.setdefault(key, []).append(entry)
                    continue
            space -= entry.size
            batch.append(entry)
        return batch

    def _hold(self, number: int, entries: Sequence[Entry]) -> None:
        """Have later messages wait for the keys of these."""
        for entry in entries:
            if entry.message.key is not None and not entry.done:
                self._busy.setdefault(entry.message.key, number)

    async def _send(self, number: int, batch: list[Entry]) -> None:
        pending, pause, give_up = batch, _FIRST_PAUSE, 0.0
        try:
            while True:
                tried = pending
                outcomes = await self._try(tried)
                now = self._loop.time()
                give_up = give_up or now + self._settings.retry_for
                pending = self._finish(number, tried, outcomes, may_retry=now + pause < give_up)
                for entry in tried if tried is not batch else ():
                    # The collector does not see entries, and an error may lead back to its batch.
                    entry.error = None if entry.done else entry.error
                if not pending:
                    break
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
        except asyncio.CancelledError:
            # Only the close of this pipeline, or the end of the loop, cancels.
            self._fail_all(
                number, pending, OperationTimeout("Publishing was cut off; whether it took effect is unknown")
            )
            self._abandon_queued()
            raise
        except Exception as error:
            self._fail_all(number, pending, BackendError(f"The backend failed: {error!r}", native=error))
            raise
        finally:
            del self._batches[number]
            if self._later is not None:
                self._later.forget(number)
            self._start_batches()

    async def _try(self, batch: list[Entry]) -> Sequence[Receipt | BrokerError]:
        try:
            return await self._publish([entry.message for entry in batch])
        except BrokerError as error:
            return [error] * len(batch)

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
            passed = overtaken(batch, outcomes, self._later.after(number) if self._later is not None else ())
            for entry, error in failed:
                if may_retry and error.retriable and id(entry) not in passed and self._is_harmless(entry, error):
                    entry.error = error
                    again.append(entry)
                else:
                    self._fail(entry, error)
                    published.append(entry)
        if self._later is not None:
            self._hold(number, again)
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
        """These are out of the pipeline: let others of their keys, waiting callers and drainers go on."""
        held = {entry.message.key for entry in again}
        busy = self._busy
        size = 0
        released: list[Entry] = []
        for entry in finished:
            entry.done = True
            size += entry.size
            if busy and (key := entry.message.key) is not None and key not in held and busy.get(key) == number:
                del busy[key]
                if self._waiting:
                    released += self._waiting.pop(key, ())
        if released:
            self._ready.extendleft(reversed(released))
        self.messages -= len(finished)
        self.bytes -= size
        if self._callers:
            self._admit()
        if self._ready:
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
                number, batch, OperationTimeout("The backend did not end its call; whether it took effect is unknown")
            )

    def _abandon_queued(self) -> None:
        self._closed = self._abandoned = True
        queued = [*self._ready]
        for waiting in self._waiting.values():
            queued += waiting
        self._waiting.clear()
        self._ready.clear()
        self._fail_all(_QUEUED, queued, Closed("The topic was closed before the message was sent"))

    def _raise_failures(self) -> None:
        unseen = [(future, error) for future, error in self._failed if is_unseen(future)]
        self._failed.clear()
        if unseen:
            for future, _ in unseen:
                if not future.cancelled():
                    future.exception()
            raise PublishError([error for _, error in unseen])
