"""Operations on a group from outside: how far it is behind, and starting it over.

What is known of a group without its code is in its table: the checkpoint of each partition has positions, and the
fingerprint of the graph that wrote it.

*Concurrency.* A reset joins the group, and goes on only while it has all partitions, so no member can run beside it.
*Failure.* A reset that was interrupted is done again as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Any, Final, Literal, Self

import msgspec

from broker import (
    CHECKPOINT_KEY,
    BackendError,
    Bounds,
    Bus,
    Bytes,
    ConfigurationError,
    DecodeError,
    NotFound,
    RecordConsumer,
    TopicNotFound,
    TopicPartition,
)
from broker_streams import keys
from broker_streams.checkpoint import Checkpoint, read_checkpoint
from broker_streams.commits import Part, choose_commits
from broker_streams.effects import Effects
from broker_streams.graph import Group, Input, table_of
from broker_streams.redo import redo_rows
from broker_streams.stores.directory import StateDirectory, StoredState, instances
from broker_streams.wording import counted

__all__ = ["Behind", "Move", "Reset", "ResetTo", "StoredGroup", "find_group", "lag"]

ResetTo = Literal["earliest", "latest"]

_NEAR_END: Final = 1000
"""Offsets at the end of a table that are read first: every checkpoint ends with its row."""
_FEW: Final = 1000
"""Offsets up to which a lag is counted exactly."""
_ROWS_AT_ONCE: Final = 5000
_JOIN_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.5
_MEMBER: Final = "reset"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """A group as the broker has it.

    :ivar topics: what it consumes, its loop included; those that exist.
    :ivar loop: the topic of its loop; None without one.
    :ivar bounds: of each of these topics, by partition.
    :ivar checkpoints: the last one of each partition of the table; None before the first, and where it cannot be read.
    :ivar unreadable: by partition why its last checkpoint cannot be read.
    """

    name: str
    table: str
    topics: tuple[str, ...]
    loop: str | None
    bounds: Mapping[str, Mapping[int, Bounds]]
    checkpoints: Mapping[int, Checkpoint | None]
    unreadable: Mapping[int, DecodeError]

    def check_readable(self) -> None:
        """:raises DecodeError: a checkpoint cannot be read."""
        if self.unreadable:
            raise self.unreadable[min(self.unreadable)]


@dataclass(frozen=True, slots=True)
class Behind:
    """How far a group is behind on a partition of a topic.

    :ivar position: the next offset to handle, as of the last checkpoint; None before the first.
    :ivar end: the position behind the last record.
    :ivar records: how many records are between them; about, if they are many.
    """

    topic: str
    partition: int
    position: int | None
    end: int
    records: int


@dataclass(frozen=True, slots=True)
class Move:
    """What a reset does to a position.

    :ivar before: None if there was none.
    """

    topic: str
    partition: int
    before: int | None
    after: int


async def find_group(bus: Bus, name: str, group: Group | None = None) -> StoredGroup:
    """What the broker has of a group.

    :param group: the group, if its code is at hand: then its topics need not be looked for in its checkpoints.
    :raises TopicNotFound: the group has no table.
    """
    table = table_of(name) if group is None else group.table
    try:
        bounds = await bus.log.bounds(table)
    except TopicNotFound as error:
        raise TopicNotFound(
            f"Group {name!r} has no table {table!r}",
            native=error,
            advice="Check the name; a group whose table has another name is given as MODULE:NAME",
        ) from error
    read = await asyncio.gather(*(_last_checkpoint(bus, table, number, bounds[number]) for number in sorted(bounds)))
    last = dict(zip(sorted(bounds), read, strict=True))
    unreadable = {number: each for number, each in last.items() if isinstance(each, DecodeError)}
    checkpoints = {number: None if isinstance(each, DecodeError) else each for number, each in last.items()}
    if group is not None:
        loop = None if group.loop is None else group.loop_topic
        topics: Iterable[str] = group.consumed
    else:
        known = [checkpoint for checkpoint in checkpoints.values() if checkpoint is not None]
        # The last graph; positions may also be of topics that an earlier one had.
        prints = max(known, key=lambda checkpoint: checkpoint.number).fingerprint if known else {}
        loop = prints.get("loop")
        topics = {*prints.get("inputs", ()), *([] if loop is None else [loop])}
    found = {topic: each for topic in sorted(topics) if (each := await _bounds(bus, topic)) is not None}
    return StoredGroup(
        name=name,
        table=table,
        topics=tuple(found),
        loop=loop,
        bounds=found,
        checkpoints=checkpoints,
        unreadable=unreadable,
    )


async def lag(bus: Bus, stored: StoredGroup) -> list[Behind]:
    """How far a group is behind, by topic and partition.

    :raises DecodeError: a checkpoint cannot be read.
    """
    stored.check_readable()
    found: list[Behind] = []
    for topic in stored.topics:
        for number, bounds in sorted(stored.bounds[topic].items()):
            checkpoint = stored.checkpoints.get(number)
            position = None if checkpoint is None else checkpoint.positions.get(topic)
            start = bounds.first if position is None else max(position, bounds.first)
            records = await _records(bus, topic, number, start, bounds.next)
            found.append(Behind(topic, number, position, bounds.next, records))
    return found


class Reset:
    """Starts a group over. Holds its state directories on this machine from `async with` on.

    :param to: where its inputs go on; the loop always goes on at its end.
    :param rows: also delete all rows of the table.
    :ivar moves: what happens to its positions.
    :ivar stores: what is deleted on this machine.
    :raises StoreLocked: on entering; a member runs on this machine.
    :raises BackendError: on entering, or by `run`; the group has members.
    :raises ConfigurationError: on entering; nothing tells what the group consumes.
    :raises DecodeError: on entering; a checkpoint cannot be read, so the rows cannot stay.
    """

    def __init__(
        self,
        bus: Bus,
        stored: StoredGroup,
        *,
        to: ResetTo = "earliest",
        rows: bool = False,
        state_dir: str | PathLike[str] | None = None,
        group: Group | None = None,
        progress: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.moves: Final[Sequence[Move]] = _moves(stored, to)
        self.stores: Sequence[StoredState] = ()
        self._bus = bus
        self._stored = stored
        self._to: ResetTo = to
        self._rows = rows
        self._state_dir = state_dir
        self._group = group
        self._progress = progress
        self._directories: list[StateDirectory] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if not self._rows:
            # Only the checkpoint has the version of the rows.
            self._stored.check_readable()
        if self._rows and not self._stored.topics:
            raise ConfigurationError(
                f"Table {self._stored.table!r} has no checkpoint that tells what group {self._stored.name!r} consumes",
                advice="Give the group as MODULE:NAME",
            )
        try:
            for instance in instances(self._state_dir, self._stored.name):
                directory = StateDirectory(self._state_dir, self._stored.name, instance)
                self._directories.append(self._stack.enter_context(directory))
            self.stores = [store for directory in self._directories for store in directory.stores()]
            await _check_members(self._bus, self._stored.name)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(self) -> int:
        """Do it; return how many rows were deleted."""
        deleted = 0
        if self._stored.topics:
            async with _alone(self._bus, self._stored) as consumer:
                deleted = await self._write(consumer)
        for directory in self._directories:
            for store in await asyncio.to_thread(directory.clear):
                self._progress(f"Deleted {store.path}")
        return deleted

    async def _write(self, consumer: RecordConsumer[Any]) -> int:
        """Write a checkpoint as a member of the group would, with the new positions."""
        stored, bus = self._stored, self._bus
        commits = choose_commits(bus, self._group or _stand_in(stored), None, _MEMBER)
        after: dict[int, dict[str, int]] = {number: {} for number in stored.checkpoints}
        for move in self.moves:
            after[move.partition][move.topic] = move.after
        deleted = 0
        await commits.open(consumer)
        try:
            for number, positions in after.items():
                await consumer.seek({TopicPartition(topic, number): at for topic, at in positions.items()})
                await commits.attach(number)
                before = stored.checkpoints[number] or Checkpoint()
                await commits.claim(number, await _redo_rows(bus, stored.table, number, before.redo), before)
                rows = await _rows(bus, stored.table, number) if self._rows else []
                checkpoint = self._checkpoint(number, positions)
                most = min(commits.most_rows or _ROWS_AT_ONCE, _ROWS_AT_ONCE)
                for start in range(0, len(rows) or 1, most):
                    gone = dict.fromkeys(rows[start : start + most])
                    part = Part(number, Effects(gone, {}, [], checkpoint, {}, {}), checkpoint.pack(), None)
                    outcome = (await commits.write([part]))[number]
                    if isinstance(outcome, BaseException):
                        raise outcome
                deleted += len(rows)
                self._progress(
                    f"Reset partition {number}" + (f", deleted {counted(len(rows), 'row')}" if self._rows else "")
                )
        finally:
            await commits.close()
        return deleted

    def _checkpoint(self, partition: int, positions: dict[str, int]) -> Checkpoint:
        before = self._stored.checkpoints[partition] or Checkpoint()
        kept = before
        if self._to == "earliest" or self._rows:
            # What was seen of the loop, and the time of the partition, belong to messages that are handled again.
            kept = Checkpoint(version=before.version, fingerprint=before.fingerprint)
        kept = kept.settled()
        # The new positions are of the topics as they are now.
        return msgspec.structs.replace(
            kept, positions=positions, identities={}, epoch=before.epoch + 1, number=before.number + 1
        )


def _moves(stored: StoredGroup, to: ResetTo) -> list[Move]:
    moves: list[Move] = []
    for topic in stored.topics:
        for number, bounds in sorted(stored.bounds[topic].items()):
            checkpoint = stored.checkpoints.get(number)
            before = None if checkpoint is None else checkpoint.positions.get(topic)
            # Old messages of the loop would count again beside those that the inputs produce again.
            after = bounds.first if to == "earliest" and topic != stored.loop else bounds.next
            moves.append(Move(topic, number, before, after))
    return moves


def _stand_in(stored: StoredGroup) -> Group:
    """A group with the names of the stored one, which is all that a checkpoint needs."""
    inputs = [topic for topic in stored.topics if topic != stored.loop]
    return Group(stored.name, Input(inputs, Bytes(), lambda ctx, message: None), table=stored.table)


@asynccontextmanager
async def _alone(bus: Bus, stored: StoredGroup) -> AsyncGenerator[RecordConsumer[Any]]:
    """Be the only member of a group.

    :raises BackendError: other members keep partitions.
    """
    wanted = {TopicPartition(topic, number) for topic in stored.topics for number in stored.bounds[topic]}
    held: set[TopicPartition] = set()

    async def assigned(partitions: Sequence[TopicPartition]) -> None:
        consumer.pause(partitions)
        held.update(partitions)

    async def gone(partitions: Sequence[TopicPartition]) -> None:
        held.difference_update(partitions)

    consumer = bus.records(
        list(stored.topics),
        group=stored.name,
        copartitioned=len(stored.topics) > 1,
        on_assigned=assigned,
        on_revoking=gone,
        on_lost=gone,
    )
    deadline = asyncio.get_running_loop().time() + _JOIN_SECONDS
    async with consumer:
        while held != wanted:
            if asyncio.get_running_loop().time() > deadline:
                others = ", ".join(f"{topic}[{number}]" for topic, number in sorted(wanted - held))
                raise _has_members(stored.name, f"which keep {others}")
            await consumer.next_batch(timeout=_LOOK_SECONDS)
        yield consumer


async def _check_members(bus: Bus, name: str) -> None:
    """:raises BackendError: the broker tells of members."""
    records = bus.capabilities.records
    if records is None or not records.group_admin:
        return
    try:
        members = (await bus.admin.describe_group(name)).members
    except NotFound:
        return
    if members:
        hosts = ", ".join(sorted({member.host for member in members}))
        raise _has_members(name, f"{len(members)} at {hosts}")


def _has_members(name: str, which: str) -> BackendError:
    return BackendError(
        f"Group {name!r} has members, {which}",
        advice="Stop them first; those that were killed are gone when their session has timed out",
    )


async def _last_checkpoint(bus: Bus, table: str, partition: int, bounds: Bounds) -> Checkpoint | DecodeError | None:
    """The last checkpoint of a partition of a table, looked for from the end on; the error if it cannot be read."""
    stop, size = bounds.next, _NEAR_END
    while stop > bounds.first:
        start = max(bounds.first, stop - size)
        found: list[bytes | None] = []
        async for batch in bus.log.read(table, partition, start, stop):
            found += [data for key, data in batch.rows("key", "data") if key == CHECKPOINT_KEY]
        if found:
            try:
                return None if found[-1] is None else read_checkpoint(found[-1], table, partition)
            except DecodeError as error:
                return error
        stop, size = start, size * 8
    return None


async def _rows(bus: Bus, table: str, partition: int) -> list[bytes]:
    """The keys of the rows of a partition, but for its checkpoint."""
    rows: dict[bytes, None] = {}
    async for batch in bus.log.read(table, partition):
        for key, data in batch.rows("key", "data"):
            if key is None or key == CHECKPOINT_KEY or key.startswith(keys.REDO):
                continue
            if data is None:
                rows.pop(key, None)
            else:
                rows[key] = None
    return list(rows)


async def _redo_rows(bus: Bus, table: str, partition: int, token: str) -> dict[bytes, bytes | None]:
    """The rows of the redo records of a partition that have this token; none without one."""
    records: dict[bytes, bytes | None] = {}
    if token:
        async for batch in bus.log.read(table, partition):
            records |= {key: data for key, data in batch.rows("key", "data") if key and key.startswith(keys.REDO)}
    return redo_rows(filter(None, records.values()), token)


async def _bounds(bus: Bus, topic: str) -> Mapping[int, Bounds] | None:
    try:
        return await bus.log.bounds(topic)
    except TopicNotFound:
        return None


async def _records(bus: Bus, topic: str, partition: int, start: int, stop: int) -> int:
    """How many records there are from `start` on, below `stop`; about, if they are many."""
    if stop - start <= _FEW:
        # Read them, so that a group at the end of its topics is not behind on markers of transactions.
        return sum([len(batch) async for batch in bus.log.read(topic, partition, start, max(start, stop))])
    records = bus.capabilities.records
    if records is None or records.counting_offsets:
        return stop - start
    spans = await bus.log.spans(topic, partition, start, stop)
    return sum(span.stop - span.start for span in spans)
