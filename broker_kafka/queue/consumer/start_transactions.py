"""`StartTransactions`: writes STARTs and the group's positions behind them in one transaction.

The coordinator takes the positions of a current member only, and trackers read committed markers: a process that was
suspended anywhere on the way has either started nothing, or started messages that no other member has.

*Concurrency.* On the loop; one claim at a time, in a producer and thread apart from the other markers, which count at
once. *Cancellation.* A claim that has begun continues. *Failure.* A transaction whose outcome is unknown is resolved by
a new producer of the same id, before anything else is claimed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from time import time
from types import MappingProxyType
from typing import Final, NamedTuple
from uuid import uuid4

from confluent_kafka import TopicPartition as NativePartition

from broker import BrokerError, MessageTooLarge, TopicPartition
from broker.driver import Backoff, lease_time
from broker_kafka.cluster.connection import Connection
from broker_kafka.errors import GENERATION_LOST, kafka_error
from broker_kafka.fenced_writer import FencedWriter, NotWritten, OutcomeUnknown, OutgoingRecord, Positions
from broker_kafka.queue.consumer.start_builder import FetchedRecord, StartBuilder
from broker_kafka.queue.consumer.unknown_commits import UnknownCommits
from broker_kafka.queue.markers.commit_text import commit_text, writer_in
from broker_kafka.queue.markers.marker_producer import explain_marker_error, pack_records
from broker_kafka.records import KafkaRecordSource

__all__ = ["ClaimOutcome", "StartTransactions"]

_REBALANCE_PAUSE: Final = 0.1
"""Seconds until a member of a former generation checks for the first time which partitions it still has."""
_LONGEST_REBALANCE_PAUSE: Final = 0.4
"""Short, since a revocation waits for the pause."""
_STOP_SECONDS: Final = 3.0


class ClaimOutcome(NamedTuple):
    """:ivar positions: the committed positions; every record below them is started.
    :ivar begun: the `lease_time` before which none of the STARTs was built.
    :ivar too_large: partitions whose next START is larger than the marker topic takes.
    """

    positions: Mapping[TopicPartition, int]
    begun: float
    too_large: Mapping[TopicPartition, BrokerError] = MappingProxyType({})


_NOTHING: Final = ClaimOutcome({}, 0.0)


class StartTransactions:
    """:param queue: the subscription.
    :param marker: a record with the topic and key of markers.
    :param unknown_commits: records what is being committed.
    :param timeout: seconds after which the brokers abort the transaction; for so long a process that died may hold up
        the trackers, and the next owner of its partitions.
    :param max_markers: of one record.
    """

    def __init__(
        self,
        connection: Connection,
        queue: str,
        marker: OutgoingRecord,
        start_builder: StartBuilder,
        unknown_commits: UnknownCommits,
        *,
        timeout: float,
        max_markers: int,
    ) -> None:
        self._connection = connection
        self._marker: Final = marker
        self._id: Final = f"{queue}.start-{uuid4().hex}"
        """Stored with each position, to tell our commits from those of later owners."""
        self._start_builder: Final = start_builder
        self._max_markers: Final = max_markers
        self._timeout_ms: Final = min(connection.settings.transaction_timeout_ms, max(1_000, int(1000 * timeout)))
        self._loop = asyncio.get_running_loop()
        self._writer: FencedWriter | None = None
        self._unresolved = _NOTHING
        """The claim whose outcome is unknown."""
        self._unknown_commits: Final = unknown_commits
        self._limit: int | None = None
        """How many records are claimed together, after one was refused."""
        self._rebalance_backoff = Backoff(_REBALANCE_PAUSE, _LONGEST_REBALANCE_PAUSE)
        self._task: asyncio.Task[ClaimOutcome] | None = None

    async def open(self) -> None:
        """Connect the producer, which ends the transaction that an earlier one left open.

        :raises BrokerError: no coordinator could be reached, or this user may not use the id.
        """
        writer = FencedWriter(self._connection, self._id, self._timeout_ms)
        try:
            await writer.start()
        except BaseException:
            await writer.stop(_STOP_SECONDS)
            raise
        self._writer = writer

    def claim(
        self, member: KafkaRecordSource, fetched: Callable[[], Sequence[FetchedRecord]]
    ) -> asyncio.Task[ClaimOutcome]:
        """The open claim, else a new one.

        The task raises BrokerError if nothing was claimed; another claim may follow.

        :param fetched: returns the fetched records that are still ours, in the order of each partition.
        """
        if self._task is None:
            self._task = self._loop.create_task(self._claim(member, fetched), name="broker-kafka-claim")
        return self._task

    @property
    def has_open_claim(self) -> bool:
        """Whether the outcome of a claim is unknown, or `take_outcome` has not returned it yet."""
        return self._task is not None or bool(self._unresolved.positions)

    def take_outcome(self, claim: asyncio.Task[ClaimOutcome]) -> ClaimOutcome:
        """The outcome of a claim that is done."""
        self._task = None
        return claim.result()

    async def close(self) -> None:
        """Close the producer; the brokers abort what it did not commit."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # retrieved, so that asyncio does not log it
        await self._drop_writer()

    async def _claim(self, member: KafkaRecordSource, fetched: Callable[[], Sequence[FetchedRecord]]) -> ClaimOutcome:
        if self._writer is None:
            await self.open()
        if self._unresolved.positions:
            return await self._resolve(member)
        # Before the records are listed: a partition that is assigned again meanwhile has another generation.
        metadata, member_id = await asyncio.gather(member.group_metadata(), member.member_id())
        records = fetched()[: self._limit]
        writer = self._writer
        if not records or writer is None:
            return _NOTHING
        claimed = ClaimOutcome({each.place: each.offset + 1 for each in records}, lease_time())
        starts = self._start_builder.starts([each for each in records if each.held is not None], int(1000 * time()))
        packed, _ = pack_records([start.marker for start in starts], self._max_markers)
        entries = [self._marker._replace(value=data, partition=partition) for partition, data, _ in packed]
        builder = self._start_builder
        text = commit_text(member_id, self._id, topic_mark=builder.topic_mark, key_mark=builder.key_mark)
        offsets = [NativePartition(*place, at, metadata=text) for place, at in claimed.positions.items()]
        self._unknown_commits.sent(claimed.positions, text)
        try:
            await writer.write(entries, Positions(offsets, metadata))
        except NotWritten as error:
            found = None if error.native is None else kafka_error(error.native)
            if found is not None and found.code() in GENERATION_LOST:
                await asyncio.sleep(self._rebalance_backoff.next())
                return _NOTHING
            if large := self._narrow_down(records, entries, error.refused):
                return large
            raise
        except BrokerError as error:
            # OutcomeUnknown, or the thread of the writer has failed.
            self._unresolved = claimed
            await self._drop_writer()
            if isinstance(error, OutcomeUnknown) and (large := self._narrow_down(records, entries, error.refused)):
                return large
            raise
        self._unknown_commits.succeeded(claimed.positions, text)
        self._rebalance_backoff.reset()
        self._limit = None if self._limit is None else 2 * self._limit
        return claimed

    async def _resolve(self, member: KafkaRecordSource) -> ClaimOutcome:
        """The outcome of the unresolved claim, read from the group's positions now that a new producer is open."""
        claim = self._unresolved
        found = await member.stored(list(claim.positions))
        ours: dict[TopicPartition, int] = {}
        for place, at in claim.positions.items():
            stored = found[place]
            if stored is not None and stored.offset == at and writer_in(stored.metadata) == self._id:
                ours[place] = at
        self._unresolved = _NOTHING
        return ClaimOutcome(ours, claim.begun)

    def _narrow_down(
        self, records: Sequence[FetchedRecord], entries: Sequence[OutgoingRecord], refused: Mapping[int, BrokerError]
    ) -> ClaimOutcome | None:
        """Claim fewer records next time, until the one that the broker refuses is alone.

        :raises BrokerError: a single record is refused, for another reason than its size.
        """
        lasting = [error for error in refused.values() if not error.retriable]
        if not lasting:
            return None
        if len(records) > 1:
            self._limit = max(1, len(records) // 4)
            return None
        error = explain_marker_error(lasting[0], self._marker.topic, len(entries[0].value or b""))
        if isinstance(error, MessageTooLarge):
            return ClaimOutcome({}, 0.0, {records[0].place: error})
        raise error

    async def _drop_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.stop(_STOP_SECONDS)
