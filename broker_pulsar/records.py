"""The Record family: one member of a group, which is a Failover subscription with a consumer for each partition.

The broker decides who reads which partition, and tells its clients; pulsar-client keeps that to itself. So the member
looks at the broker's counts every `rebalance_interval`. A partition that it is given begins anew at what is committed.

*Concurrency.* Everything here runs on the loop; each consumer has a thread that only receives. *Records* of a
partition come in order, each once per assignment. *Commits* are cumulative acks, which the client sends a moment later
and nobody confirms; one for a partition that is not ours is refused here. *Seeks* move the group's cursor on the
broker. *Failure.* The client reconnects by itself; what the broker delivers again is recognised. A deleted topic ends
it with TopicNotFound.
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
from broker_pulsar.assigned_partition import GroupPartition, ask_again, not_ours, subscribe_part, take_from
from broker_pulsar.chunked_messages import begin_id
from broker_pulsar.client import Message as NativeMessage
from broker_pulsar.connection import Connection
from broker_pulsar.log_stats import bounds_of, committed_in, cursor_in, first_of
from broker_pulsar.membership import Change, Standing, backlog_of, change_of, standing_of
from broker_pulsar.names import TopicPath, subscription_name
from broker_pulsar.receiving import Receiver

__all__ = ["PulsarRecordSource"]

_BUFFERED: Final = 1000
"""Records of a partition in memory above which no more are received."""
_REVOKE_SECONDS: Final = 30.0
_NOTICED: Final = 60.0
"""Seconds within which a broker notices that a consumer has died, as it is configured by default."""


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
        self._parts: dict[TopicPartition, GroupPartition] = {}
        self._by_receiver: dict[Receiver, GroupPartition] = {}
        self._order: list[GroupPartition] = []
        """The partitions, the one that was served last at the end."""
        self._failure: BrokerError | None = None
        self._waker = Waker()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._unwatch: Callable[[], object] = lambda: None
        self._kept: list[Callable[[], None]] = []
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
                self._kept.append(self._connection.leftovers.watch(topic, self.group))
        await self._look()
        self._unwatch = self._connection.watch.add(self._all_connected)
        self._start(self._watch())

    # -- fetching ------------------------------------------------------------------------------------------

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        self._check_open()
        self._fetching = True
        until = self._loop.time() + wait
        try:
            while True:
                taken, served = take_from(self._order, max_records, max_bytes)
                for part in served:
                    self._refill(part)
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

    def _refill(self, part: GroupPartition) -> None:
        # What arrives while it is not ours, or is being moved, is dropped: it must not be asked for.
        if part.receiver is not None and part.owned and not part.changing and len(part.buffer) < _BUFFERED:
            part.receiver.ask()

    def _all_connected(self) -> bool:
        return all(part.receiver is None or part.receiver.consumer.is_connected() for part in self._order)

    # -- ReceiverHost --------------------------------------------------------------------------------------

    def arrived(self, receiver: Receiver, messages: Sequence[NativeMessage]) -> None:
        part = self._by_receiver.get(receiver)
        if part is None or self._closed:
            return
        try:
            part.arrived(messages)
        except BrokerError as error:
            self._fail(error)
            return
        self._refill(part)
        self._waker.wake()

    def failed(self, receiver: Receiver, error: BrokerError) -> None:
        if not self._closed:
            self._start(self._explain(error))

    async def _explain(self, error: BrokerError) -> None:
        if isinstance(error, Closed):
            error = ConnectionFailed(f"Group {self.group!r}: the client closed a consumer", retriable=False)
        self._fail(await subscriptions.missing(self._connection, self._subscription.topics) or error)

    def _fail(self, error: BrokerError) -> None:
        self._failure = self._failure or error
        self._waker.wake()

    # -- positions -----------------------------------------------------------------------------------------

    async def commit(self, positions: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, BrokerError | None]:
        self._check_open()
        outcomes: dict[TopicPartition, BrokerError | None] = {}
        for place, position in positions.items():
            part = self._parts.get(place)
            if part is None or not part.owned:
                outcomes[place] = not_ours(place)
                continue
            outcomes[place] = None
            if part.cursor is not None and position <= part.cursor:
                continue
            try:
                found = part.commit_id(position)
                if found is not None and part.receiver is not None:
                    part.receiver.consumer.acknowledge_cumulative(found)
                part.committed = part.cursor = position
                self._connection.committed[place.topic, place.partition, self.group] = position
            except Exception as error:
                outcomes[place] = SettleError(f"Group {self.group!r}: the client took no commit: {error}", native=error)
        return outcomes

    async def committed(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int | None]:
        self._check_open()
        found: dict[TopicPartition, int | None] = {}
        for place in partitions:
            part = self._parts.get(place)
            if part is not None and part.owned:
                found[place] = part.committed
                continue
            logs = await self._connection.logs(place.topic)
            if not 0 <= place.partition < len(logs):
                raise NotFound(f"Topic {place.topic!r} has no partition {place.partition}")
            found[place] = await self._cursor(logs[place.partition])
        return found

    async def seek(self, positions: Mapping[TopicPartition, int | None]) -> None:
        self._check_open()
        targets: dict[GroupPartition, int] = {}
        for place, position in positions.items():
            part = self._parts.get(place)
            if part is None or not part.owned:
                raise not_ours(place)
            logs = await self._connection.logs(place.topic)
            targets[part] = part.target(position, await bounds_of(self._connection, logs[place.partition]))
        moving = asyncio.gather(*(self._move(part, position) for part, position in targets.items()))
        try:
            # A move goes on without its caller: what was halfway there could not be told from what is new.
            await asyncio.shield(moving)
        except asyncio.CancelledError:
            moving.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    async def _move(self, part: GroupPartition, position: int) -> None:
        receiver = part.receiver
        assert receiver is not None  # a partition that is owned has one
        part.changing = True
        begin, expected = 0, 0
        try:
            target = await begin_id(self._connection, part.place, position)
            await receiver.call(lambda: receiver.consumer.seek(target))
            part.cursor, part.acked, part.asked_at, begin, expected = position, 0, None, position, None
        except BrokerError:
            # Nobody knows where it stands; what was dropped here comes again, as all that is not committed.
            part.cursor = None
            with suppress(BrokerError):
                await receiver.call(receiver.consumer.redeliver_unacknowledged_messages)
            raise
        finally:
            part.changing = False
            part.begin(begin, expected=expected)
            self._refill(part)

    async def _cursor(self, log: TopicPath) -> int | None:
        """The position after all that is committed; None if nothing of its ledger is."""
        return committed_in(await self._connection.internal_stats(log), self.group)

    # -- partitions ----------------------------------------------------------------------------------------

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        for place in partitions:
            if part := self._parts.get(TopicPartition._make(place)):
                part.paused = True

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        for place in partitions:
            if part := self._parts.get(TopicPartition._make(place)):
                part.paused = False
        self._waker.wake()

    def assignment(self) -> Sequence[TopicPartition]:
        return sorted(place for place, part in self._parts.items() if part.owned)

    async def is_idle(self, seconds: float) -> bool:
        """What another member has not finished may become ours, until it is sure that this member lives; and what has
        just become ours is on its way."""
        if self._closed or seconds >= _NOTICED:
            return True
        try:
            for topic in dict.fromkeys(self._subscription.topics):
                stats = await self._connection.stats(topic, once=True)
                coming = [each for number, each in stats.items() if not self._brings(TopicPartition(topic, number))]
                if any(backlog_of(each, self.group) for each in coming):
                    return False
        except BrokerError:
            return False
        return True

    def _brings(self, place: TopicPartition) -> bool:
        part = self._parts.get(place)
        return part is not None and part.owned and part.brought

    async def _join(self, topic: str, number: int, log: TopicPath) -> None:
        place = TopicPartition(topic, number)
        start = await self._cursor(log)
        # The broker shares partitions out in the order of these names.
        part = GroupPartition(place, f"anybroker-{self._member}", start)
        consumer = await subscribe_part(self._connection, part, log, self.group)
        part.receiver = receiver = Receiver(consumer, self, f"Group {self.group!r} of {topic}[{number}]")
        self._by_receiver[receiver] = part
        self._parts[place] = part
        self._order.append(part)
        if self._closed:
            await receiver.close(self._connection)

    async def _watch(self) -> None:
        while not self._closed:
            await asyncio.sleep(self._connection.settings.rebalance_interval)
            try:
                await self._look(once=True)
            except NotFound as error:
                self._fail(error)
                return
            except BrokerError:
                continue  # The broker is away, or busy; who owns what is as it was.

    async def _look(self, *, once: bool = False) -> None:
        """See who reads what, and act on it."""
        changes: dict[Change, list[tuple[GroupPartition, Standing]]] = {change: [] for change in Change}
        silent: list[GroupPartition] = []
        for topic in dict.fromkeys(self._subscription.topics):
            stats = await self._connection.stats(topic, once=once)
            for number, each in stats.items():
                part = self._parts.get(TopicPartition(topic, number))
                if part is None:
                    await self._join(topic, number, self._connection.topic(topic).partition(number))
                    continue
                standing = standing_of(each, self.group, part.consumer_name)
                change = change_of(standing, part.consumer_name, owned=part.owned, connection=part.connection)
                changes[change].append((part, standing))
                if change is Change.NONE and part.owned and standing.active:
                    part.stays(standing.connection)
                    if part.is_to_be_asked_for(backlog_of(each, self.group), standing.sent):
                        silent.append(part)
        if self._closed:
            return
        if changes[Change.LOST]:
            self._lose([part for part, _ in changes[Change.LOST]])
        if changes[Change.GIVE]:
            await self._give([part for part, _ in changes[Change.GIVE]])
        if changes[Change.TAKE]:
            await self._take_over(changes[Change.TAKE])
        await asyncio.gather(*map(ask_again, silent))
        for part in silent:
            self._refill(part)

    def _lose(self, parts: Sequence[GroupPartition]) -> None:
        for part in parts:
            part.let_go()
        self._listener.lost([part.place for part in parts])

    async def _give(self, parts: Sequence[GroupPartition]) -> None:
        for part in parts:
            part.changing = True
        try:
            await self._listener.revoking([part.place for part in parts], self._loop.time() + _REVOKE_SECONDS)
        finally:
            for part in parts:
                part.let_go()

    async def _take_over(self, found: Sequence[tuple[GroupPartition, Standing]]) -> None:
        """Begin at what is committed, and say that they are ours."""
        if any(standing.others for _, standing in found):
            # Whoever had them hears of it as we do, and may still commit.
            await asyncio.sleep(2 * self._connection.settings.rebalance_interval)
        await asyncio.gather(*(self._rewind(part, standing.sent) for part, standing in found))
        if self._closed:
            return
        for part, standing in found:
            part.connection, part.owned, part.changing = standing.connection, True, False
        self._listener.assigned([part.place for part, _ in found])
        for part, _ in found:
            self._refill(part)

    async def _rewind(self, part: GroupPartition, sent: int) -> None:
        receiver = part.receiver
        if receiver is None:
            return
        # Nothing is received from here on, so that what was received is in the look at the log.
        await receiver.call(lambda: None)
        logs = await self._connection.logs(part.place.topic)
        stats = await self._connection.internal_stats(logs[part.place.partition])
        part.committed = part.cursor = committed_in(stats, self.group)
        if part.is_behind(found := cursor_in(stats, self.group)):
            await self._move(part, found)
            return
        part.asked_at = sent
        await receiver.call(receiver.consumer.redeliver_unacknowledged_messages)
        part.begin(part.committed or 0, expected=first_of(stats, part.committed or 0))

    # -- the end -------------------------------------------------------------------------------------------

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for unwatch in (self._unwatch, *self._kept):
            unwatch()
        self._waker.wake()
        try:
            for task in self._tasks:
                task.cancel()
            receivers = [part.receiver for part in self._parts.values() if part.receiver is not None]
            await asyncio.gather(*(receiver.close(self._connection) for receiver in receivers))
            if self._ephemeral:
                for topic in self._subscription.topics:
                    await subscriptions.let_go(self._connection, topic, self.group)
        finally:
            for part in self._parts.values():
                part.let_go()
            self._on_close(self)

    def _start(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"The member of group {self.group!r} was closed")
