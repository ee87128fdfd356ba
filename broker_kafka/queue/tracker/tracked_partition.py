"""`TrackedPartition`: one marker partition that this process tracks: its state, and the task that writes what is due.

*Concurrency.* On the loop. One task writes, turn by turn; markers that are read meanwhile wake it.

| failure | what the partition does |
|---|---|
| unknown outcome of a write | claims the partition and reads it again before it writes anything |
| repeated unknown outcomes | pauses for growing times, and warns |
| the brokers refuse the claim for good | ends the tracker, as when it opens |
| the client does not seek back | retries after growing pauses and warns; other partitions go on |

*Stop.* Waits for the turn in progress, for a bounded time.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Final, Protocol

from broker import BrokerError, Closed, LeaseLost, TopicPartition
from broker.driver import Backoff, logger, pause
from broker_kafka.codec.record_run import NativeRun
from broker_kafka.fenced_writer import FencedWriter, OutcomeUnknown
from broker_kafka.queue.tracker.partition_claim import WRITER_CLOSE, PartitionClaim
from broker_kafka.queue.tracker.partition_state import PartitionOptions, PartitionState
from broker_kafka.queue.tracker.redeliverer import Redeliverer
from broker_kafka.queue.tracker.tracker_state import TrackerCounts

__all__ = ["FailureBackoff", "SeekFailed", "TrackedPartition", "TrackerHost", "now_ms"]

_IMMEDIATE: Final = 2
"""After so many failures in a row the partition continues at once."""
_WARN_AT: Final = 5
_QUIET: Final = 30.0
"""Seconds without a failure, the pause not included, after which the count starts again."""
_LONGEST_WAIT: Final = 1.0
_LONG: Final = 60.0
"""Seconds without a claim after which operators are warned."""


class TrackedPartition:
    """:ivar state: what was read; None while the partition is being claimed again.
    :ivar end: the last known end of the log.
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
        self.state: PartitionState | None = None
        self.end = 0
        self._writer: FencedWriter | None = None
        self._live = True
        self._wake = asyncio.Event()
        self._request_backoff = Backoff(0.02, 0.5)
        """Of requests for the end of the log."""
        self._failures = FailureBackoff()
        self._paused_until = 0.0
        """The monotonic time in seconds until which the partition pauses after failures."""
        self._unclaimed = ""
        """Why the partition could not be claimed again for long, if so."""
        self._task: asyncio.Task[None] | None = None

    @property
    def trouble(self) -> str:
        """Why nothing is redelivered from this partition; empty if nothing is wrong."""
        return self._unclaimed or self._failures.trouble(monotonic())

    def begin(self, claim: PartitionClaim) -> None:
        """The partition was claimed, and is read from the claim's start. This owns the writer from now on."""
        if claim.lost is not None:
            self._host.warn(
                f"The log of {self.place.topic!r}[{self.place.partition}] does not hold the committed position "
                f"{claim.lost}: markers may be lost; reading starts at {claim.start}"
            )
        self._writer = claim.writer
        if not self._live:
            return
        self.end = claim.end
        self.state = PartitionState(claim.start, claim.end, now_ms(), self._options)
        if self._task is None:
            name = f"tracker-{self.place.topic}-{self.place.partition}"
            self._task = asyncio.get_running_loop().create_task(self._run(), name=name)
        self._wake.set()

    # -- what is read --------------------------------------------------------------------------------------

    def read(self, run: NativeRun) -> int:
        """Records of markers, in the order of the log; returns how many markers they have."""
        state = self.state
        if state is None:
            return 0
        at, unknown, count = now_ms(), state.unknown, 0
        for message in run.messages:
            offset, (_, timestamp) = message.offset(), message.timestamp()
            assert offset is not None
            count += state.read(offset, timestamp, message.value(), at)
        self._counts.markers += count
        self._counts.unknown += state.unknown - unknown
        self._request_backoff.reset()
        self._wake.set()
        return count

    def reached(self, position: int) -> None:
        """All records below this position were read, or are not visible."""
        if self.state is not None:
            self.state.moved(position)
            self._wake.set()

    def log_end_known(self, end: int, at: int) -> None:
        """The log ended here when it was looked up, at this local time."""
        self.end = end
        state = self.state
        if state is None:
            return
        before = state.is_open
        state.log_end_known(end, at)
        deadline, now = state.markers.next_deadline(), state.clock.now
        # Else a partition whose log an open transaction hides would request the end again at once.
        if state.is_open != before or (deadline is not None and now is not None and now >= deadline):
            self._wake.set()

    def reread(self) -> None:
        """Read the partition again from its committed position."""
        self.state = None
        self._wake.set()

    # -- what is written -----------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while self._live:
                self._wake.clear()
                state, writer = self.state, self._writer
                if state is None or writer is None:
                    await self._recover()
                    continue
                try:
                    more = await self._redeliverer.turn(state, writer, now_ms())
                except BrokerError as error:
                    self._write_failed(error)
                    continue
                finally:
                    self._report_warnings()
                if not more:
                    await self._wait_for_work(state)
        except Exception as error:
            logger.exception("The tracker of %s[%d] failed", *self.place)
            self._host.fail(BrokerError(f"The tracker of {self.place} failed: {error!r}", native=error))

    async def _wait_for_work(self, state: PartitionState) -> None:
        """Wait until something was read, or is due."""
        wait, at = _LONGEST_WAIT, now_ms()
        deadline, now = state.markers.next_deadline(), state.clock.now
        due = state.is_open and deadline is not None and now is not None and deadline <= now
        if due and (seconds := self._redeliverer.pause()):
            await pause(seconds, self._wake)
            return
        late = deadline is not None and state.is_open and state.clock.estimate(at) >= deadline
        if late or state.needs_end:
            self._host.request_log_end()
            wait = self._request_backoff.next()
        elif deadline is not None and state.is_open:
            wait = min(wait, (deadline - state.clock.estimate(at)) / 1000)
        await pause(wait, self._wake)

    def _report_warnings(self) -> None:
        warnings = self._redeliverer.warnings
        for text in warnings:
            self._host.warn(text)
        warnings.clear()

    def _write_failed(self, error: BrokerError) -> None:
        if not self._live:
            return
        self._counts.unknown_outcomes += 1
        self.state = None
        fenced = isinstance(error, OutcomeUnknown) and error.fenced
        logger.warning(
            "Markers of %s[%d] are read again%s: %s", *self.place, ", if the partition is ours" * fenced, error
        )
        if isinstance(error, OutcomeUnknown) and error.refusals_handled:
            return
        self._paused_until = monotonic() + self._failures.add(self._stuck(error), monotonic())
        if self._failures.is_warning_due:
            self._host.warn(self._failures.trouble(monotonic()))

    def _stuck(self, error: BrokerError) -> str:
        return f"Nothing is redelivered from {self.place.topic!r}[{self.place.partition}] for now: {error}"

    async def _recover(self) -> None:
        """Claim the partition again, for as long as it may be ours."""
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.stop(WRITER_CLOSE)
        while self._live and (seconds := self._paused_until - monotonic()) > 0:
            await pause(seconds, self._wake)
            self._wake.clear()
        claims, seeks = Backoff(0.1, 2.0), Backoff(0.1, 30.0)
        failed_seeks, begun = 0, monotonic()
        while self._live and self._writer is None:
            backoff = claims
            try:
                await self._host.reclaim(self)
            except SeekFailed as error:
                backoff = seeks
                failed_seeks += 1
                if failed_seeks == 2:
                    # A single one may mean that the partition is being revoked.
                    self._unclaimed = self._stuck(error)
                    self._host.warn(self._unclaimed)
            except LeaseLost as error:
                # The client revokes the partition, or has yet to learn of a new generation.
                logger.info("Not claimed again for now: %s", error)
            except Closed:
                self._live = False
                return
            except BrokerError as error:
                if not error.retriable:
                    self._host.fail(error)
                    self._live = False
                    return
                logger.info("Claimed again later: %s", error)
                if not self._unclaimed and monotonic() - begun > _LONG:
                    self._unclaimed = self._stuck(error)
                    self._host.warn(self._unclaimed)
            if self._writer is None:
                await pause(backoff.next(), self._wake)
                self._wake.clear()
        self._unclaimed = ""

    # -- the end -------------------------------------------------------------------------------------------

    async def stop(self, seconds: float) -> None:
        """Write no more; wait so long at most for the turn in progress."""
        self._live = False
        self._wake.set()
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=seconds)

    async def close(self) -> None:
        """Stop and close the writer."""
        await self.stop(0)
        if self._task is not None:
            self._task.cancel()
        self.state = None
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.stop(WRITER_CLOSE)


class TrackerHost(Protocol):
    """The tracker, as its partitions call it."""

    def request_log_end(self) -> None:
        """Have `log_end_known` called soon."""
        ...

    async def reclaim(self, tracked: TrackedPartition) -> None:
        """Claim the partition again and call `begin`.

        :raises LeaseLost: the partition is not ours. :raises SeekFailed: only this partition is affected.
        :raises BrokerError: the claim failed.
        """
        ...

    def fail(self, error: BrokerError) -> None:
        """A partition cannot be tracked any more."""
        ...

    def warn(self, text: str) -> None: ...


class FailureBackoff:
    """How long a partition pauses after unknown outcomes, and when operators are warned. Times are in seconds.

    A single unknown outcome comes from a broker that restarts, or from another tracker that took over the partition.
    Repeated ones have a cause that a new writer does not remove: without a pause they would keep the brokers busy,
    unnoticed.
    """

    def __init__(self) -> None:
        self._count = 0
        self._backoff = Backoff(0.5, 60.0)
        self._quiet_at = 0.0
        self._reason = ""

    def add(self, reason: str, now: float) -> float:
        """Count one more; returns how many seconds the partition pauses."""
        if now >= self._quiet_at:
            self._count = 0
            self._backoff.reset()
        self._count += 1
        self._reason = reason
        seconds = self._backoff.next() if self._count > _IMMEDIATE else 0.0
        self._quiet_at = now + seconds + _QUIET
        return seconds

    @property
    def is_warning_due(self) -> bool:
        """Whether to warn of the last one: once for all in a row."""
        return self._count == _WARN_AT

    def trouble(self, now: float) -> str:
        """What is wrong; empty if nothing is."""
        return self._reason if self._count >= _WARN_AT and now < self._quiet_at else ""


class SeekFailed(BrokerError):
    """The client does not read the partition from the position of the claim."""


def now_ms() -> int:
    """The local monotonic time in milliseconds."""
    return int(1000 * monotonic())
