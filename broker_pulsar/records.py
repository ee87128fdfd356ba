"""The Record family: one member of a group, which is a Failover subscription with a consumer per partition.

The broker assigns partitions and notifies its clients, but pulsar-client does not expose that. So the member reads the
broker's statistics every `rebalance_interval`. A newly assigned partition starts at the committed position.

*Concurrency.* Everything runs on the loop; each consumer has a thread that only receives. *Order.* Records of a
partition come in order, each once per assignment. *Commits* are cumulative acks, which the client sends later and the
broker does not confirm; a commit for a partition of another member fails here. *Seeks* move the group's cursor on the
broker. *Failure.* The client reconnects by itself, and redelivered records are dropped. A deleted topic ends the member
with TopicNotFound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from secrets import token_hex
from typing import Any, Final

from broker import BrokerError, Closed, ConnectionFailed, NotFound, Record, SettleError, TopicPartition
from broker.driver import Ephemeral, RecordListener, RecordSubscription, Waker
from broker_pulsar import subscriptions
from broker_pulsar.assigned_partition import (
    AssignedPartition,
    not_assigned,
    request_redelivery,
    subscribe_partition,
    take_records,
)
from broker_pulsar.chunked_messages import start_id
from broker_pulsar.client import Message as NativeMessage
from broker_pulsar.connection import Connection
from broker_pulsar.log_stats import committed_position, cursor_position, first_entry, log_bounds
from broker_pulsar.membership import Change, PartitionState, backlog, detect_change, partition_state
from broker_pulsar.names import TopicPath, subscription_name
from broker_pulsar.receiving import Receiver

__all__ = ["PulsarRecordSource"]

_BUFFERED: Final = 1000
"""Buffered records of a partition above which none are received."""
_REVOKE_SECONDS: Final = 30.0
_DEAD_AFTER: Final = 60.0
"""Seconds within which a broker, by default, notices the death of a consumer."""


class PulsarRecordSource:
    """Implements `RecordSource`."""

    def __init__(
        self,
        connection: Connection,
        subscription: RecordSubscription,
        listener: RecordListener,
        *,
        on_close: Callable[[PulsarRecordSource], object],
    ) -> None:
        self._connection = connection
        self._subscription = subscription
        self._listener = listener
        self._on_close = on_close
        self._ephemeral = isinstance(subscription.group, Ephemeral)
        self.group: Final = subscription_name(subscription.group)
        self._member = token_hex(6)
        self._loop = asyncio.get_running_loop()
        self._partitions: dict[TopicPartition, AssignedPartition] = {}
        self._by_receiver: dict[Receiver, AssignedPartition] = {}
        self._order: list[AssignedPartition] = []
        """The partitions, least recently served first."""
        self._failure: BrokerError | None = None
        self._waker = Waker()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._unwatch: Callable[[], object] = lambda: None
        self._cleanup_handles: list[Callable[[], None]] = []
        self._interrupted = self._fetching = self._closed = False

    async def open(self) -> None:
        """Join the group.

        :raises TopicNotFound: one of the topics does not exist.
        """
        create = subscriptions.create_ephemeral if self._ephemeral else subscriptions.create
        for topic in dict.fromkeys(self._subscription.topics):
            start = "earliest" if topic in self._subscription.whole else self._subscription.start
            await create(self._connection, topic, self.group, start)
            logs = await self._connection.logs(topic)
            await asyncio.gather(*(self._join(topic, number, log) for number, log in enumerate(logs)))
            if self._ephemeral:
                self._cleanup_handles.append(self._connection.cleanup.watch(topic, self.group))
        await self._check_assignment()
        self._unwatch = self._connection.monitor.add(self._all_connected)
        self._start(self._poll_assignment())

    # -- fetching ------------------------------------------------------------------------------------------

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        self._check_open()
        self._fetching = True
        until = self._loop.time() + wait
        try:
            while True:
                taken, served = take_records(self._order, max_records, max_bytes)
                for partition in served:
                    self._refill(partition)
                if taken:
                    return taken
                if self._failure is not None:
                    raise self._failure
                if self._interrupted:
                    return []
                left = until - self._loop.time()
                if left <= 0:
                    if not self._all_connected():
                        await self._connection.partitions(self._subscription.topics[0], once=True)
                        raise ConnectionFailed(f"Group {self.group!r}: the connection to the broker is being restored")
                    return []
                await self._waker.wait(left)
                if self._closed:
                    return []
        finally:
            self._fetching = self._interrupted = False

    def interrupt(self) -> None:
        self._interrupted = self._fetching
        self._waker.wake()

    def _refill(self, partition: AssignedPartition) -> None:
        # Records that arrive while the partition is not ours, or is changing, are dropped; do not request them.
        if (
            partition.receiver is not None
            and partition.owned
            and not partition.changing
            and len(partition.buffer) < _BUFFERED
        ):
            partition.receiver.request()

    def _all_connected(self) -> bool:
        return all(
            partition.receiver is None or partition.receiver.consumer.is_connected() for partition in self._order
        )

    # -- ReceiverListener --------------------------------------------------------------------------------------

    def arrived(self, receiver: Receiver, messages: Sequence[NativeMessage]) -> None:
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

    def failed(self, receiver: Receiver, error: BrokerError) -> None:
        if not self._closed:
            self._start(self._explain(error))

    async def _explain(self, error: BrokerError) -> None:
        if isinstance(error, Closed):
            error = ConnectionFailed(f"Group {self.group!r}: the client closed a consumer", retriable=False)
        self._fail(await subscriptions.missing_topic(self._connection, self._subscription.topics) or error)

    def _fail(self, error: BrokerError) -> None:
        self._failure = self._failure or error
        self._waker.wake()

    # -- positions -----------------------------------------------------------------------------------------

    async def commit(self, positions: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, BrokerError | None]:
        self._check_open()
        outcomes: dict[TopicPartition, BrokerError | None] = {}
        for topic_partition, position in positions.items():
            partition = self._partitions.get(topic_partition)
            if partition is None or not partition.owned:
                outcomes[topic_partition] = not_assigned(topic_partition)
                continue
            outcomes[topic_partition] = None
            if partition.cursor is not None and position <= partition.cursor:
                continue
            try:
                found = partition.commit_id(position)
                if found is not None and partition.receiver is not None:
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
            logs = await self._connection.logs(topic_partition.topic)
            if not 0 <= topic_partition.partition < len(logs):
                raise NotFound(f"Topic {topic_partition.topic!r} has no partition {topic_partition.partition}")
            found[topic_partition] = await self._cursor(logs[topic_partition.partition])
        return found

    async def seek(self, positions: Mapping[TopicPartition, int | None]) -> None:
        self._check_open()
        targets: dict[AssignedPartition, int] = {}
        for topic_partition, position in positions.items():
            partition = self._partitions.get(topic_partition)
            if partition is None or not partition.owned:
                raise not_assigned(topic_partition)
            logs = await self._connection.logs(topic_partition.topic)
            targets[partition] = partition.target(
                position, await log_bounds(self._connection, logs[topic_partition.partition])
            )
        moving = asyncio.gather(*(self._seek_partition(partition, position) for partition, position in targets.items()))
        try:
            # Shielded: after half a seek, old and new records could not be told apart.
            await asyncio.shield(moving)
        except asyncio.CancelledError:
            moving.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    async def _seek_partition(self, partition: AssignedPartition, position: int) -> None:
        receiver = partition.receiver
        assert receiver is not None  # a partition that is owned has one
        partition.changing = True
        restart, expected = 0, 0
        try:
            target = await start_id(self._connection, partition.topic_partition, position)
            await receiver.call(lambda: receiver.consumer.seek(target))
            partition.cursor, partition.acked, partition.requested_at, restart, expected = (
                position,
                0,
                None,
                position,
                None,
            )
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

    async def _cursor(self, log: TopicPath) -> int | None:
        """The committed position; None if nothing of its ledger is committed."""
        return committed_position(await self._connection.internal_stats(log), self.group)

    # -- partitions ----------------------------------------------------------------------------------------

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
            for topic in dict.fromkeys(self._subscription.topics):
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
        topic_partition = TopicPartition(topic, number)
        start = await self._cursor(log)
        # The broker assigns partitions in the order of consumer names.
        partition = AssignedPartition(topic_partition, f"anybroker-{self._member}", start)
        consumer = await subscribe_partition(self._connection, partition, log, self.group)
        partition.receiver = receiver = Receiver(consumer, self, f"Group {self.group!r} of {topic}[{number}]")
        self._by_receiver[receiver] = partition
        self._partitions[topic_partition] = partition
        self._order.append(partition)
        if self._closed:
            await receiver.close(self._connection)

    async def _poll_assignment(self) -> None:
        while not self._closed:
            await asyncio.sleep(self._connection.settings.rebalance_interval)
            try:
                await self._check_assignment(once=True)
            except NotFound as error:
                self._fail(error)
                return
            except BrokerError:
                continue  # The broker is down or busy; the assignment is unchanged.

    async def _check_assignment(self, *, once: bool = False) -> None:
        """Read the broker's assignment and apply changes."""
        changes: dict[Change, list[tuple[AssignedPartition, PartitionState]]] = {change: [] for change in Change}
        stalled: list[AssignedPartition] = []
        for topic in dict.fromkeys(self._subscription.topics):
            stats = await self._connection.stats(topic, once=once)
            for number, each in stats.items():
                partition = self._partitions.get(TopicPartition(topic, number))
                if partition is None:
                    await self._join(topic, number, self._connection.topic(topic).partition(number))
                    continue
                state = partition_state(each, self.group, partition.consumer_name)
                change = detect_change(
                    state, partition.consumer_name, owned=partition.owned, connection=partition.connection
                )
                changes[change].append((partition, state))
                if change is Change.NONE and partition.owned and state.active:
                    partition.keep(state.connection)
                    if partition.needs_redelivery_request(backlog(each, self.group), state.sent):
                        stalled.append(partition)
        if self._closed:
            return
        if changes[Change.LOST]:
            self._lose([partition for partition, _ in changes[Change.LOST]])
        if changes[Change.REVOKED]:
            await self._revoke([partition for partition, _ in changes[Change.REVOKED]])
        if changes[Change.ASSIGNED]:
            await self._take_over(changes[Change.ASSIGNED])
        await asyncio.gather(*map(request_redelivery, stalled))
        for partition in stalled:
            self._refill(partition)

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
        await asyncio.gather(*(self._rewind(partition, state.sent) for partition, state in found))
        if self._closed:
            return
        for partition, state in found:
            partition.connection, partition.owned, partition.changing = state.connection, True, False
        self._listener.assigned([partition.topic_partition for partition, _ in found])
        for partition, _ in found:
            self._refill(partition)

    async def _rewind(self, partition: AssignedPartition, sent: int) -> None:
        receiver = partition.receiver
        if receiver is None:
            return
        # Wait for a running receive, so the statistics below include its records.
        await receiver.call(lambda: None)
        logs = await self._connection.logs(partition.topic_partition.topic)
        stats = await self._connection.internal_stats(logs[partition.topic_partition.partition])
        partition.committed = partition.cursor = committed_position(stats, self.group)
        if partition.was_rewound(found := cursor_position(stats, self.group)):
            await self._seek_partition(partition, found)
            return
        partition.requested_at = sent
        await receiver.call(receiver.consumer.redeliver_unacknowledged_messages)
        partition.restart(partition.committed or 0, expected=first_entry(stats, partition.committed or 0))

    # -- closing -------------------------------------------------------------------------------------------

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for unwatch in (self._unwatch, *self._cleanup_handles):
            unwatch()
        self._waker.wake()
        try:
            for task in self._tasks:
                task.cancel()
            receivers = [
                partition.receiver for partition in self._partitions.values() if partition.receiver is not None
            ]
            await asyncio.gather(*(receiver.close(self._connection) for receiver in receivers))
            if self._ephemeral:
                for topic in self._subscription.topics:
                    await subscriptions.delete_ephemeral(self._connection, topic, self.group)
        finally:
            for partition in self._partitions.values():
                partition.release()
            self._on_close(self)

    def _start(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"The member of group {self.group!r} was closed")
