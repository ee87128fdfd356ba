"""The Record family: a group whose members own partitions.

A ticker keeps pins alive and moves partitions as the announcements of other members require; a heartbeat announces this
member, also while the ticker waits. Everything else happens in `fetch`. A claim is assigned once the server pins it:
the partitions of a dead member become free when its pins expire. The partitions of a copartitioned number are claimed
only once the members have agreed on its owner.
Records are returned only while their partition is certainly ours. `interrupt` ends a fetch; its arrivals go to the next
fetch, unless the partition is released first, in which case the new owner reads them. The server confirms commits.
After a reconnect each partition that is still ours is read on from its position.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final

from broker import BrokerError, Closed, NotFound, Record, TopicNotFound, TopicPartition
from broker.driver import RecordListener, Start, TaskSet, Waker, logger, not_assigned, pause, seek_each
from broker_jetstream import subscriptions
from broker_jetstream.assigned_partition import AssignedPartition
from broker_jetstream.connection import Connection
from broker_jetstream.log_reader import JetStreamLogReader
from broker_jetstream.membership import Membership, plan
from broker_jetstream.names import group_consumer
from broker_jetstream.number_claims import ASKED, NumberClaims
from broker_jetstream.streams import Layout, Layouts
from broker_jetstream.subscriptions import committed_position, ensure_group, pinned_by

__all__ = ["JetStreamRecordSource"]

CLOSE_SECONDS: Final = 1.0
HELLO_SECONDS: Final = 0.05
"""How long a new member waits for announcements before it claims partitions."""
REVOKE_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 10.0
"""How often topics that match a pattern are looked for."""
FIRST_PIN_SECONDS: Final = 1.0
"""How long `open` waits for pins that are free."""


class _Share:
    """What is divided among the members: the partitions of a topic, or of a copartitioned group the numbers of all
    topics.

    :ivar layouts: by topic.
    :ivar claims: what the members of a copartitioned group have agreed on; None for a topic of its own.
    :ivar owned: by number and topic, what this member reads.
    :ivar salt: see `plan`.
    """

    def __init__(
        self, layouts: dict[str, Layout], membership: Membership, salt: str, claims: NumberClaims | None
    ) -> None:
        self.layouts = layouts
        self.membership = membership
        self.salt = salt
        self.claims = claims
        self.owned: dict[int, dict[str, AssignedPartition]] = {}

    @property
    def count(self) -> int:
        """How many numbers there are."""
        return max(layout.partitions for layout in self.layouts.values())

    @property
    def partitions(self) -> list[AssignedPartition]:
        """The claimed partitions."""
        return [partition for parts in self.owned.values() for partition in parts.values()]

    @property
    def pinned(self) -> list[int]:
        """The numbers that the server has pinned to us."""
        return [number for number, parts in self.owned.items() if any(each.pinned for each in parts.values())]

    def is_ready(self, number: int) -> bool:
        """Whether the next record of each of the partitions will be ours."""
        if self.claims is not None:
            self.membership.note_running()
            if self.membership.stale:
                # Another member may own the number since; its announcement comes first.
                return False
        return all(partition.ready for partition in self.owned.get(number, {}).values())

    def missing(self, number: int) -> list[str]:
        """The topics whose partition of an owned number is not read yet."""
        return [
            topic
            for topic, layout in self.layouts.items()
            if number < layout.partitions and topic not in self.owned.get(number, {})
        ]


class JetStreamRecordSource:
    """Implements `RecordSource`.

    :param find_topics: returns the topics that match a pattern; None if the topics are named.
    :param copartitioned: claim the partitions of a number of all topics as one.
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
        copartitioned: bool = False,
    ) -> None:
        self._copartitioned = copartitioned
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
        self._topics: dict[str, _Share] = {}
        self._yielding = TaskSet(
            "broker-jetstream-yield", lambda error: logger.debug("Group %r: giving up a claim: %r", group, error)
        )
        self._paused: set[TopicPartition] = set()
        self._waker = Waker()
        self._fetching = self._interrupted = self._closed = False
        self._failure: BrokerError | None = None
        self._turn = 0
        self._ticker: asyncio.Task[None] | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._reporting = TaskSet(
            "broker-jetstream-report", lambda error: logger.error("Group %r: reporting partitions: %r", group, error)
        )
        self._wake_ticker = asyncio.Event()
        self._greeted = asyncio.Event()
        self._remove_callback = connection.on_connected(self._reconnected)

    async def open(self, topics: Sequence[str]) -> None:
        """Create missing durables, join the group and claim a share.

        :raises TopicNotFound: one of the topics does not exist.
        """
        if self._find_topics is not None:
            topics = sorted(await self._find_topics())
        self._look_at = time.monotonic() + LOOK_SECONDS
        starts: dict[str, Start] = {name: "earliest" if name in self._whole else self._start for name in topics}
        shares: list[dict[str, Start]] = [{name: start} for name, start in starts.items()]
        for share in [starts] if self._copartitioned else shares:
            try:
                await self._join(share)
            except TopicNotFound:
                # Deleted since it was found.
                if self._find_topics is None:
                    raise
        self._heartbeat = asyncio.get_running_loop().create_task(self._announce(), name="broker-jetstream-heartbeat")
        # Members answer a hello at once, so a short silence means that there are none.
        await asyncio.sleep(HELLO_SECONDS)
        await self._rebalance()
        deadline = time.monotonic() + FIRST_PIN_SECONDS
        while (
            any(partition.is_pending for partition in self._unreported()) and (left := deadline - time.monotonic()) > 0
        ):
            await self._wait(left)
        await self._report()
        self._ticker = asyncio.get_running_loop().create_task(self._tick(), name="broker-jetstream-group")

    async def _join(self, starts: Mapping[str, Start]) -> None:
        """Join the members that share these topics, each with its start."""
        layouts: dict[str, Layout] = {}
        for name, start in starts.items():
            layouts[name] = await self._layouts.find(name, fresh=True)
            await self._ensure(layouts[name], start)
        streams = sorted(layout.stream for layout in layouts.values())
        group = group_consumer(self._group, 0)[:-2]
        if self._copartitioned:
            group += f".{sha256(' '.join(streams).encode()).hexdigest()[:32]}"
        membership = Membership(self._connection, streams[0], group, self._wake_ticker.set, self._greeted.set)
        await membership.join()
        salt = str(self._group) if self._copartitioned else next(iter(starts))
        claims = NumberClaims(membership.id) if self._copartitioned else None
        self._topics.update(dict.fromkeys(starts, _Share(layouts, membership, salt, claims)))

    async def _ensure(self, layout: Layout, start: Start) -> None:
        await ensure_group(self._connection, self._log, layout, self._group, start, ephemeral=self._ephemeral)

    async def _look_for_growth(self) -> None:
        """Read the new partitions of topics that have grown, from their first record on."""
        for share in self._shares():
            for name, known in tuple(share.layouts.items()):
                try:
                    layout = await self._layouts.find(name, fresh=True)
                    if layout.partitions > known.partitions:
                        await self._ensure(layout, "earliest")
                        share.layouts[name] = layout
                except NotFound:
                    # The partitions of a deleted topic report it.
                    continue

    async def _look_for_topics(self, find: Callable[[], Awaitable[Collection[str]]]) -> None:
        """Join the group on new topics that match, and forget deleted ones."""
        found = set(await find())
        for name in sorted(self._topics.keys() - found):
            share = self._topics.pop(name)
            for partition in share.partitions:
                partition.claimed = False
                if partition.reported:
                    self._listener.lost([partition.topic_partition])
            await share.membership.leave()
        new = sorted(found - self._topics.keys())
        for name in new:
            try:
                # What is appended to a new topic before it is found is not to be missed.
                await self._join({name: "earliest" if self._start == "latest" else self._start})
            except BrokerError as error:
                logger.warning("Group %r does not read topic %r, which matches: %s", self._group, name, error)
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

    def _shares(self) -> list[_Share]:
        return list(dict.fromkeys(self._topics.values()))

    def _partitions(self) -> list[AssignedPartition]:
        return [partition for share in self._shares() for partition in share.partitions]

    def _owned(self, topic_partition: TopicPartition) -> AssignedPartition:
        """:raises LeaseLost: the partition is not assigned to this member."""
        partition = self._find(topic_partition)
        if partition is None:
            raise not_assigned(topic_partition, self._group, self.assignment())
        return partition

    def _find(self, topic_partition: TopicPartition) -> AssignedPartition | None:
        share = self._topics.get(topic_partition.topic)
        partition = None
        if share is not None:
            partition = share.owned.get(topic_partition.partition, {}).get(topic_partition.topic)
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
                if time.monotonic() >= self._look_at:
                    if self._find_topics is not None:
                        await self._look_for_topics(self._find_topics)
                    await self._look_for_growth()
                    self._look_at = time.monotonic() + LOOK_SECONDS
                if regular:
                    for partition in self._partitions():
                        await partition.keep_alive()
                await self._rebalance()
            except BrokerError as error:
                logger.debug("Group %r: %s", self._group, error)
            self._waker.wake()

    async def _announce(self) -> None:
        """Announce this member regularly, and at once to new ones."""
        interval = self._connection.settings.owner_timeout / 4
        due = time.monotonic() + interval
        while True:
            await pause(max(0.0, due - time.monotonic()), self._greeted)
            self._greeted.clear()
            regular = time.monotonic() >= due
            if regular:
                due = time.monotonic() + interval
            for share in self._shares():
                share.membership.note_running()
                if share.membership.take_greeting() or regular:
                    await share.membership.announce()

    def _reconnected(self) -> None:
        for share in self._shares():
            share.membership.reconnected()
        self._wake_ticker.set()
        self._waker.wake()

    async def _rebalance(self) -> None:
        for share in self._shares():
            if share.membership.take_unheard():
                await asyncio.gather(*(partition.check_loss() for partition in share.partitions))
            if share.claims is None:
                await self._rebalance_topic(share)
            else:
                await self._rebalance_numbers(share, share.claims)
        self._report_assigned()

    async def _rebalance_topic(self, share: _Share) -> None:
        """Divide the partitions of a topic: the server's pins decide."""
        membership, owned = share.membership, share.owned
        for number in membership.contested(owned, share.pinned):
            self._yield(share, number)
        surplus = plan(membership.id, owned, membership.others(), share.count, share.salt).release
        for number in {*membership.pinned_elsewhere(owned), *surplus}:
            # A member that was cut off for too long must report a loss, not a release.
            for partition in tuple(owned.get(number, {}).values()):
                await partition.check_loss()
        step = plan(membership.id, owned, membership.others(), share.count, share.salt)
        # Partitions pinned elsewhere were verified above.
        await self._release(share, set(step.release) - set(membership.pinned_elsewhere(owned)))
        for number in step.claim:
            await self._read(share, number)
        await membership.update(tuple(owned), share.pinned)

    async def _rebalance_numbers(self, share: _Share, claims: NumberClaims) -> None:
        """Divide the numbers of a copartitioned group: see `number_claims`."""
        membership = share.membership
        if membership.stale:
            await membership.catch_up(HELLO_SECONDS)
        step = plan(membership.id, claims.terms, membership.others(), share.count, share.salt)
        if step.release:
            # A member that was frozen must report a loss, not a release.
            await membership.receive_all()
            for partition in [each for number in step.release for each in share.owned.get(number, {}).values()]:
                await partition.check_loss()
        for number in claims.overtaken(membership.terms_of_others()):
            self._yield(share, number)
        step = plan(membership.id, claims.terms, membership.others(), share.count, share.salt)
        await self._release(share, step.release)
        for number in step.release:
            claims.drop(number)
        for number in step.claim:
            claims.ask(number)
        await membership.update_terms(claims.terms)
        if claims.asked:
            # The unread records of a number that was yielded must not be pinned to this member any more.
            await self._yielding.wait(CLOSE_SECONDS)
            await asyncio.sleep(HELLO_SECONDS)
            unsure = await self._maybe_owned(share, claims.asked)
            await membership.receive_all()
            if not membership.stale:
                claims.settle(membership.terms_of_others(), time.time_ns() // 1_000_000, unsure)
            await membership.update_terms(claims.terms)
            if any(number not in claims.terms for number in step.claim):
                # Others own them, so that the shares have changed.
                self._wake_ticker.set()
        for number, term in tuple(claims.terms.items()):
            if term != ASKED and share.missing(number):
                await self._read(share, number)

    async def _maybe_owned(self, share: _Share, numbers: Sequence[int]) -> set[int]:
        """The numbers of which a member reads a partition, that this member may not have heard of yet."""
        if time.monotonic() - share.membership.listening_since > self._connection.settings.owner_timeout:
            return set()
        found: set[int] = set()
        for number in numbers:
            name, what = group_consumer(self._group, number), f"Group {self._group!r}"
            for layout in share.layouts.values():
                if number < layout.partitions and number not in found:
                    info = await subscriptions.info(self._connection, layout.stream, name, what)
                    if pinned_by(info) or info.get("num_waiting"):
                        found.add(number)
        return found

    async def _read(self, share: _Share, number: int) -> None:
        """Claim the partitions of a number at the server."""
        share.owned.setdefault(number, {})
        for topic in share.missing(number):
            if number in share.owned:
                await self._claim(share, topic, number)

    async def _claim(self, share: _Share, topic: str, number: int) -> None:
        partition = AssignedPartition(
            self._connection,
            share.layouts[topic],
            number,
            group_consumer(self._group, number),
            self._partition_changed,
            self._lost,
        )
        partition.paused = TopicPartition(topic, number) in self._paused
        share.owned[number][topic] = partition
        await partition.claim()

    def _unreported(self) -> list[AssignedPartition]:
        return [partition for partition in self._partitions() if partition.claimed and not partition.reported]

    def _report_assigned(self) -> None:
        """Report assigned partitions in the background, so that pins are kept alive meanwhile."""
        if not self._reporting and self._reportable():
            self._reporting.spawn(self._report())

    async def _report(self) -> None:
        """Mark assigned partitions as ours, then report them: all in one call, see `_reportable`."""
        ready = self._reportable()
        marked = await asyncio.gather(*(partition.mark_owned() for partition in ready))
        still = self._reportable()
        ready = [partition for partition, done in zip(ready, marked, strict=True) if done and partition in still]
        if ready and not self._closed:
            for partition in ready:
                partition.reported = True
            self._listener.assigned([partition.topic_partition for partition in ready])
            self._waker.wake()

    def _reportable(self) -> list[AssignedPartition]:
        """The partitions to report: none while some stay pending, at most for longer than a pin lasts."""
        unreported = self._unreported()
        ready = [each for each in unreported if self._topics[each.layout.topic].is_ready(each.number)]
        if len(ready) < len(unreported):
            patience = time.monotonic() - 1.5 * self._connection.settings.owner_timeout
            ready = [partition for partition in ready if partition.claimed_at < patience]
        return ready

    async def _release(self, share: _Share, numbers: Collection[int]) -> None:
        """Release partitions in order: stop returning records, let the core commit, then unpin."""
        leaving = [
            partition
            for number in sorted(numbers)
            for partition in share.owned.get(number, {}).values()
            if partition.claimed
        ]
        for partition in leaving:
            partition.paused = True
        if leaving:
            # The mark of the next owner must be the later one.
            await self._reporting.wait(CLOSE_SECONDS)
        deadline = asyncio.get_running_loop().time() + REVOKE_SECONDS
        if reported := [partition.topic_partition for partition in leaving if partition.reported]:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._listener.revoking(reported, deadline)
            except TimeoutError:
                logger.debug("Group %r: the commit before a release timed out", self._group)
        for number in numbers:
            share.owned.pop(number, None)
        for partition in leaving:
            await partition.release()

    def _lost(self, partition: AssignedPartition) -> None:
        """Another member owns the partition already."""
        share = self._topics.get(partition.layout.topic)
        parts = {} if share is None else share.owned.get(partition.number, {})
        if parts.get(partition.layout.topic) is partition:
            if isinstance(partition.failure, NotFound):
                if self._find_topics is None:
                    self._failure = partition.failure
                else:
                    # A deleted topic that matched is no error.
                    self._look_at = 0.0
            if share is not None:
                # Who has one partition of a number is to get the others.
                self._yield(share, partition.number)

    def _yield(self, share: _Share, number: int) -> None:
        """Leave the partitions of a number to another member, at once."""
        if share.claims is not None:
            share.claims.drop(number)
        lost: list[TopicPartition] = []
        for partition in share.owned.pop(number, {}).values():
            if partition.claimed and share.claims is not None:
                self._yielding.spawn(partition.release(contested=True))
            partition.claimed = False
            if partition.reported:
                lost.append(partition.topic_partition)
        if lost:
            self._listener.lost(lost)
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

        async def move(topic_partition: TopicPartition) -> None:
            await self._owned(topic_partition).seek(positions[topic_partition])

        await seek_each(positions, move)

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
        self._reporting.cancel()
        self._waker.wake()
        if tasks := [task for task in (self._ticker, self._heartbeat) if task is not None]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        try:
            if not self._connection.closed:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._leave_group()
        except (BrokerError, TimeoutError) as error:
            logger.debug("Leaving group %r: %s", self._group, error)
        finally:
            self._on_close(self)

    async def _leave_group(self) -> None:
        await self._yielding.wait(CLOSE_SECONDS)
        await asyncio.gather(*(self._leave_share(share) for share in self._shares()))
        if self._connection.connected:
            await self._connection.flush()

    async def _leave_share(self, share: _Share) -> None:
        try:
            await asyncio.gather(*(partition.release() for partition in share.partitions))
            share.owned.clear()
            if share.claims is not None:
                share.claims.clear()
                await share.membership.update_terms(share.claims.terms)
            await share.membership.update((), ())
        finally:
            # Also when the time is over: the connection would keep its listener.
            async with asyncio.timeout(CLOSE_SECONDS):
                await share.membership.leave()
        if self._ephemeral:
            for layout in share.layouts.values():
                for number in range(layout.partitions):
                    await subscriptions.delete(
                        self._connection, layout.stream, group_consumer(self._group, number), f"Group {self._group!r}"
                    )

    def _check_open(self) -> None:
        if self._closed or self._connection.closed:
            raise Closed(f"The member of group {self._group!r} was closed")
