"""`StartTransactions`: STARTs and the positions of the group behind them, on the brokers together or not at all.

The group's coordinator takes the positions of a present member only, and trackers read what is committed: a process
that stood still anywhere on the way has started nothing, or what it started is nobody else's. *Concurrency.* On the
loop; one claim at a time, in a producer and thread of its own beside that of the other markers, which count at once.
*Cancellation.* A claim that was begun goes on. *Failure.* What is not known to be written or undone is settled by a new
producer of the same id, before anything else is claimed.
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
from broker.driver import lease_time
from broker_kafka.cluster.connection import Connection
from broker_kafka.errors import GENERATION_LOST, kafka_error
from broker_kafka.queue.consumer.start_builder import Starting, Taken
from broker_kafka.queue.consumer.unknown_commits import CommitDoubts
from broker_kafka.queue.markers.commit_text import commit_text, writer_in
from broker_kafka.queue.markers.fenced_writer import Doubtful, Entry, FencedWriter, NotWritten, Positions
from broker_kafka.queue.markers.marker_producer import explained, packed
from broker_kafka.records import KafkaRecordSource

__all__ = ["Claimed", "StartTransactions"]

_PAUSE: Final = 0.1
"""Seconds until a member that is not of the present generation looks whether it still has its partitions."""
_STOP: Final = 3.0


class Claimed(NamedTuple):
    """:ivar positions: what lies below them is started, and the group's positions are these.
    :ivar begun: the `lease_time` at which the STARTs were made, none of which is older.
    :ivar too_large: partitions whose next START the marker topic does not take.
    """

    positions: Mapping[TopicPartition, int]
    begun: float
    too_large: Mapping[TopicPartition, BrokerError] = MappingProxyType({})


_NOTHING: Final = Claimed({}, 0.0)


class StartTransactions:
    """:param queue: the subscription.
    :param marker: the topic and key of markers.
    :param doubts: told of what is being committed.
    :param lasts: seconds after which the brokers undo what was not committed; so long may a process that died hold up
        the trackers, and who gets its partitions.
    :param together: the most markers of one record.
    """

    def __init__(
        self,
        connection: Connection,
        queue: str,
        marker: Entry,
        starting: Starting,
        doubts: CommitDoubts,
        *,
        lasts: float,
        together: int,
    ) -> None:
        self._connection = connection
        self._marker: Final = marker
        self._id: Final = f"{queue}.start-{uuid4().hex}"
        """Also stored with each position, to tell ours from those of who came after us."""
        self._starting: Final = starting
        self._together: Final = together
        self._timeout_ms: Final = min(connection.settings.transaction_timeout_ms, max(1_000, int(1000 * lasts)))
        self._loop = asyncio.get_running_loop()
        self._writer: FencedWriter | None = None
        self._doubted = _NOTHING
        """What may have been written."""
        self._doubts: Final = doubts
        self._most: int | None = None
        """How much is claimed together, after something was refused."""
        self._task: asyncio.Task[Claimed] | None = None

    async def open(self) -> None:
        """Connect the producer, which settles what an earlier one has left.

        :raises BrokerError: no coordinator could be reached, or the id is not ours to use.
        """
        writer = FencedWriter(self._connection, self._id, self._timeout_ms)
        try:
            await writer.start()
        except BaseException:
            await writer.stop(_STOP)
            raise
        self._writer = writer

    def claim(self, member: KafkaRecordSource, present: Callable[[], Sequence[Taken]]) -> asyncio.Task[Claimed]:
        """The claim that is under way or whose outcome nobody took yet, else a new one.

        It raises BrokerError if nothing was claimed, and may be tried again.

        :param present: what was taken and is still ours, in the order of each partition.
        """
        if self._task is None:
            self._task = self._loop.create_task(self._claim(member, present), name="broker-kafka-claim")
        return self._task

    @property
    def is_open(self) -> bool:
        """Whether there is a claim whose outcome is not known, or nobody took."""
        return self._task is not None or bool(self._doubted.positions)

    def take_outcome(self, claim: asyncio.Task[Claimed]) -> Claimed:
        """That of a claim that is done."""
        self._task = None
        return claim.result()

    async def close(self) -> None:
        """Let go of the producer; what it did not commit the brokers undo."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # nobody asks for it any more
        await self._drop_writer()

    async def _claim(self, member: KafkaRecordSource, present: Callable[[], Sequence[Taken]]) -> Claimed:
        if self._writer is None:
            await self.open()
        if self._doubted.positions:
            return await self._settle_doubt(member)
        # Before it is known what is ours: a partition that goes and comes back meanwhile is of another generation.
        metadata, member_id = await asyncio.gather(member.group_metadata(), member.member_id())
        taken = present()[: self._most]
        writer = self._writer
        if not taken or writer is None:
            return _NOTHING
        claimed = Claimed({each.place: each.offset + 1 for each in taken}, lease_time())
        started = self._starting.starts([each for each in taken if each.hold is not None], int(1000 * time()))
        records, _ = packed([each.placed for each in started], self._together)
        entries = [self._marker._replace(value=data, partition=partition) for partition, data, _ in records]
        text = commit_text(member_id, self._id, keys=self._starting.keys)
        offsets = [NativePartition(*place, at, metadata=text) for place, at in claimed.positions.items()]
        self._doubts.asked(claimed.positions, text)
        try:
            await writer.write(entries, Positions(offsets, metadata))
        except NotWritten as error:
            found = None if error.native is None else kafka_error(error.native)
            if found is not None and found.code() in GENERATION_LOST:
                await asyncio.sleep(_PAUSE)
                return _NOTHING
            if large := self._judge(taken, entries, error.refused):
                return large
            raise
        except BrokerError as error:
            # Doubtful, or its thread has failed.
            self._doubted = claimed
            await self._drop_writer()
            if isinstance(error, Doubtful) and (large := self._judge(taken, entries, error.refused)):
                return large
            raise
        self._doubts.answered(claimed.positions, text)
        self._most = None if self._most is None else 2 * self._most
        return claimed

    async def _settle_doubt(self, member: KafkaRecordSource) -> Claimed:
        """By now all of it is written, or nothing ever will be: the group's positions tell, where they are ours yet."""
        doubted = self._doubted
        found = await member.stored(list(doubted.positions))
        ours: dict[TopicPartition, int] = {}
        for place, at in doubted.positions.items():
            stored = found[place]
            if stored is not None and stored.offset == at and writer_in(stored.metadata) == self._id:
                ours[place] = at
        self._doubted = _NOTHING
        return Claimed(ours, doubted.begun)

    def _judge(
        self, taken: Sequence[Taken], entries: Sequence[Entry], refused: Mapping[int, BrokerError]
    ) -> Claimed | None:
        """A broker refuses all for one of them: look at fewer together, until it is clear which it is.

        :raises BrokerError: it is clear, and nothing of the kind will be taken.
        """
        lasting = [error for error in refused.values() if not error.retriable]
        if not lasting:
            return None
        if len(taken) > 1:
            self._most = max(1, len(taken) // 4)
            return None
        error = explained(lasting[0], self._marker.topic, len(entries[0].value or b""))
        if isinstance(error, MessageTooLarge):
            return Claimed({}, 0.0, {taken[0].place: error})
        raise error

    async def _drop_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.stop(_STOP)
