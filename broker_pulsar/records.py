"""The Record family: one member of a group, which is a Failover subscription with a consumer per partition.

The broker assigns partitions and notifies its clients, but pulsar-client does not expose that. So the member reads the
broker's statistics every `rebalance_interval`. A newly assigned partition starts at the committed position. Each
assignment is marked in the properties of the subscription, so a member that was frozen or cut off sees that another has
owned its partition, also if it is free again. In a copartitioned group the next owner waits until the last one has
marked its release, or is no longer connected.

*Concurrency.* Everything runs on the loop; each consumer has a thread that only receives. *Order.* Records of a
partition come in order, each once per assignment. *Commits* are cumulative acks, which the client sends later and the
broker does not confirm; a commit for a partition of another member fails here. *Seeks* move the group's cursor on the
broker. *Failure.* The client reconnects by itself, and redelivered records are dropped. A deleted topic ends the member
with TopicNotFound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from secrets import token_hex
from typing import Any, Final

from broker import (
    BrokerError,
    ConfigurationError,
    NotAuthorized,
    NotFound,
    Record,
    SettleError,
    TopicNotFound,
    TopicPartition,
    TopicPattern,
)
from broker.driver import Backoff, Ephemeral, RecordListener, RecordSubscription, Start, logger, not_assigned, seek_each
from broker_pulsar import subscriptions
from broker_pulsar.assigned_partition import (
    AssignedPartition,
    Change,
    PartitionState,
    partition_state,
    take_records,
)
from broker_pulsar.chunked_messages import start_id
from broker_pulsar.client import Message as NativeMessage
from broker_pulsar.client import pulsar, seek
from broker_pulsar.connection import Connection
from broker_pulsar.errors import seek_error, translate
from broker_pulsar.log_stats import backlog, committed_position, cursor_position, first_entry, log_bounds
from broker_pulsar.names import TopicPath, subscription_name
from broker_pulsar.receiving import Receiver, ReceivingSource, batch_policy

__all__ = ["PulsarRecordSource"]

_BUFFERED: Final = 1000
"""Buffered records of a partition above which none are received."""
_REVOKE_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 10.0
"""How often topics that match a pattern are looked for."""
_SEEK_SECONDS: Final = 15.0
"""How long a seek is repeated."""
_DEAD_AFTER: Final = 60.0
"""Seconds within which a broker, by default, notices the death of a consumer."""


class PulsarRecordSource(ReceivingSource):
    """Implements `RecordSource`.

    :param list_topics: returns the topics of the namespace, for a pattern.
    """

    def __init__(
        self,
        connection: Connection,
        subscription: RecordSubscription,
        listener: RecordListener,
        list_topics: Callable[[], Awaitable[Sequence[str]]],
        *,
        on_close: Callable[[ReceivingSource], object],
    ) -> None:
        self.group: Final = subscription_name(subscription.group)
        super().__init__(connection, f"Group {self.group!r}", on_close)
        self._subscription = subscription
        self._listener = listener
        self._ephemeral = isinstance(subscription.group, Ephemeral)
        # The broker assigns partitions in the order of consumer names.
        self._consumer_name = f"anybroker-{token_hex(6)}"
        self._partitions: dict[TopicPartition, AssignedPartition] = {}
        self._by_receiver: dict[Receiver, AssignedPartition] = {}
        self._order: list[AssignedPartition] = []
        """The partitions, least recently served first."""
        self._list_topics = list_topics
        self._topics: list[str] = []
        self._look_at = 0.0

    async def open(self) -> None:
        """Join the group.

        :raises TopicNotFound: one of the topics does not exist.
        :raises ConfigurationError: several topics are copartitioned, and one has no partitions.
        """
        pattern = self._subscription.pattern
        if self._subscription.copartitioned and len(set(self._subscription.topics)) > 1:
            await self._check_partitioned()
        for topic in dict.fromkeys(self._subscription.topics if pattern is None else await self._find(pattern)):
            start = "earliest" if topic in self._subscription.whole else self._subscription.start
            try:
                await self._join_topic(topic, start)
            except TopicNotFound:
                # Deleted since it was found.
                if pattern is None:
                    raise
                await self._forget_topic(topic)
        await self._check_assignment()
        self._unwatch.append(self._connection.monitor.add(self._is_connected))
        self._tasks.spawn(self._poll_assignment())

    async def _check_partitioned(self) -> None:
        for topic in self._subscription.topics:
            if not await self._connection.partitions(topic):
                # The broker chooses the consumer of such a topic by a hash of its name.
                raise ConfigurationError(
                    f"Group {self.group!r} is copartitioned, and topic {topic!r} is not partitioned",
                    advice="Create the topic with ensure_topic(..., partitions=), or omit copartitioned",
                )

    async def _join_topic(self, topic: str, start: Start) -> None:
        # First, so that a close deletes an ephemeral subscription.
        self._topics.append(topic)
        create = subscriptions.create_ephemeral if self._ephemeral else subscriptions.create
        await create(self._connection, topic, self.group, start)
        logs = await self._connection.logs(topic)
        await asyncio.gather(*(self._join(topic, number, log) for number, log in enumerate(logs)))
        if self._ephemeral:
            self._unwatch.append(self._connection.cleanup.watch(topic, self.group))

    # The topics of a pattern.

    async def _find(self, pattern: TopicPattern) -> list[str]:
        found = sorted(filter(pattern.matches, await self._list_topics()))
        self._look_at = self._loop.time() + _LOOK_SECONDS
        return found

    async def _look_for_topics(self, pattern: TopicPattern) -> None:
        """Join the group on new topics that match, and forget deleted ones."""
        found = await self._find(pattern)
        for topic in set(self._topics).difference(found):
            await self._forget_topic(topic)
        for topic in found:
            if topic in self._topics:
                continue
            start = self._subscription.start
            try:
                # What is published to a new topic before it is found is not to be missed.
                await self._join_topic(topic, "earliest" if start == "latest" else start)
            except BrokerError as error:
                logger.warning("Group %r does not read topic %r, which matches: %s", self.group, topic, error)
                await self._forget_topic(topic)

    async def _forget_topic(self, topic: str) -> None:
        if topic in self._topics:
            self._topics.remove(topic)
        gone = [partition for place, partition in self._partitions.items() if place.topic == topic]
        for partition in gone:
            del self._partitions[partition.topic_partition], self._by_receiver[partition.receiver]
            self._order.remove(partition)
        if lost := [partition for partition in gone if partition.owned]:
            self._lose(lost)
        await asyncio.gather(*(partition.receiver.close(self._connection) for partition in gone))

    def failed(self, receiver: Receiver, error: BrokerError) -> None:
        if self._subscription.pattern is None:
            super().failed(receiver, error)
        elif not self._closed and (partition := self._by_receiver.get(receiver)) is not None:
            self._tasks.spawn(self._explain_end(partition.topic_partition.topic, error))

    async def _explain_end(self, topic: str, error: BrokerError) -> None:
        """A consumer has ended: a deleted topic is forgotten, anything else ends the member."""
        try:
            await self._connection.partitions(topic, once=True)
        except NotFound:
            self._look_at = 0.0
            return
        except BrokerError:
            pass
        await self._explain(error)

    # Fetching.

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        def take() -> list[Record[Any]]:
            records, served = take_records(self._order, max_records, max_bytes)
            for partition in served:
                self._refill(partition)
            return records

        return await self._wait_for(take, wait)

    def _request(self) -> None:
        """`_refill` requests records as soon as there is room for them."""

    def _refill(self, partition: AssignedPartition) -> None:
        # Records that arrive while the partition is not ours, or is changing, are dropped; do not request them.
        if partition.owned and not partition.changing and len(partition.buffer) < _BUFFERED:
            partition.receiver.request()

    def _is_connected(self) -> bool:
        return all(partition.receiver.consumer.is_connected() for partition in self._order)

    async def _check_exists(self) -> None:
        for topic in tuple(self._topics):
            try:
                await self._connection.partitions(topic, once=True)
            except NotFound:
                if self._subscription.pattern is None:
                    raise
                self._look_at = 0.0

    def arrived(self, receiver: Receiver, messages: Sequence[NativeMessage]) -> None:
        """Implements `ReceiverListener`."""
        partition = self._by_receiver.get(receiver)
        if partition is None or self._closed:
            return
        try:
            partition.arrived(messages)
        except BrokerError as error:
            self._fail(error)
            return
        self._refill(partition)
        self._waker.wake()

    # Positions.

    async def commit(self, positions: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, BrokerError | None]:
        self._check_open()
        outcomes: dict[TopicPartition, BrokerError | None] = {}
        for topic_partition, position in positions.items():
            partition = self._partitions.get(topic_partition)
            if partition is None or not partition.owned:
                outcomes[topic_partition] = not_assigned(topic_partition, self.group, self.assignment())
                continue
            outcomes[topic_partition] = None
            if partition.cursor is not None and position <= partition.cursor:
                continue
            try:
                found = partition.commit_id(position)
                if found is not None:
                    partition.receiver.consumer.acknowledge_cumulative(found)
                partition.committed = partition.cursor = position
                self._connection.committed[topic_partition.topic, topic_partition.partition, self.group] = position
            except Exception as error:
                outcomes[topic_partition] = SettleError(
                    f"Group {self.group!r}: the client failed to commit: {error}", native=error
                )
        return outcomes

    async def committed(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int | None]:
        self._check_open()
        found: dict[TopicPartition, int | None] = {}
        for topic_partition in partitions:
            partition = self._partitions.get(topic_partition)
            if partition is not None and partition.owned:
                found[topic_partition] = partition.committed
                continue
            found[topic_partition] = await self._cursor(await self._connection.log(*topic_partition))
        return found

    async def seek(self, positions: Mapping[TopicPartition, int | None]) -> None:
        self._check_open()
        await self._until_closed(self._seek(positions))

    async def _seek(self, positions: Mapping[TopicPartition, int | None]) -> None:
        targets: dict[AssignedPartition, int] = {}
        for topic_partition, position in positions.items():
            partition = self._partitions.get(topic_partition)
            if partition is None or not partition.owned:
                raise not_assigned(topic_partition, self.group, self.assignment())
            log = await self._connection.log(*topic_partition)
            targets[partition] = partition.target(position, await log_bounds(self._connection, log))
        by_place = {partition.topic_partition: partition for partition in targets}

        async def move(place: TopicPartition) -> None:
            await self._seek_partition(by_place[place], targets[by_place[place]])

        moving = asyncio.ensure_future(seek_each(by_place, move))
        try:
            # Shielded: after half a seek, old and new records could not be distinguished.
            await asyncio.shield(moving)
        except asyncio.CancelledError:
            moving.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    async def _seek_partition(self, partition: AssignedPartition, position: int) -> None:
        receiver = partition.receiver
        partition.changing = True
        restart: int = 0
        expected: int | None = 0
        try:
            target = await start_id(self._connection, partition.topic_partition, position)
            await self._move_cursor(partition, target)
            partition.cursor, partition.acked = position, 0
            restart, expected = position, None
        except BrokerError:
            # The position is unknown; have all uncommitted records redelivered.
            partition.cursor = None
            with suppress(BrokerError):
                await receiver.call(receiver.consumer.redeliver_unacknowledged_messages)
            raise
        finally:
            partition.changing = False
            partition.restart(restart, expected=expected)
            self._refill(partition)

    async def _move_cursor(self, partition: AssignedPartition, target: Any) -> None:
        """Seek, again while the broker moves the cursor for another client, which also disconnects our consumer.

        :raises LeaseLost: the partition went to another member meanwhile.
        """
        receiver, owned = partition.receiver, partition.owned
        backoff, until = Backoff(0.05, 1.0), self._loop.time() + _SEEK_SECONDS
        while True:
            try:
                await receiver.call(partial(seek, receiver.consumer, target, receiver.is_open))
                return
            except BrokerError as error:
                failure = seek_error(error)
                if self._closed or not failure.retriable or self._loop.time() >= until:
                    raise failure from error
            await asyncio.sleep(backoff.next())
            if partition.owned is not owned:
                raise not_assigned(partition.topic_partition, self.group, self.assignment())

    async def _cursor(self, log: TopicPath) -> int | None:
        """The committed position; None if nothing of its ledger is committed."""
        return committed_position(await self._connection.internal_stats(log), self.group)

    # Partitions.

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        for topic_partition in partitions:
            if partition := self._partitions.get(TopicPartition._make(topic_partition)):
                partition.paused = True

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        for topic_partition in partitions:
            if partition := self._partitions.get(TopicPartition._make(topic_partition)):
                partition.paused = False
        self._waker.wake()

    def assignment(self) -> Sequence[TopicPartition]:
        return sorted(topic_partition for topic_partition, partition in self._partitions.items() if partition.owned)

    async def is_idle(self, seconds: float) -> bool:
        """False while a partition that may still deliver to us has a backlog: one of a member that may have died, or
        one that was just assigned."""
        if self._closed or seconds >= _DEAD_AFTER:
            return True
        try:
            for topic in tuple(self._topics):
                stats = await self._connection.stats(topic, once=True)
                coming = [
                    each for number, each in stats.items() if not self._is_receiving(TopicPartition(topic, number))
                ]
                if any(backlog(each, self.group) for each in coming):
                    return False
        except BrokerError:
            return False
        return True

    def _is_receiving(self, topic_partition: TopicPartition) -> bool:
        partition = self._partitions.get(topic_partition)
        return partition is not None and partition.owned and partition.has_received

    async def _join(self, topic: str, number: int, log: TopicPath) -> None:
        topic_partition, what = TopicPartition(topic, number), f"Group {self.group!r} of {topic}[{number}]"
        start = await self._cursor(log)
        client, settings = self._connection.client, self._connection.settings
        try:
            consumer = await self._connection.create(
                lambda: client.subscribe(
                    log.url,
                    self.group,
                    consumer_type=pulsar.ConsumerType.Failover,
                    consumer_name=self._consumer_name,
                    initial_position=pulsar.InitialPosition.Earliest,
                    receiver_queue_size=settings.receiver_queue,
                    batch_receive_policy=batch_policy(settings.receiver_queue),
                    batch_index_ack_enabled=True,
                    start_message_id_inclusive=True,
                ),
                lambda consumer: consumer.close(),
            )
        except Exception as error:
            raise translate(error, what) from error
        receiver = Receiver(consumer, self, what)
        partition = AssignedPartition(topic_partition, self._consumer_name, receiver, start)
        self._by_receiver[receiver] = self._partitions[topic_partition] = partition
        self._order.append(partition)
        if self._closed:
            await receiver.close(self._connection)

    async def _poll_assignment(self) -> None:
        while not self._closed:
            await asyncio.sleep(self._connection.settings.rebalance_interval)
            pattern = self._subscription.pattern
            try:
                if pattern is not None and self._loop.time() >= self._look_at:
                    await self._look_for_topics(pattern)
                await self._check_assignment(once=True)
            except NotFound as error:
                if pattern is None:
                    self._fail(error)
                    return
                self._look_at = 0.0
            except BrokerError:
                continue  # The broker is down or busy; the assignment is unchanged.

    async def _check_assignment(self, *, once: bool = False) -> None:
        """Read the broker's assignment and apply changes."""
        changes: dict[Change, list[tuple[AssignedPartition, PartitionState]]] = {change: [] for change in Change}
        stalled: list[AssignedPartition] = []
        unreleased: list[AssignedPartition] = []
        for topic in tuple(self._topics):
            for place, state in (await self._states(topic, once=once)).items():
                partition = self._partitions.get(place)
                if partition is None:
                    await self._join(topic, place.partition, self._connection.topic(topic).partition(place.partition))
                    continue
                change = partition.detect_change(state)
                if change is Change.ASSIGNED and not self._is_free(state):
                    continue
                if self._subscription.copartitioned and (
                    change in {Change.REVOKED, Change.LOST} or partition.is_unreleased(state)
                ):
                    unreleased.append(partition)
                changes[change].append((partition, state))
                if change is Change.NONE and partition.owned and state.active:
                    partition.connection = state.connection
                    if partition.needs_redelivery_request(state.sent):
                        stalled.append(partition)
        if self._closed:
            return
        if changes[Change.LOST]:
            self._lose([partition for partition, _ in changes[Change.LOST]])
        if changes[Change.REVOKED]:
            await self._revoke([partition for partition, _ in changes[Change.REVOKED]])
        await asyncio.gather(*(self._mark_released(partition) for partition in unreleased))
        if changes[Change.ASSIGNED]:
            await self._take_over(changes[Change.ASSIGNED])
        await asyncio.gather(*(partition.request_redelivery() for partition in stalled))
        for partition in stalled:
            self._refill(partition)

    async def _states(self, topic: str, *, once: bool) -> dict[TopicPartition, PartitionState]:
        """The broker's view of our member's partitions of a topic."""
        stats = await self._connection.stats(topic, once=once)
        return {
            TopicPartition(topic, number): partition_state(each, self.group, self._consumer_name)
            for number, each in stats.items()
        }

    def _lose(self, partitions: Sequence[AssignedPartition]) -> None:
        for partition in partitions:
            partition.release()
        self._listener.lost([partition.topic_partition for partition in partitions])

    async def _revoke(self, partitions: Sequence[AssignedPartition]) -> None:
        for partition in partitions:
            partition.changing = True
        try:
            await self._listener.revoking(
                [partition.topic_partition for partition in partitions], self._loop.time() + _REVOKE_SECONDS
            )
        finally:
            for partition in partitions:
                partition.release()

    async def _take_over(self, found: Sequence[tuple[AssignedPartition, PartitionState]]) -> None:
        """Rewind newly assigned partitions to the committed position, and report them."""
        if any(state.others for _, state in found):
            # The former owner notices as late as we do, and may still commit.
            await asyncio.sleep(2 * self._connection.settings.rebalance_interval)
            found = await self._still_assigned([partition for partition, _ in found])
        await asyncio.gather(*(self._rewind(partition) for partition, _ in found))
        await asyncio.gather(*(self._mark_owned(partition, state) for partition, state in found))
        if self._closed:
            return
        for partition, state in found:
            partition.connection, partition.owned, partition.changing = state.connection, True, False
        self._listener.assigned([partition.topic_partition for partition, _ in found])
        for partition, _ in found:
            self._refill(partition)

    async def _still_assigned(
        self, partitions: Sequence[AssignedPartition]
    ) -> list[tuple[AssignedPartition, PartitionState]]:
        """Those of the partitions that no other member was assigned meanwhile, and their state now."""
        topics = {partition.topic_partition.topic for partition in partitions}
        states = {place: state for topic in topics for place, state in (await self._states(topic, once=True)).items()}
        now = [(partition, states[partition.topic_partition]) for partition in partitions]
        return [
            (partition, state)
            for partition, state in now
            if partition.detect_change(state) is Change.ASSIGNED and self._is_free(state)
        ]

    def _is_free(self, state: PartitionState) -> bool:
        """Whether we may take the partition over: in a copartitioned group no other member may still own it."""
        return not self._subscription.copartitioned or state.released

    async def _mark_owned(self, partition: AssignedPartition, state: PartitionState) -> None:
        """Tell a former owner that it has lost the partition, which it also sees when the partition is free again.

        :raises NotAuthorized: the group is copartitioned, and we may not say that the partition is ours.
        """
        log = await self._connection.log(*partition.topic_partition)
        try:
            partition.mark = await subscriptions.mark_owner(
                self._connection, log, self.group, self._consumer_name, state.properties
            )
        except NotAuthorized as error:
            if self._subscription.copartitioned:
                # Others could not see that the partition is ours: it is not handed over, and the member ends.
                self._fail(error)
                raise
            # Without the right a loss is noticed only while the new owner is there.
            logger.debug("Group %r: marking an owner: %s", self.group, error)
            partition.mark = state.owner

    async def _mark_released(self, partition: AssignedPartition) -> None:
        log = await self._connection.log(*partition.topic_partition)
        await subscriptions.mark_released(self._connection, log, self.group, partition.mark)

    async def _rewind(self, partition: AssignedPartition) -> None:
        receiver = partition.receiver
        # Wait for a running receive, so the statistics below include its records.
        await receiver.call(lambda: None)
        stats = await self._connection.internal_stats(await self._connection.log(*partition.topic_partition))
        partition.committed = partition.cursor = committed_position(stats, self.group)
        if partition.was_rewound(found := cursor_position(stats, self.group)):
            await self._seek_partition(partition, found)
            return
        position = partition.committed or 0
        partition.restart(position, expected=first_entry(stats, position))
        if partition.awaits_redelivery:
            await receiver.call(receiver.consumer.redeliver_unacknowledged_messages)

    # Closing.

    async def close(self) -> None:
        if self._closed:
            return
        self._stop()
        try:
            await asyncio.gather(*(receiver.close(self._connection) for receiver in self._by_receiver))
            if self._ephemeral:
                for topic in self._topics:
                    await subscriptions.delete_ephemeral(self._connection, topic, self.group)
        finally:
            for partition in self._partitions.values():
                partition.release()
            self._on_close(self)
