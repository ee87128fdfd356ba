"""`Redelivery`: redelivers records from memory, failed and released ones after a delay, those of retry topics when due.

Used on one event loop, by one source. Calls neither fail nor wait; forgotten records are read again from the log.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Final

from broker.driver.as_messages.partition import MessagePartition
from broker.driver.concurrency import Backoff
from broker.driver.record_messages import Delivery, delivery_of, read_retry_letter, record_of
from broker.messages import Message, Outcome
from broker.records import Record

__all__ = ["Redelivery"]

_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 5.0


class Redelivery:
    """The records of one source that wait for redelivery.

    :param interrupt: called when a record is due, to end a running fetch.
    """

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._loop = asyncio.get_running_loop()
        self._heap: list[tuple[float, int, int, Delivery, MessagePartition]] = []
        """Due time, offset, and a number that breaks ties."""
        self._backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        self._numbers = 0
        self._timer: asyncio.TimerHandle | None = None

    def put(self, message: Message[Any], part: MessagePartition, outcome: Outcome, delay: float) -> None:
        """Redeliver a message after so many seconds."""
        record, attempt, returns, letter = record_of(message)
        attempt += message.retries + (outcome is Outcome.NACK)
        if delay <= 0 and returns >= 2:
            # A message that is released again and again must not keep the loop busy.
            delay = self._backoff.after(returns - 1)
        self._put(Delivery(record, attempt, returns + 1, letter), part, delay)

    def first(self, record: Record[Any], part: MessagePartition) -> Message[Any] | None:
        """The message of a record on a retry topic if it is due; otherwise keep it until then, and return None."""
        letter = read_retry_letter(record.attributes)
        if letter is None:
            # Another program wrote the record, without a due time.
            return delivery_of(Delivery(record, 1, 0), part.topic, part)
        delivery = Delivery(record, letter.attempts + 1, 0, letter)
        # Clocks differ, but no message waits longer than the delay of its topic.
        wait = min(letter.due - time.time(), part.delay)
        if wait <= 0:
            return delivery_of(delivery, part.topic, part)
        part.not_due += 1
        self._put(delivery, part, wait)
        return None

    def take_due(self, max_messages: int, max_bytes: int) -> list[Message[Any]]:
        """Remove and return the messages that are due."""
        messages: list[Message[Any]] = []
        heap = self._heap
        if not heap:
            return messages
        now = self._loop.time()
        while heap and heap[0][0] <= now and len(messages) < max_messages and max_bytes > 0:
            _, offset, _, delivery, part = heappop(heap)
            message = delivery_of(delivery, part.topic, part)
            part.unsettled[offset] = message
            part.waiting -= 1
            if not delivery.returns:
                part.not_due -= 1
            max_bytes -= message.size
            messages.append(message)
        self._await_due()
        return messages

    def forget(self) -> None:
        """Forget the records of partitions that are being revoked: the next owner reads them."""
        kept = [entry for entry in self._heap if not entry[-1].revoking]
        if len(kept) < len(self._heap):
            self._heap[:] = kept
            heapify(self._heap)

    def close(self) -> None:
        """Forget all records."""
        if self._timer is not None:
            self._timer.cancel()
        self._heap.clear()

    def _put(self, delivery: Delivery, part: MessagePartition, delay: float) -> None:
        due = self._loop.time() + delay if delay > 0 else 0.0
        self._numbers += 1
        part.waiting += 1
        heappush(self._heap, (due, delivery.record.offset, self._numbers, delivery, part))
        self._await_due()

    def _await_due(self) -> None:
        """End the running fetch when the next delivery is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._heap:
            due = self._heap[0][0]
            if due <= self._loop.time():
                self._interrupt()
            else:
                self._timer = self._loop.call_at(due, self._interrupt)
