"""Spark's stream reader over a subscription.

Spark pickles the reader into several processes, so the spool is opened by the first call that needs it. A batch is a
range of whole segments: a batch that is run again has exactly the same rows. At SIGTERM, by which Spark ends the
process, the reader releases the spool.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import pyarrow
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from broker.errors import BrokerError, ConfigurationError
from broker.hooks import logger
from broker.urls import mask_within
from broker_spark.common.connections import check_reachable
from broker_spark.common.files import masked_reason, open_files
from broker_spark.common.options import SourceOptions
from broker_spark.runtime.workers import collect_less_often, end_quietly, freeze_loaded_objects
from broker_spark.spool import segments
from broker_spark.spool.positions import SpoolPosition
from broker_spark.spool.receiver import Receiver
from broker_spark.spool.segments import Segment
from broker_spark.spool.spool import Spool

__all__ = ["Shutdown", "SpoolPart", "SpoolStreamReader"]

_WAIT: Final = 0.5
"""Seconds to wait for messages before reporting none."""
_FULLER: Final = 1.0
"""Seconds to wait for a fuller batch while messages come fast: a batch has a fixed cost for Spark."""
_PROCESS: Final = "pyspark.sql.streaming.python_streaming_source_runner"
_RELEASE_SECONDS: Final = 8.0
"""The most that releasing may take: unresponsive storage must not keep a process that Spark has given up."""


@dataclass(frozen=True)
class SpoolPart(InputPartition):
    """The segments of one task, in order."""

    segments: tuple[Segment, ...]


class SpoolStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the spool that a receiver fills, in batches of whole segments."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._spool: Spool | None = None
        self._receiver: Receiver | None = None
        self._shutdown = Shutdown()
        self._draining = False
        self._waiting_since: float | None = None
        """Since when there are fewer rows than minRows."""

    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint begins: at the first segment of the spool.

        :raises ConfigurationError: another query owns the spool, or it holds other messages or lacks columns.
        :raises BrokerError: the subscription cannot be opened.
        """
        spool, _ = self._begin()
        spool.check_columns(self._options.columns, spool.first)
        with spool.changed:
            rows = sum(segment.rows for segment in spool.between(spool.first, spool.next))
            of_others = rows > spool.added
        # Spark asks twice, and by then this query may have received something.
        if of_others:
            logger.warning(
                "The query has no checkpoint, and the spool %s holds messages: the last batches of an earlier query "
                "are read again",
                mask_within(self._options.spool),
            )
        return SpoolPosition(spool.id, spool.first).to_json()

    def prepareForTriggerAvailableNow(self) -> None:
        """Read the messages that wait now, then end."""
        self._draining = True

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limit for `latestOffset`, which also applies `minRows` and `maxBytes`."""
        return ReadMaxRows(self._options.max_rows)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next batch; `start` itself if there is none. Waits a little for messages.

        :raises ConfigurationError: the checkpoint is of another spool, another query took over the spool, or unread
            segments lack columns.
        :raises OffsetOutOfRange: the checkpoint needs a segment that is deleted.
        :raises BrokerError: the receiver failed.
        """
        spool, receiver = self._begin()
        first = self._position(spool, start).next
        spool.check_columns(self._options.columns, first)
        spool.plan(first)
        began = time.monotonic()
        while True:
            receiver.check()
            finished = receiver.finished
            waiting = spool.between(first, spool.next)
            passed = time.monotonic() - began
            if waiting and (finished or not self._should_wait(waiting, limit, receiver, passed)):
                end = first + self._admitted(waiting, limit)
                spool.plan(end)
                return SpoolPosition(spool.id, end).to_json()
            if finished or (passed >= _WAIT and not self._draining and not (waiting and receiver.busy)):
                return start
            with spool.changed:
                if spool.next == first + len(waiting) and receiver.finished == finished and receiver.failure is None:
                    spool.changed.wait(_WAIT)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Rows in the spool and at the broker, for the query's progress."""
        spool, receiver = self._spool, self._receiver
        if spool is None or receiver is None:
            return None
        name = self._options.pattern or ",".join(self._options.topics)
        with spool.changed:
            behind = spool.ahead()[0] + receiver.waiting
            return {**SpoolPosition(spool.id, spool.next).to_json(), "behind": {name: behind}}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a batch; the same rows for the same offsets.

        :raises OffsetOutOfRange: a segment is deleted.
        """
        spool, _ = self._begin()
        first, last = self._position(spool, start).next, self._position(spool, end).next
        spool.check_columns(self._options.columns, first)
        found = spool.between(first, last)
        spool.plan(last)
        return _parts(found, self._options.tasks)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """One task's rows."""
        assert isinstance(partition, SpoolPart)
        options = self._options
        files = open_files(options.spool)
        for segment in partition.segments:
            yield from segments.read(files, mask_within(options.spool), segment, options.columns)
        freeze_loaded_objects()

    def commit(self, end: dict[str, Any]) -> None:
        """Delete the segments of committed batches. Never raises: the next call deletes the rest."""
        try:
            spool, _ = self._begin()
            spool.trim(self._position(spool, end).next)
        except (BrokerError, OSError) as error:
            logger.warning("Old segments of the spool %s were not deleted: %s", mask_within(self._options.spool), error)

    def stop(self) -> None:
        """Release messages that are not written yet, and release the spool."""
        self._release()
        self._shutdown.finish()
        end_quietly()

    def _release(self) -> None:
        self._shutdown.begin_release()
        spool, receiver = self._spool, self._receiver
        self._spool = self._receiver = None
        if receiver is not None:
            receiver.stop()
        if spool is not None:
            spool.release()

    def _begin(self) -> tuple[Spool, Receiver]:
        """Claim the spool and start the receiver, on the first call."""
        if self._spool is None or self._receiver is None:
            options = self._options
            shown = mask_within(options.spool)
            try:
                spool = Spool.open(open_files(options.spool), shown, _metadata(options))
            except OSError as error:
                if isinstance(error, BrokerError):
                    raise
                raise ConfigurationError(
                    f"Option spool is {shown!r}, which cannot be used: {masked_reason(error, options.spool)}",
                    advice="It takes a writable directory, or a URI such as s3://bucket/spools/orders",
                ) from error
            collect_less_often()
            self._shutdown.install()
            self._spool, self._receiver = spool, receiver = spool, Receiver(options, spool)
            if self._draining:
                receiver.drain()
            try:
                receiver.start()
            except BaseException:
                # Also on SIGTERM during the start.
                self._release()
                raise
        return self._spool, self._receiver

    def _position(self, spool: Spool, given: dict[str, Any]) -> SpoolPosition:
        found = SpoolPosition.from_json(given)
        if found.spool != spool.id:
            raise ConfigurationError(
                f"The checkpoint belongs to spool {found.spool}, but {mask_within(self._options.spool)} is {spool.id}",
                advice="Give this query the spool of its checkpoint, or a spool and a checkpointLocation of its own",
            )
        return found

    def _should_wait(self, waiting: Sequence[Segment], limit: ReadLimit, receiver: Receiver, passed: float) -> bool:
        """Whether to wait for more rows.

        :param passed: seconds since `latestOffset` was called.
        """
        rows = sum(segment.rows for segment in waiting)
        if (
            isinstance(limit, ReadAllAvailable)
            or not receiver.has_room
            or self._admitted(waiting, limit) < len(waiting)
        ):
            self._waiting_since = None
            return False
        least = self._options.min_rows
        if least is None or rows >= least or self._draining:
            self._waiting_since = None
            return receiver.busy and passed < _FULLER and rows < self._most(limit)
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since < self._options.max_delay:
            return True
        self._waiting_since = None
        return False

    def _most(self, limit: ReadLimit) -> int:
        return limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.max_rows

    def _admitted(self, waiting: Sequence[Segment], limit: ReadLimit) -> int:
        """How many segments go into a batch, one at least."""
        if isinstance(limit, ReadAllAvailable):
            return len(waiting)
        most = self._most(limit)
        most_bytes = self._options.max_bytes
        rows = size = 0
        for number, segment in enumerate(waiting):
            rows += segment.rows
            size += segment.bytes
            if number and (rows > most or (most_bytes is not None and size > most_bytes)):
                return number
        return len(waiting)


def _metadata(options: SourceOptions) -> dict[str, Any]:
    """The metadata of a spool."""
    return {
        "backend": check_reachable(options.url).capabilities.backend,
        "subscription": options.subscription,
        **({"topics": sorted(options.topics)} if options.pattern is None else {"pattern": options.pattern}),
    }


def _parts(found: Sequence[Segment], tasks: int) -> list[SpoolPart]:
    """Up to `tasks` runs of segments, of about as many rows each."""
    total = sum(segment.rows for segment in found)
    parts: list[list[Segment]] = []
    rows = 0
    for segment in found:
        # A segment belongs to the part in which its middle lies.
        if not parts or (rows + segment.rows / 2) * tasks >= total * len(parts):
            parts.append([])
        parts[-1].append(segment)
        rows += segment.rows
    return [SpoolPart(tuple(part)) for part in parts]


class Shutdown:
    """Turns SIGTERM into SystemExit, so that Spark's runner calls the reader's `stop` before the process ends."""

    def __init__(self) -> None:
        self._installed = False
        self._releasing = False
        self._requested = False

    def install(self) -> None:
        """Handle SIGTERM from now on, in the process of a streaming source only."""
        running = getattr(sys.modules.get("__main__"), "__spec__", None)
        if running is not None and running.name == _PROCESS and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)
            self._installed = True

    def begin_release(self) -> None:
        """From now on no signal interrupts the caller, who releases the spool."""
        self._releasing = True
        if self._requested:
            _start_deadline()

    def finish(self) -> None:
        """End the process if a signal came. Spark's runner would only log that its peer is gone."""
        if self._installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._requested:
            os.kill(os.getpid(), signal.SIGTERM)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Spark sends the signal twice, perhaps after its runner began to exit.
        is_first, self._requested = not self._requested, True
        if not self._releasing:
            self._releasing = True
            raise SystemExit(128 + number)
        if is_first:
            _start_deadline()


def _start_deadline() -> None:
    deadline = threading.Timer(_RELEASE_SECONDS, os._exit, (128 + signal.SIGTERM,))
    deadline.daemon = True
    deadline.start()
