"""`Tracker`: redelivers messages whose leases ended, and writes dead letters; the members of its group share the work.

It reads the markers of one subscription. Any number of processes may run one; each marker partition has one of them.

*Concurrency.* On the loop that opened it; its clients live in threads: one that reads, and one per partition that
writes. *Exactly once.* A redelivery and its END are one transaction, and the new owner of a partition fences the former
one before it looks up the end of the log: a process that was suspended or cut off writes nothing afterwards.
*Failure.* While the brokers are unreachable the clocks stop, and nothing is redelivered. An error that is not
retriable becomes `failure`, and `wait` raises it; trouble of a single partition holds up no other. *Close.* Commits and
leaves the group, within `CLOSE_SECONDS` without brokers too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from confluent_kafka import TopicPartition as NativePartition

from broker import BrokerError, Closed, LeaseLost, TopicNotFound, TopicPartition
from broker.driver import Hooks, PartitionsAssigned, PartitionsLost, PartitionsRevoked, TaskSet, Warned, logger, pause
from broker_kafka.client.consumer import ConsumerThread
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import bounds_of, high_watermarks
from broker_kafka.cluster.requests import describe_topic
from broker_kafka.codec.record_run import NativeRun
from broker_kafka.config.properties import in_own_group
from broker_kafka.offsets.kafka import ThreadOffsetStore
from broker_kafka.offsets.protocol import positions_in
from broker_kafka.queue.markers.lease import LeaseState
from broker_kafka.queue.markers.marker_producer import explain_marker_error
from broker_kafka.queue.markers.marker_topic import ensure_marker_topic, marker_topic_name, tracker_group
from broker_kafka.queue.tracker.offset_committer import OffsetCommitter
from broker_kafka.queue.tracker.partition_claim import WRITER_CLOSE, PartitionClaim, claim_partitions
from broker_kafka.queue.tracker.redeliverer import Redeliverer, RedeliveryRate
from broker_kafka.queue.tracker.redelivery_checks import GroupPositions, TopicChecks
from broker_kafka.queue.tracker.tracked_partition import SeekFailed, TrackedPartition, now_ms
from broker_kafka.queue.tracker.tracker_state import QueueTracked, TrackerCounts, TrackerOptions, TrackerState

__all__ = ["CLOSE_SECONDS", "Tracker"]

CLOSE_SECONDS: Final = 15.0
"""Seconds that a close takes at most."""
_TURN_SECONDS: Final = 3.0
_COMMIT_SECONDS: Final = 3.0
_LEAVE_SECONDS: Final = 5.0
_LEAST_PAUSE: Final = 0.01
_REQUEST_SECONDS: Final = 2.0
_BATCH: Final = 2_000
_REVOKE_SECONDS: Final = 10.0


class Tracker:
    """:param subscription: whose messages are tracked; also the group whose positions its workers commit.
    :param hooks: given partition events, warnings and `QueueTracked`.
    :ivar failure: why it stopped tracking, if it did.
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
        self._thread: ConsumerThread | None = None
        self._store: ThreadOffsetStore
        self._committer: OffsetCommitter
        topics = {topic for topic in (*self._options.topics, self._options.topic) if topic}
        self._positions = GroupPositions(connection, subscription, self.warn, topics=topics)
        self._topics = TopicChecks(connection, topics=topics)
        self._rate = RedeliveryRate(connection.settings.redelivery_rate)
        self._tracked: dict[TopicPartition, TrackedPartition] = {}
        self._claims: dict[TopicPartition, PartitionClaim] = {}
        """Of partitions that are being assigned."""
        self._tasks = TaskSet(f"tracker-{subscription}", self._task_failed)
        self._closing_partitions = TaskSet(f"tracker-{subscription}-close-partition", self._task_failed)
        self._log_end_requested = asyncio.Event()
        self._stopped = asyncio.Event()
        self._answered_at = now_ms()
        """When the last log end request that was answered was sent."""
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def unanswered_seconds(self) -> float:
        """Seconds since the brokers last answered."""
        return (now_ms() - self._answered_at) / 1000

    @property
    def trouble(self) -> str:
        """Why nothing is redelivered from a partition; empty if nothing is wrong."""
        return next((text for each in self._tracked.values() if (text := each.trouble)), "")

    # -- opening and closing -------------------------------------------------------------------------------

    async def open(self, *, topic_checked: bool = False) -> None:
        """Create or check the marker topic and join the group. Partitions are assigned later.

        :param topic_checked: skips the marker topic.
        :raises ConfigurationError: the marker topic has unfit settings.
        :raises BrokerError: the client cannot be created, or no broker answers.
        """
        options = self._options
        if not topic_checked:
            await ensure_marker_topic(
                self._connection, self.subscription, topics=options.topics, partitions=options.marker_partitions
            )
        thread = _marker_thread(self._connection, self.group, self)
        self._store = ThreadOffsetStore(thread, timeout=self._connection.settings.request_timeout)
        self._committer = OffsetCommitter(thread, self._tracked.values, options, self.counts)
        self._thread = thread
        try:
            await thread.start()
            await thread.subscribe([self.topic])
        except BaseException:
            await self.close()
            raise
        self._tasks.spawn(self._watch())
        self._tasks.spawn(self._committer.run())
        self._tasks.spawn(self._report())

    async def wait(self) -> None:
        """Wait until it is closed.

        :raises BrokerError: it failed.
        """
        await self._stopped.wait()
        if self.failure is not None:
            raise self.failure

    async def close(self) -> None:
        """Stop, and leave the group to its other members; may be called twice, and continues if it is cancelled."""
        self._closed = True
        if self._closing is None:
            # Cut short, a close would leave a member that has partitions and does nothing for them.
            self._closing = asyncio.get_running_loop().create_task(self._close(), name=f"tracker-{self.group}-close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._tasks.cancel()
        tracked = list(self._tracked.values())
        await asyncio.gather(*(each.stop(_TURN_SECONDS) for each in tracked))
        if self._thread is not None:
            await self._commit(tracked, _COMMIT_SECONDS)
            await self._thread.stop(_LEAVE_SECONDS)
        self._tracked.clear()
        unused, self._claims = list(self._claims.values()), {}
        await asyncio.gather(
            *(each.close() for each in tracked),
            *self._closing_partitions,
            *(each.writer.stop(WRITER_CLOSE) for each in unused),
        )
        self._stopped.set()

    # -- its state -----------------------------------------------------------------------------------------

    def state(self) -> TrackerState:
        """The present state."""
        read = {place.partition: (each, each.state) for place, each in sorted(self._tracked.items())}
        known = [(each, partition) for each, partition in read.values() if partition is not None]
        at, clocks = now_ms(), [partition.clock for _, partition in known]
        leases = [(partition.clock.now or 0, each) for _, partition in known for each in partition.markers.entries()]
        return TrackerState(
            partitions=list(read),
            catching_up=[number for number, (_, found) in read.items() if found is None or not found.is_open],
            open=len(leases),
            open_bytes=sum(partition.markers.bytes for _, partition in known),
            due=sum(each.state == LeaseState.SENDING or each.deadline <= now for now, each in leases),
            oldest=max(((now - each.started) / 1000 for now, each in leases), default=None),
            clock_lag=max((clock.lag(at) / 1000 for clock in clocks if clock.now is not None), default=None),
            lag=sum(max(0, each.end - partition.position) for each, partition in known),
            uncommitted=sum(partition.position - partition.committed_position for _, partition in known),
        )

    # -- for its partitions --------------------------------------------------------------------------------

    def request_log_end(self) -> None:
        self._log_end_requested.set()

    async def reclaim(self, tracked: TrackedPartition) -> None:
        thread, place = self._open_thread(), tracked.place
        await self._check_ownership(thread, place)
        claimed = (await claim_partitions(self._connection, self._store, self.group, [place]))[place]
        begun = False

        def on_seek(moved: Sequence[TopicPartition]) -> None:
            nonlocal begun
            if place in moved:
                begun = True
                tracked.begin(claimed)

        try:
            await thread.seek({place: claimed.start}, on_seek)
        except BrokerError as error:
            if error.retriable or isinstance(error, (Closed, LeaseLost)) or thread.failure is not None:
                raise
            raise SeekFailed(error.message, native=error.native) from error
        finally:
            if not begun or self._tracked.get(place) is not tracked:
                await claimed.writer.stop(WRITER_CLOSE)

    def fail(self, error: BrokerError) -> None:
        if self.failure is None and not self._closed:
            self.failure = error
            self.warn(f"The tracker of {self.subscription!r} failed: {error}")
            self._stopped.set()

    def warn(self, text: str) -> None:
        logger.warning(text)
        if self._hooks.listening:
            self._hooks.emit(Warned(text=text))

    # -- ConsumerHost ----------------------------------------------------------------------------------------

    def arrived(self, runs: Sequence[NativeRun]) -> None:
        try:
            for run in runs:
                tracked = self._tracked.get(TopicPartition(run.topic, run.partition))
                if tracked is not None:
                    self._committer.read(tracked.read(run))
        finally:
            self._open_thread().taken()

    def reached(self, partition: TopicPartition, position: int) -> None:
        """All records below this position were handed over, or are not visible."""
        tracked = self._tracked.get(partition)
        if tracked is not None:
            tracked.reached(position)

    async def assigning(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        if self._closed:
            raise Closed(f"The tracker of {self.subscription!r} was closed")
        claims = await claim_partitions(self._connection, self._store, self.group, partitions)
        replaced = [self._claims.pop(place).writer for place in partitions if place in self._claims]
        self._claims |= claims
        for writer in replaced:
            self._tasks.spawn(writer.stop(WRITER_CLOSE))
        return {place: found.start for place, found in claims.items()}

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        if self._closed:
            return
        for place in partitions:
            redeliverer = Redeliverer(place, self._positions, self._topics, self._options, self.counts, self._rate)
            tracked = TrackedPartition(place, self, redeliverer, self._options.partition, self.counts)
            self._tracked[place] = tracked
            tracked.begin(self._claims.pop(place))
        self._log_end_requested.set()
        if self._hooks.listening:
            self._hooks.emit(PartitionsAssigned(partitions=list(partitions), current=sorted(self._tracked)))

    async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
        revoked = [self._tracked[place] for place in partitions if place in self._tracked]
        if self._hooks.listening:
            current = sorted(set(self._tracked).difference(partitions))
            self._hooks.emit(PartitionsRevoked(partitions=list(partitions), current=current))
        await asyncio.gather(*(each.stop(_TURN_SECONDS) for each in revoked))
        await self._commit(revoked, min(_COMMIT_SECONDS, deadline - asyncio.get_running_loop().time()))
        self._drop(partitions)

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        self._drop(partitions)
        if self._hooks.listening:
            self._hooks.emit(PartitionsLost(partitions=list(partitions), current=sorted(self._tracked)))

    def out_of_range(self, partition: TopicPartition, position: int) -> None:
        tracked = self._tracked.get(partition)
        if tracked is not None:
            self.warn(
                f"The log of {partition.topic!r}[{partition.partition}] does not hold position {position} any more"
            )
            tracked.reread()

    def failed(self, error: BrokerError) -> None:
        thread = self._thread
        if thread is not None and thread.failure is not None:
            self.fail(thread.failure)
        elif isinstance(error, TopicNotFound):
            self._tasks.spawn(self._check_topic())
        elif error.retriable or isinstance(error, LeaseLost):
            logger.info("The tracker of %r continues after: %s", self.subscription, error)
        else:
            self.fail(error)

    # -- inside --------------------------------------------------------------------------------------------

    def _open_thread(self) -> ConsumerThread:
        if self._thread is None:
            raise Closed(f"The tracker of {self.subscription!r} is not open")
        return self._thread

    async def _check_ownership(self, thread: ConsumerThread, place: TopicPartition) -> None:
        """Commit the stored position again, which the coordinator takes from the owner only.

        :raises LeaseLost: the partition is not ours.
        """
        stored = positions_in(await self._store.fetch(self.group, [place])).get(place)
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
            logger.info("Positions of markers are not committed, and some markers are read again: %s", error)

    def _drop(self, partitions: Sequence[TopicPartition]) -> None:
        for place in partitions:
            tracked = self._tracked.pop(place, None)
            if tracked is not None:
                self._closing_partitions.spawn(tracked.close())

    async def _check_topic(self) -> None:
        """Fail if the topic does not exist; a broker may not know a new topic yet."""
        try:
            await describe_topic(self._connection, self.topic)
        except TopicNotFound as error:
            self.fail(explain_marker_error(error, self.topic, 0))
        except BrokerError as error:
            logger.info("The tracker of %r continues after: %s", self.subscription, error)

    async def _watch(self) -> None:
        """Report the log ends to the partitions: on request, and often enough that no clock counts a stall."""
        heartbeat = self._options.partition.stall_ms / 4000
        while True:
            await pause(heartbeat, self._log_end_requested)
            self._log_end_requested.clear()
            tracked = dict(self._tracked)
            at = now_ms()
            # A tracker without partitions requests it too: its `unanswered_seconds` must be right before it takes over.
            places = list(tracked) or [TopicPartition(self.topic, 0)]
            try:
                found = await high_watermarks(self._connection, places, _REQUEST_SECONDS)
            except BrokerError as error:
                logger.debug("The log ends of the markers of %r are unknown: %s", self.subscription, error)
                found = {}
            if found:
                self._answered_at = at
            for place, end in found.items():
                if place in tracked and self._tracked.get(place) is tracked[place]:
                    tracked[place].log_end_known(end, at)
            await asyncio.sleep(_LEAST_PAUSE)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._options.report_interval)
            if self._hooks.listening:
                self._hooks.emit(QueueTracked(subscription=self.subscription, state=self.state(), counts=self.counts))

    def _task_failed(self, error: Exception) -> None:
        if not isinstance(error, BrokerError):
            error = BrokerError(f"The tracker of {self.subscription!r} failed: {error!r}", native=error)
        self.fail(error)


def _marker_thread(connection: Connection, group: str, tracker: Tracker) -> ConsumerThread:
    """The thread of a member of the trackers' group.

    The end of a partition lies behind records that the client does not return, such as those that end transactions:
    without its report a tracker would never know that it has read everything.
    """
    config = in_own_group(connection.client_config("consumer")) | {
        "group.id": group,
        # A START of an aborted transaction leases nothing.
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
    }
    return ConsumerThread(
        config,
        tracker,
        name=f"broker-kafka-{group}",
        warn=connection.warn,
        max_batch=_BATCH,
        revoke_seconds=min(_REVOKE_SECONDS, connection.settings.max_poll_interval_ms / 2000),
        # Its commands are rare and not urgent, and checking for them between short polls costs more.
        busy_seconds=0.0,
        ended=tracker.reached,
    )
