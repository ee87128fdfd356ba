"""The Record family: a group whose members own partitions.

A ticker keeps pins alive, receives the announcements of other members and moves partitions; everything else happens in
`fetch`. A claim is assigned once the server pins it: the partitions of a dead member become free when its pins expire.
Records are returned only while their partition is certainly ours. `interrupt` ends a fetch; its arrivals go to the next
fetch, unless the partition is released first, in which case the new owner reads them. The server confirms commits.
After a reconnect each partition that is still ours is read on from its position.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Final

from broker import BrokerError, Closed, NotFound, Record, TopicNotFound, TopicPartition
from broker.driver import RecordListener, Start, Waker, logger, not_assigned, pause
from broker_jetstream import subscriptions
from broker_jetstream.assigned_partition import AssignedPartition
from broker_jetstream.connection import Connection
from broker_jetstream.log_reader import JetStreamLogReader
from broker_jetstream.membership import Membership, plan
from broker_jetstream.names import group_consumer
from broker_jetstream.streams import Layout, Layouts
from broker_jetstream.subscriptions import committed_position, ensure_group

__all__ = ["JetStreamRecordSource"]

CLOSE_SECONDS: Final = 1.0
HELLO_SECONDS: Final = 0.05
"""How long a new member waits for announcements before it claims partitions."""
REVOKE_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 10.0
"""How often topics that match a pattern are looked for."""
FIRST_PIN_SECONDS: Final = 1.0
"""How long `open` waits for pins that are free."""


class _Topic:
    """One topic: the member's partitions, and the members that share them."""

    def __init__(self, layout: Layout, membership: Membership) -> None:
        self.layout = layout
        self.membership = membership
        self.owned: dict[int, AssignedPartition] = {}


class JetStreamRecordSource:
    """Implements `RecordSource`.

    :param find_topics: returns the topics that match a pattern; None if the topics are named.
    """

    def __init__(
        self,
        connection: Connection,
        layouts: Layouts,
        group: str,
        start: Start,
        listener: RecordListener,
        *,
        ephemeral: bool,
        whole: Collection[str] = (),
        on_close: Callable[[JetStreamRecordSource], object],
        find_topics: Callable[[], Awaitable[Collection[str]]] | None = None,
    ) -> None:
        self._connection = connection
        self._layouts = layouts
        self._group = group
        self._start: Start = start
        self._whole = frozenset(whole)
        self._find_topics = find_topics
        self._look_at = 0.0
        self._listener = listener
        self._on_close = on_close
        self._ephemeral = ephemeral
        self._log = JetStreamLogReader(connection, layouts)
        self._topics: dict[str, _Topic] = {}
        self._paused: set[TopicPartition] = set()
        self._waker = Waker()
        self._fetching = self._interrupted = self._closed = False
        self._failure: BrokerError | None = None
        self._turn = 0
        self._ticker: asyncio.Task[None] | None = None
        self._wake_ticker = asyncio.Event()
        self._remove_callback = connection.on_connected(self._reconnected)

    async def open(self, topics: Sequence[str]) -> None:
        """Create missing durables, join the group and claim a share.

        :raises TopicNotFound: one of the topics does not exist.
        """
        if self._find_topics is not None:
            topics = sorted(await self._find_topics())
            self._look_at = time.monotonic() + LOOK_SECONDS
        for name in dict.fromkeys(topics):
            try:
                await self._join(name, "earliest" if name in self._whole else self._start)
            except TopicNotFound:
                # Deleted since it was found.
                if self._find_topics is None:
                    raise
        # Members answer a hello at once, so a short silence means that there are none.
        await asyncio.sleep(HELLO_SECONDS)
        await self._rebalance()
        deadline = time.monotonic() + FIRST_PIN_SECONDS
        while (
            any(partition.is_pending for partition in self._unreported()) and (left := deadline - time.monotonic()) > 0
        ):
            await self._wait(left)
        self._report_assigned()
        self._ticker = asyncio.get_running_loop().create_task(self._tick(), name="broker-jetstream-group")

    async def _join(self, name: str, start: Start) -> None:
        layout = await self._layouts.find(name, fresh=True)
        await ensure_group(self._connection, self._log, layout, self._group, start, ephemeral=self._ephemeral)
        encoded = group_consumer(self._group, 0)[:-2]
        membership = Membership(self._connection, layout.stream, encoded, self._wake_ticker.set)
        await membership.join()
        self._topics[name] = _Topic(layout, membership)

    async def _look_for_topics(self, find: Callable[[], Awaitable[Collection[str]]]) -> None:
        """Join the group on new topics that match, and forget deleted ones."""
        found = set(await find())
        for name in sorted(self._topics.keys() - found):
            topic = self._topics.pop(name)
            for partition in topic.owned.values():
                partition.claimed = False
                if partition.reported:
                    self._listener.lost([partition.topic_partition])
            await topic.membership.leave()
        new = sorted(found - self._topics.keys())
        for name in new:
            try:
                # What is appended to a new topic before it is found is not to be missed.
                await self._join(name, "earliest" if self._start == "latest" else self._start)
            except BrokerError as error:
                logger.warning("Group %r does not read topic %r, which matches: %s", self._group, name, error)
        self._look_at = time.monotonic() + LOOK_SECONDS
        if new:
            await asyncio.sleep(HELLO_SECONDS)

    # Fetching.

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        self._check_open()
        self._fetching = True
        deadline = time.monotonic() + wait
        try:
            while True:
                if self._failure is not None:
                    failure, self._failure = self._failure, None
                    raise failure
                records = await self._take(max_records, max_bytes)
                if records or self._interrupted:
                    return records
                left = deadline - time.monotonic()
                if left <= 0:
                    if not self._connection.connected:
                        raise self._connection.down_error()
                    return records
                await self._wait(left)
                self._check_open()
        finally:
            self._fetching = self._interrupted = False

    async def _take(self, max_records: int, max_bytes: int) -> list[Record[Any]]:
        self._report_assigned()
        records: list[Record[Any]] = []
        active = [partition for partition in self._partitions() if partition.claimed and not partition.paused]
        if not active:
            return records
        share = max(1, max_records // len(active))
        for partition in active:
            await partition.request(share, max_bytes // len(active))
        self._turn += 1
        first = self._turn % len(active)
        room, left = max_bytes, max_records
        # Start at another partition each time, so a full one does not starve the others.
        for partition in active[first:] + active[:first]:
            if left <= 0 or (records and room <= 0):
                break
            if not partition.buffered or not partition.reported or not await partition.verify() or partition.paused:
                continue
            before = len(records)
            room -= partition.take(left, room, records)
            left -= len(records) - before
        return records

    async def _wait(self, seconds: float) -> None:
        if any(
            partition.buffered and partition.proven and partition.reported and not partition.paused
            for partition in self._partitions()
        ):
            # Records arrived before this wait.
            await asyncio.sleep(0)
            return
        await self._waker.wait(seconds)

    def _partition_changed(self) -> None:
        """The state of a partition changed."""
        self._waker.wake()
        if self._unreported():
            self._wake_ticker.set()

    def interrupt(self) -> None:
        self._interrupted = self._fetching
        self._waker.wake()

    def _partitions(self) -> list[AssignedPartition]:
        return [partition for topic in self._topics.values() for partition in topic.owned.values()]

    def _owned(self, topic_partition: TopicPartition) -> AssignedPartition:
        """:raises LeaseLost: the partition is not assigned to this member."""
        partition = self._find(topic_partition)
        if partition is None:
            raise not_assigned(topic_partition, self._group, self.assignment())
        return partition

    def _find(self, topic_partition: TopicPartition) -> AssignedPartition | None:
        topic = self._topics.get(topic_partition.topic)
        partition = topic.owned.get(topic_partition.partition) if topic is not None else None
        return partition if partition is not None and partition.claimed else None

    # The group.

    async def _tick(self) -> None:
        interval = self._connection.settings.owner_timeout / 4
        due = time.monotonic()
        while True:
            await pause(max(0.0, due - time.monotonic()), self._wake_ticker)
            self._wake_ticker.clear()
            regular = time.monotonic() >= due
            if regular:
                due = time.monotonic() + interval
            if not self._connection.connected:
                continue
            try:
                if self._find_topics is not None and time.monotonic() >= self._look_at:
                    await self._look_for_topics(self._find_topics)
                if regular:
                    for partition in self._partitions():
                        await partition.keep_alive()
                await self._rebalance()
                for topic in tuple(self._topics.values()):
                    if regular or topic.membership.take_greeting():
                        await topic.membership.announce()
            except BrokerError as error:
                logger.debug("Group %r: %s", self._group, error)
            self._waker.wake()

    def _reconnected(self) -> None:
        for topic in self._topics.values():
            topic.membership.reset_silence()
        self._wake_ticker.set()
        self._waker.wake()

    async def _rebalance(self) -> None:
        for name, topic in tuple(self._topics.items()):
            membership, owned, layout = topic.membership, topic.owned, topic.layout
            for number in membership.contested(owned, [number for number, each in owned.items() if each.pinned]):
                self._lost(owned[number])
            surplus = plan(membership.id, owned, membership.others(), layout.partitions, name).release
            for number in {*membership.pinned_elsewhere(owned), *surplus}:
                # A member that was cut off for too long must report a loss, not a release.
                if (partition := owned.get(number)) is not None:
                    await partition.verify()
            step = plan(membership.id, owned, membership.others(), layout.partitions, name)
            # Partitions pinned elsewhere were verified above.
            if leaving := set(step.release) - set(membership.pinned_elsewhere(owned)):
                await self._release([TopicPartition(name, number) for number in sorted(leaving)])
            if step.claim:
                for number in step.claim:
                    partition = AssignedPartition(
                        self._connection,
                        layout,
                        number,
                        group_consumer(self._group, number),
                        self._partition_changed,
                        self._lost,
                    )
                    partition.paused = TopicPartition(name, number) in self._paused
                    owned[number] = partition
                    await partition.claim()
            await membership.update(tuple(owned), [number for number, each in owned.items() if each.pinned])
        self._report_assigned()

    def _unreported(self) -> list[AssignedPartition]:
        return [partition for partition in self._partitions() if partition.claimed and not partition.reported]

    def _report_assigned(self) -> None:
        """Report assigned partitions: all in one call, unless some stay pending for longer than a pin lasts."""
        unreported = self._unreported()
        ready = [partition for partition in unreported if partition.ready]
        if len(ready) < len(unreported):
            patience = time.monotonic() - 1.5 * self._connection.settings.owner_timeout
            ready = [partition for partition in ready if partition.claimed_at < patience]
        if ready:
            for partition in ready:
                partition.reported = True
            self._listener.assigned([partition.topic_partition for partition in ready])
            self._waker.wake()

    async def _release(self, topic_partitions: Sequence[TopicPartition]) -> None:
        """Release partitions in order: stop returning records, let the core commit, then unpin."""
        leaving = [
            partition for topic_partition in topic_partitions if (partition := self._find(topic_partition)) is not None
        ]
        for partition in leaving:
            partition.paused = True
        deadline = asyncio.get_running_loop().time() + REVOKE_SECONDS
        if reported := [partition.topic_partition for partition in leaving if partition.reported]:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._listener.revoking(reported, deadline)
            except TimeoutError:
                logger.debug("Group %r: the commit before a release timed out", self._group)
        for topic_partition in topic_partitions:
            if (topic := self._topics.get(topic_partition.topic)) is not None:
                topic.owned.pop(topic_partition.partition, None)
        for partition in leaving:
            await partition.release()

    def _lost(self, partition: AssignedPartition) -> None:
        """Another member owns the partition already."""
        topic = self._topics.get(partition.layout.topic)
        if topic is not None and topic.owned.get(partition.number) is partition:
            del topic.owned[partition.number]
            partition.claimed = False
            if isinstance(partition.failure, NotFound):
                if self._find_topics is None:
                    self._failure = partition.failure
                else:
                    # A deleted topic that matched is no error.
                    self._look_at = 0.0
            if partition.reported:
                self._listener.lost([partition.topic_partition])
            self._wake_ticker.set()
            self._waker.wake()

    # Positions.

    async def commit(self, positions: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, BrokerError | None]:
        self._check_open()
        topic_partitions = list(positions)
        results = await asyncio.gather(
            *(self._commit(topic_partition, positions[topic_partition]) for topic_partition in topic_partitions)
        )
        return dict(zip(topic_partitions, results, strict=True))

    async def _commit(self, topic_partition: TopicPartition, position: int) -> BrokerError | None:
        try:
            await self._owned(topic_partition).commit(position)
        except BrokerError as error:
            return error
        return None

    async def committed(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int | None]:
        self._check_open()
        found: dict[TopicPartition, int | None] = {}
        for topic_partition in partitions:
            layout = await self._layouts.find(topic_partition.topic)
            name = group_consumer(self._group, topic_partition.partition)
            what = f"Group {self._group!r} on topic {topic_partition.topic!r}"
            info = await subscriptions.info(self._connection, layout.stream, name, what)
            found[topic_partition] = committed_position(info)
        return found

    async def seek(self, positions: Mapping[TopicPartition, int | None]) -> None:
        self._check_open()
        for topic_partition, position in positions.items():
            partition = self._owned(topic_partition)
            if position is not None:
                await partition.check_bounds(position)
        for topic_partition, position in positions.items():
            await self._owned(topic_partition).seek(position)

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self._paused.update(partitions)
        self._set_paused(partitions, paused=True)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self._paused.difference_update(partitions)
        self._set_paused(partitions, paused=False)
        self._waker.wake()

    def _set_paused(self, topic_partitions: Sequence[TopicPartition], *, paused: bool) -> None:
        for topic_partition in topic_partitions:
            partition = self._find(topic_partition)
            if partition is not None:
                partition.paused = paused

    def assignment(self) -> Sequence[TopicPartition]:
        return sorted(partition.topic_partition for partition in self._partitions() if partition.reported)

    # Closing.

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._remove_callback()
        self._waker.wake()
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.wait((self._ticker,))
        try:
            if not self._connection.closed:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._leave_group()
        except (BrokerError, TimeoutError) as error:
            logger.debug("Leaving group %r: %s", self._group, error)
        finally:
            self._on_close(self)

    async def _leave_group(self) -> None:
        await asyncio.gather(*(self._leave_topic(topic) for topic in self._topics.values()))
        if self._connection.connected:
            await self._connection.flush()

    async def _leave_topic(self, topic: _Topic) -> None:
        try:
            await asyncio.gather(*(partition.release() for partition in topic.owned.values()))
            topic.owned.clear()
            await topic.membership.update((), ())
        finally:
            # Also when the time is over: the connection would keep its listener.
            async with asyncio.timeout(CLOSE_SECONDS):
                await topic.membership.leave()
        if self._ephemeral:
            for number in range(topic.layout.partitions):
                await subscriptions.delete(
                    self._connection,
                    topic.layout.stream,
                    group_consumer(self._group, number),
                    f"Group {self._group!r}",
                )

    def _check_open(self) -> None:
        if self._closed or self._connection.closed:
            raise Closed(f"The member of group {self._group!r} was closed")
