"""`Tracker`: sends messages again whose leases ended, and writes dead letters; a group of them shares the partitions.

It reads the markers of one subscription. Any number of processes may run one; each marker partition has one of them.
*Concurrency.* On the loop that opened it; the clients live in threads: one that reads, and one per partition that
writes. *Exactly once.* A redelivery and its END are one transaction, and a partition's new owner fences the old one
before it reads where the log ends, so a process that was paused, or is cut off, writes nothing any more. *Failure.*
Trouble of the brokers is waited out: time stands still while the log is not heard of, and nothing is redelivered.
What cannot be mended is `failure`, and `wait` raises it; the trouble of a single partition holds up no other. *Close.*
Commits and leaves the group, within `CLOSE` seconds, cut off from the brokers too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final

from confluent_kafka import TopicPartition as NativePartition

from broker import BrokerError, Closed, LeaseLost, TopicNotFound, TopicPartition
from broker.driver import Hooks, PartitionsAssigned, PartitionsLost, PartitionsRevoked, Warned, logger
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import bounds_of, high_watermarks
from broker_kafka.cluster.requests import describe_topic
from broker_kafka.codec.record_run import NativeRun
from broker_kafka.offsets.kafka import ThreadOffsetStore
from broker_kafka.queue.markers.lease import State
from broker_kafka.queue.markers.producer import explained
from broker_kafka.queue.markers.topic import ensure_marker_topic, marker_topic_name, tracker_group
from broker_kafka.queue.tracker.group_positions import GroupPositions
from broker_kafka.queue.tracker.marker_consumer import MarkerConsumer
from broker_kafka.queue.tracker.message_topics import MessageTopics
from broker_kafka.queue.tracker.offset_committer import OffsetCommitter
from broker_kafka.queue.tracker.partition_claim import WRITER_CLOSE, Claim, claim
from broker_kafka.queue.tracker.redeliverer import Redeliverer, RedeliveryRate
from broker_kafka.queue.tracker.tracked_partition import NotMoved, TrackedPartition, now_ms
from broker_kafka.queue.tracker.tracking import QueueTracked, TrackerCounts, TrackerOptions, TrackerState

__all__ = ["CLOSE", "Tracker"]

CLOSE: Final = 15.0
"""Seconds that a close takes at most."""
_TURN: Final = 3.0
_COMMIT: Final = 3.0
_LEAVE: Final = 5.0
_LEAST_PAUSE: Final = 0.01
_PATIENCE: Final = 2.0


class Tracker:
    """:param subscription: whose messages are tracked; also the group whose positions its workers commit.
    :param hooks: told of partitions, of what operators should know, and of `QueueTracked`.
    :ivar counts: all it has done.
    :ivar failure: why it tracks no more, if it has failed.
    """

    def __init__(
        self, connection: Connection, subscription: str, hooks: Hooks, *, options: TrackerOptions | None = None
    ) -> None:
        self._connection = connection
        self.subscription: Final = subscription
        self.topic: Final = marker_topic_name(subscription, connection.settings.marker_topic)
        self.group: Final = tracker_group(subscription, connection.settings.marker_topic)
        self._hooks = hooks
        self._options = options or TrackerOptions()
        self.counts: Final = TrackerCounts()
        self.failure: BrokerError | None = None
        self._thread: MarkerConsumer | None = None
        self._store: ThreadOffsetStore
        self._committer: OffsetCommitter
        self._positions = GroupPositions(connection, subscription, self.warn)
        self._topics = MessageTopics(connection)
        self._rate = RedeliveryRate(connection.settings.redelivery_rate)
        self._tracked: dict[TopicPartition, TrackedPartition] = {}
        self._claims: dict[TopicPartition, Claim] = {}
        """Of partitions that are being assigned."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        """What is let go of, and its clients closed."""
        self._asked = asyncio.Event()
        self._over = asyncio.Event()
        self._heard = now_ms()
        """When it was asked last where the markers end, of what was answered."""
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def silent(self) -> float:
        """Seconds since brokers last told of the markers."""
        return (now_ms() - self._heard) / 1000

    @property
    def trouble(self) -> str:
        """Why nothing comes again of a partition, for people; empty if nothing is wrong."""
        return next((text for each in self._tracked.values() if (text := each.trouble)), "")

    # -- opening and closing -------------------------------------------------------------------------------

    async def open(self, *, ensured: bool = False) -> None:
        """See to the marker topic and join the group. Partitions come later.

        :param ensured: the marker topic has just been seen to.
        :raises ConfigurationError: the marker topic is not fit for it.
        :raises BrokerError: the client cannot be made, or no broker answers.
        """
        options = self._options
        if not ensured:
            await ensure_marker_topic(
                self._connection, self.subscription, topics=options.topics, partitions=options.marker_partitions
            )
        thread = MarkerConsumer(self._connection, self.group, self)
        self._store = ThreadOffsetStore(thread, timeout=self._connection.settings.request_timeout)
        self._committer = OffsetCommitter(thread, lambda: list(self._tracked.values()), options, self.counts)
        self._thread = thread
        try:
            await thread.start()
            await thread.subscribe([self.topic])
        except BaseException:
            await self.close()
            raise
        self._spawn(self._watch(), "watch")
        self._spawn(self._committer.run(), "commit")
        self._spawn(self._report(), "report")

    async def wait(self) -> None:
        """Until it is closed.

        :raises BrokerError: it has failed.
        """
        await self._over.wait()
        if self.failure is not None:
            raise self.failure

    async def close(self) -> None:
        """End it; may be called twice, and goes on if it is cancelled. Its partitions go to the others of the group."""
        self._closed = True
        if self._closing is None:
            # Half of it would leave a member behind that has partitions and does nothing for them.
            self._closing = asyncio.get_running_loop().create_task(self._close(), name=f"tracker-{self.group}-close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        tracked = list(self._tracked.values())
        await asyncio.gather(*(each.stop(_TURN) for each in tracked))
        if self._thread is not None:
            await self._commit(tracked, _COMMIT)
            await self._thread.stop(_LEAVE)
        self._tracked.clear()
        left, self._claims = list(self._claims.values()), {}
        await asyncio.gather(
            *(each.close() for each in tracked), *self._leaving, *(each.writer.stop(WRITER_CLOSE) for each in left)
        )
        self._over.set()

    # -- what is told --------------------------------------------------------------------------------------

    def state(self) -> TrackerState:
        """How it is doing now."""
        read = {place.partition: (each, each.partition) for place, each in sorted(self._tracked.items())}
        known = [(each, partition) for each, partition in read.values() if partition is not None]
        at, clocks = now_ms(), [partition.clock for _, partition in known]
        leases = [(partition.clock.now or 0, each) for _, partition in known for each in partition.markers.entries()]
        return TrackerState(
            partitions=list(read),
            catching_up=[number for number, (_, found) in read.items() if found is None or not found.is_open],
            open=len(leases),
            open_bytes=sum(partition.markers.bytes for _, partition in known),
            due=sum(each.state == State.SENDING or each.deadline <= now for now, each in leases),
            oldest=max(((now - each.started) / 1000 for now, each in leases), default=None),
            clock_lag=max((clock.lag(at) / 1000 for clock in clocks if clock.now is not None), default=None),
            lag=sum(max(0, each.end - partition.position) for each, partition in known),
            uncommitted=sum(partition.position - partition.committed_position for _, partition in known),
        )

    # -- for its partitions --------------------------------------------------------------------------------

    def ask_end(self, place: TopicPartition) -> None:
        self._asked.set()

    async def claim_again(self, tracked: TrackedPartition) -> None:
        thread, place = self._open_thread(), tracked.place
        await self._check_ours(thread, place)
        claimed = (await claim(self._connection, self._store, self.group, [place]))[place]
        begun = False

        def sought(moved: Sequence[TopicPartition]) -> None:
            nonlocal begun
            if place in moved:
                begun = True
                tracked.begin(claimed)

        try:
            await thread.seek({place: claimed.start}, sought)
        except BrokerError as error:
            if error.retriable or isinstance(error, (Closed, LeaseLost)) or thread.failure is not None:
                raise
            raise NotMoved(error.message, native=error.native) from error
        finally:
            if not begun or self._tracked.get(place) is not tracked:
                await claimed.writer.stop(WRITER_CLOSE)

    def gave_up(self, error: BrokerError) -> None:
        if self.failure is None and not self._closed:
            self.failure = error
            self.warn(f"The tracker of {self.subscription!r} has failed: {error}")
            self._over.set()

    def warn(self, text: str) -> None:
        logger.warning(text)
        if self._hooks.listening:
            self._hooks.emit(Warned(text=text))

    # -- MarkerHost ----------------------------------------------------------------------------------------

    def arrived(self, runs: Sequence[NativeRun]) -> None:
        try:
            for run in runs:
                tracked = self._tracked.get(TopicPartition(run.topic, run.partition))
                if tracked is not None:
                    self._committer.read(tracked.read(run))
        finally:
            self._open_thread().taken()

    def reached(self, partition: TopicPartition, position: int) -> None:
        tracked = self._tracked.get(partition)
        if tracked is not None:
            tracked.reached(position)

    async def assigning(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        if self._closed:
            raise Closed(f"The tracker of {self.subscription!r} was closed")
        claims = await claim(self._connection, self._store, self.group, partitions)
        left = [self._claims.pop(place).writer for place in partitions if place in self._claims]
        self._claims |= claims
        for writer in left:
            self._spawn(writer.stop(WRITER_CLOSE), "stop")
        return {place: found.start for place, found in claims.items()}

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        if self._closed:
            return
        for place in partitions:
            redeliverer = Redeliverer(place, self._positions, self._topics, self._options, self.counts, self._rate)
            tracked = TrackedPartition(place, self, redeliverer, self._options.partition, self.counts)
            self._tracked[place] = tracked
            tracked.begin(self._claims.pop(place))
        self._asked.set()
        if self._hooks.listening:
            self._hooks.emit(PartitionsAssigned(partitions=list(partitions), current=sorted(self._tracked)))

    async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
        going = [self._tracked[place] for place in partitions if place in self._tracked]
        if self._hooks.listening:
            rest = sorted(set(self._tracked).difference(partitions))
            self._hooks.emit(PartitionsRevoked(partitions=list(partitions), current=rest))
        await asyncio.gather(*(each.stop(_TURN) for each in going))
        await self._commit(going, min(_COMMIT, deadline - asyncio.get_running_loop().time()))
        self._let_go(partitions)

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        self._let_go(partitions)
        if self._hooks.listening:
            self._hooks.emit(PartitionsLost(partitions=list(partitions), current=sorted(self._tracked)))

    def out_of_range(self, partition: TopicPartition, position: int) -> None:
        tracked = self._tracked.get(partition)
        if tracked is not None:
            self.warn(f"Position {position} of the markers {partition.topic!r}[{partition.partition}] is gone")
            tracked.read_anew()

    def failed(self, error: BrokerError) -> None:
        thread = self._thread
        if thread is not None and thread.failure is not None:
            self.gave_up(thread.failure)
        elif isinstance(error, TopicNotFound):
            self._spawn(self._look_for_topic(), "look")
        elif error.retriable or isinstance(error, LeaseLost):
            logger.info("The tracker of %r goes on after: %s", self.subscription, error)
        else:
            self.gave_up(error)

    # -- inside --------------------------------------------------------------------------------------------

    def _open_thread(self) -> MarkerConsumer:
        if self._thread is None:
            raise Closed(f"The tracker of {self.subscription!r} is not open")
        return self._thread

    async def _check_ours(self, thread: MarkerConsumer, place: TopicPartition) -> None:
        """By a commit that changes nothing, which the coordinator takes of the owner only.

        :raises LeaseLost: it is not.
        """
        stored = (await self._store.fetch(self.group, [place]))[place]
        if isinstance(stored, BrokerError):
            raise stored
        if stored is None:
            at = (await bounds_of(self._connection, [place], committed=False))[place].first
        else:
            at = stored.offset
        error = (await thread.commit([NativePartition(*place, at)])).get(place)
        if error is not None:
            raise error

    async def _commit(self, tracked: Sequence[TrackedPartition], seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._committer.commit(tracked)
        except (BrokerError, TimeoutError) as error:
            logger.info("Positions of markers are not committed, and some are read again: %s", error)

    def _let_go(self, partitions: Sequence[TopicPartition]) -> None:
        for place in partitions:
            tracked = self._tracked.pop(place, None)
            if tracked is not None:
                task = asyncio.get_running_loop().create_task(tracked.close(), name="tracker-let-go")
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)

    async def _look_for_topic(self) -> None:
        """A broker may not know of a new topic yet."""
        try:
            await describe_topic(self._connection, self.topic)
        except TopicNotFound as error:
            self.gave_up(explained(error, self.topic, 0))
        except BrokerError as error:
            logger.info("The tracker of %r goes on after: %s", self.subscription, error)

    async def _watch(self) -> None:
        """Tell the partitions where their logs end: when one asks, and so often that none takes it for a stall."""
        heartbeat = self._options.partition.stall_ms / 4000
        while True:
            try:
                async with asyncio.timeout(heartbeat):
                    await self._asked.wait()
            except TimeoutError:
                pass
            self._asked.clear()
            asked = dict(self._tracked)
            at = now_ms()
            # Who tracks none asks too: that no broker answers is to be known before it has to take over.
            places = list(asked) or [TopicPartition(self.topic, 0)]
            try:
                found = await high_watermarks(self._connection, places, _PATIENCE)
            except BrokerError as error:
                logger.debug("The ends of the markers of %r are not known: %s", self.subscription, error)
                found = {}
            if found:
                self._heard = at
            for place, end in found.items():
                if place in asked and self._tracked.get(place) is asked[place]:
                    asked[place].log_ends(end, at)
            await asyncio.sleep(_LEAST_PAUSE)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._options.tell_each)
            if self._hooks.listening:
                self._hooks.emit(QueueTracked(subscription=self.subscription, state=self.state(), counts=self.counts))

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"tracker-{self.subscription}-{name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.gave_up(
                error
                if isinstance(error, BrokerError)
                else BrokerError(f"The tracker of {self.subscription!r} failed: {error!r}", native=error)
            )
