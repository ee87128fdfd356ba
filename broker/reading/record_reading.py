"""Waits until a record can be handed over, and hands over: the reading half of a record consumer.

*Concurrency.* Several tasks of one event loop may read; each record goes to one of them. *Cancellation.* Between the
wait and the hand-over nothing suspends, so a cancelled call has taken nothing. *Failure.* The intake's fatal error is
raised once, to whoever waits, when the buffer is empty; `ended` from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from broker.errors import BrokerError
from broker.reading.assignments import Assignments
from broker.reading.record_decoding import RecordDecoder
from broker.reading.record_pump import RecordPump
from broker.records import Record, RecordOwner

__all__ = ["RecordReading"]

_RECORDS_BETWEEN_YIELDS: Final = 256
_LOOK_AGAIN: Final = 0.5


class RecordReading:
    """:param check: raises Closed if nothing may be handed over any more.
    :param is_idle: asked after `stop_when_idle` seconds without a record: whether there is none.
    """

    def __init__(
        self,
        owner: RecordOwner,
        pump: RecordPump,
        assignments: Assignments,
        decoder: RecordDecoder | None,
        *,
        check: Callable[[], None],
        stop_when_idle: float | None,
        is_idle: Callable[[float], Awaitable[bool]],
    ) -> None:
        self._owner = owner
        self._pump = pump
        self._assignments = assignments
        self._decoder = decoder
        self._check = check
        self._stop_when_idle = stop_when_idle
        self._is_idle = is_idle
        self._time = asyncio.get_running_loop().time
        self._since_yield = 0
        self.ended: BrokerError | None = None
        """The fatal error, once it was raised."""

    async def one(self, timeout: float | None) -> Record[Any] | None:
        """The next record; None if there was none in time."""
        if self._decoder is None and len(self._pump) and self._since_yield < _RECORDS_BETWEEN_YIELDS:
            self._check()
        elif not await self._available(timeout):
            return None
        record = self._pump.pop_one()
        self._assignments.hand_over_one(record, self._owner)
        self._since_yield += 1
        return record

    async def some(self, limit: int, timeout: float | None) -> Sequence[Record[Any]]:
        """The next records, at most `limit`; none if there were none in time."""
        if not await self._available(timeout):
            return []
        if self._decoder is None and self._pump.unmade:
            runs = self._assignments.hand_over_runs(self._pump.pop_runs(limit), self._owner)
            self._since_yield += len(runs)
            return runs
        records = self._pump.pop(limit)
        if self._decoder is not None:
            self._decoder.decode_following(records)
        self._assignments.hand_over(records, self._owner)
        self._since_yield += len(records)
        return records

    async def _available(self, timeout: float | None) -> bool:
        """Wait until the next record can be popped, decoded; False if there was none in time."""
        if self._since_yield >= _RECORDS_BETWEEN_YIELDS:
            # A consumer that finds its buffer full never suspends: let the intake and everybody else have their turn.
            self._since_yield = 0
            await asyncio.sleep(0)
        pump = self._pump
        started: float | None = None
        idle = False
        while True:
            self._check()
            if self._decoder is None:
                if len(pump):
                    return True
                head = None
            else:
                head = pump.peek()
                if head is not None and self._decoder.decode_next(head):
                    return True
            if head is None and pump.error is not None:
                self.ended = pump.error
                raise pump.error
            now = self._time()
            first, started = started is None, now if started is None else started
            if head is not None and self._decoder is not None:
                left = None if timeout is None else started + timeout - now
            else:
                left = self._patience(now, started, timeout)
            if left is not None and left <= 0 and not first:
                if idle or timeout is not None:
                    return False
                # Whatever comes while this is asked is found before it counts.
                idle = await self._is_idle(now - self._silent_since(started))
                if idle:
                    continue
                left = _LOOK_AGAIN
            idle = False
            if head is not None and self._decoder is not None:
                await self._decoder.buried(left)
            else:
                self._since_yield = 0
                await pump.arrival(left)

    def _patience(self, now: float, started: float, timeout: float | None) -> float | None:
        """Seconds that a call which began at `started` may still wait; None is for ever."""
        if timeout is not None:
            return started + timeout - now
        if self._stop_when_idle is None or self._pump.idle_since is None:
            return None
        return self._silent_since(started) + self._stop_when_idle - now

    def _silent_since(self, started: float) -> float:
        return max(started, self._pump.idle_since or started)
