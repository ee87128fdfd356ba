"""The batches of a polling thread that are not read yet. Pure, for one event loop, without a lock.

Batches leave in the order in which they came. Runs of a paused partition are kept aside until it is resumed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from broker import TopicPartition
from broker_kafka.codec.record_run import NativeRun

__all__ = ["FetchedRuns"]


class _Batch:
    __slots__ = ("from_thread", "runs")

    def __init__(self, runs: Sequence[NativeRun], *, from_thread: bool = True) -> None:
        self.runs = deque(runs)
        self.from_thread = from_thread
        """Whether the thread waits for room."""


class FetchedRuns:
    """:param taken: called for each batch of the thread that has left."""

    def __init__(self, taken: Callable[[], object]) -> None:
        self._taken = taken
        self._batches: deque[_Batch] = deque()
        self.paused: set[TopicPartition] = set()
        """Nothing of these leaves."""
        self._aside: dict[TopicPartition, list[NativeRun]] = {}

    def __bool__(self) -> bool:
        return bool(self._batches)

    def add(self, runs: Sequence[NativeRun]) -> None:
        """A batch came."""
        self._batches.append(_Batch(runs))
        if self.paused:
            self._set_aside()

    def take(self, max_records: int, max_bytes: int) -> list[NativeRun]:
        """The next batch, or the wanted part of it: at least one record. There must be a batch."""
        batch = self._batches[0]
        runs, taken = batch.runs, list[NativeRun]()
        while runs:
            run = runs.popleft()
            count = min(max_records, len(run) if run.size <= max_bytes else run.within(max_bytes))
            if not taken:
                count = max(1, count)
            if count < len(run):
                if count:
                    run, rest = run.split(count)
                    taken.append(run)
                    run = rest
                runs.appendleft(run)
                return taken
            taken.append(run)
            max_records -= len(run)
            max_bytes -= run.size
        self._batches.popleft()
        if batch.from_thread:
            self._taken()
        return taken

    def drop(self, partitions: Collection[TopicPartition]) -> None:
        """Forget the runs of these."""
        self._take_out(partitions)
        for partition in partitions:
            self._aside.pop(partition, None)

    def clear(self) -> None:
        """Forget everything."""
        self._batches.clear()
        self._aside.clear()

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Keep the runs of these aside until they are resumed."""
        self.paused.update(partitions)
        self._set_aside()

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Undo `pause`; what was kept aside leaves before what comes later."""
        for partition in partitions:
            self.paused.discard(partition)
            runs = self._aside.pop(partition, None)
            if runs:
                self._batches.append(_Batch(runs, from_thread=False))

    def _set_aside(self) -> None:
        for run in self._take_out(self.paused):
            self._aside.setdefault(TopicPartition(run.topic, run.partition), []).append(run)

    def _take_out(self, partitions: Collection[TopicPartition]) -> list[NativeRun]:
        taken: list[NativeRun] = []
        kept: deque[_Batch] = deque()
        for batch in self._batches:
            rest: deque[NativeRun] = deque()
            for run in batch.runs:
                (taken if (run.topic, run.partition) in partitions else rest).append(run)
            if rest:
                batch.runs = rest
                kept.append(batch)
            elif batch.from_thread:
                self._taken()
        self._batches = kept
        return taken
