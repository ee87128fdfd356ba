"""`RecordsAsMessages`: a message source over a record source; each record is a message that is settled on its own.

*Concurrency.* One event loop; `settle` may run during `fetch`. *Cancellation.* Commits run in tasks of this source, and
do not end with a caller. *Failure.* A retriable error of a commit is a warning, and the commit is repeated later; any
other error is raised by the next `fetch`.

Acking or rejecting a record finishes its offset. The highest contiguous finished offset of each partition is committed,
and nothing else: every `commit_every` records, every `commit_interval` seconds, when the partition is revoked, and on
close. A source that `CommitsRanges` also stores the finished ranges above it, which a restart then does not repeat. A
nacked or released record is redelivered from memory. A partition is paused when more than `max_gap` records are
finished or waiting above an unfinished one, or when the source's room for ranges is nearly full; it resumes at half of
that. All are paused while commits have no success (`CommitPatience`), which bounds what a crash
repeats. A record of a retry topic becomes the original message when it is due; until then its partition is paused, so
that at most one fetch of the partition is in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from broker.capabilities import Capabilities, ConfirmedAck, LeaseMode, MessageCapabilities
from broker.driver.as_messages.partition import MessagePartition, progress_of
from broker.driver.as_messages.redelivery import Redelivery
from broker.driver.assignments import partition_lost
from broker.driver.commits import CommitPatience, Committer
from broker.driver.contract import (
    Backend,
    RecordSource,
    RecordSubscription,
    RetryTopic,
    Settlement,
    SourceListener,
    TopicPartition,
)
from broker.driver.optional import CommitsRanges, ReportsIdle
from broker.driver.record_messages import FIRST, Delivery, record_of
from broker.errors import BrokerError, Closed, LeaseLost, Unsupported
from broker.hooks import Event, Hooks, PartitionsAssigned, PartitionsLost, PartitionsRevoked, Warned, logger
from broker.messages import Message, Outcome, SettleState
from broker.records import Record

__all__ = ["RecordsAsMessages", "message_capabilities"]

_LONGEST_COMMIT: Final = 10.0
_FULL: Final = 0.75
"""The fullness at which a partition is paused."""


class RecordsAsMessages:
    """Implements `MessageSource` for the consumer, and `RecordListener` for the source of the records.

    :param max_gap: the most records of a partition that may be finished, or wait for redelivery, above an unfinished
        one.
    :param commit_every: commit after this many finished records.
    :param commit_interval: commit after this many seconds, if a record was finished.
    :param retry_topics: the retry topics, each read from its first record on.
    """

    def __init__(
        self,
        listener: SourceListener,
        *,
        hooks: Hooks,
        max_gap: int = 10_000,
        commit_every: int = 1000,
        commit_interval: float = 1.0,
        retry_topics: Sequence[RetryTopic] = (),
    ) -> None:
        self._listener = listener
        self._hooks = hooks
        self._max_gap = max_gap
        self._commit_every = commit_every
        self._commit_interval = commit_interval
        self._loop = asyncio.get_running_loop()
        self._partitions: dict[TopicPartition, MessagePartition] = {}
        self._paused: set[TopicPartition] = set()
        self._generation = 0
        self._redelivery = Redelivery(lambda: self._source.interrupt())
        self._retry_topics = {each.name: each for each in retry_topics}
        self._finished = 0
        self._commit_timer: asyncio.TimerHandle | None = None
        self._committing: asyncio.Task[None] | None = None
        self._patience = CommitPatience(self._commits_stalled)
        self._settled = asyncio.Event()
        self._failure: BrokerError | None = None
        self._closing = False

    async def join(self, backend: Backend, subscription: RecordSubscription) -> RecordsAsMessages:
        """Join the group, for the retry topics too; returns this source.

        :raises BrokerError: as for `Backend.join`.
        """
        if self._retry_topics:
            names = tuple(self._retry_topics)
            subscription = replace(
                subscription, topics=(*subscription.topics, *names), whole=(*subscription.whole, *names)
            )
        self._source: RecordSource = await backend.join(subscription, self)
        self._ranges = self._source if isinstance(self._source, CommitsRanges) else None
        by_pattern = subscription.pattern is not None
        self._committer = Committer(self._source, self._hooks, progress_of, by_pattern=by_pattern)
        if not self._partitions:
            self._assign(self._source.assignment())
        return self

    # -- MessageSource -------------------------------------------------------------------------------------

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        if self._closing:
            raise Closed("The source is closed")
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        messages = self._due(max_messages, max_bytes)
        if not messages:
            messages = self._as_messages(await self._source.fetch(max_messages, max_bytes, wait))
        return messages or self._due(max_messages, max_bytes)

    def interrupt(self) -> None:
        self._source.interrupt()

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        if self._closing:
            raise Closed("The source is closed")
        results: list[BrokerError | None] = []
        touched: set[MessagePartition] = set()
        part: Any = None
        for settlement in settlements:
            message = settlement.message
            if message.lease is not part:
                part = message.lease
                touched.add(part)
            if part.lost:
                results.append(partition_lost(part.partition))
                continue
            results.append(None)
            raw = message.raw
            offset = raw.record.offset if type(raw) is Delivery else raw.offset
            if part.unsettled.pop(offset, None) is None:
                continue
            outcome = settlement.outcome
            if outcome is Outcome.ACK or outcome is Outcome.REJECT:
                part.ranges_changed = not part.tracker.finished(offset) or part.ranges_changed
                self._finished += 1
            elif not part.revoking:
                self._redelivery.put(message, part, outcome, settlement.delay or 0.0)
        self._settled.set()
        for partition in touched:
            self._update_pause(partition)
        self._schedule_commit()
        return results

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        """Do nothing: a record is ours while its partition is assigned."""
        return [None] * len(messages)

    async def is_idle(self, seconds: float) -> bool:
        if self._patience.lost:
            return False  # the source takes paused partitions for read
        return not isinstance(self._source, ReportsIdle) or await self._source.is_idle(seconds)

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        if self._commit_timer is not None:
            self._commit_timer.cancel()
        self._patience.succeeded()
        self._redelivery.close()
        try:
            async with asyncio.timeout(_LONGEST_COMMIT):
                if self._committing is not None:
                    await asyncio.wait((self._committing,))
                await self._commit(self._partitions.values())
        except (BrokerError, TimeoutError) as error:
            self._warn(f"The last commit failed, its records are redelivered: {str(error) or 'no answer in time'}")
        finally:
            await self._source.close()
            self._forget(list(self._partitions.values()))

    # -- deliveries ----------------------------------------------------------------------------------------

    def _as_messages(self, records: Sequence[Record[Any]]) -> list[Message[Any]]:
        messages: list[Message[Any]] = []
        part: MessagePartition | None = None
        topic, partition, last, before = "", -1, -1, self._finished
        for record in records:
            if record.partition != partition or record.topic != topic:
                topic, partition = record.topic, record.partition
                part = self._partitions.get(TopicPartition(topic, partition))
                last = -1 if part is None else part.tracker.last_started
                if part is not None and part.restored is None:
                    part.restored = [] if self._ranges is None else list(self._ranges.finished_ranges(part.partition))
            offset = record.offset
            # This assignment has fetched the record before.
            if part is None or part.revoking or offset <= last:
                continue
            part.tracker.started(offset)
            if part.restored and part.was_finished(offset):
                part.tracker.finished(offset)
                self._finished += 1
                continue
            if part.delay:
                message = self._redelivery.first(record, part)
                if message is None:
                    self._update_pause(part)
                    continue
            else:
                message = Message(topic, record.data, record, FIRST, part, record.size)
            part.unsettled[offset] = message
            messages.append(message)
        if self._finished > before:
            self._schedule_commit()
        return messages

    def _due(self, max_messages: int, max_bytes: int) -> list[Message[Any]]:
        messages = self._redelivery.take_due(max_messages, max_bytes)
        for part in {id(message.lease): message.lease for message in messages if message.lease.delay}.values():
            self._update_pause(part)
        return messages

    def _update_pause(self, part: MessagePartition) -> None:
        if part.revoking:
            return
        if part.tracker.first_unfinished is None:
            # No unfinished message could make room.
            part.range_fullness = 0.0
        if not part.over_limit and (part.gap > self._max_gap or part.range_fullness > _FULL):
            part.over_limit = True
            topic, number = part.partition
            self._warn(
                f"{topic}[{number}] is paused: offset {part.tracker.first_unfinished} is not settled, and {part.gap} "
                "records after it are finished or waiting"
            )
        elif part.over_limit and 2 * part.gap <= self._max_gap and 2 * part.range_fullness <= _FULL:
            part.over_limit = False
        paused = part.over_limit or part.not_due > 0 or self._patience.lost
        if paused and not part.paused:
            self._paused.add(part.partition)
            self._source.pause((part.partition,))
        elif part.paused and not paused:
            self._paused.discard(part.partition)
            self._source.resume((part.partition,))
        part.paused = paused

    # -- commits -------------------------------------------------------------------------------------------

    def _schedule_commit(self) -> None:
        """Commit now, after `commit_interval`, or when the running commit has ended."""
        if self._committing is not None or not self._finished:
            return
        if self._finished >= self._commit_every:
            self._commit_soon()
        elif self._commit_timer is None:
            self._commit_timer = self._loop.call_later(self._commit_interval, self._commit_soon)

    def _commit_soon(self) -> None:
        if self._commit_timer is not None:
            self._commit_timer.cancel()
            self._commit_timer = None
        if self._committing is None and not self._closing:
            self._finished = 0
            self._committing = self._loop.create_task(self._commit_and_schedule(), name="broker-as-messages-commit")

    async def _commit_and_schedule(self) -> None:
        self._patience.trying()
        try:
            await self._commit(self._partitions.values())
            self._patience.succeeded()
        except LeaseLost as error:
            logger.info("A partition was lost before its commit: %s", error)
            self._patience.succeeded()
        except BrokerError as error:
            if error.retriable:
                self._warn(f"A commit failed and is repeated: {error}")
                self._commit_timer = self._loop.call_later(self._commit_interval, self._commit_soon)
            else:
                self._failure = error
                self._patience.succeeded()
                self._source.interrupt()
        finally:
            self._committing = None
            if not self._closing:
                self._schedule_commit()

    def _commits_stalled(self, stalled: bool) -> None:
        if self._closing:
            return
        if stalled:
            logger.info(
                "No commit has succeeded for %g s; nothing more is fetched until one does", CommitPatience.SECONDS
            )
        self._update_pauses()

    def _update_pauses(self) -> None:
        for part in self._partitions.values():
            self._update_pause(part)

    async def _commit(self, parts: Iterable[MessagePartition]) -> None:
        positions = {part.partition: (part, at) for part in parts if (at := self._position(part)) is not None}
        try:
            await self._committer.commit(positions)
        finally:
            for part, _ in positions.values():
                part.tracker.committed(part.committed)
                if self._ranges is not None:
                    # The ranges of an earlier owner shrink as the partition is read.
                    part.range_fullness = 0.0 if part.restored else self._ranges.fullness(part.partition)
                    self._update_pause(part)

    def _position(self, part: MessagePartition) -> int | None:
        """The position to commit; None if there is none."""
        at = part.tracker.committable()
        return part.tracker.resume_at if at is None and part.ranges_changed and self._ranges is not None else at

    # -- RecordListener ------------------------------------------------------------------------------------

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self._assign(partitions)
        stale = [partition for partition in partitions if partition in self._paused]
        if stale:
            self._paused.difference_update(stale)
            self._source.resume(stale)
        if self._patience.lost:
            self._update_pauses()
        self.event(PartitionsAssigned(partitions=tuple(partitions), current=self._current()))

    async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
        going = self._parts(partitions)
        for part in going:
            part.revoking = True
        self._redelivery.forget()
        self._take_back_unused(going)
        self.event(PartitionsRevoked(partitions=tuple(partitions), current=self._current()))
        now = self._loop.time()
        try:
            if not self._closing:
                # Leave time for the commit.
                async with asyncio.timeout_at(deadline - min(1.0, max(0.0, deadline - now) / 4)):
                    while any(part.unsettled for part in going):
                        self._settled.clear()
                        await self._settled.wait()
        except TimeoutError:
            self._warn(
                f"{sum(len(part.unsettled) for part in going)} messages of {list(partitions)} were not settled in time"
            )
        try:
            async with asyncio.timeout_at(deadline):
                await self._commit(going)
        except (BrokerError, TimeoutError) as error:
            self._warn(f"The commit before the release failed: {str(error) or 'no answer in time'}")
        finally:
            self._lose(going)

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        self._lose(self._parts(partitions))
        self.event(PartitionsLost(partitions=tuple(partitions), current=self._current()))

    def event(self, event: Event) -> None:
        self._listener.event(event)

    def _assign(self, partitions: Iterable[TopicPartition]) -> None:
        for partition in map(TopicPartition._make, partitions):
            part = self._partitions.get(partition)
            if part is not None and not part.revoking:
                continue
            if part is not None:
                self._lose([part])
            self._generation += 1
            retry_topic = self._retry_topics.get(partition.topic)
            self._partitions[partition] = MessagePartition(partition, self._generation, retry_topic)

    def _lose(self, parts: Sequence[MessagePartition]) -> None:
        """These partitions are lost, with their unsettled messages."""
        unsettled = [message for part in parts for message in part.unsettled.values()]
        self._forget(parts)
        if unsettled:
            self._listener.lost(unsettled)

    def _take_back_unused(self, parts: Sequence[MessagePartition]) -> None:
        """Drop messages that were not handed over: a revocation must not wait for them."""
        unused: list[Message[Any]] = []
        for part in parts:
            mine = [m for m in part.unsettled.values() if m.lease_ends is None and m.state is SettleState.OPEN]
            unused += mine
            for message in mine:
                del part.unsettled[record_of(message).record.offset]
        if unused:
            self._listener.lost(unused)

    def _forget(self, parts: Sequence[MessagePartition]) -> None:
        for part in parts:
            part.revoking = part.lost = True
            part.unsettled = {}
            if self._partitions.get(part.partition) is part:
                del self._partitions[part.partition]
        self._redelivery.forget()

    def _parts(self, partitions: Iterable[TopicPartition]) -> list[MessagePartition]:
        return [part for partition in partitions if (part := self._partitions.get(partition)) is not None]

    def _current(self) -> tuple[TopicPartition, ...]:
        return tuple(partition for partition, part in self._partitions.items() if not part.revoking)

    def _warn(self, text: str) -> None:
        logger.warning(text)
        self.event(Warned(text=text))


def message_capabilities(capabilities: Capabilities) -> MessageCapabilities:
    """What the messages made of a backend's records can do.

    :raises Unsupported: the backend has no records.
    """
    records = capabilities.records
    if records is None:
        raise Unsupported(f"Backend {capabilities.backend!r} has no records", advice="Use bus.messages(...)")
    return MessageCapabilities(
        lease=LeaseMode.NONE,
        confirmed_ack=ConfirmedAck.NEVER,
        native_delay=0.0,
        delivery_attempt=True,
        release_keeps_attempt=True,
        key_affinity=capabilities.publish.partitions,
        shared_by_message=False,
        ordered_delivery=True,
        creates_subscriptions=True,
        start_latest=True,
        start_time=records.start_time,
        ephemeral=True,
        topic_patterns=records.topic_patterns,
        retry_topics=True,
    )
