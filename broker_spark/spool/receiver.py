"""Receives messages in a thread of its own while Spark works on what came before.

While one segment is written and acked the next one is received. Nothing is acked before it is written durably, and
nothing is received while as much is ahead of Spark as may be. What is received and not written when the process ends
comes again when its lease is over.

*Concurrency.* `start`, `drain` and `stop` come from one other thread. *Failure.* What ends the thread is in `failure`.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any, Final, cast

import pyarrow

import broker
from broker.bus import Bus
from broker.capabilities import ConfirmedAck
from broker.consuming.consumer import MessageConsumer
from broker.errors import BrokerError, ConfigurationError, InvalidName, NotAuthorized, Unsupported
from broker.hooks import logger
from broker.messages import Message, MessageBatch, SettleState
from broker_spark.common.files import spool_error
from broker_spark.common.options import SourceOptions
from broker_spark.spool.columns import Stamps, identified_by_id, places_of, stamps_of, table_of, unseen_rows
from broker_spark.spool.drain_goal import FOREVER, IDLE, DrainGoal, find_drain_goal
from broker_spark.spool.lease import BEAT
from broker_spark.spool.segments import IDENTITY
from broker_spark.spool.spool import Spool

__all__ = ["SEGMENT_BYTES", "SEGMENT_ROWS", "Receiver"]

SEGMENT_ROWS: Final = 20_000
SEGMENT_BYTES: Final = 16 << 20
LINGER: Final = 0.1
"""Seconds from the first message of a segment until it is written, however few there are."""
_STOP_SECONDS: Final = 4.0
"""Less than who takes over on this machine waits for an owner to end."""


class Receiver:
    """Fills a spool.

    :ivar failure: what ended it; None while it runs.
    :ivar finished: it was to drain the queue, and has.
    :ivar busy: messages come as fast as they are taken.
    """

    def __init__(self, options: SourceOptions, spool: Spool) -> None:
        self.failure: BaseException | None = None
        self.finished = False
        self.busy = False
        self._options = options
        self._spool = spool
        self._rows = min(SEGMENT_ROWS, options.max_rows)
        # While one is written another is received.
        self._bytes = min(SEGMENT_BYTES, options.max_bytes or SEGMENT_BYTES, max(1, options.ahead_bytes // 2))
        self._mean = float(self._bytes)
        """Bytes of a message, as those that came last; so the first one comes by itself."""
        self._columns = options.columns
        self._opened = threading.Event()
        self._draining = False
        self._came = 0
        self._settled = 0
        self._in_hand = 0
        """Messages that are being written."""
        self._dropped = 0
        """Messages that came again."""
        self._highest: dict[str, int] = {}
        """How far messages came in the log of each topic, where the broker tells."""
        self._seen = (0, 0)
        """How many messages were not kept when the broker was asked, and how many were."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="broker-spool", daemon=True)

    # -- from the other thread ---------------------------------------------------------------------------

    def start(self) -> None:
        """Return when the subscription is open.

        :raises BrokerError: it cannot be opened.
        """
        self._thread.start()
        self._opened.wait()
        self.check()

    def drain(self) -> None:
        """Receive what waits now, and no more; before `start`."""
        self._draining = True

    def check(self) -> None:
        """:raises BaseException: what ended the thread."""
        if self.failure is not None:
            raise self.failure

    @property
    def waiting(self) -> int:
        """How many messages are not in the spool: as the broker last told, without those that were kept since."""
        missing, kept = self._seen
        return max(0, missing - (self._kept - kept))

    @property
    def has_room(self) -> bool:
        """Whether less is ahead of Spark than may be."""
        rows, size = self._spool.ahead()
        return rows + self._in_hand < self._options.ahead_rows and size < self._options.ahead_bytes

    def stop(self) -> None:
        """Give back what was not written. Waits for it, but not for ever."""
        loop, main = self._loop, self._main
        if loop is not None and main is not None and not loop.is_closed():
            loop.call_soon_threadsafe(main.cancel)
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    # -- in the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                self._spool.on_room = self._make_room
                runner.run(self._receive())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self.failure = spool_error(error, self._options.spool)
        finally:
            self._spool.on_room = _nothing
            self._opened.set()
            with self._spool.changed:
                self._spool.changed.notify_all()

    def _make_room(self) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._room.set)

    async def _receive(self) -> None:
        self._main = asyncio.current_task()
        beats = asyncio.create_task(self._beat())
        beats.add_done_callback(self._beats_ended)
        try:
            await self._consume()
            self.finished = True
            with self._spool.changed:
                self._spool.changed.notify_all()
            # What was received is still to be read.
            await beats
        finally:
            beats.cancel()

    def _beats_ended(self, beats: asyncio.Task[None]) -> None:
        if not beats.cancelled() and self._main is not None:
            error = beats.exception()
            self.failure = error and spool_error(error, self._options.spool)
            self._main.cancel()

    async def _consume(self) -> None:
        options = self._options
        async with broker.connect(options.url) as bus:
            family = bus.capabilities.messages
            if family is None:
                raise Unsupported(f"{bus.capabilities.backend} has no subscriptions", advice="Leave subscription out")
            confirm = True if family.confirmed_ack is ConfirmedAck.OPTIONAL else None
            async with AsyncExitStack() as stack:
                consumer, topics = await self._subscribed(bus, stack, confirm)
                lease = family.lease_seconds or 0.0
                goal = await find_drain_goal(bus, topics, options.subscription or "", lease) if self._draining else None
                await self._look(bus, topics)
                self._opened.set()
                watch = asyncio.create_task(self._watch_lag(bus, topics))
                try:
                    await self._fill(consumer, goal)
                finally:
                    watch.cancel()

    async def _subscribed(
        self, bus: Bus, stack: AsyncExitStack, confirm: bool | None
    ) -> tuple[MessageConsumer[bytes], Sequence[str]]:
        """What consumes, and the topics."""
        topics = await self._topics(bus)
        identities = {topic: await _identity_of(bus, topic) for topic in topics}
        await asyncio.to_thread(self._spool.check_topics, identities)
        while True:
            try:
                return await stack.enter_async_context(self._consumer(bus, topics, confirm)), topics
            except Unsupported:
                if confirm is None:
                    raise
                confirm = None  # some cannot, as those of Pub/Sub without exactly-once delivery
            except InvalidName as error:
                left = [topic for topic in topics if topic != error.topic]
                if self._options.pattern is None or left in ([], topics):
                    raise
                # The queue itself may have made it since the pattern was written.
                logger.info("Option topicPattern leaves out what is not to be consumed: %s", error.message)
                topics = left

    def _consumer(self, bus: Bus, topics: Sequence[str], confirm_acks: bool | None) -> MessageConsumer[bytes]:
        options = self._options
        return bus.messages(
            topics,
            subscription=options.subscription or "",
            start="earliest" if options.start.offsets else options.start.default,
            # However often the query was killed with it, a message is never given up here.
            retry=broker.Retry(max_deliveries=FOREVER),
            confirm_acks=confirm_acks,
            max_outstanding=max(3 * self._rows, 2 * len(topics)),
            max_outstanding_bytes=4 * self._bytes,
            prefetch=max(self._rows, len(topics)),
        )

    async def _fill(self, consumer: MessageConsumer[bytes], goal: DrainGoal | None) -> None:
        """:param goal: None is to receive for ever."""
        kept: asyncio.Task[None] | None = None
        most = FOREVER if goal is None else goal.messages
        is_over = False
        try:
            heard = monotonic()
            while self._came < most and not is_over:
                # Nobody listened meanwhile, so that the queue is not known to be empty.
                heard += await self._wait_for_room()
                batches = await self._gather(consumer, most - self._came)
                self._came += sum(map(len, batches))
                if batches and (goal is None or goal.was_waiting(batches)):
                    heard = monotonic()
                is_over = goal is not None and monotonic() - heard >= goal.patience
                if kept is not None and (batches or kept.done()):
                    # A stop meanwhile is to end this loop, and not what is being written.
                    await asyncio.shield(kept)
                    kept = None
                if batches:
                    self._in_hand = sum(map(len, batches))
                    kept = asyncio.create_task(self._keep(batches))
        finally:
            if kept is not None:
                # It is in the spool, or will be: to leave it unacked would have it come again.
                await asyncio.shield(kept)

    async def _wait_for_room(self) -> float:
        """Return when there is room; the seconds that it had to be waited for."""
        began = monotonic()
        while not self.has_room:
            self._room.clear()
            if self.has_room:
                break
            await self._room.wait()
        return monotonic() - began

    async def _gather(self, consumer: MessageConsumer[bytes], most: int) -> list[MessageBatch[bytes]]:
        """The messages of one segment; none after some idle time."""
        found: list[MessageBatch[bytes]] = []
        rows = size = 0
        most = min(most, self._rows)
        left = IDLE / 2
        ends = 0.0
        while rows < most and size < self._bytes and left > 0:
            # The consumer may hold the bytes of several.
            fit = int((self._bytes - size) / self._mean)
            batch = await consumer.next_batch(max(1, min(most - rows, fit)), timeout=left)
            if not batch:
                break
            ends = ends or monotonic() + LINGER
            found.append(batch)
            rows += len(batch)
            size += sum([message.size for message in batch])
            self._mean = max(1.0, size / rows)
            left = ends - monotonic()
        self.busy = rows * 2 >= self._rows or size * 2 >= self._bytes
        return found

    async def _keep(self, batches: Sequence[MessageBatch[bytes]]) -> None:
        """Write, then ack."""
        # One whose lease was lost comes again, perhaps to another.
        messages = [message for batch in batches for message in batch if not message.lease_lost]
        written = await asyncio.to_thread(self._write, messages) if messages else None
        self._in_hand = 0
        self._room.set()
        ends = await asyncio.gather(*(batch.ack() for batch in batches), return_exceptions=True)
        self._settled += len(messages)
        for end in ends:
            if isinstance(end, BaseException) and not isinstance(end, BrokerError):
                raise end
            if end is not None:
                logger.warning("Messages that are in the spool were not acked, and are dropped when they come: %s", end)
        if written is not None:
            await asyncio.to_thread(self._acked, messages, *written)

    def _write(self, messages: list[Message[bytes]]) -> tuple[Any, int | None, set[str]]:
        """The identities of all, the segment's number if there is one, and what was there before."""
        stamps = stamps_of(messages)
        places = places_of(messages) if stamps is None else None
        table: Any = table_of(messages, self._columns, stamps, places)
        names: Any = table.column(IDENTITY)
        repeated: set[str] = set()
        by_id = identified_by_id(places)
        again = not by_id and self._may_be_redelivered(messages, stamps)
        if again or self._spool.doubtful or names.length() > len(names.unique()):
            known: list[str] = names.to_pylist()
            repeated = self._spool.known(names, late=again)
            first = unseen_rows(messages, known, repeated, by_id)
            table = table.take(cast("Any", pyarrow).array(first, "int64"))
            self._dropped += len(messages) - table.num_rows
        return names, self._spool.add(table, self._options.arrow_rows) if table.num_rows else None, repeated

    def _may_be_redelivered(self, messages: list[Message[bytes]], stamps: Stamps | None) -> bool:
        """Whether some may have come before and were acked: the broker says so, or they lie behind what has come."""
        # What an earlier process wrote may come again too, of a broker that was killed with it.
        self._highest.update(self._spool.inherit())
        again = any((message.delivery_attempt or 1) > 1 for message in messages)
        if stamps is None:
            return again
        # A broker that was killed may count deliveries from 1 again.
        for message, place in zip(messages, stamps[0], strict=True):
            if place > self._highest.get(message.topic, -1):
                self._highest[message.topic] = place
            else:
                again = True
        return again

    def _acked(self, messages: list[Message[bytes]], names: Any, number: int | None, repeated: set[str]) -> None:
        unsure = [
            names[place].as_py() for place, message in enumerate(messages) if message.state is not SettleState.SETTLED
        ]
        self._spool.settled(repeated.difference(unsure))
        self._spool.acked(number, unsure)

    async def _beat(self) -> None:
        while True:
            await asyncio.to_thread(self._spool.beat)
            await asyncio.sleep(BEAT)

    async def _watch_lag(self, bus: Bus, topics: Sequence[str]) -> None:
        while True:
            await asyncio.sleep(BEAT)
            await self._look(bus, topics)

    async def _look(self, bus: Bus, topics: Sequence[str]) -> None:
        try:
            lags = [await bus.admin.lag(topic, self._options.subscription or "") for topic in topics]
        except BrokerError as error:
            logger.debug("The broker does not tell what waits: %s", error)
            return
        kept = self._kept
        # Of what is not settled some is in the spool and not acked yet.
        unsettled = sum(each.waiting + (each.unsettled or 0) for each in lags)
        self._seen = (unsettled - (kept - self._settled), kept)

    @property
    def _kept(self) -> int:
        return self._spool.added + self._dropped

    async def _topics(self, bus: Bus) -> list[str]:
        pattern = self._options.pattern
        if pattern is None:
            return list(self._options.topics)
        found = [name for name in await bus.admin.topics() if re.fullmatch(pattern, name)]
        if not found:
            raise ConfigurationError(f"Option topicPattern {pattern!r} matches no topic", advice="Make one first")
        return found


async def _identity_of(bus: Bus, topic: str) -> str | None:
    """What tells a topic from another of the same name, if we may ask."""
    try:
        return await bus.admin.topic_identity(topic)
    except (NotAuthorized, Unsupported):
        return None


def _nothing() -> None:
    pass
