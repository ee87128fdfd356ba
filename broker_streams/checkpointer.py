"""`Checkpointer`: takes what the partitions of a member have done, writes it, and undoes it if that fails.

One checkpoint is written at a time, and covers every partition that has something for it; the partitions go on
meanwhile. A partition in the middle of a message is waited for, but not for long: it has the next checkpoint.

*Concurrency.* Checkpoints queue. *Cancellation.* A checkpoint that was cancelled may have been written; its partitions
are to be dropped. *Failure.* `Commits` repeats a write where that is safe. When it gives up with an error that may
pass, all partitions go back to their last checkpoint, and read again from there. After other errors, which are raised,
the partitions of the checkpoint write nothing more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final

from broker import BrokerError, LeaseLost, RecordConsumer, Retry, TransactionFatal
from broker.metrics import Histogram
from broker_streams.commits import Commits, Fenced, Part
from broker_streams.off_loop import in_thread
from broker_streams.partition import PartitionRunner

__all__ = ["Checkpointer"]

logger: Final = logging.getLogger("broker_streams")

_BARRIER_SECONDS: Final = 1.0
"""How long a checkpoint waits for a partition in the middle of a message."""
_MOST_FATAL: Final = 5
"""How often in a row another publisher may take the name of this member."""
_LOOK_SECONDS: Final = 5.0
"""How often it is looked whether the table is still the same topic."""
_AGAIN: Final = Retry(initial=0.1, maximum=10.0)
_BOUNDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Checkpointer:
    """See the module.

    :param group: the name of the group, for the log.
    :param runners: the partitions at work, by number; they come and go.
    :param interval: seconds between checkpoints.
    :param messages: messages after which there is one before that.
    :param stopping: set when the member stops: then nothing is read again.
    :param check_table: raises TopicRecreated if the table was deleted and recreated.
    :param read_again: lets a partition read and handle messages from its positions on; raises LeaseLost if it has gone.
    :param fenced: called with a partition that another process writes, and the delay before it is recovered.
    :param failed: called with a partition that failed, and its error.
    :ivar seconds: how long the last checkpoint took; None before the first.
    :ivar durations: of all checkpoints.
    :ivar undone: how many were undone.
    """

    def __init__(
        self,
        group: str,
        commits: Commits,
        runners: Mapping[int, PartitionRunner],
        *,
        interval: float,
        messages: int,
        stopping: asyncio.Event,
        check_table: Callable[[], Awaitable[None]],
        read_again: Callable[[PartitionRunner], Awaitable[None]],
        fenced: Callable[[PartitionRunner, float], object],
        failed: Callable[[PartitionRunner, BaseException], object],
    ) -> None:
        self.commits: Final = commits
        self.seconds: float | None = None
        self.durations: Final = Histogram(_BOUNDS, [0] * (len(_BOUNDS) + 1))
        self.undone = 0
        self._group = group
        self._runners = runners
        self._interval = interval
        self._messages = messages
        self._stopping = stopping
        self._check_table = check_table
        self._read_again = read_again
        self._fenced = fenced
        self._failed = failed
        self._due = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._taking: dict[PartitionRunner, asyncio.Task[Part]] = {}
        self._undoing: asyncio.Task[None] | None = None
        self._settling: asyncio.Task[None] | None = None
        self._answered = asyncio.Event()
        """No checkpoint is on its way to the broker and back."""
        self._answered.set()
        self._continuing: asyncio.Task[None] | None = None
        self._handled = 0
        self._failures = self._fatal = 0
        self._looked_at = time.monotonic()

    async def open(self, consumer: RecordConsumer[Any]) -> None:
        """Before the first checkpoint.

        :param consumer: whose positions are committed.
        """
        await self.commits.open(consumer)

    async def close(self) -> None:
        ending = [*self._taking.values()]
        ending += [task for task in (self._undoing, self._continuing, self._settling) if task is not None]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)
        await self.commits.close()

    def progress(self, handled: int) -> None:
        """So many messages were handled."""
        self._handled += handled
        if self._handled >= self._messages:
            self._due.set()

    def wake(self) -> None:
        """Write a checkpoint now, or end `run` if the member stops."""
        self._due.set()

    async def run(self) -> None:
        """Write checkpoints until the member stops. Does not stop in the middle of one.

        :raises BrokerError: one failed, and repeating does not help.
        """
        while not self._stopping.is_set():
            try:
                async with asyncio.timeout(self._interval):
                    await self._due.wait()
            except TimeoutError:
                pass
            self._due.clear()
            self._handled = 0
            if not self._stopping.is_set():
                await self.write(list(self._runners.values()), patience=_BARRIER_SECONDS)

    async def write(self, runners: Collection[PartitionRunner], *, patience: float, force: bool = False) -> None:
        """Write a checkpoint of these partitions.

        :param patience: seconds to wait for a partition in the middle of a message.
        :param force: write also what says nothing new.
        :raises BrokerError: it failed, and repeating does not help.
        """
        async with self._one_at_a_time:
            # Of a call that was cancelled.
            if self._undoing is not None:
                await asyncio.wait((self._undoing,))
            await self.stored()
            taken = await self._take(runners, patience, force)
            if not taken:
                return
            began = time.monotonic()
            self._answered.clear()
            try:
                await self._look()
                outcomes = await self.commits.write(list(taken.values()))
            except BrokerError as error:
                if not self._may_repeat(error):
                    self._end(taken, error)
                    raise
                self._undoing = asyncio.create_task(self._undo(error), name="undo-checkpoint")
                await asyncio.shield(self._undoing)
                return
            finally:
                self._answered.set()
            self.seconds = time.monotonic() - began
            self.durations.add(self.seconds)
            self._failures = self._fatal = 0
            written: list[tuple[PartitionRunner, Part, int | None]] = []
            for runner, part in taken.items():
                outcome = outcomes[part.partition]
                if runner.retired:
                    # The store may be newer already.
                    continue
                if isinstance(outcome, Fenced):
                    self._give_up(runner, outcome)
                else:
                    written.append((runner, part, outcome))
            if written:
                self._settling = asyncio.create_task(self._settle(written), name="settle-checkpoint")
                await asyncio.shield(self._settling)

    async def _look(self) -> None:
        """:raises TopicRecreated: the rows of the last checkpoints are gone; those of the next would pass for all."""
        if (now := time.monotonic()) - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = now
            await self._check_table()

    async def _settle(self, written: Collection[tuple[PartitionRunner, Part, int | None]]) -> None:
        """Bring the stores up to a checkpoint that is written."""
        await in_thread(lambda: [runner.store_checkpoint(part, position) for runner, part, position in written])
        for runner, part, _ in written:
            runner.settled(part)

    async def up_to_date(self) -> None:
        """Wait until the stores have all that readers of the table may have seen: also of a checkpoint that the broker
        has stored and not yet answered.
        """
        await self._answered.wait()
        await self.stored()

    async def stored(self) -> None:
        """Wait until the stores have the checkpoint that was written last."""
        settling = self._settling
        if settling is not None and not settling.done():
            await asyncio.wait((settling,))

    async def forget(self, runner: PartitionRunner) -> None:
        """Drop what was taken of a partition and not written. Its store is not written any more afterwards."""
        await self.stored()
        if (task := self._taking.pop(runner, None)) is not None:
            task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()

    async def _take(
        self, runners: Collection[PartitionRunner], patience: float, force: bool
    ) -> dict[PartitionRunner, Part]:
        """What the partitions have for a checkpoint; those in the middle of a message are left for the next one."""
        for runner in runners:
            if not runner.retired and runner not in self._taking and (force or runner.engine.has_effects):
                self._taking[runner] = asyncio.create_task(runner.take(), name=f"take-{runner.partition}")
        waiting = {runner: task for runner in runners if (task := self._taking.get(runner)) is not None}
        if waiting:
            await asyncio.wait(waiting.values(), timeout=patience)
        taken: dict[PartitionRunner, Part] = {}
        for runner, task in waiting.items():
            if not task.done() or self._taking.pop(runner, None) is None or task.cancelled():
                continue
            if (error := task.exception()) is not None:
                self._failed(runner, error)
            else:
                taken[runner] = task.result()
        return taken

    def _give_up(self, runner: PartitionRunner, error: Fenced) -> None:
        """Another process writes the partition. If it is still this member's, it is recovered again."""
        self.undone += 1
        self._failures += 1
        logger.warning("Group %s: %s", self._group, error)
        self._fenced(runner, _AGAIN.delay(self._failures))

    def _may_repeat(self, error: BrokerError) -> bool:
        """Whether doing the work again may help."""
        fatal = isinstance(error, TransactionFatal)
        away = isinstance(error.native, BrokerError) and error.native.retriable
        # A transaction that could not be aborted since the broker is away ends its publisher too.
        self._fatal += fatal and not away
        return (error.retriable or fatal) and self._fatal <= _MOST_FATAL and not self._stopping.is_set()

    def _end(self, runners: Collection[PartitionRunner], error: BrokerError) -> None:
        """Let these partitions write nothing more: what failed would be missing below it."""
        for runner in runners:
            runner.retired = True
            if not self._stopping.is_set():
                self._failed(runner, error)

    async def _undo(self, error: BrokerError) -> None:
        """Take the partitions back to their last checkpoint, and let them handle it again in a while."""
        self.undone += 1
        self._failures += 1
        if (continuing := self._continuing) is not None:
            continuing.cancel()
            await asyncio.wait((continuing,))
        for runner in tuple(self._runners.values()):
            await self.forget(runner)
            await runner.abort()
            runner.rollback()
        self._continuing = asyncio.create_task(self._continue(error), name="redo-checkpoint")

    async def _continue(self, error: BrokerError) -> None:
        """After a rollback: let the partitions handle again what they had handled."""
        delay = 0.0 if self._failures == 1 else _AGAIN.delay(self._failures)
        logger.warning(
            "Group %s: a checkpoint was undone, and its messages are handled again in %.1f s: %s",
            self._group,
            delay,
            error,
        )
        await asyncio.sleep(delay)
        # All at once: one may have to wait for its topics.
        await asyncio.gather(*map(self._start_again, tuple(self._runners.values())))

    async def _start_again(self, runner: PartitionRunner) -> None:
        failures = 0
        while not (runner.retired or self._stopping.is_set()):
            try:
                await self._read_again(runner)
                return
            except LeaseLost:
                # The partition has gone; who tells so clears away.
                return
            except Exception as error:
                if not (isinstance(error, BrokerError) and error.retriable):
                    self._failed(runner, error)
                    return
                failures += 1
                delay = _AGAIN.delay(failures)
                logger.warning(
                    "Group %s: partition %d is not read; again in %.1f s: %s",
                    *(self._group, runner.partition, delay, error),
                )
                await asyncio.sleep(delay)
