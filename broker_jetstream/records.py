"""The Record family: a group whose members own partitions, one each at a time.

A ticker keeps pins alive, listens to the other members and moves partitions between them; everything else happens in
`fetch`. A claim is assigned when the server lets us have it: what a dead member held waits until its pin has run out.
Records of a partition are handed over only while it is certainly ours. `fetch` is ended by `interrupt`; what had
arrived is the next fetch's, unless the partition goes first: then its new owner reads it. Commits are confirmed by the
server. After a reconnect each partition is read on from its position if it is still ours.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from broker import BrokerError, Closed, LeaseLost, NotFound, Record, TopicPartition
from broker.driver import RecordListener, Start, Waker
from broker_jetstream import subscriptions
from broker_jetstream.assigned_partition import Partition
from broker_jetstream.connection import Connection
from broker_jetstream.log_reader import JetStreamLogReader
from broker_jetstream.membership import Membership, plan
from broker_jetstream.names import group_consumer
from broker_jetstream.streams import Layout, Layouts
from broker_jetstream.subscriptions import committed_of, ensure_group

__all__ = ["JetStreamRecordSource"]

logger = logging.getLogger("broker")
CLOSE_SECONDS: Final = 1.0
HELLO_SECONDS: Final = 0.05
"""How long a new member listens before it claims anything."""
REVOKE_SECONDS: Final = 5.0
FIRST_PIN_SECONDS: Final = 1.0
"""How long opening waits for pins that nothing stands in the way of."""


class _Topic:
    """The partitions of one topic that this member has, and the membership they are shared in."""

    def __init__(self, layout: Layout, membership: Membership) -> None:
        self.layout = layout
        self.membership = membership
        self.owned: dict[int, Partition] = {}


class JetStreamRecordSource:
    """One member of a record group."""

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
    ) -> None:
        self._connection = connection
        self._layouts = layouts
        self._group = group
        self._start: Start = start
        self._whole = frozenset(whole)
        self._listener = listener
        self._ephemeral = ephemeral
        self._log = JetStreamLogReader(connection, layouts)
        self._topics: dict[str, _Topic] = {}
        self._paused: set[TopicPartition] = set()
        self._waker = Waker()
        self._fetching = self._interrupted = self._closed = False
        self._failure: BrokerError | None = None
        self._turn = 0
        self._ticker: asyncio.Task[None] | None = None
        self._nudge = asyncio.Event()
        self._remove_callback = connection.on_connected(self._reconnected)

    async def open(self, topics: Sequence[str]) -> None:
        """Make the durables that are missing, meet the other members, and claim a share.

        :raises TopicNotFound: one of the topics does not exist.
        """
        for name in dict.fromkeys(topics):
            layout = await self._layouts.find(name, fresh=True)
            start: Start = "earliest" if name in self._whole else self._start
            await ensure_group(self._connection, self._log, layout, self._group, start, ephemeral=self._ephemeral)
            encoded = group_consumer(self._group, 0)[:-2]
            membership = Membership(self._connection, layout.stream, encoded, self._nudge.set)
            self._topics[name] = _Topic(layout, membership)
            await membership.join()
        try:
            # Peers answer a hello at once, so a short silence means that there are none.
            async with asyncio.timeout(HELLO_SECONDS):
                await asyncio.Event().wait()
        except TimeoutError:
            pass
        await self._rebalance()
        deadline = time.monotonic() + FIRST_PIN_SECONDS
        while any(partition.is_coming for partition in self._untold()) and (left := deadline - time.monotonic()) > 0:
            await self._wait(left)
        self._tell_assigned()
        self._ticker = asyncio.get_running_loop().create_task(self._tick(), name="broker-jetstream-group")

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
                taken = await self._take(max_records, max_bytes)
                if taken or self._interrupted:
                    return taken
                left = deadline - time.monotonic()
                if left <= 0:
                    if not self._connection.connected:
                        raise self._connection.broken()
                    return taken
                await self._wait(left)
                self._check_open()
        finally:
            self._fetching = self._interrupted = False

    async def _take(self, max_records: int, max_bytes: int) -> list[Record[Any]]:
        self._tell_assigned()
        taken: list[Record[Any]] = []
        active = [partition for partition in self._partitions() if partition.claimed and not partition.paused]
        if not active:
            return taken
        share = max(1, max_records // len(active))
        for partition in active:
            await partition.request(share, max_bytes // len(active))
        self._turn += 1
        first = self._turn % len(active)
        room, left = max_bytes, max_records
        # Another partition begins each time, so that a full one does not starve the rest.
        for partition in active[first:] + active[:first]:
            if left <= 0 or (taken and room <= 0):
                break
            if not partition.buffered or not partition.told or not await partition.verify() or partition.paused:
                continue
            before = len(taken)
            room -= partition.take(left, room, taken)
            left -= len(taken) - before
        return taken

    async def _wait(self, seconds: float) -> None:
        if any(
            partition.buffered and partition.proven and partition.told and not partition.paused
            for partition in self._partitions()
        ):
            # It came between the look and the wait.
            await asyncio.sleep(0)
            return
        await self._waker.wait(seconds)

    def _news(self) -> None:
        """A partition has changed."""
        self._waker.wake()
        if self._untold():
            self._nudge.set()

    def interrupt(self) -> None:
        self._interrupted = self._fetching
        self._waker.wake()

    def _partitions(self) -> list[Partition]:
        return [partition for topic in self._topics.values() for partition in topic.owned.values()]

    def _find(self, place: TopicPartition) -> Partition | None:
        topic = self._topics.get(place.topic)
        partition = topic.owned.get(place.partition) if topic is not None else None
        return partition if partition is not None and partition.claimed else None

    # The group.

    async def _tick(self) -> None:
        pause = self._connection.settings.owner_timeout / 4
        due = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(max(0.0, due - time.monotonic())):
                    await self._nudge.wait()
            except TimeoutError:
                pass
            self._nudge.clear()
            regular = time.monotonic() >= due
            if regular:
                due = time.monotonic() + pause
            if not self._connection.connected:
                continue
            try:
                if regular:
                    await self._keep()
                await self._rebalance()
                for topic in self._topics.values():
                    if regular or topic.membership.take_question():
                        await topic.membership.tell()
            except BrokerError as error:
                logger.debug("Group %r: %s", self._group, error)
            self._waker.wake()

    async def _keep(self) -> None:
        for partition in self._partitions():
            await partition.keep()

    def _reconnected(self) -> None:
        for topic in self._topics.values():
            topic.membership.forgive()
        self._nudge.set()
        self._waker.wake()

    async def _rebalance(self) -> None:
        for name, topic in self._topics.items():
            membership, owned, layout = topic.membership, topic.owned, topic.layout
            for number in membership.contested(owned, [number for number, each in owned.items() if each.pinned]):
                self._lost(owned[number])
            surplus = plan(membership.id, owned, membership.others(), layout.partitions, name).release
            for number in {*membership.pinned_elsewhere(owned), *surplus}:
                # Who was cut off for too long learns that it is lost before it lets it go as if it were not.
                if (partition := owned.get(number)) is not None:
                    await partition.verify()
            step = plan(membership.id, owned, membership.others(), layout.partitions, name)
            # A member that still takes one for its own finds out that it was ours, unless nobody has it when it looks.
            if going := set(step.release) - set(membership.pinned_elsewhere(owned)):
                await self._release([TopicPartition(name, number) for number in sorted(going)])
            if step.claim:
                for number in step.claim:
                    partition = Partition(
                        self._connection, layout, number, group_consumer(self._group, number), self._news, self._lost
                    )
                    partition.paused = TopicPartition(name, number) in self._paused
                    owned[number] = partition
                    await partition.claim()
            await membership.update(tuple(owned), [number for number, each in owned.items() if each.pinned])
        self._tell_assigned()

    def _untold(self) -> list[Partition]:
        return [partition for partition in self._partitions() if partition.claimed and not partition.told]

    def _tell_assigned(self) -> None:
        """Tell of the claims that are ours: all in one, unless some keep us waiting for longer than a pin lasts."""
        untold = self._untold()
        settled = [partition for partition in untold if partition.settled]
        if len(settled) < len(untold):
            patience = time.monotonic() - 1.5 * self._connection.settings.owner_timeout
            settled = [partition for partition in settled if partition.claimed_at < patience]
        if settled:
            for partition in settled:
                partition.told = True
            self._listener.assigned([partition.place for partition in settled])
            self._waker.wake()

    async def _release(self, places: Sequence[TopicPartition]) -> None:
        """Let partitions go in order: nothing more is handed over, the core commits, then others may have them."""
        going = [partition for place in places if (partition := self._find(place)) is not None]
        for partition in going:
            partition.paused = True
        deadline = asyncio.get_running_loop().time() + REVOKE_SECONDS
        if told := [partition.place for partition in going if partition.told]:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._listener.revoking(told, deadline)
            except TimeoutError:
                logger.debug("Group %r: letting partitions go took too long", self._group)
        for place in places:
            self._topics[place.topic].owned.pop(place.partition, None)
        for partition in going:
            await partition.release()

    def _lost(self, partition: Partition) -> None:
        """It is somebody else's already."""
        topic = self._topics[partition.layout.topic]
        if topic.owned.get(partition.number) is partition:
            del topic.owned[partition.number]
            partition.claimed = False
            if isinstance(partition.failure, NotFound):
                self._failure = partition.failure
            if partition.told:
                self._listener.lost([partition.place])
            self._nudge.set()
            self._waker.wake()

    # Positions.

    async def commit(self, positions: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, BrokerError | None]:
        self._check_open()
        places = list(positions)
        results = await asyncio.gather(*(self._commit(place, positions[place]) for place in places))
        return dict(zip(places, results, strict=True))

    async def _commit(self, place: TopicPartition, position: int) -> BrokerError | None:
        partition = self._find(place)
        if partition is None:
            return LeaseLost(f"Partition {place.partition} of topic {place.topic!r} is not ours")
        try:
            await partition.commit(position)
        except BrokerError as error:
            return error
        return None

    async def committed(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int | None]:
        self._check_open()
        found: dict[TopicPartition, int | None] = {}
        for place in partitions:
            layout = await self._layouts.find(place.topic)
            name, what = group_consumer(self._group, place.partition), f"Group {self._group!r} on topic {place.topic!r}"
            found[place] = committed_of(await subscriptions.info(self._connection, layout.stream, name, what))
        return found

    async def seek(self, positions: Mapping[TopicPartition, int | None]) -> None:
        self._check_open()
        for place, position in positions.items():
            partition = self._find(place)
            if partition is None:
                raise LeaseLost(f"Partition {place.partition} of topic {place.topic!r} is not ours")
            await partition.seek(position)

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self._paused.update(partitions)
        self._set_paused(partitions, paused=True)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self._paused.difference_update(partitions)
        self._set_paused(partitions, paused=False)
        self._waker.wake()

    def _set_paused(self, places: Sequence[TopicPartition], *, paused: bool) -> None:
        for place in places:
            partition = self._find(place)
            if partition is not None:
                partition.paused = paused

    def assignment(self) -> Sequence[TopicPartition]:
        return sorted(partition.place for partition in self._partitions() if partition.told)

    # The end.

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._remove_callback()
        self._waker.wake()
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.wait((self._ticker,))
        if self._connection.closed:
            return
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._leave()
        except (BrokerError, TimeoutError) as error:
            logger.debug("Leaving group %r: %s", self._group, error)

    async def _leave(self) -> None:
        for topic in self._topics.values():
            await asyncio.gather(*(partition.release() for partition in topic.owned.values()))
            topic.owned.clear()
            await topic.membership.update((), ())
            await topic.membership.leave()
            if self._ephemeral:
                for number in range(topic.layout.partitions):
                    await subscriptions.delete(
                        self._connection,
                        topic.layout.stream,
                        group_consumer(self._group, number),
                        f"Group {self._group!r}",
                    )
        if self._connection.connected:
            await self._connection.flush()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"The member of group {self._group!r} was closed")
        self._connection.check_open()
