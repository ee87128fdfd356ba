"""How a checkpoint is written on this broker: chosen by what it can do, never by its name.

| what the broker can do | a checkpoint is | promise |
|---|---|---|
| transactions | one transaction over all partitions: outputs, rows, checkpoint rows, positions | exactly once |
| atomic writes to tables | outputs with ids; rows and checkpoint in one fenced write; positions | exactly once (1) |
| writes to tables | outputs; by a fenced writer redo records, checkpoint, rows, checkpoint | exactly once (1) |
| the same, as a choice | outputs; rows and checkpoint in order, by a fenced writer; positions | at least once |
| publishing to a partition | outputs, rows, checkpoint, positions | at least once |

(1) Rows always; outputs after a crash for as long as the broker drops repeated ids; otherwise they repeat with the same
id.

The truth is the checkpoint row: recovery ends at it, and reading goes on at its positions. Redo records have no effect
before it is there (see `redo`). The positions of the group are for lag and tools; only a transaction commits both
together.

*Concurrency.* One write at a time. *Cancellation.* A cancelled write may have been carried out: roll back to what the
table holds. *Failure.* A write that may be repeated is repeated until it succeeds, where that is safe; what `write`
raises says whether the work has to be done again.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from broker import (
    CHECKPOINT_KEY,
    BrokerError,
    Bus,
    Capabilities,
    Closed,
    LeaseLost,
    OffsetOutOfRange,
    OutboundMessage,
    Partitioner,
    PublishError,
    Receipt,
    RecordConsumer,
    Retry,
    TableWriter,
    TopicPartition,
    TransactionAborted,
    TransactionalPublisher,
    TransactionFatal,
    Unsupported,
)
from broker_streams.checkpoint import Checkpoint
from broker_streams.engine import Effects
from broker_streams.graph import Group
from broker_streams.redo import pack

__all__ = ["Commits", "Fenced", "Guarantee", "Part", "Written", "check_capabilities", "choose_commits"]

logger: Final = logging.getLogger("broker_streams")

Guarantee = Literal["exactly_once", "at_least_once"]

_AGAIN: Final = Retry(initial=0.1, maximum=10.0)
_REDO_BYTES: Final = 1 << 19
"""The most bytes of a redo record, unless one of its rows has more."""
_TRIES: Final = 4
"""How often a transaction is written before its work is done again."""
_LOOK_SECONDS: Final = 30.0
"""How often the end of the table is asked for, so that a restart does not read again what is in the store."""


class Fenced(BrokerError):
    """Another process writes this partition of the table.

    :ivar partition: its number.
    """

    def __init__(self, partition: int, cause: BrokerError) -> None:
        super().__init__(f"Partition {partition} is written elsewhere: {cause.message}", native=cause)
        self.partition = partition


@dataclass(frozen=True, slots=True)
class Part:
    """What a checkpoint writes for one partition.

    :ivar effects: taken from its engine.
    :ivar packed: the bytes of their checkpoint.
    :ivar before: those of the checkpoint that is in the table.
    :ivar retired: whether the partition has gone, perhaps to come back with newer rows: then nothing may be written.
    """

    partition: int
    effects: Effects
    packed: bytes
    before: bytes | None
    retired: Callable[[], bool] = lambda: False

    @property
    def checkpoint(self) -> Checkpoint:
        return self.effects.checkpoint

    @property
    def written_before(self) -> bytes:
        """The checkpoint row that the table has."""
        return self.before if self.before is not None else Checkpoint().pack()

    def check(self) -> None:
        """Check that it may be written.

        :raises LeaseLost: the partition has gone.
        """
        if self.retired():
            raise self.gone()

    def gone(self) -> LeaseLost:
        """The error of a partition that has gone."""
        return LeaseLost(f"Partition {self.partition} went to another member before its checkpoint was written")


Written = int | None | Fenced
"""The position in the table up to which a store then has the rows, None where that is not known; or the failure."""


class Commits(Protocol):
    """Writes checkpoints.

    :ivar guarantee: what holds.
    :ivar how: the same for the log, in a few words.
    :ivar most_rows: the most rows that a checkpoint of a partition may have; None is no limit.
    :ivar together: whether the positions of the group are committed with the checkpoint: then one that is below them is
        not the last.
    :ivar patience: seconds for which the last checkpoint may stay hidden from a reader who sees the positions.
    """

    guarantee: Guarantee
    how: str
    most_rows: int | None
    together: bool
    patience: float

    async def open(self, consumer: RecordConsumer[Any]) -> None:
        """Before the first write."""
        ...

    async def close(self) -> None: ...
    async def attach(self, partition: int) -> None:
        """Before the table partition is recovered: no other member can write it from now on, if the broker fences."""
        ...

    async def detach(self, partition: int) -> None: ...
    async def claim(self, partition: int, rows: Mapping[bytes, bytes | None], checkpoint: Checkpoint) -> None:
        """After the table partition was recovered, and before anything else is written to it: write what was found,
        if some of it may be missing, or if something of an older owner could still come after it.

        :param rows: those of the checkpoint that the table may lack.
        :raises Fenced: another process writes the partition.
        """
        ...

    async def write(self, parts: Sequence[Part]) -> Mapping[int, Written]:
        """Write; return the outcome of each part.

        :raises BrokerError: nothing is known to be written. A retriable error: roll back, and do the work again.
        """
        ...


def check_capabilities(capabilities: Capabilities, topics: Collection[str]) -> None:
    """Check that a group that consumes these topics can run here.

    :raises Unsupported: the error names what is missing.
    """
    records = capabilities.records
    missing = (
        "a log"
        if records is None
        else "compacted topics"
        if not records.compacted_topics
        else "following a log"
        if not records.follow
        else "seeking"
        if not records.seek
        else f"copartitioned topics, and the group consumes {', '.join(sorted(topics))}"
        if len(topics) > 1 and not records.copartitioned
        else None
    )
    if missing is not None:
        raise Unsupported(
            f"{capabilities.backend} does not support {missing}",
            advice="A stream processor needs it; see bus.capabilities",
        )


def choose_commits(bus: Bus, group: Group, guarantee: Guarantee | None, name: str) -> Commits:
    """The best way to write checkpoints that this broker has.

    :param guarantee: None is the best that holds.
    :param name: of this member, the same after a restart.
    :raises Unsupported: the guarantee does not hold here.
    """
    publish = bus.capabilities.publish
    if guarantee != "at_least_once":
        if publish.transactions and publish.partitions:
            return _Transactions(bus, group, name)
        if publish.tables and not publish.transactions:
            how = "atomic writes to the table" if publish.atomic_tables else "redo records before the rows"
            return _TableWrites(bus, group, "exactly_once", how)
        if guarantee == "exactly_once":
            raise Unsupported(
                f"{bus.capabilities.backend} has neither transactions nor fenced writes to tables, so messages may "
                "count twice after a crash",
                advice='Take guarantee="at_least_once", or a broker with publish.transactions or publish.tables',
            )
    if publish.tables and not publish.transactions:
        return _TableWrites(bus, group, "at_least_once", "fenced writes to the table")
    if publish.partitions:
        return _PlainWrites(bus, group)
    raise Unsupported(
        f"{bus.capabilities.backend} does not let publishers choose a partition, so rows cannot be written",
        advice="See bus.capabilities.settings_needed for settings that allow it",
    )


class _Transactions:
    guarantee: Guarantee = "exactly_once"
    how = "transactions"
    most_rows: int | None = None
    together = True
    # A transaction that its publisher has left holds back what comes after it, until it times out.
    patience = 90.0

    def __init__(self, bus: Bus, group: Group, name: str) -> None:
        self._bus = bus
        self._table = group.table
        self._outputs = _Outputs(bus, group)
        self._id = f"{group.name}.{name}"
        self._consumer: RecordConsumer[Any] | None = None
        self._opened: AbstractAsyncContextManager[TransactionalPublisher] | None = None
        self._publisher: TransactionalPublisher | None = None

    async def open(self, consumer: RecordConsumer[Any]) -> None:
        self._consumer = consumer
        await self._open()

    async def _open(self) -> TransactionalPublisher:
        if self._publisher is None:
            self._opened = self._bus.transactional_publisher(self._id)
            self._publisher = await self._opened.__aenter__()
        return self._publisher

    async def close(self) -> None:
        opened, self._opened, self._publisher = self._opened, None, None
        if opened is not None:
            await opened.__aexit__(None, None, None)

    async def attach(self, partition: int) -> None:
        """The generation of the group fences: a member that lost its partitions cannot commit."""

    async def detach(self, partition: int) -> None: ...

    async def claim(self, partition: int, rows: Mapping[bytes, bytes | None], checkpoint: Checkpoint) -> None: ...

    async def write(self, parts: Sequence[Part]) -> Mapping[int, Written]:
        gone = {part.partition: Fenced(part.partition, part.gone()) for part in parts}
        failures = 0
        while left := [part for part in parts if not part.retired()]:
            try:
                return {**gone, **await self._write(left)}
            except TransactionAborted as error:
                # Nothing was written, and what was taken still holds: often the group has just rebalanced, and the
                # next try has the new generation. A partition that went meanwhile is retired, and is left out.
                failures += 1
                if failures == _TRIES:
                    raise
                logger.info("A checkpoint is written again: %s", error)
                await asyncio.sleep(0.0 if failures == 1 else _AGAIN.delay(failures - 1))
        return gone

    async def _write(self, parts: Sequence[Part]) -> Mapping[int, Written]:
        publisher = await self._open()
        outputs = await self._outputs.by_topic(parts)
        rows = [row for part in parts for row in _rows(part)]
        ends = [_checkpoint_row(part) for part in parts]
        try:
            async with publisher.transaction(self._consumer, positions=_positions(parts), rewind=False) as transaction:
                await asyncio.gather(
                    *(
                        _naming(topic, transaction.publish_batch(topic, batch, receipts=False))
                        for topic, batch in outputs.items()
                    )
                )
                await transaction.publish_batch(self._table, rows, receipts=False)
                receipts = await transaction.publish_batch(self._table, ends)
                for part in parts:
                    part.check()
        except LeaseLost as error:
            raise TransactionAborted(error.message, native=error) from error
        except PublishError as error:
            fatal = next((each for each in error.outcomes if isinstance(each, TransactionFatal)), None)
            if fatal is None:
                raise
            await self.close()
            raise fatal from error
        except TransactionFatal:
            # The id may have been taken by an earlier life of this member that is not gone yet.
            await self.close()
            raise
        return _behind(parts, receipts)


class _TableWrites:
    together = False
    patience = 1.0

    def __init__(self, bus: Bus, group: Group, guarantee: Guarantee, how: str) -> None:
        self.guarantee: Guarantee = guarantee
        self.how = how
        # The checkpoint is a row too, but one that the limit does not count.
        self.most_rows = bus.capabilities.publish.table_rows
        self._atomic = bus.capabilities.publish.atomic_tables
        body = bus.capabilities.publish.limits.body
        self._redo_bytes = _REDO_BYTES if body is None else min(_REDO_BYTES, body // 2)
        self._bus = bus
        self._table = group.table
        self._outputs = _Outputs(bus, group)
        self._writers: dict[int, tuple[TableWriter, AsyncExitStack]] = {}
        self._looked_at = 0.0
        self._consumer: RecordConsumer[Any] | None = None

    async def open(self, consumer: RecordConsumer[Any]) -> None:
        self._consumer = consumer

    async def close(self) -> None:
        for partition in tuple(self._writers):
            await self.detach(partition)

    async def attach(self, partition: int) -> None:
        await self.detach(partition)
        stack = AsyncExitStack()
        writer = await stack.enter_async_context(self._bus.table_writer(self._table, partition))
        self._writers[partition] = (writer, stack)

    async def detach(self, partition: int) -> None:
        if (found := self._writers.pop(partition, None)) is not None:
            await found[1].aclose()

    async def write(self, parts: Sequence[Part]) -> Mapping[int, Written]:
        assert self._consumer is not None
        # A partition may go and come back before its turn; then it has another writer.
        writers = [self._writer(part) for part in parts]
        await self._outputs.publish(parts)
        ends = await self._ends()
        outcomes = await asyncio.gather(*map(self._write, parts, writers), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None and not isinstance(outcome, Fenced):
                raise outcome
        written = [part for part, outcome in zip(parts, outcomes, strict=True) if outcome is None]
        await _commit(self._consumer, written)
        # All rows below these ends were this writer's, or were recovered: otherwise the write would have been refused.
        return {
            part.partition: outcome if isinstance(outcome, Fenced) else ends.get(part.partition)
            for part, outcome in zip(parts, outcomes, strict=True)
        }

    def _writer(self, part: Part) -> TableWriter:
        return self._writers[part.partition][0]

    async def claim(self, partition: int, rows: Mapping[bytes, bytes | None], checkpoint: Checkpoint) -> None:
        if self._atomic and not checkpoint.redo:
            # What an older owner has under way is refused, or comes first and has this one's writes refused.
            return
        packed = checkpoint.settled().pack()
        part = Part(partition, Effects(dict(rows), {}, [], checkpoint, {}, {}), packed, checkpoint.pack())
        await self._write_all(part, self._writer(part), _rows(part), part.written_before, packed)

    async def _write(self, part: Part, writer: TableWriter) -> None:
        rows, most = _rows(part), self.most_rows
        if not rows or (self._atomic and (most is None or len(rows) <= most)):
            await self._write_once(part, writer, rows, part.packed)
        elif self.guarantee == "exactly_once":
            token = uuid.uuid4().hex
            packed = part.checkpoint.pending(token).pack()
            records = pack(part.effects.rows, token, self._redo_bytes)
            redo = [OutboundMessage(data, key, partition=part.partition) for key, data in records.items()]
            await self._write_all(part, writer, redo, part.written_before, packed)
            # The checkpoint counts. Whoever finds it writes these rows, if this member cannot.
            await self._write_all(part, writer, rows, packed, part.packed)
        else:
            await self._write_all(part, writer, rows, part.written_before, part.packed)

    async def _write_all(
        self, part: Part, writer: TableWriter, rows: Sequence[OutboundMessage], before: bytes, checkpoint: bytes
    ) -> None:
        """Write rows and a checkpoint, in parts if they are many; all parts but the last have the one before."""
        most = self.most_rows or len(rows) or 1
        while len(rows) > most:
            await self._write_once(part, writer, rows[:most], before)
            rows = rows[most:]
        await self._write_once(part, writer, rows, checkpoint)

    async def _write_once(
        self, part: Part, writer: TableWriter, rows: Sequence[OutboundMessage], checkpoint: bytes
    ) -> None:
        failures = 0
        while True:
            try:
                part.check()
                await writer.write(rows, checkpoint=checkpoint)
                return
            except (TransactionFatal, LeaseLost, Closed) as error:
                raise Fenced(part.partition, error) from error
            except BrokerError as error:
                if not error.retriable:
                    raise
                failures += 1
                await _pause("The table", failures, error)

    async def _ends(self) -> Mapping[int, int]:
        """Where the partitions of the table end now; empty if that was asked a moment ago."""
        if (now := time.monotonic()) - self._looked_at < _LOOK_SECONDS:
            return {}
        self._looked_at = now
        try:
            return {number: bounds.next for number, bounds in (await self._bus.log.bounds(self._table)).items()}
        except BrokerError as error:
            logger.debug("The end of table %s is unknown: %s", self._table, error)
            return {}


class _PlainWrites:
    guarantee: Guarantee = "at_least_once"
    how = "single messages"
    most_rows: int | None = None
    together = False
    patience = 1.0

    def __init__(self, bus: Bus, group: Group) -> None:
        self._bus = bus
        self._table = group.table
        self._outputs = _Outputs(bus, group)
        self._consumer: RecordConsumer[Any] | None = None

    async def open(self, consumer: RecordConsumer[Any]) -> None:
        self._consumer = consumer

    async def close(self) -> None: ...

    async def attach(self, partition: int) -> None:
        """Nothing fences: a member that was cut off may write rows a moment longer."""

    async def detach(self, partition: int) -> None: ...

    async def claim(self, partition: int, rows: Mapping[bytes, bytes | None], checkpoint: Checkpoint) -> None: ...

    async def write(self, parts: Sequence[Part]) -> Mapping[int, Written]:
        assert self._consumer is not None
        await self._outputs.publish(parts)
        table = self._bus.topic(self._table)
        failures = 0
        while True:
            # Nobody would refuse rows that are too old.
            left = [part for part in parts if not part.retired()]
            try:
                await table.publish_batch([row for part in left for row in _rows(part)], receipts=False)
                receipts = await table.publish_batch([_checkpoint_row(part) for part in left])
                break
            except BrokerError as error:
                if not error.retriable:
                    raise
                failures += 1
                await _pause("The table", failures, error)
        await _commit(self._consumer, left)
        gone = {part.partition: Fenced(part.partition, part.gone()) for part in parts}
        return gone | _behind(left, receipts)


class _Outputs:
    """Publishes what the engines have emitted."""

    def __init__(self, bus: Bus, group: Group) -> None:
        self._bus = bus
        self._partitioner: Partitioner = group.partitioner

    async def by_topic(self, parts: Sequence[Part]) -> dict[str, list[OutboundMessage]]:
        """The messages of each topic, in order."""
        found: dict[str, list[OutboundMessage]] = {}
        for part in parts:
            for topic, message in part.effects.outputs:
                if self._partitioner != "broker" and message.key is not None and message.partition is None:
                    partition = await self._bus.partition_of(topic, message.key, partitioner=self._partitioner)
                    message = message.replace(partition=partition)
                found.setdefault(topic, []).append(message)
        return found

    async def publish(self, parts: Sequence[Part]) -> None:
        """Publish, again and again while the error is retriable: the ids stay, so a broker can drop what it has."""
        outputs = await self.by_topic(parts)
        await asyncio.gather(*(self._publish(topic, messages, parts) for topic, messages in outputs.items()))

    async def _publish(self, topic: str, messages: Sequence[OutboundMessage], parts: Sequence[Part]) -> None:
        failures = 0
        while messages:
            try:
                await _naming(topic, self._bus.topic(topic).publish_batch(messages, receipts=False))
                return
            except BrokerError as error:
                if not error.retriable:
                    raise
                failures += 1
                await _pause(f"Topic {topic!r}", failures, error)
                left = [part for part in parts if not part.retired()]
                if len(left) < len(parts):
                    messages = (await self.by_topic(left)).get(topic, [])


def _rows(part: Part) -> list[OutboundMessage]:
    partition = part.partition
    return [OutboundMessage(data, key, partition=partition) for key, data in part.effects.rows.items()]


def _checkpoint_row(part: Part) -> OutboundMessage:
    return OutboundMessage(part.packed, CHECKPOINT_KEY, partition=part.partition)


def _behind(parts: Sequence[Part], receipts: Sequence[Receipt]) -> dict[int, Written]:
    """The positions behind the checkpoint rows."""
    return {
        part.partition: None if receipt.offset is None else receipt.offset + 1
        for part, receipt in zip(parts, receipts, strict=True)
    }


def _positions(parts: Sequence[Part]) -> dict[TopicPartition, int]:
    return {
        TopicPartition(topic, part.partition): position
        for part in parts
        for topic, position in part.checkpoint.positions.items()
    }


async def _commit(consumer: RecordConsumer[Any], parts: Sequence[Part]) -> None:
    """Commit the positions of the group, which nothing but lag and tools depend on."""
    try:
        await consumer.commit_positions(_positions(parts))
    except (LeaseLost, OffsetOutOfRange, Closed) as error:
        logger.debug("The positions of a checkpoint were not committed: %s", error)
    except BrokerError as error:
        logger.warning("The positions of a checkpoint were not committed; the next one commits them: %s", error)


async def _naming(topic: str, publishing: Awaitable[object]) -> None:
    """Publish outputs; an error that repeating does not help against says to which topic."""
    try:
        await publishing
    except BrokerError as error:
        if not error.retriable and repr(topic) not in error.message:
            error.message = f"Topic {topic!r}: {error.message}"
        raise


async def _pause(what: str, failures: int, error: BrokerError) -> None:
    delay = _AGAIN.delay(failures)
    logger.warning("%s could not be written; again in %.1f s: %s", what, delay, error)
    await asyncio.sleep(delay)
