"""`KafkaLogFollower`: reads partitions of a topic without end; nothing is left on the cluster.

Its client is in no group and has its partitions assigned. Only committed records are read, and aborted transactions
are passed over. *Concurrency.* One event loop. *Failure.* A missing topic is looked up before it counts: brokers do not
know a new one at once. The client continues silently in a recreated topic whose log holds its position; the core
notices that by the topic's id.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from broker import BrokerError, Closed, NotFound, Record, TopicNotFound, TopicPartition, TopicRecreated
from broker.driver import RecordRun, Waker, logger
from broker_kafka.client.log_follower import FollowerThread
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import bounds_of, check_in_log
from broker_kafka.cluster.requests import describe_topic
from broker_kafka.codec.record_run import NativeRun

__all__ = ["KafkaLogFollower"]

_STOP: Final = 5.0


class KafkaLogFollower:
    """Implements `LogFollowerSpi` and `FetchesRuns`.

    :param config: of the client.
    """

    def __init__(
        self,
        connection: Connection,
        config: Mapping[str, Any],
        topic: str,
        *,
        on_close: Callable[[KafkaLogFollower], object],
    ) -> None:
        self._connection = connection
        self._topic = topic
        self._on_close = on_close
        self._thread = FollowerThread(config, topic, self)
        self._topic_id = ""
        self._reached: dict[int, int] = {}
        self._runs: deque[NativeRun] = deque()
        """Of the batch that is fetched now."""
        self._ends: Mapping[int, int] = {}
        self._batches: deque[tuple[Sequence[NativeRun], Mapping[int, int]]] = deque()
        self._failure: BrokerError | None = None
        self._waker = Waker()
        self._fetching = self._interrupted = self._closed = False

    async def open(self, positions: Mapping[int, int]) -> None:
        """Start the client.

        :raises OffsetOutOfRange: the log does not hold a position.
        :raises TopicNotFound: the topic does not exist.
        """
        self._topic_id = str((await describe_topic(self._connection, self._topic)).topic_id)
        places = {TopicPartition(self._topic, number): position for number, position in positions.items()}
        check_in_log(await bounds_of(self._connection, list(places)), places)
        await self._thread.start()
        await self.add(positions)

    async def add(self, positions: Mapping[int, int]) -> None:
        self._check_open()
        self._reached |= positions
        await self._thread.assign(positions)

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        runs = await self.fetch_runs(max_records, max_bytes, wait)
        return list(chain.from_iterable(run.make(None, 0) for run in runs))

    async def fetch_runs(self, max_records: int, max_bytes: int, wait: float) -> Sequence[RecordRun]:
        self._check_open()
        self._fetching = True
        deadline = time.monotonic() + wait
        try:
            while True:
                if self._runs or self._batches:
                    return self._take(max_records, max_bytes)
                if self._failure is not None:
                    failure, self._failure = self._failure, None
                    if not isinstance(failure, NotFound) or await self._is_gone():
                        raise failure
                    logger.debug("Following %r: %s", self._topic, failure)
                left = deadline - time.monotonic()
                if self._interrupted:
                    return []
                if left <= 0:
                    if self._connection.down:
                        raise self._connection.unreachable()
                    return []
                if not self._batches and self._failure is None:
                    await self._waker.wait(left)
                self._check_open()
        finally:
            self._fetching = self._interrupted = False

    def _take(self, max_records: int, max_bytes: int) -> list[RecordRun]:
        """The next records of one batch, and with its last ones the ends of partitions that followed."""
        if not self._runs:
            runs, self._ends = self._batches.popleft()
            self._runs.extend(runs)
        found: list[RecordRun] = []
        while self._runs and max_records > 0 and max_bytes > 0:
            run = self._runs.popleft()
            count = min(len(run), max_records)
            if run.size > max_bytes:
                # Only a record by itself may be larger.
                count = min(count, run.within(max_bytes)) or (0 if found else 1)
            if count < len(run):
                head, rest = run.split(count)
                self._runs.appendleft(rest)
                if not count:
                    break
                run = head
            found.append(run)
            max_records -= count
            max_bytes -= run.size
            self._reached[run.partition] = run.last + 1
        if not self._runs:
            for number, end in self._ends.items():
                self._reached[number] = max(self._reached.get(number, 0), end)
            self._thread.taken()
        return found

    async def _is_gone(self) -> bool:
        """Whether the topic is gone, which the client says.

        :raises TopicRecreated: there is another one of its name.
        """
        try:
            found = str((await describe_topic(self._connection, self._topic, known=True)).topic_id)
        except TopicNotFound:
            return True
        if found != self._topic_id:
            raise TopicRecreated(f"Topic {self._topic!r} was deleted and recreated while it was followed")
        return False

    def interrupt(self) -> None:
        self._interrupted = self._fetching
        self._waker.wake()

    def reached(self, partition: int) -> int:
        return self._reached[partition]

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._on_close(self)
        self._waker.wake()
        await asyncio.shield(self._thread.stop(_STOP))
        self._runs.clear()
        self._batches.clear()

    # Called by the thread, on the loop.

    def arrived(self, runs: Sequence[NativeRun], ends: Mapping[int, int]) -> None:
        self._batches.append((runs, ends))
        self._waker.wake()

    def failed(self, error: BrokerError) -> None:
        if self._failure is None or (self._failure.retriable and not error.retriable):
            self._failure = error
            self._waker.wake()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"The followed log {self._topic!r} was closed")
