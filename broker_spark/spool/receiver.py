"""Receives messages in its own thread while Spark works on earlier ones.

While one segment is written and acked the next one is received. Messages are acked only after they are written durably,
and none are received while `aheadRows` or `aheadBytes` wait for Spark. If the process ends, messages that are received
and not acked are redelivered. For `Trigger.AvailableNow` it stops at a `DrainGoal`: what waited at the start.

*Concurrency.* `start`, `drain` and `stop` come from one other thread. *Failure.* The error that ended the thread is in
`failure`.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
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
from broker_spark.spool.lease import HEARTBEAT_SECONDS
from broker_spark.spool.segments import IDENTITY
from broker_spark.spool.spool import Spool

__all__ = ["DrainGoal", "Receiver", "find_drain_goal"]

SEGMENT_ROWS: Final = 20_000
SEGMENT_BYTES: Final = 16 << 20
LINGER: Final = 0.1
"""The most seconds from the first message of a segment until it is written."""
IDLE: Final = 1.0
"""Seconds without a message after which a subscription without unsettled messages counts as empty."""
FOREVER: Final = 2**31 - 1
_STOP_SECONDS: Final = 4.0
"""Less than `lease.LOCAL_WAIT_SECONDS`, which the next owner on this machine waits."""


class Receiver:
    """Fills a spool.

    :ivar failure: the error that ended it; None while it runs.
    :ivar finished: the subscription is drained.
    :ivar busy: segments fill up before their time is over.
    """

    def __init__(self, options: SourceOptions, spool: Spool) -> None:
        self.failure: BaseException | None = None
        self.finished = False
        self.busy = False
        self._options = options
        self._spool = spool
        self._rows = min(SEGMENT_ROWS, options.max_rows)
        # One segment is written while the next one is received.
        self._bytes = min(SEGMENT_BYTES, options.max_bytes or SEGMENT_BYTES, max(1, options.ahead_bytes // 2))
        self._mean = float(self._bytes)
        """Mean bytes of a message in the last segment. Starts high, so that the first message comes alone."""
        self._columns = options.columns
        self._opened = threading.Event()
        self._draining = False
        self._received = 0
        self._settled = 0
        self._being_written = 0
        """Messages of the segment that is being written."""
        self._dropped = 0
        """Redelivered messages."""
        self._highest: dict[str, int] = {}
        """The highest offset received of each topic, if messages have offsets."""
        self._last_lag = (0, 0)
        """Messages outside of the spool when the lag was last fetched, and those inside."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="broker-spool", daemon=True)

    # From the other thread.

    def start(self) -> None:
        """Return when the subscription is open.

        :raises BrokerError: it cannot be opened.
        """
        self._thread.start()
        self._opened.wait()
        self.check()

    def drain(self) -> None:
        """Receive only the messages that wait now. Call it before `start`."""
        self._draining = True

    def check(self) -> None:
        """:raises BaseException: the error that ended the thread."""
        if self.failure is not None:
            raise self.failure

    @property
    def waiting(self) -> int:
        """Messages outside of the spool: the last lag minus the messages added since."""
        missing, spooled = self._last_lag
        return max(0, missing - (self._spooled - spooled))

    @property
    def has_room(self) -> bool:
        """Whether less than `aheadRows` and `aheadBytes` waits for Spark."""
        rows, size = self._spool.ahead()
        return rows + self._being_written < self._options.ahead_rows and size < self._options.ahead_bytes

    def stop(self) -> None:
        """Release messages that are not written. Waits `_STOP_SECONDS` at most."""
        loop, main = self._loop, self._main
        if loop is not None and main is not None and not loop.is_closed():
            loop.call_soon_threadsafe(main.cancel)
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    # In the thread.

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
        heartbeats = asyncio.create_task(self._send_heartbeats())
        heartbeats.add_done_callback(self._heartbeats_ended)
        try:
            await self._consume()
            self.finished = True
            with self._spool.changed:
                self._spool.changed.notify_all()
            # Keep owning the spool until its messages are read.
            await heartbeats
        finally:
            heartbeats.cancel()

    def _heartbeats_ended(self, heartbeats: asyncio.Task[None]) -> None:
        if not heartbeats.cancelled() and self._main is not None:
            error = heartbeats.exception()
            self.failure = error and spool_error(error, self._options.spool)
            self._main.cancel()

    async def _consume(self) -> None:
        options = self._options
        async with broker.connect(options.url) as bus:
            family = bus.capabilities.messages
            if family is None:
                raise Unsupported(
                    f"{bus.capabilities.backend} has no subscriptions", advice="Remove option subscription"
                )
            confirm = True if family.confirmed_ack is ConfirmedAck.OPTIONAL else None
            async with AsyncExitStack() as stack:
                consumer, topics = await self._subscribed(bus, stack, confirm)
                lease = family.lease_seconds or 0.0
                goal = await find_drain_goal(bus, topics, options.subscription or "", lease) if self._draining else None
                await self._refresh_lag(bus, topics)
                self._opened.set()
                watch = asyncio.create_task(self._watch_lag(bus, topics))
                try:
                    await self._fill(consumer, goal)
                finally:
                    watch.cancel()

    async def _subscribed(
        self, bus: Bus, stack: AsyncExitStack, confirm: bool | None
    ) -> tuple[MessageConsumer[bytes], Sequence[str]]:
        """The open consumer and its topics."""
        topics = await self._topics(bus)
        identities = {topic: await _identity_of(bus, topic) for topic in topics}
        await asyncio.to_thread(self._spool.check_topics, identities)
        while True:
            try:
                return await stack.enter_async_context(self._consumer(bus, topics, confirm)), topics
            except Unsupported:
                if confirm is None:
                    raise
                confirm = None  # such as Pub/Sub subscriptions without exactly-once delivery
            except InvalidName as error:
                left = [topic for topic in topics if topic != error.topic]
                if self._options.pattern is None or left in ([], topics):
                    raise
                # Such as a topic that the backend itself created for the queue.
                logger.info("Option topicPattern skips a topic that cannot be consumed: %s", error.message)
                topics = left

    def _consumer(self, bus: Bus, topics: Sequence[str], confirm_acks: bool | None) -> MessageConsumer[bytes]:
        options = self._options
        return bus.messages(
            topics,
            subscription=options.subscription or "",
            start="earliest" if options.start.offsets else options.start.default,
            # A message is never dropped, however often the query was killed with it.
            retry=broker.Retry(max_deliveries=FOREVER),
            confirm_acks=confirm_acks,
            max_outstanding=max(3 * self._rows, 2 * len(topics)),
            max_outstanding_bytes=4 * self._bytes,
            prefetch=max(self._rows, len(topics)),
        )

    async def _fill(self, consumer: MessageConsumer[bytes], goal: DrainGoal | None) -> None:
        """:param goal: None receives for ever."""
        writing: asyncio.Task[None] | None = None
        most = FOREVER if goal is None else goal.messages
        is_over = False
        try:
            last_message = monotonic()
            while self._received < most and not is_over:
                # Time without receiving does not show that the subscription is empty.
                last_message += await self._wait_for_room()
                batches = await self._gather(consumer, most - self._received)
                self._received += sum(map(len, batches))
                if batches and (goal is None or goal.was_waiting(batches)):
                    last_message = monotonic()
                is_over = goal is not None and monotonic() - last_message >= goal.patience
                if writing is not None and (batches or writing.done()):
                    # A stop ends this loop, but not the write.
                    await asyncio.shield(writing)
                    writing = None
                if batches:
                    self._being_written = sum(map(len, batches))
                    writing = asyncio.create_task(self._write_and_ack(batches))
        finally:
            if writing is not None:
                # Finish writing and acking: otherwise the messages would be redelivered.
                await asyncio.shield(writing)

    async def _wait_for_room(self) -> float:
        """Wait until there is room. Returns the seconds waited."""
        began = monotonic()
        while not self.has_room:
            self._room.clear()
            if self.has_room:
                break
            await self._room.wait()
        return monotonic() - began

    async def _gather(self, consumer: MessageConsumer[bytes], most: int) -> list[MessageBatch[bytes]]:
        """Receive the messages of one segment; none after some idle time."""
        found: list[MessageBatch[bytes]] = []
        rows = size = 0
        most = min(most, self._rows)
        left = IDLE / 2
        ends = 0.0
        while rows < most and size < self._bytes and left > 0:
            # The consumer may have buffered the bytes of several segments.
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

    async def _write_and_ack(self, batches: Sequence[MessageBatch[bytes]]) -> None:
        """Write, then ack."""
        # A message with a lost lease is redelivered, perhaps to another consumer.
        messages = [message for batch in batches for message in batch if not message.lease_lost]
        written = await asyncio.to_thread(self._write, messages) if messages else None
        self._being_written = 0
        self._room.set()
        ends = await asyncio.gather(*(batch.ack() for batch in batches), return_exceptions=True)
        self._settled += len(messages)
        for end in ends:
            if isinstance(end, BaseException) and not isinstance(end, BrokerError):
                raise end
            if end is not None:
                logger.warning("Messages in the spool were not acked, and are dropped on redelivery: %s", end)
        if written is not None:
            await asyncio.to_thread(self._record_acks, messages, *written)

    def _write(self, messages: list[Message[bytes]]) -> tuple[Any, int | None, set[str]]:
        """Write the new messages. Returns all identities, the segment's number if any, and known identities."""
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
        """Whether some may be redelivered after their ack: by their delivery attempt, or by their offset."""
        # A broker that was killed may also redeliver messages that an earlier process wrote.
        self._highest.update(self._spool.load_earlier_rows())
        again = any((message.delivery_attempt or 1) > 1 for message in messages)
        if stamps is None:
            return again
        # A broker that was killed may count deliveries from 1 again, so compare offsets.
        for message, place in zip(messages, stamps[0], strict=True):
            if place > self._highest.get(message.topic, -1):
                self._highest[message.topic] = place
            else:
                again = True
        return again

    def _record_acks(self, messages: list[Message[bytes]], names: Any, number: int | None, repeated: set[str]) -> None:
        unsure = [
            names[place].as_py() for place, message in enumerate(messages) if message.state is not SettleState.SETTLED
        ]
        self._spool.forget_doubts(repeated.difference(unsure))
        self._spool.record_acks(number, unsure)

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.to_thread(self._spool.beat)
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _watch_lag(self, bus: Bus, topics: Sequence[str]) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            await self._refresh_lag(bus, topics)

    async def _refresh_lag(self, bus: Bus, topics: Sequence[str]) -> None:
        try:
            lags = [await bus.admin.lag(topic, self._options.subscription or "") for topic in topics]
        except BrokerError as error:
            logger.debug("The lag is unknown: %s", error)
            return
        spooled = self._spooled
        # Some unsettled messages are already in the spool.
        unacked = sum(each.waiting + (each.unsettled or 0) for each in lags)
        self._last_lag = (unacked - (spooled - self._settled), spooled)

    @property
    def _spooled(self) -> int:
        return self._spool.added + self._dropped

    async def _topics(self, bus: Bus) -> list[str]:
        pattern = self._options.pattern
        if pattern is None:
            return list(self._options.topics)
        found = [name for name in await bus.admin.topics() if re.fullmatch(pattern, name)]
        if not found:
            raise ConfigurationError(f"Option topicPattern {pattern!r} matches no topic", advice="Create one first")
        return found


@dataclass(frozen=True, slots=True)
class DrainGoal:
    """When to stop receiving.

    :ivar messages: the most messages to receive.
    :ivar patience: stop earlier after this many seconds without a message that waited at the start.
    :ivar began: the start, if the broker does not count waiting messages; else None.
    """

    messages: int
    patience: float
    began: datetime | None

    def was_waiting(self, batches: Sequence[MessageBatch[bytes]]) -> bool:
        """Whether one of these may have waited at the start, by the broker's clock, or else the publisher's."""
        if self.began is None:
            return True
        times = [message.broker_time or message.publish_time for batch in batches for message in batch]
        return any(time is None or time <= self.began for time in times)


async def find_drain_goal(bus: Bus, topics: Sequence[str], subscription: str, lease: float) -> DrainGoal:
    """The goal of a drain that starts now.

    :param lease: seconds until an unsettled message is redelivered.
    """
    began = datetime.now(UTC)
    try:
        lags = [await bus.admin.lag(topic, subscription) for topic in topics]
    except BrokerError as error:
        logger.warning("The lag of subscription %s is unknown, so draining it takes longer: %s", subscription, error)
        lags = []
    if not lags or not all(each.current for each in lags):
        return DrainGoal(FOREVER, lease + IDLE, began)
    unsettled = sum(each.unsettled or 0 for each in lags)
    # Messages of a killed consumer come when their leases end. Some brokers count these as waiting.
    uncounted = any(each.unsettled is None for each in lags)
    return DrainGoal(
        sum(each.waiting for each in lags) + unsettled, lease + IDLE if unsettled or uncounted else IDLE, None
    )


async def _identity_of(bus: Bus, topic: str) -> str | None:
    """The broker's id of a topic; None without the right to ask or where there is none."""
    try:
        return await bus.admin.topic_identity(topic)
    except (NotAuthorized, Unsupported):
        return None


def _nothing() -> None:
    pass
