"""One member of a record group on an in-memory server.

Published and committed records and changes of partitions wake `fetch`. The listener is called on the member's loop,
never under the server's lock. A revoked partition is released when the listener returns, or when its time is up. A
member that was removed from its group while it was disconnected rejoins when it reaches the server again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from broker import BrokerError, Closed, OffsetOutOfRange, Record, SubscriptionNotFound, TopicPartition
from broker.driver import Ephemeral, RecordListener, RecordSubscription, Start, TaskSet, Warned, logger, not_assigned
from broker_inmem.connection import Connection
from broker_inmem.entries import ENTRY_VIEW, Entry
from broker_inmem.fetching import Fetching
from broker_inmem.groups import Claim, Group, Notice
from broker_inmem.server import Broker

__all__ = ["InmemRecordSource"]

_LISTENER_PART: Final = 0.9
"""The part of `rebalance_seconds` that the listener may use."""


class _Assigned:
    __slots__ = ("generation", "paused", "position", "revoking")

    def __init__(self, position: int, generation: int) -> None:
        self.position = position
        self.generation = generation
        self.paused = False
        self.revoking = False


class InmemRecordSource(Fetching[Record[Any]]):
    """Implements `RecordSource`, and `GroupMember` for its group."""

    def __init__(
        self,
        broker: Broker,
        connection: Connection,
        subscription: RecordSubscription,
        listener: RecordListener,
        *,
        on_close: Callable[[InmemRecordSource], object],
    ) -> None:
        super().__init__(broker, connection, listener.event)
        self._listener = listener
        self._pattern = subscription.pattern
        self._copartitioned = subscription.copartitioned
        topics = subscription.topics if self._pattern is None else self._matching(broker)
        self._starts: dict[str, Start] = dict.fromkeys(topics, subscription.start)
        self._starts |= dict.fromkeys(subscription.whole, "earliest")
        self._committed_only = subscription.isolation == "read_committed"
        self._on_close = on_close
        self._topics = tuple(dict.fromkeys(topics))
        self._notices: deque[Notice] = deque()
        self._partitions: dict[TopicPartition, _Assigned] = {}
        self._revocations = TaskSet("inmem-revoke", self._revocation_failed)
        self._turn = 0
        with broker.lock:
            connection.check()
            if broker.faults.armed:
                for name in self._topics:
                    broker.faults.check("open", name)
            now = broker.clock.time()
            self._number = broker.number()
            self._ephemeral = isinstance(subscription.group, Ephemeral)
            group = subscription.group
            self._group_name = f"ephemeral-{self._number}" if isinstance(group, Ephemeral) else group
            for name in self._topics:
                broker.topic(name, now)
                broker.check_family(name, self._group_name, "records")
            self._join(now)
            connection.sources[self._number] = self

    @property
    def topics(self) -> Sequence[str]:
        return self._topics

    @property
    def copartitioned(self) -> bool:
        return self._copartitioned

    @property
    def group(self) -> Group:
        return self._group

    @property
    def broker(self) -> Broker:
        """The server."""
        return self._broker

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        return await self._fetch(max_records, max_bytes, wait)

    async def commit(self, positions: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, BrokerError | None]:
        broker = self._broker
        claims = self.claims(positions)
        with broker.lock:
            self._check_open()
            if broker.faults.armed:
                for name in {partition.topic for partition in positions}:
                    broker.faults.check("commit", name)
            self._group.advance(broker.clock.time())
            results = self._group.commit(claims)
        self._process_notices()
        return results

    def claims(self, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, Claim]:
        """Positions with the generations of their assignments."""
        claims: dict[TopicPartition, Claim] = {}
        for partition, position in positions.items():
            assigned = self._partitions.get(partition)
            claims[_plain(partition)] = Claim(position, -1 if assigned is None else assigned.generation)
        return claims

    async def committed(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int | None]:
        with self._broker.lock:
            self._check_open()
            return {_plain(partition): self._group.committed(_plain(partition)) for partition in partitions}

    async def seek(self, positions: Mapping[TopicPartition, int | None]) -> None:
        """:raises LeaseLost: a partition is not assigned. :raises OffsetOutOfRange: its log has no such position."""
        with self._broker.lock:
            self._check_open()
            wanted: dict[TopicPartition, int] = {}
            for partition, position in positions.items():
                partition = _plain(partition)
                if partition not in self._partitions:
                    raise not_assigned(partition, self._group_name, self.assignment())
                log = self._broker.topics[partition.topic].partitions[partition.partition]
                if position is not None and not log.first <= position <= log.next:
                    holds = f"{partition.topic!r}[{partition.partition}] holds {log.first} to {log.next}"
                    raise OffsetOutOfRange(f"{holds}; cannot seek to {position}")
                wanted[partition] = self._group.position(partition) if position is None else position
            for partition, position in wanted.items():
                self._partitions[partition].position = position
        self._waker.wake()

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        for partition in partitions:
            assigned = self._partitions.get(_plain(partition))
            if assigned is not None:
                assigned.paused = True

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        for partition in partitions:
            assigned = self._partitions.get(_plain(partition))
            if assigned is not None:
                assigned.paused = False
        self._waker.wake()

    def assignment(self) -> Sequence[TopicPartition]:
        return sorted(self._partitions)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        broker = self._broker
        self._revocations.cancel()
        with broker.lock:
            self._connection.sources.pop(self._number, None)
            now = broker.clock.time()
            if self._connection.usable:
                self._group.leave(self._number, now)
            else:
                self._group.mark_silent(self._number, now)
            if self._ephemeral:
                broker.groups.pop(self._group_name, None)
        self._partitions.clear()
        self._interrupted = True
        self._waker.wake()
        self._on_close(self)

    # Called by the server, under its lock and from any thread.

    def notify(self, notice: Notice) -> None:
        self._notices.append(notice)
        self._waker.call(self._process_notices)

    def wake(self) -> None:
        self._waker.wake()

    def find_topics(self) -> Collection[str]:
        if self._pattern is None:
            return ()
        before, self._topics = self._topics, self._matching(self._broker)
        return set(self._topics).difference(before)

    def _matching(self, broker: Broker) -> tuple[str, ...]:
        """The topics that match the pattern now."""
        return tuple(sorted(name for name in tuple(broker.topics) if self._pattern and self._pattern.matches(name)))

    # On the member's loop.

    def _join(self, now: float) -> None:
        self._group = self._broker.ensure_group(self._group_name)
        self._group.join(self._number, self, self._starts, now)

    def _process_notices(self) -> None:
        """Process the group's notices, unless the server is unreachable."""
        while self._notices and not self._closed and self._connection.usable:
            kind, partitions, positions, generation = self._notices.popleft()
            if kind == "assigned":
                for partition in partitions:
                    self._partitions[partition] = _Assigned(positions[partition], generation)
                self._listener.assigned(partitions)
            elif kind == "revoking":
                # A member that was cut off may have lost them since.
                losses = [notice for notice in self._notices if notice.kind in {"lost", "expelled"}]
                gone = {partition for notice in losses for partition in notice.partitions}
                mine = [each for each in partitions if each in self._partitions and each not in gone]
                for partition in mine:
                    self._partitions[partition].revoking = True
                if mine:
                    self._revocations.spawn(self._revoke(mine))
            else:
                self._lose([partition for partition in partitions if partition in self._partitions])
                if kind == "expelled":
                    self._rejoin()
        self._waker.wake()

    def _lose(self, partitions: Sequence[TopicPartition]) -> None:
        for partition in partitions:
            del self._partitions[partition]
        if partitions:
            self._listener.lost(partitions)

    def _rejoin(self) -> None:
        broker = self._broker
        with broker.lock:
            del self._connection.sources[self._number]
            self._number = broker.number()
            self._connection.sources[self._number] = self
            self.find_topics()
            if all(name in broker.topics for name in self._topics):
                self._join(broker.clock.time())

    async def _revoke(self, partitions: Sequence[TopicPartition]) -> None:
        broker, loop = self._broker, self._waker.loop
        deadline = loop.time() + _LISTENER_PART * broker.options.rebalance_seconds
        try:
            async with asyncio.timeout_at(deadline):
                await self._listener.revoking(partitions, deadline)
        except TimeoutError:
            text = f"Group {self._group_name!r}: {len(partitions)} partitions were released late"
            self._listener.event(Warned(text=text))
        except Exception as error:
            self._revocation_failed(error)
        mine = [p for p in partitions if (assigned := self._partitions.get(p)) is not None and assigned.revoking]
        for partition in mine:
            del self._partitions[partition]
        with broker.lock:
            if not self._closed:
                self._group.release(self._number, mine, broker.clock.time())

    def _revocation_failed(self, error: Exception) -> None:
        self._listener.event(Warned(text=f"Group {self._group_name!r}: revoking partitions failed: {error}"))

    def _closed_error(self) -> Closed:
        return Closed(f"The member of group {self._group_name!r} was closed")

    def _take(self, most: int, max_bytes: int, now: float) -> list[Record[Any]] | None:
        broker = self._broker
        for name in self._topics:
            if broker.faults.armed:
                broker.faults.check("fetch", name)
            if name in broker.topics and name not in self._group.topics:
                raise SubscriptionNotFound(f"Group {self._group_name!r} of topic {name!r} was deleted")
        for name in self._topics:
            broker.topic(name, now)
        self._group.advance(now)
        return None if self._notices else self._read(most, max_bytes, now)

    def _watch(self) -> float | None:
        for name in self._topics:
            self._broker.topics[name].watchers.add(self._waker)
        return self._broker.next_due(self._topics, self._group.next_due())

    def _stop_watching(self) -> None:
        for name in self._topics:
            if name in self._broker.topics:
                self._broker.topics[name].watchers.discard(self._waker)

    def _read(self, max_records: int, max_bytes: int, now: float) -> list[Record[Any]]:
        records: list[Record[Any]] = []
        order = list(self._partitions.items())
        if len(order) > 1:
            self._turn = (self._turn + 1) % len(order)
            order = order[self._turn :] + order[: self._turn]
        size = 0
        for partition, assigned in order:
            if assigned.paused or assigned.revoking:
                continue
            log = self._broker.topics[partition.topic].partitions[partition.partition]
            if assigned.position < log.first:
                self._warn_of_gap(partition, assigned.position, log.first)
                assigned.position = log.first
            entries, assigned.position = log.read(
                assigned.position, max_records - len(records), max_bytes - size, now, committed=self._committed_only
            )
            generation = assigned.generation
            for entry in entries:
                records.append(_record(entry, generation))
                size += entry.size
            if len(records) >= max_records or size >= max_bytes:
                break
        return records

    def _warn_of_gap(self, partition: TopicPartition, position: int, first: int) -> None:
        text = (
            f"Group {self._group_name!r}: retention removed {first - position} offsets of "
            f"{partition.topic!r}[{partition.partition}] that were not read; reading continues at {first}"
        )
        logger.warning("%s", text)
        self._waker.call(self._listener.event, Warned(text=text))


def _record(entry: Entry, generation: int) -> Record[Any]:
    return Record(
        entry.topic,
        entry.partition,
        entry.offset,
        entry.key,
        entry.data,
        entry,
        ENTRY_VIEW,
        entry.size,
        generation=generation,
    )


def _plain(partition: TopicPartition) -> TopicPartition:
    """Accepts a plain tuple, too."""
    return partition if type(partition) is TopicPartition else TopicPartition(*partition)
