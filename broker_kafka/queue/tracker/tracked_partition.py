"""`RepeatedDoubts`: how long a partition rests after doubts that nobody can explain, and when people are told of them.

A doubt now and then is that of a broker that went away, or of another tracker that took the partition. What comes again
and again has a cause that a new writer does not mend: without a rest it would keep the brokers busy, and nobody would
see it. Pure: it is told the local monotonic time in seconds.

MERGED broker_kafka.queue.tracker.tracked_partition: `TrackedPartition`: one marker partition that this process tracks: what was read of it, and the task of its turns.

*Concurrency.* On the loop. One task writes, turn by turn; what is read meanwhile wakes it. *Failure.* After any doubt
about what was written, the partition is taken over anew and read from its committed position, once it is sure that it
is still ours; nothing is written before. Doubts that are repeated have it rest, longer and longer, and are told. What
the brokers refuse for good then, such as the right to it, ends the
tracker, as when it opens. A client that does not go back in the log is this partition's own trouble: it is tried again,
ever more seldom, and told, while the other partitions go on. *Stop.* The turn that is under way is awaited for a
bounded time.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Final, Protocol

from broker import BrokerError, Closed, LeaseLost, TopicPartition
from broker.driver import logger
from broker_kafka.codec.record_run import NativeRun
from broker_kafka.queue.markers.fenced_writer import Doubtful, FencedWriter
from broker_kafka.queue.tracker.partition_claim import WRITER_CLOSE, Claim
from broker_kafka.queue.tracker.partition_state import AssignedPartition, PartitionOptions
from broker_kafka.queue.tracker.redeliverer import Redeliverer
from broker_kafka.queue.tracker.tracker_state import TrackerCounts

__all__ = ["NotMoved", "RepeatedDoubts", "TrackedPartition", "TrackerHost", "now_ms"]


_FREE: Final = 2
"""So many in a row cost no rest."""
_TOLD: Final = 5
_FIRST: Final = 0.5
_LONGEST: Final = 60.0
_QUIET: Final = 30.0
"""Seconds without a doubt, beside the rest, after which the next one is the first again."""


class RepeatedDoubts:
    """Those of one partition."""

    def __init__(self) -> None:
        self._count = 0
        self._quiet_at = 0.0
        self._reason = ""

    def add(self, reason: str, now: float) -> float:
        """There was one more; for how many seconds the partition is to rest."""
        if now >= self._quiet_at:
            self._count = 0
        self._count += 1
        self._reason = reason
        over = self._count - _FREE
        rest = min(_LONGEST, _FIRST * 2.0 ** min(over - 1, 16)) if over > 0 else 0.0
        self._quiet_at = now + rest + _QUIET
        return rest

    @property
    def is_news(self) -> bool:
        """Whether the last one is the one that people are to be told of: once for all in a row."""
        return self._count == _TOLD

    def trouble(self, now: float) -> str:
        """What is wrong, for people; empty if nothing is."""
        return self._reason if self._count >= _TOLD and now < self._quiet_at else ""


_LONGEST_WAIT: Final = 1.0
_LEAST_WAIT: Final = 0.02
_ASK_AGAIN: Final = 0.5
_RECOVER: Final = 0.1
_LONGEST_RECOVER: Final = 2.0
_LONGEST_UNMOVED: Final = 30.0
_LONG: Final = 60.0
"""Seconds after which a partition that cannot be taken over anew is told of."""


def now_ms() -> int:
    """The local monotonic time in milliseconds."""
    return int(1000 * monotonic())


class NotMoved(BrokerError):
    """The client does not read the partition from where it was taken over."""


class TrackerHost(Protocol):
    """What a partition asks of its tracker."""

    def ask_end(self, place: TopicPartition) -> None:
        """Have `log_ends` told soon."""
        ...

    async def claim_again(self, tracked: TrackedPartition) -> None:
        """Take the partition over anew and have `begin` called.

        :raises LeaseLost: it is not ours. :raises NotMoved: nobody but this partition has this trouble.
        :raises BrokerError: it could not be done.
        """
        ...

    def gave_up(self, error: BrokerError) -> None:
        """A partition cannot be tracked any more."""
        ...

    def warn(self, text: str) -> None: ...


class TrackedPartition:
    """:ivar partition: what was read; None while it is being taken over.
    :ivar end: where the log ended when it was last asked.
    """

    def __init__(
        self,
        place: TopicPartition,
        host: TrackerHost,
        redeliverer: Redeliverer,
        options: PartitionOptions,
        counts: TrackerCounts,
    ) -> None:
        self.place: Final = place
        self._host: Final = host
        self._redeliverer: Final = redeliverer
        self._options: Final = options
        self._counts: Final = counts
        self.partition: AssignedPartition | None = None
        self.end = 0
        self._writer: FencedWriter | None = None
        self._live = True
        self._wake = asyncio.Event()
        self._wait = _LEAST_WAIT
        self._doubts = RepeatedDoubts()
        self._rest_until = 0.0
        """The monotonic time in seconds until which it rests after doubts."""
        self._untaken = ""
        """Why it has not been taken over anew for long, if it has not."""
        self._task: asyncio.Task[None] | None = None

    @property
    def trouble(self) -> str:
        """Why nothing comes again of it, for people; empty if nothing is wrong."""
        return self._untaken or self._doubts.trouble(monotonic())

    def begin(self, claim: Claim) -> None:
        """It was taken over, and what is read next lies at the claim's start. The writer is this one's to close."""
        if claim.lost is not None:
            self._host.warn(
                f"The log of {self.place.topic!r}[{self.place.partition}] does not hold the committed position "
                f"{claim.lost}: markers may be lost, and it is read from {claim.start}"
            )
        self._writer = claim.writer
        if not self._live:
            return
        self.end = claim.end
        self.partition = AssignedPartition(claim.start, claim.end, now_ms(), self._options)
        if self._task is None:
            name = f"tracker-{self.place.topic}-{self.place.partition}"
            self._task = asyncio.get_running_loop().create_task(self._run(), name=name)
        self._wake.set()

    # -- what is read --------------------------------------------------------------------------------------

    def read(self, run: NativeRun) -> int:
        """Records of markers, in the order of the log; how many markers they have."""
        partition = self.partition
        if partition is None:
            return 0
        at, unknown, count = now_ms(), partition.unknown, 0
        for message in run.messages:
            offset, (_, timestamp) = message.offset(), message.timestamp()
            assert offset is not None
            count += partition.read(offset, timestamp, message.value(), at)
        self._counts.markers += count
        self._counts.unknown += partition.unknown - unknown
        self._wait = _LEAST_WAIT
        self._wake.set()
        return count

    def reached(self, position: int) -> None:
        """All below was read, or is not shown."""
        if self.partition is not None:
            self.partition.moved(position)
            self._wake.set()

    def log_ends(self, end: int, at: int) -> None:
        """The log ended here when it was asked for at this local time."""
        self.end = end
        partition = self.partition
        if partition is None:
            return
        before = partition.is_open
        partition.log_ends(end, at)
        deadline, now = partition.markers.next_deadline(), partition.clock.now
        # Else who waits for the log, which an open transaction may hide, would ask again at once.
        if partition.is_open != before or (deadline is not None and now is not None and now >= deadline):
            self._wake.set()

    def read_anew(self) -> None:
        """What was read is not to be relied on."""
        self.partition = None
        self._wake.set()

    # -- what is written -----------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while self._live:
                self._wake.clear()
                partition, writer = self.partition, self._writer
                if partition is None or writer is None:
                    await self._recover()
                    continue
                try:
                    more = await self._redeliverer.turn(partition, writer, now_ms())
                except BrokerError as error:
                    self._doubt(error)
                    continue
                finally:
                    self._tell()
                if not more:
                    await self._wait_for_work(partition)
        except Exception as error:
            logger.exception("The tracker of %s[%d] failed", *self.place)
            self._host.gave_up(BrokerError(f"The tracker of {self.place} failed: {error!r}", native=error))

    async def _wait_for_work(self, partition: AssignedPartition) -> None:
        """Until something was read, or is due."""
        wait, at = _LONGEST_WAIT, now_ms()
        deadline, now = partition.markers.next_deadline(), partition.clock.now
        due = partition.is_open and deadline is not None and now is not None and deadline <= now
        if due and (pause := self._redeliverer.pause()):
            await self._sleep(pause)
            return
        late = deadline is not None and partition.is_open and partition.clock.estimate(at) >= deadline
        if late or partition.needs_end:
            self._host.ask_end(self.place)
            wait, self._wait = self._wait, min(2 * self._wait, _ASK_AGAIN)
        elif deadline is not None and partition.is_open:
            wait = min(wait, (deadline - partition.clock.estimate(at)) / 1000)
        await self._sleep(wait)

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return

    def _tell(self) -> None:
        told = self._redeliverer.told
        for text in told:
            self._host.warn(text)
        told.clear()

    def _doubt(self, error: BrokerError) -> None:
        if not self._live:
            return
        self._counts.doubts += 1
        self.partition = None
        fenced = isinstance(error, Doubtful) and error.fenced
        logger.warning("Markers of %s[%d] are read anew%s: %s", *self.place, ", if they are ours" * fenced, error)
        if isinstance(error, Doubtful) and error.explained:
            return
        self._rest_until = monotonic() + self._doubts.add(self._stuck(error), monotonic())
        if self._doubts.is_news:
            self._host.warn(self._doubts.trouble(monotonic()))

    def _stuck(self, error: BrokerError) -> str:
        return f"Nothing comes again of {self.place.topic!r}[{self.place.partition}] for now: {error}"

    async def _recover(self) -> None:
        """Take the partition over anew, for as long as it may be ours."""
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.stop(WRITER_CLOSE)
        while self._live and (rest := self._rest_until - monotonic()) > 0:
            await self._sleep(rest)
            self._wake.clear()
        pause, longest, unmoved, begun = _RECOVER, _LONGEST_RECOVER, 0, monotonic()
        while self._live and self._writer is None:
            try:
                await self._host.claim_again(self)
            except NotMoved as error:
                unmoved += 1
                longest = _LONGEST_UNMOVED
                if unmoved == 2:
                    # Once it may be that the partition goes, and this is the first to hear of it.
                    self._untaken = self._stuck(error)
                    self._host.warn(self._untaken)
            except LeaseLost as error:
                # The client will say so itself, unless it still has to hear of a new generation.
                logger.info("Not taken over anew for now: %s", error)
            except Closed:
                self._live = False
                return
            except BrokerError as error:
                if not error.retriable:
                    self._host.gave_up(error)
                    self._live = False
                    return
                logger.info("Taken over anew later: %s", error)
                if not self._untaken and monotonic() - begun > _LONG:
                    self._untaken = self._stuck(error)
                    self._host.warn(self._untaken)
            if self._writer is None:
                await self._sleep(pause)
                self._wake.clear()
                pause = min(2 * pause, longest)
        self._untaken = ""

    # -- the end -------------------------------------------------------------------------------------------

    async def stop(self, seconds: float) -> None:
        """Write no more; wait so long at most for the turn that is under way."""
        self._live = False
        self._wake.set()
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=seconds)

    async def close(self) -> None:
        """Let go of everything."""
        await self.stop(0)
        if self._task is not None:
            self._task.cancel()
        self.partition = None
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.stop(WRITER_CLOSE)
