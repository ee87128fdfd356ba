"""`DispatchingReader`: one reader of a topic for all of its queues that one process consumes.

*Why.* A queue that reads a shared topic by itself fetches the messages of all others too: the topic travels as often as
it has queues. Here the process is one member of one group, whose queue client writes the STARTs and commits, as for one
queue; then each message goes into the lane of its queue, by its key. Its markers are those of any queue of that group,
so that trackers know nothing of this. *The position waits for no queue:* what was started is kept by its marker, not by
the position. What waits in a lane has its lease renewed here. What a lane has no room for, or what nobody consumes
here, is started as "held by nobody, due later" (`DispatchStarting`), and a tracker sends it again. *Reading begins*
when all queues of the group are consumed here, or a moment after the last that came, so that little has to come again.

*Concurrency.* One event loop. *Rebalances* concern the queue client alone: what lies in lanes was started, and is ours
wherever its partition goes. *Failure.* What may pass is told to each lane, and reading goes on after a pause; else
nothing is read any more, lanes give what they have and then raise it. *Close.* A queue that is consumed no more has
what waited in its lane sent again at once, and the others go on.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Collection, Sequence
from math import inf
from typing import Any, Final

from broker import BackendError, BrokerError, LeaseLost, Message, Outcome
from broker.consuming.leases import tell_not_renewed
from broker.driver import Event, Settlement, Waker, Warned, logger
from broker_kafka.queue.consumer.queue_client import QueueClient
from broker_kafka.queue.consumer.queue_lane import QueueLane
from broker_kafka.queue.consumer.transacted_ends import TransactedEnds
from broker_kafka.queue.dispatch.dispatch_starting import queue_of
from broker_kafka.queue.dispatch.dispatch_table import DispatchTable, Policy

__all__ = ["DispatchingReader"]

_BATCH: Final = 500
_BATCH_BYTES: Final = 4 * 1024 * 1024
_WAIT: Final = 1.0
_SETTLED: Final = 0.5
"""Seconds after which no queue more is waited for."""
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 5.0
_CLOSE: Final = 3.0
_FORSAKEN: Final = 10.0
"""Seconds after which somebody is told of a queue that nobody consumes here."""
_TOLD: Final = 100
"""The most queues of which that is told."""
_EARLY: Final = 100
"""The most events that are kept for the first consumer."""


class DispatchingReader:
    """:param table: the lanes, which the STARTs of the client are written by.
    :param declared: the queues of the group; None if every key is one.
    :param group: the group, for people.
    :param lease_seconds: of what waits.
    """

    def __init__(
        self,
        table: DispatchTable[Message[Any]],
        *,
        declared: Collection[bytes] | None,
        group: str,
        lease_seconds: float,
    ) -> None:
        self._table = table
        self._declared = declared
        self._group = group
        self._lease_seconds = lease_seconds
        self._loop = asyncio.get_running_loop()
        self._lanes: list[QueueLane] = []
        self._client: QueueClient | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._begin_at = inf
        self._waker = Waker()
        self._told: set[bytes] = set()
        self._early: deque[Event] = deque(maxlen=_EARLY)
        self._closing = False
        self.failure: BrokerError | None = None

    def begin(self, client: QueueClient) -> None:
        """Read by this client, which is open."""
        self._client = client
        self._tasks = [
            self._loop.create_task(self._read(client), name=f"broker-kafka-dispatch-{self._group}"),
            self._loop.create_task(self._renew(client), name=f"broker-kafka-renew-{self._group}"),
        ]

    def attach(self, lane: QueueLane, policy: Policy) -> None:
        """Hand the messages of its queue to this one too."""
        now = self._loop.time()
        self._table.open(lane.queue, policy, now)
        self._lanes.append(lane)
        while self._early:
            lane.event(self._early.popleft())
        self._begin_at = now + (_SETTLED if self._begin_at > now else 0.0)
        self._waker.wake()

    async def detach(self, lane: QueueLane) -> None:
        """It is closed; what waited for it alone comes again at once."""
        self._lanes.remove(lane)
        waiting = self._table.close(lane.queue, self._loop.time())
        self._waker.wake()
        await self._give_back(waiting)

    async def close(self) -> None:
        """Read no more, and leave the group."""
        self._closing = True
        client = self._client
        if client is None:
            return
        try:
            reading, renewing = self._tasks
            renewing.cancel()
            client.interrupt()
            self._waker.wake()
            await asyncio.wait({reading}, timeout=_CLOSE)
            reading.cancel()
            await asyncio.wait({reading, renewing})
        finally:
            await client.close()

    # -- for the client: SourceListener --------------------------------------------------------------------

    def lost(self, messages: Sequence[Message[Any]]) -> None:
        """Queues with markers tell it when a lease is renewed."""

    def passed_over(self, messages: Sequence[Message[Any]]) -> None:
        lanes = Counter(lane.queue for lane in self._lanes)
        for lane in self._lanes:
            # Of two, either may get it when it comes again.
            if lanes[lane.queue] == 1:
                lane.passed_over([message for message in messages if message.key == lane.queue])

    def event(self, event: Event) -> None:
        """One of the consumers tells what concerns the reader, the first one what went before it."""
        if self._lanes:
            self._lanes[0].event(event)
        else:
            self._early.append(event)

    # -- for lanes: LaneReader -----------------------------------------------------------------------------

    def take(self, queue: bytes, max_messages: int, max_bytes: int) -> list[Message[Any]]:
        found = self._table.take(queue, max_messages, max_bytes, self._loop.time())
        if found:
            self._waker.wake()
        return found

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        assert self._client is not None
        return await self._client.settle(settlements)

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        assert self._client is not None
        return await self._client.extend(messages)

    async def keep(self, message: Message[Any], delay: float) -> BrokerError | None:
        assert self._client is not None
        return await self._client.keep(message, delay)

    @property
    def transacted(self) -> TransactedEnds:
        assert self._client is not None
        return self._client.transacted

    async def is_idle(self, queue: bytes, seconds: float) -> bool:
        client, table = self._client, self._table
        if client is None or not table.is_quiet(queue, self._loop.time()) or not await client.is_idle(seconds):
            return False
        return table.is_quiet(queue, self._loop.time())

    # -- reading -------------------------------------------------------------------------------------------

    async def _read(self, client: QueueClient) -> None:
        try:
            await self._read_on(client)
        except BrokerError as error:
            self._fail(error)
        except Exception as error:
            self._fail(BackendError(f"Reading for the queues of {self._group!r} failed: {error}", native=error))

    async def _read_on(self, client: QueueClient) -> None:
        pause = _FIRST_PAUSE
        while not self._closing:
            if (seconds := self._until_begin()) > 0:
                await self._waker.wait(min(_WAIT, seconds))
                continue
            room = self._table.room()
            if room == 0:
                await self._waker.wait(_WAIT)
                continue
            try:
                messages = await client.fetch(min(room, _BATCH), _BATCH_BYTES, _WAIT)
            except BrokerError as error:
                if self._closing:
                    return
                if not error.retriable:
                    raise
                for lane in self._lanes:
                    lane.trouble(error)
                await self._pause(pause)
                pause = min(_LONGEST_PAUSE, 2 * pause)
                continue
            pause = _FIRST_PAUSE
            await self._hand_out(messages)

    def _until_begin(self) -> float:
        if self._declared is not None and len(self._table) >= len(self._declared):
            return 0.0
        return self._begin_at - self._loop.time()

    async def _pause(self, seconds: float) -> None:
        until = self._loop.time() + seconds
        while not self._closing and (left := until - self._loop.time()) > 0:
            await self._waker.wait(left)

    async def _hand_out(self, messages: Sequence[Message[Any]]) -> None:
        table, now = self._table, self._loop.time()
        queues: set[bytes] = set()
        left: list[Message[Any]] = []
        for message in messages:
            queue = queue_of(message.raw)
            if table.offer(queue, message, message.size, now):
                queues.add(queue)
            else:
                left.append(message)
        for lane in self._lanes:
            if lane.queue in queues:
                lane.wake()
        # Of a queue whose consumer closed meanwhile.
        await self._give_back(left)
        if not messages:
            await asyncio.sleep(0)

    async def _give_back(self, messages: Sequence[Message[Any]]) -> None:
        if not messages or self._client is None:
            return
        settlements = [Settlement(message, Outcome.RELEASE, 0.0) for message in messages]
        try:
            async with asyncio.timeout(_CLOSE):
                await self._client.settle(settlements)
        except (BrokerError, TimeoutError) as error:
            logger.info("%d messages of %r come again when their leases end: %s", len(messages), self._group, error)

    async def _renew(self, client: QueueClient) -> None:
        """Keep what waits, as the consumer does with what it has."""
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            waiting = self._table.waiting()
            if not waiting:
                continue
            results: Sequence[BrokerError | None]
            try:
                results = await client.extend(waiting)
            except BrokerError as error:
                results = [error] * len(waiting)
            tell_not_renewed(self.event, waiting, results)
            gone = [message for message, error in zip(waiting, results, strict=True) if isinstance(error, LeaseLost)]
            self._table.discard(gone)
            self._waker.wake()

    def _fail(self, error: BrokerError) -> None:
        self.failure = error
        for lane in self._lanes:
            lane.wake()

    def forsaken(self, queue: bytes) -> None:
        """A message was deferred since nobody consumes its queue here; that is told once of each queue."""
        if queue in self._told or len(self._told) >= _TOLD:
            return
        if self._table.forsaken(queue, self._loop.time()) < _FORSAKEN:
            return
        self._told.add(queue)
        name = queue.decode("utf-8", "replace")
        text = (
            f"Queue {name!r} of group {self._group!r} is not consumed in this process, which gets messages of it: they "
            "come again later. Consume it in every process of the group, or take it out of queue_ids"
        )
        logger.warning(text)
        self.event(Warned(text=text))
