"""`QueueClient`: fetches records of the subscription's group, and hands each over once its START is on the brokers.

*Order.* A fetch writes the STARTs of all records that it got and waits for them, then commits the group's positions
once, then hands the messages over; `StartTransactions` does both in one transaction. A process that dies before the
commit leaves the records to the next member of the group; one that dies after it leaves them to the tracker.

*Concurrency.* One event loop; `settle` and `extend` may run beside `fetch`. *Rebalances.* A revoked partition waits for
claims in flight, also those that an interrupted fetch left behind; a close waits for them for a second. Messages that
were handed over stay with this process: their markers are no other member's. *Failure.* Records that could not be
started or committed are kept, and the next `fetch` tries again; a revoked partition drops them, and its next owner
reads them from the committed position. A partition with a message whose START is larger than the marker topic allows is
paused until the topic takes it; other partitions go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from time import time
from typing import Any, Final, TypeVar

from broker import BackendError, BrokerError, Closed, LeaseLost, Message, MessageTooLarge, TopicPartition
from broker.driver import (
    Backoff,
    Event,
    PartitionsAssigned,
    PartitionsLost,
    PartitionsRevoked,
    RecordListener,
    Settlement,
    SourceListener,
    Warned,
    lease_time,
    logger,
)
from broker_kafka.cluster.connection import Connection
from broker_kafka.queue.consumer.lease_manager import LeaseManager, expired_messages
from broker_kafka.queue.consumer.start_builder import FetchedRecord, StartBuilder
from broker_kafka.queue.consumer.start_transactions import StartTransactions
from broker_kafka.queue.consumer.unknown_commits import UnknownCommits
from broker_kafka.queue.markers.commit_text import commit_text
from broker_kafka.queue.markers.marker_producer import MarkerProducer
from broker_kafka.records import KafkaRecordSource

__all__ = ["InFlightClaims", "OversizedStarts", "QueueClient"]

R = TypeVar("R")

_CLOSE_SECONDS: Final = 1.0
_GRACE: Final = 1.0
"""Seconds for which an interrupted fetch still waits for the claim in flight."""
_TRUSTED: Final = 5.0
"""Seconds after a commit or an assignment for which our partitions count as ours."""


class QueueClient:
    """Implements `MessageSource` with all optional parts, and `RecordListener` for the member of the group.

    :param member: makes the member of the group, which reports its partitions to this.
    :param transactions: writes STARTs and positions in one transaction; None writes them one after the other.
    :param unknown_commits: shared with `transactions`.
    :param failure: returns the error for which no more messages may be handed over, if any.
    :param session_seconds: the group reassigns our partitions after so long without a sign of this process.
    :param on_close: awaited at the end of `close`, even if that fails.
    """

    def __init__(
        self,
        listener: SourceListener,
        *,
        connection: Connection,
        member: Callable[[RecordListener], KafkaRecordSource],
        producer: MarkerProducer,
        start_builder: StartBuilder,
        transactions: StartTransactions | None,
        unknown_commits: UnknownCommits,
        leases: LeaseManager,
        failure: Callable[[], BrokerError | None],
        session_seconds: float,
        on_close: Callable[[QueueClient], Coroutine[Any, Any, None]],
    ) -> None:
        self._listener = listener
        self.connection: Final = connection
        self._producer = producer
        self._start_builder = start_builder
        self._transactions = transactions
        self._unknown_commits = unknown_commits
        self.leases: Final = leases
        self._failure = failure
        self._trusted = min(_TRUSTED, session_seconds / 2)
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._assignments: dict[TopicPartition, int] = {}
        """The assigned partitions, each with the number of its assignment."""
        self._assignment_count = 0
        self._commit_text = ""
        self._text_built_at = 0
        """The `_assignment_count` at which `_commit_text` was built."""
        self._fetched: list[FetchedRecord] = []
        """What is not committed, in the order of each partition."""
        self._oversized = OversizedStarts()
        self._known_at = -inf
        """The `lease_time` at which the group last confirmed our partitions."""
        self._claims = InFlightClaims()
        self._fetching = self._closed = False
        self._member = member(self)

    async def open(self) -> None:
        """Connect the producers, and join the group.

        :raises BrokerError: one of these failed.
        """
        if self._transactions is not None:
            await self._transactions.open()
        await asyncio.gather(self._producer.open(), self._member.open())

    # -- MessageSource -------------------------------------------------------------------------------------

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        self._check_open()
        if (failure := self._failure()) is not None:
            raise failure
        self._fetching = True
        try:
            self._fetched += self._oversized.due(self._loop.time())
            if not self._fetched:
                await self._fetch_records(max_messages, max_bytes, wait)
            if not self._fetched:
                return []
            with self._claims.claim():
                if self._transactions is None:
                    await self._resolve_unknown_commits()
                    return await self._claim()
                if not self._transactions.has_open_claim:
                    await self._resolve_unknown_commits()
                return await self._claim_in_transaction(self._transactions)
        finally:
            self._fetching = False
            if not self._closed:
                self._claims.resume()

    def interrupt(self) -> None:
        if self._fetching:
            self._claims.interrupt()
        self._member.interrupt()

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        self._check_open()
        return await self.leases.settle(settlements)

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        self._check_open()
        return await self.leases.extend([message.lease for message in messages])

    async def store_attempt(self, message: Message[Any], delay: float) -> BrokerError | None:
        return await self.leases.keep(message.lease, message.delivery_attempt, delay)

    async def is_idle(self, seconds: float) -> bool:
        """As the member of the group; messages that are deferred, or held elsewhere, do not count."""
        return not self._fetched and not self._oversized and await self._member.is_idle(seconds)

    def expire_leases(self, messages: Sequence[Message[Any]]) -> None:
        if expired := expired_messages(messages):
            self._listener.lost(expired)

    def lease_left(self, message: Message[Any]) -> float:
        return message.lease.until - lease_time()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._claims.interrupt()
        try:
            # Else a START could follow that of the partition's next owner, and even the END of its message.
            await self._claims.drain(self._loop.time() + _CLOSE_SECONDS)
            await asyncio.gather(self._member.close(), self._producer.close(_CLOSE_SECONDS))
        finally:
            try:
                if self._transactions is not None:
                    await self._transactions.close()
            finally:
                await self._on_close(self)

    # -- starting and committing ---------------------------------------------------------------------------

    async def _fetch_records(self, max_messages: int, max_bytes: int, wait: float) -> None:
        """Wait for the first records, and take all that is there: each claim costs two round trips."""
        while (
            max_messages > 0
            and max_bytes > 0
            and (runs := await self._member.fetch_runs(max_messages, max_bytes, wait))
        ):
            for run in runs:
                # The member returns no run of a revoked partition: this is the assignment of the run.
                assignment = self._assignments.get(TopicPartition(run.topic, run.partition), 0)
                self._fetched += self._start_builder.fetched(run, assignment)
                max_messages -= len(run)
                max_bytes -= run.size
            wait = 0.0

    async def _resolve_unknown_commits(self) -> None:
        """Release messages of partitions that were revoked and assigned again, if their commit succeeded after all.

        :raises BrokerError: the group's positions cannot be read.
        """
        found = await self._unknown_commits.resolve(self._member, self._assignments)
        self._release([self._start_builder.message(each) for each in found if each.held and not each.deferred])

    def _release(self, messages: Sequence[Message[Any]]) -> None:
        """Have these redelivered at once; later messages of their keys wait for them."""
        if messages:
            self.leases.release_now([message.lease for message in messages])
            self._listener.expired(messages)

    async def _claim(self) -> list[Message[Any]]:
        """Start the fetched records, commit, and return the messages whose position was committed.

        :raises BrokerError: all of them failed; the next fetch tries again.
        """
        if lease_time() - self._known_at > self._trusted and not await self._confirm_ownership():
            return []
        begun = lease_time()
        failed = await self._write_starts([record for record in self._fetched if record.held is not None])
        if failed is None:
            return []
        positions: dict[TopicPartition, int] = {}
        stopped: dict[TopicPartition, BrokerError] = {}
        for record in self._drop_stale():
            error = failed.get(record) if failed else None
            if error is not None:
                # Later records of the partition wait for this one.
                stopped.setdefault(record.place, error)
            if not stopped or record.place not in stopped:
                positions[record.place] = record.offset + 1
        errors = [error for error in stopped.values() if not isinstance(error, MessageTooLarge)]
        results = await self._commit(positions)
        if results is None:
            return []
        errors += [error for error in results.values() if error is not None]
        committed = {place: positions[place] for place, error in results.items() if error is None}
        messages = self._hand_over(committed, begun + self.leases.lease_seconds)
        self._pause_oversized({each: error for each, error in stopped.items() if isinstance(error, MessageTooLarge)})
        self._resume_oversized(set(committed).difference(stopped))
        if not messages and errors:
            raise next((error for error in errors if not error.retriable), errors[0])
        return messages

    async def _claim_in_transaction(self, transactions: StartTransactions) -> list[Message[Any]]:
        """`_claim` in one transaction. One that outlasts an interrupted fetch is continued by the next.

        :raises BrokerError: as `_claim`.
        """
        claim = transactions.claim(self._member, self._drop_stale)
        if not await self._claims.finished(claim):
            return []
        outcome = transactions.take_outcome(claim)
        messages = self._hand_over(outcome.positions, outcome.begun + self.leases.lease_seconds)
        self._pause_oversized(outcome.too_large)
        self._resume_oversized(outcome.positions)
        return messages

    def _pause_oversized(self, too_large: Mapping[TopicPartition, BrokerError]) -> None:
        """Pause partitions whose next START is too large, and warn."""
        for place, error in too_large.items():
            waiting = [record for record in self._drop_stale() if record.place == place]
            if waiting and self._oversized.add(place, waiting, self._loop.time()):
                text = f"{place.topic}[{place.partition}] waits from {waiting[0].offset} on: {error}"
                logger.warning(text)
                self.event(Warned(text=text))
                self._member.pause([place])
            self._drop_records([place])

    def _resume_oversized(self, places: Collection[TopicPartition]) -> None:
        """Resume partitions whose first waiting record was handed over."""
        for place in places:
            if place in self._oversized:
                self._fetched += self._oversized.remove(place)
                self._member.resume([place])

    async def _confirm_ownership(self) -> bool:
        """Commit the positions before the fetched records; whether any of these is still ours.

        A process that was suspended would else start messages that others have handled meanwhile.

        :raises BrokerError: the coordinator does not answer.
        """
        firsts: dict[TopicPartition, int] = {}
        for record in self._drop_stale():
            firsts.setdefault(record.place, record.offset)
        results = await self._commit(firsts)
        if results is None:
            return False
        for error in results.values():
            if error is not None:
                raise error
        return bool(self._drop_stale())

    async def _commit(self, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, BrokerError | None] | None:
        """The result of each partition that is still ours; None if the fetch was interrupted."""
        if not positions:
            return {}
        sent_at = lease_time()
        results = await self._claims.unless_interrupted(self._commit_with_text(positions))
        if results is None:
            return None
        if any(error is None for error in results.values()):
            self._known_at = sent_at
        # A group that rebalances accepts no commits, not even of partitions that stay with this member.
        return {
            place: _rebalancing(error) if isinstance(error, LeaseLost) else error
            for place, error in results.items()
            if place in self._assignments
        }

    async def _commit_with_text(
        self, positions: Mapping[TopicPartition, int]
    ) -> Mapping[TopicPartition, BrokerError | None]:
        if self._text_built_at != self._assignment_count:
            # A member that was expelled rejoins with another id, and is assigned its partitions again.
            member = await self._member.member_id()
            builder = self._start_builder
            self._commit_text = commit_text(member, topic_mark=builder.topic_mark, key_mark=builder.key_mark)
            self._text_built_at = self._assignment_count
        text = self._commit_text
        self._unknown_commits.sent(positions, text)
        results = await self._member.commit_with_metadata({place: (at, text) for place, at in positions.items()})
        self._unknown_commits.succeeded({place: at for place, at in positions.items() if results[place] is None}, text)
        return results

    async def _write_starts(self, records: Sequence[FetchedRecord]) -> dict[FetchedRecord, BrokerError] | None:
        """Start these records; the errors of those that failed, or None if the fetch was interrupted."""
        if not records:
            return {}
        starts = self._start_builder.starts(records, int(1000 * time()))
        outcomes = await self._claims.unless_interrupted(
            self._producer.write([start.marker for start in starts], by=self._known_at + 2 * self._trusted)
        )
        if outcomes is None:
            return None
        results = zip(starts, outcomes, strict=True)
        return {record: error for start, error in results if error is not None for record in start.records}

    def _hand_over(self, committed: Mapping[TopicPartition, int], until: float) -> list[Message[Any]]:
        """The messages below the committed positions; records above these are kept."""
        messages: list[Message[Any]] = []
        late: list[Message[Any]] = []
        kept: list[FetchedRecord] = []
        # All that was started together has one lease; if that is over, this process was suspended.
        expired = lease_time() >= until
        place: TopicPartition | None = None
        below = 0
        for record in self._fetched:
            if record.place is not place:
                place = record.place
                below = committed.get(place, 0)
            if record.offset >= below:
                kept.append(record)
            elif (held := record.held) is not None and not record.deferred:
                held.until = until
                # A tracker may have sent an expired message again.
                (late if expired else messages).append(self._start_builder.message(record))
        self._fetched = kept
        self._release(late)
        return messages

    def _drop_stale(self) -> list[FetchedRecord]:
        """The fetched records of present assignments; drops all others."""
        self._fetched = [each for each in self._fetched if self._assignments.get(each.place) == each.assignment]
        return self._fetched

    def _drop_records(self, partitions: Collection[TopicPartition]) -> None:
        self._fetched = [each for each in self._fetched if each.place not in partitions]

    # -- RecordListener ------------------------------------------------------------------------------------

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self._known_at = lease_time()
        for partition in partitions:
            self._assignment_count += 1
            self._assignments[partition] = self._assignment_count
        self.event(PartitionsAssigned(partitions=tuple(partitions), current=tuple(self._assignments)))

    async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
        current = tuple(each for each in self._assignments if each not in partitions)
        self.event(PartitionsRevoked(partitions=tuple(partitions), current=current))
        try:
            await self._claims.drain(deadline)
        finally:
            # Also when time runs out: what is not committed is the next owner's.
            self._remove(partitions)

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        self._remove(partitions)
        self.event(PartitionsLost(partitions=tuple(partitions), current=tuple(self._assignments)))

    def event(self, event: Event) -> None:
        self._listener.event(event)

    def _remove(self, partitions: Sequence[TopicPartition]) -> None:
        for partition in partitions:
            self._assignments.pop(partition, None)
            self._unknown_commits.removed(partition, [each for each in self._fetched if each.place == partition])
        self._drop_records(set(partitions))
        if waiting := self._oversized.forget(partitions):
            self._member.resume(waiting)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("The source is closed")


class InFlightClaims:
    """What is being started and committed: an interrupted fetch leaves it behind, and a revocation waits for it.

    Created on the event loop. *Cancellation.* Work that has begun continues.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._open: set[asyncio.Future[Any]] = set()
        # A future, not an event: waiting for it and a task at once needs no further task.
        self._interrupted: asyncio.Future[None] = self._loop.create_future()

    def interrupt(self) -> None:
        """Have the running fetch return without slow work."""
        if not self._interrupted.done():
            self._interrupted.set_result(None)

    def resume(self) -> None:
        """Have the next fetch wait for its work."""
        if self._interrupted.done():
            self._interrupted = self._loop.create_future()

    @contextmanager
    def claim(self) -> Generator[None]:
        """Counts as in flight for as long as the block runs, between its tasks too."""
        claim = self._loop.create_future()
        self._open.add(claim)
        try:
            yield
        finally:
            self._open.discard(claim)
            claim.set_result(None)

    async def unless_interrupted(self, work: Coroutine[Any, Any, R]) -> R | None:
        """The result of the work; None if the fetch was interrupted and the work takes long; it then continues.

        Records that were started and not committed are read again by the partition's next owner; the lease of those
        that were committed and not handed over ends.
        """
        task = self._loop.create_task(work, name="broker-kafka-claim")
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        try:
            return task.result() if await self.finished(task) else None
        finally:
            if not task.done():
                task.add_done_callback(_log_exception)

    async def finished(self, task: asyncio.Task[Any]) -> bool:
        """Wait for the task; False if the fetch was interrupted and the task takes long."""
        await asyncio.wait({task, self._interrupted}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await asyncio.wait({task}, timeout=_GRACE)
        return task.done()

    async def drain(self, by: float) -> None:
        """Wait until nothing is in flight, at most until this loop time."""
        while self._open and (left := by - self._loop.time()) > 0:
            await asyncio.wait(self._open, timeout=left)


def _log_exception(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.debug("A claim that an interrupted fetch left behind failed: %s", error)


class _Waiting:
    __slots__ = ("backoff", "records", "retry_at")

    def __init__(self) -> None:
        self.records: list[FetchedRecord] = []
        self.backoff = Backoff(1.0, 30.0)
        self.retry_at = 0.0


class OversizedStarts:
    """Records that cannot be started because the START is larger than the marker topic takes. Pure.

    They wait by partition, with the records behind them, in the order of the log. The first of each partition is tried
    again after growing pauses. None is committed, so that the partition's next owner reads all of them.
    """

    def __init__(self) -> None:
        self._waiting: dict[TopicPartition, _Waiting] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, place: object) -> bool:
        return place in self._waiting

    def add(self, place: TopicPartition, records: list[FetchedRecord], now: float) -> bool:
        """Put these before what waits of the partition; whether nothing did.

        :param now: a time in seconds, of the clock that `due` is given.
        """
        new = place not in self._waiting
        waiting = self._waiting.setdefault(place, _Waiting())
        waiting.records = records + waiting.records
        waiting.retry_at = now + waiting.backoff.next()
        return new

    def due(self, now: float) -> list[FetchedRecord]:
        """Take the first record of each partition that is to be tried again; `add` or `remove` follows."""
        due = [waiting for waiting in self._waiting.values() if waiting.records and waiting.retry_at <= now]
        return [waiting.records.pop(0) for waiting in due]

    def remove(self, place: TopicPartition) -> list[FetchedRecord]:
        """The rest of a partition whose first record was started."""
        waiting = self._waiting.pop(place, None)
        return [] if waiting is None else waiting.records

    def forget(self, places: Collection[TopicPartition]) -> list[TopicPartition]:
        """Drop partitions that are not ours any more; returns those of which records waited."""
        return [place for place in places if self._waiting.pop(place, None) is not None]


def _rebalancing(error: BrokerError) -> BackendError:
    return BackendError(
        f"The group is rebalancing and accepted no commit: {error.message}", native=error.native, retriable=True
    )
