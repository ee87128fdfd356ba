"""`RecordConsumer`: reads partitions of a log as a member of a group, in order, and commits on request.

Commits are explicit: `close` commits nothing. The next owner of a partition reads again what was handed over and not
committed. When partitions are revoked, their buffered records are dropped. Positions can be committed until the
partitions are released; later commits raise `LeaseLost`.

*Concurrency.* One event loop; several tasks may read, and each record goes to one of them. *Cancellation.* Cancelling a
call loses no record. A requested commit is carried out anyway; `close` waits for it. *Failure.* A retriable error is an
event, and the consumer fetches again. Any other error is raised once, by a waiting call, after all earlier records were
handed over; then the consumer counts as closed. None or an empty batch means idle, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from types import TracebackType
from typing import Any, Final, Generic, Protocol, Self

from typing_extensions import TypeVar

from broker.capabilities import MessageCapabilities
from broker.checks import check_count, check_patience, check_seconds
from broker.consumer_state import ConsumerState
from broker.consuming.consumer import MessageConsumer, Steps
from broker.consuming.engine import OpenSource
from broker.consuming.options import ConsumerOptions, check_pattern, check_policies
from broker.consuming.retry.policy import Drop, Retry
from broker.consuming.retry.topics import RetryRoutes, RetryTopics, one_try_each, routes_of
from broker.driver.as_messages.source import RecordsAsMessages, message_capabilities
from broker.driver.assignments import Assignments, check_own_positions, check_positions
from broker.driver.concurrency import check_loop
from broker.driver.contract import Backend, RecordSubscription, SourceListener, TopicPartition
from broker.driver.loop_watch import LoopWatch
from broker.errors import BrokerError, Closed, ConfigurationError, TopicNotFound, TopicRecreated, Unsupported
from broker.hooks import Hooks, logger
from broker.protocols import AnyCodec, OwnPositions
from broker.reading.copartitions import Copartitions, check_counts, partition_counts
from broker.reading.decoding import RecordDecoder, open_decoder
from broker.reading.membership import Membership
from broker.reading.options import check_record_options
from broker.reading.rebalance_callbacks import OnPartitions
from broker.reading.record_fetcher import RecordFetcher
from broker.records import Record, RecordBatch, RecordOwner
from broker.token_bucket import TokenBucket

__all__ = ["RecordConsumer", "RecordReading"]


_RECORDS_BETWEEN_YIELDS: Final = 256
_IDLE_RECHECK: Final = 0.5


class RecordReading:
    """Waits for records in the buffer, and hands them over.

    :param check: raises Closed if no record may be handed over any more.
    :param is_idle: called after `stop_when_idle` seconds without a record; returns whether the member is idle.
    :param explain: returns what to raise for an error of the source.
    :param max_rate: records handed over per second.
    """

    def __init__(
        self,
        owner: RecordOwner,
        fetcher: RecordFetcher,
        assignments: Assignments,
        decoder: RecordDecoder | None,
        *,
        check: Callable[[], None],
        stop_when_idle: float | None,
        is_idle: Callable[[float], Awaitable[bool]],
        explain: Callable[[Exception], Awaitable[Exception]],
        max_rate: float | None,
    ) -> None:
        self._owner = owner
        self._fetcher = fetcher
        self._buffer = fetcher.buffer
        self._assignments = assignments
        self._decoder = decoder
        self._check = check
        self._stop_when_idle = stop_when_idle
        self._is_idle = is_idle
        self._explain = explain
        self._time = asyncio.get_running_loop().time
        self._bucket = None if max_rate is None else TokenBucket(max_rate, self._time())
        self._at_once = decoder is None and self._bucket is None
        """Whether a buffered record can be handed over without more ado."""
        self._since_yield = 0
        self._before_yield = 0
        self.ended: Exception | None = None
        """The fatal error, once it was raised."""

    async def one(self, timeout: float | None) -> Record[Any] | None:
        """The next record, or None if there was none in time."""
        if self._at_once and len(self._buffer) and self._since_yield < _RECORDS_BETWEEN_YIELDS:
            self._check()
        elif not await self._available(timeout):
            return None
        record = self._buffer.pop_one()
        self._assignments.hand_over_one(record, self._owner)
        self._since_yield += 1
        if self._bucket is not None:
            self._bucket.take(1, self._time())
        return record

    async def some(self, limit: int, timeout: float | None, max_wait: float | None = None) -> Sequence[Record[Any]]:
        """The next records, at most `limit`; none if there were none in time."""
        began = self._time()
        if not await self._available(timeout):
            return []
        if max_wait:
            left = None if timeout is None else began + timeout - self._time()
            await self._fill(limit, max_wait if left is None else min(max_wait, left))
            # A rebalance may have taken the records meanwhile.
            if not await self._available(None if timeout is None else began + timeout - self._time()):
                return []
        if self._decoder is None and self._buffer.unmade:
            runs = self._assignments.hand_over_runs(self._buffer.pop_runs(limit), self._owner)
            self._since_yield += len(runs)
            if self._bucket is not None:
                self._bucket.take(len(runs), self._time())
            return runs
        records = self._buffer.pop(limit)
        if self._decoder is not None:
            self._decoder.decode_following(records)
        self._assignments.hand_over(records, self._owner)
        self._since_yield += len(records)
        if self._bucket is not None:
            self._bucket.take(len(records), self._time())
        return records

    async def _fill(self, limit: int, max_wait: float) -> None:
        """Wait until so many records are buffered, or nothing more is fetched, for at most `max_wait` seconds."""
        due = self._time() + max_wait
        while (
            len(self._buffer) < limit
            and self._fetcher.has_room
            and self._fetcher.error is None
            and (left := due - self._time()) > 0
        ):
            await self._fetcher.arrival(left)
            self._check()

    async def _available(self, timeout: float | None) -> bool:
        """Wait until the next record may be handed over, decoded; False if there was none in time."""
        if self._bucket is None:
            return await self._buffered(timeout)
        deadline = None if timeout is None else self._time() + timeout
        if not await self._buffered(timeout):
            return False
        while (delay := self._bucket.delay(now := self._time())) > 0:
            left = None if deadline is None else deadline - now
            if left is not None and left <= 0:
                return False
            await self._fetcher.arrival(delay if left is None else min(delay, left))
            self._check()
        # A rebalance may have taken the records meanwhile.
        return await self._buffered(None if deadline is None else deadline - self._time())

    async def _buffered(self, timeout: float | None) -> bool:
        """Wait until the next record can be popped, decoded; False if there was none in time."""
        if self._since_yield >= _RECORDS_BETWEEN_YIELDS:
            # A consumer that finds its buffer full never suspends: let the fetch loop and other tasks run.
            self._yielded()
            await asyncio.sleep(0)
        fetcher = self._fetcher
        started: float | None = None
        idle = False
        while True:
            self._check()
            if self._decoder is None:
                if len(self._buffer):
                    return True
                head = None
            else:
                head = self._buffer.peek()
                if head is not None and self._decoder.decode_next(head):
                    return True
            if head is None and fetcher.error is not None:
                self.ended = await self._explain(fetcher.error)
                raise self.ended
            now = self._time()
            first, started = started is None, now if started is None else started
            if head is not None and self._decoder is not None:
                left = None if timeout is None else started + timeout - now
            else:
                left = self._patience(now, started, timeout)
            if left is not None and left <= 0 and not first:
                if idle or timeout is not None:
                    return False
                # The loop looks for a record that arrived meanwhile before it returns.
                idle = await self._is_idle(now - self._silent_since(started))
                if idle:
                    continue
                left = _IDLE_RECHECK
            idle = False
            if head is not None and self._decoder is not None:
                await self._decoder.head_changed(left)
            else:
                self._yielded()
                await fetcher.arrival(left)

    @property
    def handed_over(self) -> int:
        """How many records were handed over."""
        return self._before_yield + self._since_yield

    def _yielded(self) -> None:
        self._before_yield += self._since_yield
        self._since_yield = 0

    def _patience(self, now: float, started: float, timeout: float | None) -> float | None:
        """Seconds that a call which began at `started` may still wait; None is forever."""
        if timeout is not None:
            return started + timeout - now
        if self._stop_when_idle is None or self._fetcher.idle_since is None:
            return None
        return self._silent_since(started) + self._stop_when_idle - now

    def _silent_since(self, started: float) -> float:
        return max(started, self._fetcher.idle_since or started)


T = TypeVar("T", default=bytes)

_LEAST_CLOSE: Final = 1.0


class _State(IntEnum):
    NEW = 0
    OPENING = 1
    OPEN = 2
    CLOSING = 3
    CLOSED = 4


class MakeMessages(Protocol):
    """Makes a message consumer of these sources, each given with its topic."""

    def __call__(
        self,
        sources: Sequence[tuple[str, OpenSource]],
        family: MessageCapabilities,
        options: ConsumerOptions,
        *,
        retry: Retry,
        dead_letter: str | Drop | None,
        codec: AnyCodec[Any] | None,
        subscription: str | None,
        group: str | None,
        retry_routes: RetryRoutes | None,
    ) -> MessageConsumer[Any]: ...


class RecordConsumer(Generic[T]):
    """A member of a group; created by `bus.records`. Joins the group when its `async with` block is entered.

    :param codec: decodes payloads; None leaves them bytes.
    :param on_decode_error: "raise" raises DecodeError in place of the record, and the next call continues after it. Any
        other text is the topic to which undecodable records are dead-lettered; commits cover them.
    :param max_buffered: maximum number of buffered records.
    :param max_buffered_bytes: maximum size of these records in bytes; one record may exceed it.
    :param max_rate: maximum number of records handed over per second; a batch is not split for it.
    :param stop_when_idle: end after this many seconds without records: iterations end, and calls without a timeout
        return nothing. Joining (at most 10 s) and times without a connection do not count.
    :param close_timeout: seconds that pending commits have to end at the close.
    :param on_assigned: awaited with new partitions before their first record is delivered or buffered; may `seek` them.
        An exception ends the consumer, which raises it.
    :param on_revoking: awaited with the partitions that are about to be revoked, while delivered records can still be
        committed; bounded by the broker's deadline.
    :param on_lost: awaited with partitions that went to another member before they could be released; nothing of them
        can be committed.
    :param assign_timeout: seconds that `on_assigned` may take, or the consumer ends with OperationTimeout; None is no
        limit.
    :param check_bus: raises an error if the bus cannot be used.
    """

    def __init__(
        self,
        backend: Backend,
        subscription: RecordSubscription,
        *,
        hooks: Hooks,
        codec: AnyCodec[T] | None = None,
        on_decode_error: str = "raise",
        max_buffered: int = 10_000,
        max_buffered_bytes: int = 64 * 1024 * 1024,
        max_rate: float | None = None,
        stop_when_idle: float | None = None,
        close_timeout: float = 30.0,
        on_assigned: OnPartitions | None = None,
        on_revoking: OnPartitions | None = None,
        on_lost: OnPartitions | None = None,
        assign_timeout: float | None = 300.0,
        make_messages: MakeMessages | None = None,
        check_bus: Callable[[], None] = lambda: None,
    ) -> None:
        check_record_options(
            subscription,
            codec=codec,
            on_decode_error=on_decode_error,
            callbacks={"on_assigned": on_assigned, "on_revoking": on_revoking, "on_lost": on_lost},
            assign_timeout=assign_timeout,
            max_buffered=max_buffered,
            max_buffered_bytes=max_buffered_bytes,
            max_rate=max_rate,
            stop_when_idle=stop_when_idle,
            close_timeout=close_timeout,
        )
        self._backend = backend
        self._subscription = subscription
        self._hooks = hooks
        self._codec = codec
        self._on_decode_error = on_decode_error
        self._max_buffered = max_buffered
        self._max_buffered_bytes = max_buffered_bytes
        self._max_rate = max_rate
        self._stop_when_idle = stop_when_idle
        self._close_timeout = close_timeout
        self._on_assigned = on_assigned
        self._on_revoking = on_revoking
        self._on_lost = on_lost
        self._assign_timeout = assign_timeout
        self._make_messages = make_messages
        self._check_bus = check_bus
        self._loop: asyncio.AbstractEventLoop | None = None
        self._state = _State.NEW
        self._assignments = Assignments()
        self._reading: RecordReading | None = None
        self._closing: asyncio.Task[None] | None = None
        self._decoder: RecordDecoder | None = None

    # -- opening and closing -------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Join the group.

        :raises TopicNotFound: one of the topics does not exist.
        :raises ConfigurationError: with `copartitioned`, the topics have different numbers of partitions.
        :raises Unsupported: the backend has no records.
        :raises BrokerError: the group could not be joined.
        """
        if self._state is not _State.NEW:
            raise Closed("A record consumer opens once", advice="Create a new one with bus.records(...)")
        self._check_bus()
        if self._backend.capabilities.records is None:
            raise Unsupported(
                f"Backend {self._backend.capabilities.backend!r} has no records",
                advice="Use bus.messages(...), or a backend with a log",
            )
        self._loop = asyncio.get_running_loop()
        self._fetcher = RecordFetcher(
            admits=lambda partition: self._assignments.admit(partition) is not None,
            topic=self._subscription.topics_text,
            hooks=self._hooks,
            max_records=self._max_buffered,
            max_bytes=self._max_buffered_bytes,
        )
        self._decoder = await open_decoder(
            self._codec,
            self._on_decode_error,
            backend=self._backend,
            group=str(self._subscription.group),
            fetcher=self._fetcher,
            assignments=self._assignments,
            hooks=self._hooks,
        )
        copartitions = Copartitions(self._subscription.topics) if self._subscription.copartitioned else None
        self._member = Membership(
            self._assignments,
            self._fetcher,
            group=str(self._subscription.group),
            hooks=self._hooks,
            on_assigned=self._on_assigned,
            on_revoking=self._on_revoking,
            on_lost=self._on_lost,
            assign_timeout=self._assign_timeout,
            copartitions=copartitions,
            forget=None if self._decoder is None else self._decoder.forget,
        )
        self._state = _State.OPENING
        try:
            if copartitions is not None:
                await check_counts(self._backend, copartitions.topics, str(self._subscription.group))
            await self._member.join(self._backend, self._subscription)
        except BaseException:
            self._state = _State.CLOSED
            raise
        if self._state is not _State.OPENING:
            await self._close()
            raise self._not_open()
        self._state = _State.OPEN
        self._reading = RecordReading(
            self,
            self._fetcher,
            self._assignments,
            self._decoder,
            check=self._check_open,
            stop_when_idle=self._stop_when_idle,
            is_idle=self._member.is_idle,
            explain=self._explain,
            max_rate=self._max_rate,
        )
        self._watch = LoopWatch.join(None)
        self._opened_at = self._loop.time()
        logger.info("Reading %s in group %s", self._subscription.topics_text, self._subscription.group)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Leave the group: waiting calls raise Closed, iterations end.

        Cancels `on_assigned`, waits for `on_lost` and for pending commits, at most `close_timeout` seconds, and commits
        nothing itself. The group persists. May be called twice; cancelling the caller does not stop the close. A call
        from `on_assigned` or `on_lost` does not wait.
        """
        check_loop(self._loop)
        if self._state <= _State.OPENING:
            self._state = _State.CLOSED
        if self._state is _State.CLOSED:
            return
        if self._closing is None:
            self._state = _State.CLOSING
            self._closing = asyncio.create_task(self._close(), name="broker-record-close")
        if not self._member.calls_back_in(asyncio.current_task()):
            await asyncio.shield(self._closing)

    async def _explain(self, error: Exception) -> Exception:
        """The error that ends the consumer: TopicRecreated instead of TopicNotFound if all topics exist again."""
        if not isinstance(error, TopicNotFound) or self._subscription.pattern is not None:
            return error
        try:
            await partition_counts(self._backend, self._subscription.topics)
        except BrokerError:
            return error
        return TopicRecreated(
            f"A topic was deleted and recreated while group {str(self._subscription.group)!r} read it: {error.message}",
            native=error.native,
        )

    async def _close(self) -> None:
        time = asyncio.get_running_loop().time
        deadline = time() + self._close_timeout
        try:
            if self._decoder is not None:
                self._decoder.stop()
            self._fetcher.stop()
            await self._fetcher.stopped(deadline)
            await self._member.end_callbacks(deadline)
            await self._member.drain(deadline)
            async with asyncio.timeout(max(_LEAST_CLOSE, deadline - time())):
                await self._member.leave()
                if self._decoder is not None:
                    await self._decoder.close()
        except (BrokerError, TimeoutError) as error:
            self._member.warn(f"Leaving group {self._subscription.group!r} failed: {str(error) or 'no answer in time'}")
        finally:
            self._state = _State.CLOSED
            self._fetcher.cancel()
            self._fetcher.buffer.clear()
            if self._reading is not None:
                self._watch.leave(None)
                logger.info(
                    "Stopped reading %s in group %s after %.1f s: %d records handed over%s",
                    self._subscription.topics_text,
                    self._subscription.group,
                    time() - self._opened_at,
                    self._reading.handed_over,
                    "" if self._reading.ended is None else f"; ended by an error: {_text_of(self._reading.ended)}",
                )

    def as_messages(
        self,
        *,
        retry: Retry | None = None,
        retry_topics: RetryTopics | None = None,
        dead_letter: str | Drop | None = None,
        ordered_by_key: bool = False,
        max_outstanding: int = 1000,
        max_outstanding_bytes: int = 64 * 1024 * 1024,
        prefetch: int | None = None,
        max_rate: float | None = None,
        max_gap: int = 10_000,
        commit_every: int = 1000,
        commit_interval: float = 1.0,
        stop_when_idle: float | None = None,
        close_timeout: float | None = None,
    ) -> MessageConsumer[T]:
        """A consumer that serves the records as messages, which are settled one by one. It replaces this consumer.

        A record that was acked or rejected is finished. The highest contiguous finished offset of each partition is
        committed, and nothing else; a crash repeats what is above it. The options are those of `bus.messages`, and:

        :param max_gap: maximum number of finished records above an unfinished one; then the partition is paused.
        :param commit_every: commit after this many finished records, and after `commit_interval` seconds.
        :raises ConfigurationError: the options contradict each other, or this consumer has an `on_decode_error`.
        :raises Closed: this consumer was already opened or closed.
        """
        if self._state is not _State.NEW:
            raise Closed(
                "as_messages() must be called before the record consumer is opened", advice="Call it instead of opening"
            )
        if self._on_decode_error != "raise":
            raise ConfigurationError("as_messages() has no on_decode_error", advice="Give it dead_letter= instead")
        if self._subscription.copartitioned:
            raise ConfigurationError("as_messages() cannot be copartitioned", advice="Leave copartitioned out")
        for name in ("on_assigned", "on_revoking", "on_lost"):
            if getattr(self, f"_{name}") is not None:
                raise ConfigurationError(
                    f"as_messages() has no {name}", advice="Listen to the events of partitions with bus.hooks instead"
                )
        if self._make_messages is None:
            raise Unsupported("This consumer was created without a bus", advice="Create it with bus.records(...)")
        check_count("max_gap", max_gap)
        check_count("commit_every", commit_every)
        check_seconds("commit_interval", commit_interval)
        check_policies(retry, retry_topics, dead_letter, self._codec)
        backend, subscription, hooks = self._backend, self._subscription, self._hooks
        check_pattern(subscription.pattern, retry_topics, dead_letter)
        routes = None
        if retry_topics is not None:
            retry = one_try_each(retry, retry_topics)
            routes = routes_of(retry_topics, subscription.topics, subscription.group)

        async def open_source(listener: SourceListener) -> RecordsAsMessages:
            source = RecordsAsMessages(
                listener,
                hooks=hooks,
                max_gap=max_gap,
                commit_every=commit_every,
                commit_interval=commit_interval,
                retry_topics=() if routes is None else routes.every(),
            )
            return await source.join(backend, subscription)

        consumer = self._make_messages(
            [(subscription.topics_text, open_source)],
            message_capabilities(backend.capabilities),
            ConsumerOptions(
                max_outstanding=max_outstanding,
                max_outstanding_bytes=max_outstanding_bytes,
                prefetch=prefetch,
                max_rate=self._max_rate if max_rate is None else max_rate,
                ordered_by_key=ordered_by_key,
                stop_when_idle=self._stop_when_idle if stop_when_idle is None else stop_when_idle,
                close_timeout=self._close_timeout if close_timeout is None else close_timeout,
            ),
            retry=Retry() if retry is None else retry,
            dead_letter=dead_letter,
            codec=self._codec,
            subscription=None,
            group=str(subscription.group),
            retry_routes=routes,
        )
        self._state = _State.CLOSED
        return consumer

    @property
    def closed(self) -> bool:
        """Whether the consumer was closed, or ended by an error."""
        return self._state > _State.OPEN or (self._reading is not None and self._reading.ended is not None)

    @property
    def state(self) -> ConsumerState:
        """What the consumer does now; makes no call. Never `PAUSED`, since partitions are paused, and not consumers."""
        if self._state <= _State.OPENING:
            return ConsumerState.NEW
        if self._reading is not None and (self._reading.ended is not None or self._fetcher.error is not None):
            return ConsumerState.FAILED
        if self._state is not _State.OPEN:
            return ConsumerState.STOPPED
        return ConsumerState.RETRYING if self._fetcher.failing else ConsumerState.RUNNING

    # -- reading -------------------------------------------------------------------------------------------

    async def next_record(self, timeout: float | None = None) -> Record[T] | None:
        """The next record, or None after `timeout` idle seconds; without a timeout, after `stop_when_idle` or never.

        :raises DecodeError: the payload cannot be decoded (only with `on_decode_error="raise"`).
        :raises Closed: the consumer was closed.
        """
        if timeout is not None:
            check_patience("timeout", timeout)
        return await self._open_reading().one(timeout)

    async def next_batch(
        self, max_records: int = 5000, timeout: float | None = None, *, max_wait: float | None = None
    ) -> RecordBatch[T]:
        """The available records, 1 to `max_records`; an empty batch after `timeout` idle seconds.

        :param max_wait: seconds for which the first record waits for a full batch. A batch comes earlier when it is
            full, at the `timeout`, and when the buffer is too full for the next fetch (half of `max_buffered`).
        :raises DecodeError: the next payload cannot be decoded (only with `on_decode_error="raise"`).
        :raises Closed: the consumer was closed.
        """
        check_count("max_records", max_records)
        check_patience("timeout", timeout)
        check_seconds("max_wait", max_wait, zero=True, optional=True)
        return RecordBatch(await self._open_reading().some(max_records, timeout, max_wait), self)

    def __aiter__(self) -> AsyncIterator[Record[T]]:
        """Iterate over the records until the consumer is closed or idle. Leaving the loop loses no record."""
        return Steps(self.next_record, lambda: self.closed)

    def batches(self, max_records: int = 5000, *, max_wait: float | None = None) -> AsyncIterator[RecordBatch[T]]:
        """Iterate over batches of records until the consumer is closed or idle. Leaving the loop loses no record.

        :param max_wait: as for `next_batch`.
        """
        check_count("max_records", max_records)
        check_seconds("max_wait", max_wait, zero=True, optional=True)
        return Steps(lambda: self.next_batch(max_records, max_wait=max_wait), lambda: self.closed)

    def _open_reading(self) -> RecordReading:
        check_loop(self._loop)
        if self._reading is None:
            raise self._not_open()
        return self._reading

    def _check_open(self) -> None:
        if self.closed:
            raise self._not_open()

    def _not_open(self) -> Closed:
        if self._state <= _State.OPENING:
            return Closed(
                "The record consumer is not open", advice="Enter it first: async with bus.records(...) as log"
            )
        ended = None if self._reading is None else self._reading.ended
        if ended is not None:
            return Closed(f"The record consumer ended with an error: {_text_of(ended)}", native=ended)
        return Closed("The record consumer is closed")

    # -- committing and positions --------------------------------------------------------------------------

    async def commit(self) -> None:
        """Commit the positions after all records delivered so far.

        :raises LeaseLost: a partition with uncommitted records was revoked since the last call; the others are
            committed.
        :raises BrokerError: the commit failed; it may be repeated.
        :raises Unsupported: a transaction of this consumer is open, and commits its positions.
        """
        self._check_not_closed()
        await self._member.commit()

    async def commit_records(self, records: Sequence[Record[Any]]) -> None:
        """Commit the positions after these records, which settles all lower offsets. A position never falls.

        :raises LeaseLost: a partition was revoked, or another consumer delivered the records; the other partitions are
            committed.
        :raises BrokerError, Unsupported: as for `commit`.
        """
        self._check_not_closed()
        await self._member.commit_records(records, self)

    async def commit_positions(self, positions: OwnPositions) -> None:
        """Commit positions of your own: for each partition the next offset to read, which settles all lower ones.

        For work that ends later than the hand-over, or keeps its positions elsewhere. A position lies from the
        committed one up to where this consumer has read since the partition was assigned; to commit another, `seek`
        there first.

        :raises OffsetOutOfRange: a position lies beyond what was delivered, or below the committed one; nothing is
            committed.
        :raises LeaseLost: a partition is not assigned to this member; the others are committed.
        :raises ConfigurationError: `positions` is not a mapping of partitions to offsets.
        :raises BrokerError, Unsupported: as for `commit`.
        """
        self._check_not_closed()
        await self._member.commit_positions(check_own_positions(positions))

    async def committed(
        self, partitions: Iterable[tuple[str, int]] | None = None
    ) -> Mapping[TopicPartition, int | None]:
        """The committed position of each partition, or None; by default of all assigned partitions."""
        return await self.member.committed(self._assignments.named(partitions))

    async def seek(self, positions: Mapping[tuple[str, int], int | None]) -> None:
        """Continue reading at these positions; None is the committed position, otherwise `start`.

        Drops buffered records of the partitions. Later commits may lie below earlier ones: only a seek moves a position
        back.

        All partitions and positions are checked before the first one moves. If the broker fails later, or a partition
        is lost at that moment, some may have moved: the error names these, and the others are read on as before.

        :raises LeaseLost: a partition is not assigned to this member.
        :raises OffsetOutOfRange: the log does not hold a position.
        :raises Unsupported: the backend cannot seek.
        :raises ConfigurationError: `positions` is not a mapping of partitions to offsets.
        """
        await self.member.seek(check_positions(positions))

    def pause(self, partitions: Iterable[tuple[str, int]] | None = None) -> None:
        """Stop delivering records of these partitions (by default of all assigned ones) until `resume`.

        Partitions that are assigned later are not paused.

        :raises LeaseLost: a partition is not assigned to this member; nothing is paused.
        """
        self.member.pause(self._assignments.named(partitions))

    def resume(self, partitions: Iterable[tuple[str, int]] | None = None) -> None:
        """Undo `pause`.

        :raises LeaseLost: a partition is not assigned to this member; nothing is resumed.
        """
        self.member.resume(self._assignments.named(partitions))

    def assignment(self) -> list[TopicPartition]:
        """The partitions of this member, without those that are being revoked."""
        return self._assignments.current()

    @property
    def member(self) -> Membership:
        """The membership in the group, for a transactional publisher.

        :raises Closed: the consumer is not open.
        """
        if self._state is not _State.OPEN:
            raise self._not_open()
        check_loop(self._loop)
        return self._member

    def _check_not_closed(self) -> None:
        check_loop(self._loop)
        if self._state not in (_State.OPEN, _State.CLOSING):
            raise self._not_open()


def _text_of(error: Exception) -> str:
    return error.message if isinstance(error, BrokerError) else repr(error)
