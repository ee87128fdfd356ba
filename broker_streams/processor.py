"""`Processor`: a member of a group, which runs its graph on the partitions that it is given.

    async with Processor(bus, group, state_dir="state") as processor:      # beside others, in any program
        await processor.ready()
        ...

    await broker.serve(Processor(bus, group))                              # until a signal, or an error

A partition that is assigned is recovered before its first record is read, while the others go on and the member stays
in its group. A partition that is revoked writes a last checkpoint first.

*Concurrency.* One event loop. Each partition has a task of its own; checkpoints are written one after the other, while
the partitions go on. *Cancellation.* A cancelled processor stops as by `stop`. *Failure.* A checkpoint that could not
be written is undone: partitions go back to the last one and read again. The error of a message whose policy is to stop,
and any that repeating does not help against, ends the processor, which raises it; what was handled before is kept.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Final, Literal, Self, cast

import msgspec

from broker import (
    BackendError,
    BrokerError,
    Bus,
    Closed,
    ConfigurationError,
    ConsumerState,
    LeaseLost,
    NotFound,
    RecordConsumer,
    Retry,
    Service,
    TopicPartition,
    TopicRecreated,
    Unsupported,
)
from broker.checks import check_count, check_seconds, is_whole
from broker_streams import keys
from broker_streams.checkpoint import Checkpoint, read_checkpoint
from broker_streams.checkpointer import Checkpointer
from broker_streams.commits import Fenced, Guarantee, check_capabilities, choose_commits
from broker_streams.context import Context
from broker_streams.engine import Reader
from broker_streams.graph import Group, Input, differences
from broker_streams.metrics import ProcessorMetrics
from broker_streams.off_loop import in_thread
from broker_streams.partition import PartitionLog, PartitionRunner, PartitionState, PartitionTables, Rows, wait_ready
from broker_streams.recovery import CHECKPOINT, TableCopy, stored_checkpoint
from broker_streams.states import StateSignal
from broker_streams.stats import InputStats, PartitionStats, ProcessorState, ProcessorStats, TableStats
from broker_streams.stores.directory import StateDirectory
from broker_streams.stores.lmdb import Lmdb
from broker_streams.stores.memory import Memory
from broker_streams.stores.store import Store, StoreCorrupt, StoreFactory
from broker_streams.topics import TopicPolicy
from broker_streams.visits import Visit, VisitAborted
from broker_streams.wording import counted

__all__ = ["Processor", "VisitAborted"]

logger: Final = logging.getLogger("broker_streams")

_MOST_WAITING: Final = 20_000
"""Records of a partition that may wait before it is paused."""
_FEW_WAITING: Final = 5_000
_RELEASE_SECONDS: Final = 3.0
_CLOSE_SECONDS: Final = 30.0
_KEEP_SECONDS: Final = 60.0
"""How long the tables of a partition stay open after it has gone."""
_SPARE_SECONDS: Final = 30.0
"""After which a member without a partition counts as a spare, if the broker does not tell."""
_SPARE_LOOK_SECONDS: Final = 1.0
_AGAIN: Final = Retry(initial=0.1, maximum=10.0)


class Processor(Service):
    """A member of a group; opens once, by `async with`, `run` or `broker.serve`.

    :param state_dir: where stores on disk are kept; by default below `XDG_STATE_HOME` or `~/.local/state`.
    :param store: what keeps them: `Lmdb()`, `Sqlite()`, `RocksDb()` or `Memory()`.
    :param guarantee: "exactly_once" or "at_least_once"; None is the best that the broker has.
    :param checkpoint_interval: seconds between checkpoints.
    :param checkpoint_messages: messages after which there is a checkpoint before that.
    :param standby: partitions whose tables are kept up to date here while others have them: "all", or their numbers.
    :param recover_ahead: recover the tables of all partitions before joining the group.
    :param topics: how the topics of the group are created and checked.
    :param name: of this member, unique in the group and the same after a restart, so that a transaction that was open
        when it was killed ends at once. By default a name that is kept in the state directory.
    :param attributes: of every message that the group publishes.
    :param wrap: called once for each partition with its context; callbacks get what it returns.
    :raises ConfigurationError: an option is invalid.
    """

    def __init__(
        self,
        bus: Bus,
        group: Group,
        *,
        state_dir: str | PathLike[str] | None = None,
        store: StoreFactory | None = None,
        guarantee: Guarantee | None = None,
        checkpoint_interval: float = 1.0,
        checkpoint_messages: int = 10_000,
        standby: Literal["all"] | Collection[int] | None = None,
        recover_ahead: bool = False,
        topics: TopicPolicy | None = None,
        name: str | None = None,
        attributes: Mapping[str, str] | None = None,
        wrap: Callable[[Context], Context] | None = None,
    ) -> None:
        if guarantee not in (None, "exactly_once", "at_least_once"):
            raise ConfigurationError(
                f"guarantee is {guarantee!r}", advice='It takes "exactly_once", "at_least_once" or None'
            )
        check_seconds("checkpoint_interval", checkpoint_interval)
        check_count("checkpoint_messages", checkpoint_messages)
        if not _is_standby(standby):
            raise ConfigurationError(f"standby is {standby!r}", advice='It takes "all", or numbers of partitions')
        # What `broker.run` asks of a service: its bus, and to stop.
        self.consumer = cast("Any", self)
        self.bus: Final = bus
        self.group: Final = group
        self._state_dir = state_dir
        self._factory: StoreFactory = Lmdb() if store is None else store
        self._guarantee: Guarantee | None = guarantee
        self._interval = checkpoint_interval
        self._messages = checkpoint_messages
        self._standby_of: Literal["all"] | Collection[int] = standby or ()
        self._recover_ahead = recover_ahead
        self._policy = TopicPolicy() if topics is None else topics
        self._name = name
        self._attributes = attributes
        self._wrap = wrap
        self._signal = StateSignal(ProcessorState.IDLE)
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._failure: BaseException | None = None
        self._main: asyncio.Task[None] | None = None
        self._directory: StateDirectory | None = None
        self._checkpoints: Checkpointer | None = None
        self._reading: RecordConsumer[Any] | None = None
        self._partitions = 0
        self._identities: dict[str, str] = {}
        """What the broker calls the topics that the group consumes, and its table."""
        self._paused = False
        self._without_since: float | None = None
        """Since when it has been in its group without a partition."""
        self._runners: dict[int, PartitionRunner] = {}
        self._places: dict[int, list[TopicPartition]] = {}
        self._states: dict[int, PartitionState] = {}
        self._tables: dict[int, PartitionTables] = {}
        self._opening = asyncio.Lock()
        """Held while stores are opened."""
        self._bringing: dict[int, asyncio.Task[None]] = {}
        self._dropping: dict[int, asyncio.Task[None]] = {}
        self._lookups: dict[str, tuple[TableCopy, asyncio.Task[Any]]] = {}
        self._held: set[int] = set()
        """Partitions that are paused because too many of their records wait."""
        self._told_differences: set[str] = set()
        self._hide_metrics: Callable[[], None] = lambda: None
        self._metrics = ProcessorMetrics(
            bus,
            group.name,
            topics=tuple(group.consumed),
            state=lambda: self._signal.state,
            states=self._states,
            standby=self._on_standby,
            runners=self._runners,
            tables=self._tables,
            lookups=lambda: [copy for copy, _ in tuple(self._lookups.values())],
            checkpoints=lambda: self._checkpoints,
        )

    # -- opening and closing -------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Check the topics and what the broker can do; then join the group in the background. See `ready`.

        :raises ConfigurationError: the topics do not fit.
        :raises Unsupported: the broker lacks something, or the guarantee does not hold.
        :raises StoreLocked: another process uses the state directory under this name.
        :raises Closed: the processor was used before.
        """
        if self._signal.state is not ProcessorState.IDLE:
            raise Closed("A processor opens once", advice="Create a new one")
        self._change(ProcessorState.STARTING)
        try:
            consumed = tuple(self.group.consumed)
            check_capabilities(self.bus.capabilities, consumed)
            commits = choose_commits(self.bus, self.group, self._guarantee, self._open_directory())
            self._partitions = await self._policy.prepare(self.bus, self.group)
            topics = (*consumed, self.group.table)
            identities = await asyncio.gather(*map(self.bus.admin.topic_identity, topics))
            self._identities = {topic: each for topic, each in zip(topics, identities, strict=True) if each is not None}
            self._check_standby()
        except BaseException:
            self._close_directory()
            self._change(ProcessorState.STOPPED)
            raise
        logger.info(
            "Group %s: %s by %s, %s",
            self.group.name,
            commits.guarantee.replace("_", " "),
            commits.how,
            counted(self._partitions, "partition"),
        )
        self._checkpoints = Checkpointer(
            self.group.name,
            commits,
            self._runners,
            interval=self._interval,
            messages=self._messages,
            stopping=self._stopping,
            check_table=self._check_table,
            read_again=self._read_again,
            fenced=self._fenced,
            failed=self._runner_failed,
        )
        self._hide_metrics = self.bus.hooks.show_metrics(self._metrics)
        self._main = asyncio.create_task(self._run_to_end(), name=f"processor-{self.group.name}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, with a last checkpoint; raise the error that has ended the processor."""
        await self._finish()
        if self._failure is not None and error is None:
            raise self._failure

    async def run(self) -> None:
        """Open, and handle messages until `stop` or an error, which is raised."""
        async with self:
            await self._stopping.wait()

    async def serve(self) -> None:
        """What `broker.serve` and `broker.run` call: opens the bus if it is not open, then runs."""
        await self.bus.open()
        await self.run()

    def stop(self) -> None:
        """Stop, with a last checkpoint. Returns at once; leaving the `async with` block waits for it."""
        self._stopping.set()

    async def _finish(self) -> None:
        self._stopping.set()
        main = self._main
        if main is not None:
            # A cancelled caller does not cancel the last checkpoint.
            try:
                await asyncio.shield(asyncio.wait((main,)))
            finally:
                hide, self._hide_metrics = self._hide_metrics, lambda: None
                hide()

    async def ready(self) -> None:
        """Wait until all partitions that this member has are recovered and handle messages.

        It waits until the member has a partition. A spare member gets none, since others have them all: it is ready
        once the broker says so, or where the broker does not describe groups, after half a minute without a partition.

        :raises BrokerError: the error that has ended the processor.
        """
        while not self._is_ready() and not await self._is_spare():
            if self._failure is not None:
                raise self._failure
            if self._signal.state in (ProcessorState.IDLE, ProcessorState.STOPPED):
                raise Closed("The processor is not open", advice="Enter it first: async with Processor(...)")
            # The partitions of other members change without an event here.
            with suppress(TimeoutError):
                async with asyncio.timeout(_SPARE_LOOK_SECONDS):
                    await self._changed.wait()

    def _is_ready(self) -> bool:
        return (
            self._signal.state is ProcessorState.RUNNING
            and bool(self._states)
            and all(state is PartitionState.RUNNING for state in self._states.values())
        )

    async def _is_spare(self) -> bool:
        """Whether this member has no partition, and is about to get none."""
        without = 0.0 if self._without_since is None else time.monotonic() - self._without_since
        if without < _SPARE_LOOK_SECONDS:
            # The broker may not know of it yet.
            return False
        records = self.bus.capabilities.records
        late = without >= _SPARE_SECONDS
        if records is None or not records.group_admin:
            return late
        try:
            found = await self.bus.admin.describe_group(self.group.name)
        except BrokerError as error:
            logger.debug("Group %s is not described: %s", self.group.name, error)
            return late and not error.retriable
        taken = {place for member in found.members for place in member.partitions}
        wanted = {TopicPartition(topic, number) for topic in self.group.consumed for number in range(self._partitions)}
        # With as many members as partitions, one may not have joined yet: this one.
        return (
            not self._states and found.state == "stable" and wanted <= taken and len(found.members) > self._partitions
        )

    def _open_directory(self) -> str:
        """Lock the state directory; return the name of this member."""
        if isinstance(self._factory, Memory):
            return self._name or f"m{uuid.uuid4().hex}"
        self._directory = StateDirectory(self._state_dir, self.group.name, self._name)
        if self._name is not None:
            return self._name
        path = self._directory.path / "member"
        found = path.read_text(errors="replace") if path.exists() else ""
        if not re.fullmatch("m[0-9a-f]{32}", found):
            # A number would not do: another machine has the same.
            found = f"m{uuid.uuid4().hex}"
            path.write_text(found)
        return found

    def _open_store(self, name: str) -> Store:
        directory = self._directory
        return self._factory.open(None, name) if directory is None else directory.open(self._factory, name)

    def _close_directory(self) -> None:
        directory, self._directory = self._directory, None
        if directory is None:
            return
        if isinstance(self._failure, StoreCorrupt):
            try:
                directory.set_aside(self._failure)
            except BrokerError as error:
                logger.warning("The store of group %s was not set aside: %s", self.group.name, error)
        directory.close()

    # -- the run -------------------------------------------------------------------------------------------

    async def _run_to_end(self) -> None:
        gauges = asyncio.create_task(self._metrics.run(), name=f"gauges-{self.group.name}")
        try:
            await self._run()
        except BaseException as error:
            self._fail(error)
        finally:
            gauges.cancel()
            await asyncio.wait((gauges,))
            await self._clear_away()
            self._change(ProcessorState.STOPPED)

    async def _run(self) -> None:
        assert self._checkpoints is not None
        await self._unless_stopped(self._open_lookups())
        await self._unless_stopped(self._warm_up())
        if self._stopping.is_set():
            return
        topics = list(self.group.consumed)
        self._reading = consumer = self.bus.records(
            topics,
            group=self.group.name,
            copartitioned=len(topics) > 1,
            on_assigned=self._assigned,
            on_revoking=self._revoking,
            on_lost=self._lost,
            close_timeout=_CLOSE_SECONDS,
        )
        await self._checkpoints.open(consumer)
        try:
            async with consumer:
                reading = asyncio.create_task(self._read(consumer), name="processor-read")
                checkpoints = asyncio.create_task(self._checkpoints.run(), name="processor-checkpoints")
                self._change(ProcessorState.RUNNING)
                try:
                    await self._until_stopped(reading, checkpoints)
                except BaseException as error:
                    self._fail(error)
                self._stopping.set()
                self._change(ProcessorState.STOPPING)
                await self._wind_down(reading, checkpoints)
        finally:
            await self._checkpoints.close()

    async def _until_stopped(self, *tasks: asyncio.Task[None]) -> None:
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((stopping, *tasks), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        for task in tasks:
            if task.done():
                task.result()

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this, unless the processor is stopped meanwhile."""
        task = asyncio.create_task(work)
        try:
            await self._until_stopped(task)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))

    async def _wind_down(self, *tasks: asyncio.Task[None]) -> None:
        """Stop the partitions, and write the last checkpoint."""
        assert self._checkpoints is not None
        reading, checkpoints = tasks
        reading.cancel()
        for task in self._bringing.values():
            task.cancel()
        runners = list(self._runners.values())
        for runner in runners:
            self._tell(runner.partition, PartitionState.STOPPING)
        await asyncio.gather(*(runner.halt() for runner in runners))
        self._checkpoints.wake()
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                # It ends by itself, since the processor is stopping; a write under way is not interrupted.
                await asyncio.wait((checkpoints,))
                await self._checkpoints.write(runners, patience=_RELEASE_SECONDS)
                checkpoints.result()
        except TimeoutError:
            logger.warning("Group %s: the last checkpoint was not written in time", self.group.name)
        except BrokerError as error:
            if self._failure is None and not error.retriable:
                self._fail(error)
            else:
                # The next owner of the partitions does the work again.
                logger.warning("Group %s: the last checkpoint was not written: %s", self.group.name, error)
        finally:
            checkpoints.cancel()
            await asyncio.wait((reading, checkpoints))

    async def _clear_away(self) -> None:
        """End every task, and close every store."""
        for task in self._bringing.values():
            task.cancel()
        if ending := [*self._bringing.values(), *self._dropping.values()]:
            await asyncio.wait(ending, timeout=_CLOSE_SECONDS)
        for runner in self._runners.values():
            await runner.abort()
        for partition in tuple(self._runners):
            self._metrics.runner_gone(self._runners.pop(partition))
        self._states.clear()
        for number, tables in self._tables.items():
            try:
                if number in self._places:
                    tables.own.sync(current=True)
            except BrokerError as error:
                self._fail(error)
            try:
                await tables.close()
            except BrokerError as error:
                self._fail(error)
        for partition in tuple(self._tables):
            self._metrics.copies_gone(*self._tables.pop(partition).copies)
        for copy, task in self._lookups.values():
            task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()
            try:
                copy.sync()
            except BrokerError as error:
                self._fail(error)
            with suppress(BrokerError):
                copy.store.close()
        self._close_directory()

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            if not isinstance(error, asyncio.CancelledError):
                logger.error("Group %s stops: %s", self.group.name, error)
        self._stopping.set()
        self._pulse()

    async def _read(self, consumer: RecordConsumer[Any]) -> None:
        """Hand the records to their partitions."""
        while True:
            batch = await consumer.next_batch()
            for place, part in batch.by_partition().items():
                runner = self._runners.get(place.partition)
                if runner is None:
                    # They are read again from the position at which the partition starts.
                    continue
                runner.put(place.topic, part)
                if runner.backlog > _MOST_WAITING and place.partition not in self._held:
                    self._held.add(place.partition)
                    self._set_reading(place.partition, reading=False)

    def _set_reading(self, partition: int, *, reading: bool) -> None:
        consumer = self._reading
        assert consumer is not None
        with suppress(LeaseLost, Closed):
            (consumer.resume if reading else consumer.pause)(self._places.get(partition, ()))

    # -- tables of others ----------------------------------------------------------------------------------

    async def _open_lookups(self) -> None:
        for lookup in self.group.lookups:
            if lookup.table not in self._lookups:
                copy = TableCopy(self.bus, lookup.table, self._open_store(f"lookup-{lookup.table}"))
                self._lookups[lookup.table] = (copy, asyncio.create_task(copy.run(), name=f"lookup-{lookup.table}"))
        for copy, task in self._lookups.values():
            await wait_ready(copy, task)

    def _lookup_readers(self) -> dict[str, Reader]:
        return {table: Rows(copy.store) for table, (copy, _) in self._lookups.items()}

    async def _warm_up(self) -> None:
        """Recover partitions ahead, and begin to follow those that are on standby."""
        if not (self._standby_of or self._recover_ahead):
            return
        for number in range(self._partitions):
            if self._recover_ahead or self._stands_by(number):
                await self._open_tables(number)
        if self._recover_ahead:
            await asyncio.gather(*(tables.recover(None, 0.0) for tables in self._tables.values()))
        for number in range(self._partitions):
            if self._stands_by(number):
                self._spawn_stand_by(number)

    def _stands_by(self, partition: int) -> bool:
        return self._standby_of == "all" or partition in self._standby_of

    def _check_standby(self) -> None:
        """:raises ConfigurationError: the group has no such partitions."""
        if self._standby_of != "all" and not set(self._standby_of) <= set(range(self._partitions)):
            raise ConfigurationError(
                f"standby is {sorted(self._standby_of)}, and group {self.group.name!r} has "
                f"{counted(self._partitions, 'partition')}",
                advice=f"It takes numbers from 0 to {self._partitions - 1}",
            )

    def _on_standby(self) -> tuple[int, ...]:
        """The partitions that are on standby."""
        return tuple(sorted(each for each in tuple(self._tables) if each not in self._states and self._stands_by(each)))

    def _spawn_stand_by(self, partition: int) -> None:
        tables = self._tables[partition]

        async def stand_by() -> None:
            await tables.stand_by()
            logger.info("Partition %d of group %s is on standby", partition, self.group.name)

        self._bring(partition, stand_by)

    async def _open_tables(self, partition: int) -> PartitionTables:
        opened: list[PartitionTables] = []

        def open_tables() -> None:
            opened.append(PartitionTables(self.bus, self.group, partition, self._open_store))

        async with self._opening:
            try:
                await in_thread(open_tables)
            finally:
                # Also when the call was cancelled: the stores are open.
                for tables in opened:
                    self._tables[partition] = tables
        return opened[0]

    # -- partitions come -----------------------------------------------------------------------------------

    async def _assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """Hold the records back, and begin to recover. Returns at once, so that the member stays in its group."""
        assert self._reading is not None
        self._reading.pause(partitions)
        if self._stopping.is_set():
            return
        for number, places in _by_number(partitions).items():
            self._places[number] = places
            self._tell(number, PartitionState.RECOVERING)
            self._bring(number, partial(self._bring_up, number, places))

    def _bring(self, partition: int, work: Callable[[], Awaitable[None]]) -> None:
        """Run a task that brings a partition up, or down, in place of the one before."""
        before = self._bringing.pop(partition, None)

        async def bring() -> None:
            if before is not None:
                before.cancel()
                await asyncio.wait((before,))
            await work()

        task = self._bringing[partition] = asyncio.create_task(bring(), name=f"bring-up-{partition}")
        task.add_done_callback(self._brought)

    def _brought(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, Closed) and self._stopping.is_set():
            # The consumer was closed first.
            logger.debug("Group %s: a partition was not brought up: %s", self.group.name, error)
        else:
            self._fail(error)

    async def _bring_up(self, partition: int, places: Sequence[TopicPartition]) -> None:
        failures = 0
        while True:
            try:
                await self._recover(partition, places)
                return
            except LeaseLost as error:
                # The partition went; on_revoking or on_lost clears away.
                logger.debug("Partition %d of group %s went: %s", partition, self.group.name, error)
                return
            except BrokerError as error:
                if not (error.retriable or isinstance(error, Fenced)):
                    raise
                failures += 1
                delay = _AGAIN.delay(failures)
                logger.warning(
                    "Partition %d of group %s is not recovered; again in %.1f s: %s",
                    partition,
                    self.group.name,
                    delay,
                    error,
                )
                await asyncio.sleep(delay)

    async def _recover(self, partition: int, places: Sequence[TopicPartition]) -> None:
        """Recover a partition, and start it at the positions of its checkpoint."""
        consumer, checkpoints = self._reading, self._checkpoints
        assert consumer is not None
        assert checkpoints is not None
        commits = checkpoints.commits
        if (dropping := self._dropping.get(partition)) is not None:
            await asyncio.wait((dropping,))
        await self._check_table()
        # Before the table is read: what an older owner wrote until now is read, and it writes no more.
        await commits.attach(partition)
        if (tables := self._tables.get(partition)) is None:
            tables = await self._open_tables(partition)
        stored = await consumer.committed(places)
        committed = {place.topic: position for place, position in stored.items() if position is not None}

        log = PartitionLog(self.bus, partition)

        async def enough(packed: bytes | None) -> bool:
            positions = {} if packed is None else read_checkpoint(packed, self.group.table, partition).positions
            for topic, position in committed.items():
                # A position that was committed may have moved on over offsets without a record.
                if await log.has_records(topic, positions.get(topic, 0), position):
                    return False
            return True

        seen = await tables.recover(enough if committed else None, commits.patience)
        packed = stored_checkpoint(tables.store)
        if not seen:
            self._check_positions(partition, committed, packed, together=commits.together)
        checkpoint = Checkpoint() if packed is None else read_checkpoint(packed, self.group.table, partition)
        self._check_owner(checkpoint)
        rows = tables.own.redo(checkpoint.redo) if checkpoint.redo else {}
        await commits.claim(partition, rows, checkpoint)
        if checkpoint.redo:
            checkpoint = checkpoint.settled()
            tables.store.write({}, {CHECKPOINT: checkpoint.pack()})
            logger.info(
                "Partition %d of table %s: wrote %s of the last checkpoint again, which may have been missing",
                *(partition, self.group.table, counted(len(rows), "row")),
            )
        if checkpoint.fingerprint:
            self._tell_differences(checkpoint.fingerprint)
        self._check_identities(checkpoint)
        missing = {topic: position for topic, position in committed.items() if topic not in checkpoint.positions}
        missing |= (starts := await self._starts(partition, {*checkpoint.positions, *missing}))
        checkpoint = msgspec.structs.replace(checkpoint, positions={**missing, **checkpoint.positions})
        runner = PartitionRunner(
            self.group,
            partition,
            tables,
            checkpoint=checkpoint,
            lookups=self._lookup_readers(),
            epoch=checkpoint.epoch + 1,
            log=log,
            most_rows=commits.most_rows,
            progress=self._progress,
            want_checkpoint=checkpoints.wake,
            failed=self._runner_failed,
            attributes=self._attributes,
            limits=self.bus.capabilities.publish.limits,
            wrap=self._wrap,
            raises=self.bus.hooks.raises,
        )
        if upgraded := await runner.upgrade():
            logger.info(
                "Upgraded %s of partition %d of table %s", counted(upgraded, "row"), partition, self.group.table
            )
        runner.engine.identities = self._identities
        runner.pause(self._paused)
        if starts:
            # Otherwise a restart before the first checkpoint would begin later.
            await consumer.seek({place: runner.engine.positions.get(place.topic) for place in places})
            await checkpoints.write((runner,), patience=_CLOSE_SECONDS, force=True)
        await self._start(runner)

    def _check_owner(self, checkpoint: Checkpoint) -> None:
        """:raises ConfigurationError: the table is that of another group."""
        owner = checkpoint.fingerprint.get("group", self.group.name)
        if owner != self.group.name:
            raise ConfigurationError(
                f"Table {self.group.table!r} of group {self.group.name!r} belongs to group {owner!r}: it has its "
                "checkpoints",
                advice=f"Give group {self.group.name!r} a table of its own (table=), or name it {owner!r} to go on "
                "where that group is",
            )

    def _check_identities(self, checkpoint: Checkpoint) -> None:
        """:raises TopicRecreated: rows or a position of the checkpoint are of a topic that is gone."""
        recreated = {topic for topic, now in self._identities.items() if checkpoint.identities.get(topic, now) != now}
        if self.group.table in recreated:
            raise self._table_recreated()
        for topic, position in checkpoint.positions.items():
            if topic in recreated:
                raise TopicRecreated(
                    f"Topic {topic!r} was deleted and recreated since the last checkpoint of group "
                    f"{self.group.name!r}, whose position in it, {position}, means other messages now",
                    advice=f"`broker streams reset {self.group.name}` reads it from the beginning; the rows stay",
                )

    async def _check_table(self) -> None:
        """:raises TopicRecreated: the table is not the one that this member began with."""
        table = self.group.table
        if (began := self._identities.get(table)) is None:
            return
        try:
            now = await self.bus.admin.topic_identity(table)
        except BrokerError as error:
            # Whoever reads or writes the table next says what is wrong.
            logger.debug("Group %s: the identity of table %s is unknown: %s", self.group.name, table, error)
            return
        if now != began:
            raise self._table_recreated()

    def _table_recreated(self) -> TopicRecreated:
        name = self.group.name
        return TopicRecreated(
            f"Table {self.group.table!r} was deleted and recreated while group {name!r} ran, so rows are missing in it",
            advice=f"`broker streams reset {name} --table` deletes the rows that were written since, and reads the "
            "inputs from the beginning",
        )

    def _check_positions(
        self, partition: int, committed: Mapping[str, int], packed: bytes | None, *, together: bool
    ) -> None:
        """The positions of the group lie beyond the checkpoint.

        :raises BackendError: then the checkpoint cannot be the last one.
        """
        name, table = self.group.name, self.group.table
        if packed is None:
            logger.warning(
                "Group %s begins with positions, %s, but without a checkpoint in partition %d of table %s; its rows "
                "are taken as they are",
                *(name, committed, partition, table),
            )
        elif together:
            raise BackendError(
                f"The positions of group {name!r} in partition {partition}, {committed}, lie beyond the checkpoint in "
                f"table {table!r}, {Checkpoint.unpack(packed).positions}",
                advice="If somebody has moved the group, move it back to the checkpoint; otherwise end the transaction "
                "that hides the last checkpoint, which has no end by itself",
            )
        else:
            logger.warning(
                "The positions of group %s in partition %d, %s, lie beyond the checkpoint, which counts",
                *(name, partition, committed),
            )

    async def _start(self, runner: PartitionRunner) -> None:
        """Read from the positions of a runner on, and let it run.

        :raises LeaseLost: the partition is no longer assigned.
        """
        assert self._reading is not None
        positions, partition = runner.engine.positions, runner.partition
        places = self._places[partition]
        await self._reading.seek({place: positions.get(place.topic) for place in places})
        # What came until now is from beyond.
        runner.drop_waiting()
        await runner.start()
        if runner.retired or self._places.get(partition) is not places:
            await runner.abort()
            return
        self._runners[partition] = runner
        self._held.discard(partition)
        if not self._paused:
            self._reading.resume(places)
        self._tell(partition, PartitionState.RUNNING)
        begins = ", ".join(f"{topic} {position}" for topic, position in positions.items()) or "the beginning"
        logger.info("Group %s: partition %d runs, from %s on", self.group.name, partition, begins)

    async def _starts(self, partition: int, known: Collection[str]) -> dict[str, int]:
        """Where inputs begin that have no position and do not begin at their start."""
        starts: dict[str, int] = {}
        for topic, edge in self.group.consumed.items():
            if topic in known or not isinstance(edge, Input) or edge.start == "earliest":
                continue
            if isinstance(edge.start, datetime):
                starts[topic] = (await self.bus.log.position_at(topic, edge.start))[partition]
            else:
                starts[topic] = (await self.bus.log.bounds(topic))[partition].next
        return starts

    def _tell_differences(self, before: Mapping[str, Any]) -> None:
        for line in differences(before, self.group.fingerprint()):
            if line not in self._told_differences:
                self._told_differences.add(line)
                logger.warning("The graph of group %s has changed since the last checkpoint: %s", self.group.name, line)

    # -- partitions go -------------------------------------------------------------------------------------

    async def _revoking(self, partitions: Sequence[TopicPartition]) -> None:
        """Write a last checkpoint of partitions that another member is about to get."""
        assert self._checkpoints is not None
        numbers = _by_number(partitions)
        self._stop_bringing(numbers)
        runners = [runner for number in numbers if (runner := self._runners.get(number)) is not None]
        for runner in runners:
            self._tell(runner.partition, PartitionState.STOPPING)
        try:
            await asyncio.gather(*(runner.halt() for runner in runners))
            await self._checkpoints.write(runners, patience=_RELEASE_SECONDS)
        except BrokerError as error:
            logger.warning(
                "Group %s: the last checkpoint of partitions %s was not written: %s",
                self.group.name,
                ", ".join(map(str, numbers)),
                error,
            )
        finally:
            drops = [self._spawn_drop(number) for number in numbers]
        await asyncio.wait(drops)

    async def _lost(self, partitions: Sequence[TopicPartition]) -> None:
        """Drop partitions that another member has already."""
        numbers = _by_number(partitions)
        self._stop_bringing(numbers)
        await asyncio.wait([self._spawn_drop(number) for number in numbers])

    def _stop_bringing(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if (task := self._bringing.get(number)) is not None:
                task.cancel()

    def _spawn_drop(self, partition: int) -> asyncio.Task[None]:
        """Clear a partition away. A task, since the broker does not wait for long."""
        logger.info("Group %s: partition %d has gone", self.group.name, partition)
        if (runner := self._runners.pop(partition, None)) is not None:
            runner.retired = True
            self._metrics.runner_gone(runner)
        self._places.pop(partition, None)
        self._states.pop(partition, None)
        if not self._states and self._signal.state is ProcessorState.RUNNING:
            self._without_since = time.monotonic()
        self._held.discard(partition)
        self._pulse()
        before = [task for task in (self._bringing.pop(partition, None),) if task is not None]
        for task in before:
            task.cancel()
        if (dropping := self._dropping.get(partition)) is not None:
            before.append(dropping)
        task = self._dropping[partition] = asyncio.create_task(
            self._drop(partition, runner, before), name=f"drop-{partition}"
        )
        task.add_done_callback(self._dropped)
        return task

    def _dropped(self, task: asyncio.Task[None]) -> None:
        for partition, each in tuple(self._dropping.items()):
            if each is task:
                del self._dropping[partition]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _drop(
        self, partition: int, runner: PartitionRunner | None, before: Collection[asyncio.Task[None]]
    ) -> None:
        """Clear away, after these tasks of the partition have ended."""
        assert self._checkpoints is not None
        if before:
            await asyncio.wait(before)
        if runner is not None:
            await self._checkpoints.forget(runner)
            await runner.abort()
        try:
            await self._checkpoints.commits.detach(partition)
        except BrokerError as error:
            logger.debug("Detaching partition %d failed: %s", partition, error)
        if partition not in self._tables or partition in self._places or self._stopping.is_set():
            # Assigned again, it is brought up as soon as this has ended.
            return
        if self._stands_by(partition):
            self._spawn_stand_by(partition)
        else:
            self._bring(partition, partial(self._close_later, partition))

    async def _close_later(self, partition: int) -> None:
        """Keep the tables of a partition that has gone for a while: a rebalance may give it back."""
        await asyncio.sleep(_KEEP_SECONDS)
        tables = self._tables.pop(partition)
        self._metrics.copies_gone(*tables.copies)
        # In the way of the next assignment, unlike the wait.
        task = self._dropping[partition] = asyncio.create_task(tables.close(), name=f"close-{partition}")
        task.add_done_callback(self._dropped)

    # -- checkpoints ---------------------------------------------------------------------------------------

    def _progress(self, handled: int) -> None:
        """Called by a partition that has handled messages."""
        assert self._checkpoints is not None
        self._checkpoints.progress(handled)
        for partition in tuple(self._held):
            runner = self._runners.get(partition)
            if runner is not None and runner.backlog < _FEW_WAITING:
                self._held.discard(partition)
                if not self._paused:
                    self._set_reading(partition, reading=True)

    async def _read_again(self, runner: PartitionRunner) -> None:
        if self._states.get(runner.partition) is PartitionState.RUNNING:
            await self._start(runner)

    def _fenced(self, runner: PartitionRunner, delay: float) -> None:
        """Another process writes the table partition: recover it again if it is still this member's."""
        partition = runner.partition
        if not self._owns(runner):
            return
        places = self._places[partition]
        self._set_reading(partition, reading=False)
        del self._runners[partition]
        runner.retired = True
        self._metrics.runner_gone(runner)
        self._tell(partition, PartitionState.RECOVERING)

        async def again() -> None:
            assert self._checkpoints is not None
            await self._checkpoints.forget(runner)
            await runner.abort()
            # If the partition went to another member, the group says so meanwhile.
            await asyncio.sleep(delay)
            await self._bring_up(partition, places)

        self._bring(partition, again)

    def _runner_failed(self, runner: PartitionRunner, error: BaseException) -> None:
        if self._runners.get(runner.partition) is runner:
            self._fail(error)

    # -- what the application asks -------------------------------------------------------------------------

    @property
    def state(self) -> ProcessorState:
        """What the processor is doing."""
        return self._signal.state

    @property
    def healthy(self) -> bool:
        """Whether the processor is a member of its group, and its last fetch succeeded. Makes no call."""
        if self._reading is None or self._signal.state is not ProcessorState.RUNNING:
            return False
        return self._reading.state is ConsumerState.RUNNING

    @property
    def partitions(self) -> Mapping[int, PartitionState]:
        """The partitions of this member, by number."""
        return dict(self._states)

    def states(self) -> AsyncIterator[ProcessorState]:
        """The state now, and each that follows; ends with `STOPPED`. One who does not read misses older ones."""
        return self._signal.watch()

    async def get(self, key: str) -> Any:
        """The row of a key as of the last checkpoint; None if there is none.

        :raises NotFound: another member has the partition of the key.
        :raises ConfigurationError: the group has no `Persist`.
        """
        persist = self.group.persist
        if persist is None:
            raise ConfigurationError(f"Group {self.group.name!r} has no Persist, so it has no rows")
        wire, table = keys.encode(key), self.group.table
        try:
            homes = [await self.bus.partition_of(table, wire, partitioner=self.group.partitioner)]
        except Unsupported:
            # The broker does not tell where it puts keys.
            homes = list(await self.bus.log.partitions(table))
        if self._checkpoints is not None:
            # So that a row which the caller has seen in the table is in the store.
            await self._checkpoints.up_to_date()
        here = [runner for partition in homes if (runner := self._runners.get(partition)) is not None]
        for runner in here:
            try:
                data = runner.store.get(keys.ROWS, wire)
            except StoreCorrupt as error:
                # The end of the processor sets the store aside.
                self._fail(error)
                raise
            if data is not None:
                return persist.codec.decode(data)
        if len(here) < len(homes):
            where = f"partition {homes[0]}" if len(homes) == 1 else "a partition"
            raise NotFound(
                f"Key {key!r} belongs to {where} of {table!r} that does not run here",
                advice="Ask the member that has it, or read the table by a View",
            )
        return None

    async def visit(self, name: str, meta: Any = None) -> int:
        """Call the `Visitor` of this name for every row of this member's partitions, between messages.

        :returns: how many rows were visited, and are part of a checkpoint.
        :raises VisitAborted: a partition left, or the processor stopped.
        :raises ConfigurationError: the group has no such visitor.
        """
        if all(visitor.name != name for visitor in self.group.visitors):
            known = ", ".join(repr(visitor.name) for visitor in self.group.visitors) or "none"
            raise ConfigurationError(f"Group {self.group.name!r} has no Visitor {name!r}", advice=f"It has {known}")
        checkpoints = self._checkpoints
        if self._signal.state is not ProcessorState.RUNNING or checkpoints is None:
            raise VisitAborted(0, f"the processor is {self._signal.state}")
        visit = Visit(
            name,
            meta,
            list(self._runners.values()),
            owns=self._owns,
            checkpoint=partial(checkpoints.write, patience=_CLOSE_SECONDS),
            failed=self._runner_failed,
        )
        return await visit.run()

    def pause(self) -> None:
        """Handle no messages until `resume`; the member stays in its group, and timers go on."""
        self._set_paused(paused=True)

    def resume(self) -> None:
        """Undo `pause`."""
        self._set_paused(paused=False)

    def _set_paused(self, *, paused: bool) -> None:
        self._paused = paused
        for partition, runner in self._runners.items():
            runner.pause(paused)
            if partition not in self._held:
                self._set_reading(partition, reading=not paused)

    def stats(self) -> ProcessorStats:
        """Figures of this moment."""
        checkpoints = self._checkpoints
        commits = None if checkpoints is None else checkpoints.commits
        return ProcessorStats(
            state=self._signal.state,
            guarantee="" if commits is None else commits.guarantee,
            how="" if commits is None else commits.how,
            partitions={number: self._partition_stats(runner) for number, runner in self._runners.items()},
            recovering={
                number: found
                for number, tables in self._tables.items()
                if number in self._states and (found := tables.own.recovery()) is not None
            },
            lookups={table: _table_stats(copy) for table, (copy, _) in self._lookups.items()},
            standby=self._on_standby(),
            checkpoint_seconds=None if checkpoints is None else checkpoints.seconds,
            failed_checkpoints=0 if checkpoints is None else checkpoints.undone,
        )

    def _partition_stats(self, runner: PartitionRunner) -> PartitionStats:
        positions = runner.engine.positions
        inputs: dict[str, InputStats] = {}
        for topic in self.group.consumed:
            number, size = runner.handled.get(topic, (0, 0))
            inputs[topic] = InputStats(count=number, bytes=size, position=positions.get(topic))
        return PartitionStats(
            state=self._states.get(runner.partition, PartitionState.STOPPING),
            inputs=inputs,
            counts=dict(runner.counts),
            backlog=runner.backlog,
            checkpoints=runner.checkpoints,
            published=runner.published,
            rows=runner.rows,
            store_bytes=runner.store.size(),
            stream_time=runner.engine.stream_time,
            table=_table_stats(runner.tables.own),
            joins={table: _table_stats(copy) for table, copy in runner.tables.joins.items()},
        )

    # -- telling -------------------------------------------------------------------------------------------

    @property
    def runners(self) -> Collection[PartitionRunner]:
        """The partitions at work."""
        return list(self._runners.values())

    def _owns(self, runner: PartitionRunner) -> bool:
        return self._runners.get(runner.partition) is runner and not self._stopping.is_set()

    def _tell(self, partition: int, state: PartitionState) -> None:
        self._states[partition] = state
        self._without_since = None
        self._pulse()

    def _change(self, state: ProcessorState) -> None:
        self._signal.change(state)
        self._without_since = time.monotonic() if state is ProcessorState.RUNNING and not self._states else None
        if state is ProcessorState.STOPPED:
            self._signal.end()
        self._pulse()

    def _pulse(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _is_standby(value: object) -> bool:
    if value is None or isinstance(value, str):
        return value in (None, "all")
    return isinstance(value, Collection) and all(map(is_whole, cast("Collection[object]", value)))


def _by_number(partitions: Iterable[TopicPartition]) -> dict[int, list[TopicPartition]]:
    found: dict[int, list[TopicPartition]] = {}
    for place in partitions:
        found.setdefault(place.partition, []).append(place)
    return found


def _table_stats(copy: TableCopy) -> TableStats:
    return TableStats(rows=copy.rows, recovery_seconds=copy.seconds, staleness=copy.staleness)
