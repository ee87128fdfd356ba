"""`Tester`: groups on logs in memory, for tests without a broker, without waiting and without `await`.

    with Tester(group, partitions=4) as test:
        test.publish("clicks-topic", key="alice", value=Click())
        assert test[group.table] == {"alice": 1}

The tester runs the engine that a `Processor` runs: values pass through their codecs, every partition has a store of its
own, and a partition that crashes is recovered from its table topic, up to the last checkpoint. What a test sees depends
on its calls alone: partitions take turns in a fixed order, and time stands still until the test advances it.

*Checkpoints.* A checkpoint publishes what a partition has emitted, with its rows and positions, all or nothing. The
tester takes one whenever a partition has handled what was there, so that everything is written when `publish` returns.
Inside `with test.hold_checkpoints():` it takes none: nothing is published, and `crash()` loses what was handled since.

*Failure.* `publish`, like every other call that makes groups work, raises what a group fails with. The partition keeps
what it handled before that message, and handles the message again with the next call, as a processor that is restarted.
A failed assertion in a callback is raised as it is, whatever the error policy of its edge.

*Concurrency.* A tester belongs to one thread. Callbacks that wait run on an event loop of the tester's own, so their
tests are plain functions, not coroutines.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, Final, Generic, Self, TypeVar, cast, overload

from broker import CHECKPOINT_KEY, BrokerError, Codec, ConfigurationError, OutboundMessage
from broker.checks import check_count, is_finite, is_whole, refused
from broker_streams import keys
from broker_streams.checkpoint import Checkpoint
from broker_streams.context import Incoming
from broker_streams.engine import PartitionEngine
from broker_streams.failures import StreamFailed, policy_topics
from broker_streams.graph import Group, Visitor
from broker_streams.handles import Output
from broker_streams.memory_logs import Entry, Lag, MemoryTable, MemoryTopic
from broker_streams.stores.memory import Memory

__all__ = ["Clock", "EndlessLoop", "Published", "TableView", "Tester"]

T = TypeVar("T")

_START: Final = datetime(2026, 1, 1, tzinfo=UTC)


class EndlessLoop(BrokerError):
    """One call of a test causes messages without end."""

    default_advice = "End the loop in the callback, or raise `limit` of the tester"


@dataclass(frozen=True, slots=True)
class Published(Generic[T]):
    """A message that a group has published.

    :ivar value: decoded; None for a tombstone; bytes if the topic has no codec, as that of dead letters.
    :ivar timestamp: its event time, which is that of the message, timer or window that caused it.
    :ivar id: the same if the message is published again after a crash.
    """

    key: str | None
    value: T
    attributes: Mapping[str, str]
    timestamp: datetime
    partition: int
    id: str | None


class Clock:
    """The wall clock of a tester. It stands still until it is advanced."""

    def __init__(self, start: datetime, advance: Callable[[float], None]) -> None:
        self._now = start.timestamp()
        self._advance = advance

    def time(self) -> float:
        """Seconds since 1970, UTC."""
        return self._now

    def now(self) -> datetime:
        """The time as a datetime, UTC."""
        return datetime.fromtimestamp(self._now, UTC)

    def advance(self, seconds: float) -> None:
        """Let time pass: timers of the wall clock fire in order, idle windows close, deferred messages time out.

        :raises ConfigurationError: `seconds` is not a number of 0 or more.
        :raises StreamFailed, EndlessLoop: as `Tester.publish`.
        """
        if not is_finite(seconds) or seconds < 0:
            raise refused("seconds", seconds, "a number of 0 or more: a clock does not run backwards")
        self._advance(self._now + seconds)

    def move_to(self, time: float) -> None:
        """Set the time, and nothing else happens. It never falls."""
        self._now = max(self._now, time)


class TableView(Generic[T]):
    """A table as a reader elsewhere has it, with the reading calls of a `View`. It lags as `Tester.lag` says."""

    def __init__(self, table: MemoryTable, codec: Codec[T]) -> None:
        self._table = table
        self._codec = codec

    def get(self, key: str) -> T | None:
        """The row of a key; None if there is none.

        :raises DecodeError: the codec cannot read the row.
        """
        data = self._table.get(keys.encode(key))
        return None if data is None else self._codec.decode(data)

    def __contains__(self, key: str) -> bool:
        return self._table.get(keys.encode(key)) is not None

    def __len__(self) -> int:
        return len(self._table.items())

    def items(
        self, *, start: str | None = None, stop: str | None = None, prefix: str = "", reverse: bool = False
    ) -> Iterator[tuple[str, T]]:
        """The rows with the prefix, from `start` up to but without `stop`, in the order of their keys' bytes."""
        first, end = (None if each is None else keys.encode(each) for each in (start, stop))
        beginning = keys.encode(prefix)
        rows = self._table.items()
        for key, data in reversed(rows) if reverse else rows:
            if (first is None or key >= first) and (end is None or key < end) and key.startswith(beginning):
                yield keys.decode(key), self._codec.decode(data)


class _Topics:
    """The topics of all groups, and the faults that the test has asked for."""

    def __init__(self, groups: Collection[Group], partitions: int, clock: Clock) -> None:
        self.clock: Final = clock
        self.partitions: Final = partitions
        self.tables: Final[dict[str, Codec[Any] | None]] = {}
        """The codec of the rows of each table; None if it has checkpoints only."""
        self.lags: Final[dict[str, Lag]] = {}
        self.published: Final[dict[str, list[tuple[int, Entry, str | None]]]] = {}
        """What groups have published: partition, entry and id."""
        self.failing: Final = Counter[str]()
        self._topics: dict[str, MemoryTopic] = {}
        self._entries = 0
        for group in groups:
            self._add(group)

    def _add(self, group: Group) -> None:
        for name, edge in group.consumed.items():
            self._topic(name, group).read_by.append(edge.codec)
            for letters in policy_topics(edge.on_error, edge.on_undecodable):
                self._topic(letters, group)
        for edge in (*group.joins, *group.lookups):
            self._topic(edge.topic, group).read_by.append(edge.codec)
            self._table(edge.topic, edge.codec)
        for edge in group.outputs:
            self._topic(edge.topic, group).written_by.append(edge.codec)
        if group.loop is not None:
            self._topic(group.loop_topic, group).written_by.append(group.loop.codec)
        self._topic(group.table, group)
        self._table(group.table, None)
        if group.persist is not None:
            self.tables[group.table] = group.persist.codec

    def _topic(self, name: str, group: Group) -> MemoryTopic:
        if name not in self._topics:
            self._topics[name] = MemoryTopic(name, self.partitions, group.partitioner)
            self.published[name] = []
        return self._topics[name]

    def _table(self, name: str, codec: Codec[Any] | None) -> None:
        self.tables[name] = self.tables.get(name) or codec
        self.lags.setdefault(name, Lag())

    def __getitem__(self, name: str) -> MemoryTopic:
        """:raises ConfigurationError: no group has this topic."""
        if (topic := self._topics.get(name)) is None:
            raise ConfigurationError(
                f"No group of the tester has a topic {name!r}",
                advice=f"Its topics are {', '.join(sorted(self._topics))}",
            )
        return topic

    def table(self, name: str) -> MemoryTopic:
        """:raises ConfigurationError: no group has this table."""
        if name not in self.tables:
            raise ConfigurationError(
                f"No group of the tester has a table {name!r}",
                advice=f"Its tables are {', '.join(sorted(self.tables))}",
            )
        return self._topics[name]

    def codec_of(self, table: str) -> Codec[Any]:
        """:raises ConfigurationError: no group has this table, or it has no rows."""
        self.table(table)
        if (codec := self.tables[table]) is None:
            raise ConfigurationError(f"The table {table!r} has no rows", advice="Give its group a Persist")
        return codec

    def read(self, table: str, partition: int | None = None) -> MemoryTable:
        """A copy for a reader that may lag, of a table or of one of its partitions."""
        logs = self._topics[table].logs
        return MemoryTable(logs if partition is None else [logs[partition]], self.lags[table])

    def append(self, topic: str, partition: int, message: OutboundMessage, timestamp_ms: int | None = None) -> Entry:
        self._entries += 1
        if timestamp_ms is None:
            timestamp_ms = round(self.clock.time() * 1000)
        log = self._topics[topic].logs[partition]
        return log.append(self._entries, message.key, message.data, timestamp_ms, message.attributes)

    def publish(self, name: str, message: OutboundMessage) -> None:
        """Publish a message of a group."""
        topic = self._topics[name]
        partition = topic.partition_of(message.key) if message.partition is None else message.partition
        time = None if message.publish_time is None else round(message.publish_time.timestamp() * 1000)
        self.published[name].append((partition, self.append(name, partition, message, time), message.id))

    def fails(self, names: Collection[str]) -> bool:
        """Whether the test wants a checkpoint that writes to these topics to fail."""
        for name in names:
            if self.failing[name]:
                self.failing[name] -= 1
                return True
        return False


class _EventLoop:
    """Runs coroutines of engines to their end. The loop is made when it is needed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, engine: PartitionEngine, coroutine: Coroutine[Any, Any, T]) -> T:
        """:raises RuntimeError: the coroutine waits, and the caller is a coroutine too."""
        if _in_a_coroutine():
            return _at_once(coroutine)
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(_with_deferred(engine, coroutine))

    async def sleep(self, seconds: float) -> None:
        """The delay of a retry: the clock moves, without waiting."""
        self._clock.move_to(self._clock.time() + seconds)

    def close(self) -> None:
        if self._loop is None or self._loop.is_closed():
            return
        if tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._loop.close()


def _in_a_coroutine() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        coroutine.send(None)
    except StopIteration as result:
        return result.value
    coroutine.close()
    raise RuntimeError("A callback waits while its Tester is used in a coroutine. Make the test a plain function")


async def _with_deferred(engine: PartitionEngine, coroutine: Coroutine[Any, Any, T]) -> T:
    """Wait for the tasks, too, that callbacks have started to end deferred messages."""
    result = await coroutine
    while engine.pending and (tasks := asyncio.all_tasks() - {asyncio.current_task()}):
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return result


class _Member:
    """One partition of a group: its engine, its store, and how far it has read.

    `recover` starts it again from the table topic: that is all that another instance of the group has of it.
    """

    def __init__(self, group: Group, partition: int, topics: _Topics, loop: _EventLoop) -> None:
        self.group: Final = group
        self.partition: Final = partition
        self._topics = topics
        self._loop = loop
        self._inputs = {name: topics[name].logs[partition] for name in group.consumed}
        self._log = topics[group.table].logs[partition]
        self._joins = {edge.topic: topics.read(edge.topic, partition) for edge in group.joins}
        self._lookups = {edge.topic: topics.read(edge.topic) for edge in group.lookups}
        self.recover()

    def recover(self) -> None:
        """Forget everything since the last checkpoint; rebuild store and engine from the table topic."""
        rows: dict[bytes, bytes | None] = {}
        packed: bytes | None = None
        for entry in self._log.entries:
            if entry.key == CHECKPOINT_KEY:
                packed = entry.data
            elif entry.key is not None:
                rows[entry.key] = entry.data
        checkpoint = None if packed is None else Checkpoint.unpack(packed)
        due: dict[bytes, bytes | None] = {}
        for row, data in rows.items():
            if (key := keys.user_key(row)) is not None:
                due |= keys.due_changes(key, None, data)
        self._store = Memory().open(None, f"{self.group.name}.{self.partition}")
        self._store.write({keys.ROWS: rows, keys.DUE: due})
        self.engine = PartitionEngine(
            self.group,
            self.partition,
            self._store,
            joins=self._joins,
            lookups=self._lookups,
            checkpoint=checkpoint,
            now=self._topics.clock.time,
            sleep=self._loop.sleep,
            epoch=0 if checkpoint is None else checkpoint.epoch + 1,
        )
        self.engine.raises = _is_assertion
        self._positions = {} if checkpoint is None else dict(checkpoint.positions)
        self._checkpoint = packed
        self.changed = False

    def handle(self) -> int:
        """Handle what is there; return the number of messages."""
        messages = self._fetch()
        if messages:
            self._run(self.engine.handle(messages))
        return len(messages)

    def advance(self) -> None:
        self._run(self.engine.advance())

    def visit(self, visitor: Visitor, meta: object) -> int:
        return self._run(self.engine.visit(visitor, meta, [key for key, _ in self._store.items(keys.ROWS)]))

    def checkpoint(self) -> None:
        """Write outputs, rows and positions to the topics; nothing of it if the test wants the checkpoint to fail.

        While messages are deferred there is no checkpoint.
        """
        if self.engine.pending:
            return
        self._run(self.engine.drained())
        self.changed = False
        effects = self.engine.take()
        table = self.group.table
        if self._topics.fails([*dict(effects.outputs), *([table] if effects.rows else [])]):
            self.recover()
            return
        for topic, message in effects.outputs:
            self._topics.publish(topic, message)
        for key, data in effects.rows.items():
            self._topics.append(table, self.partition, OutboundMessage(data, key))
        self._checkpoint = effects.checkpoint.pack()
        self._topics.append(table, self.partition, OutboundMessage(self._checkpoint, CHECKPOINT_KEY))
        self._store.write({keys.ROWS: effects.rows, keys.DUE: effects.due})
        self.engine.settled(effects)

    def set_row(self, key: bytes, data: bytes | None) -> None:
        """Change a row behind the engine's back, which then starts again."""
        self.checkpoint()
        self._topics.append(self.group.table, self.partition, OutboundMessage(data, key))
        if self._checkpoint is not None:
            # The row is part of this checkpoint, since it lies before its end.
            self._topics.append(self.group.table, self.partition, OutboundMessage(self._checkpoint, CHECKPOINT_KEY))
        self.recover()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        self.changed = True
        return self._loop.run(self.engine, coroutine)

    def _fetch(self) -> list[Incoming]:
        """The messages that are there, merged in the order of the group."""
        by_time = self.group.order == "time"
        found: list[list[tuple[int, int, Incoming]]] = []
        for topic, log in self._inputs.items():
            if entries := log.since(self._positions.get(topic, 0)):
                self._positions[topic] = entries[-1].offset + 1
                found.append(
                    [(each.timestamp_ms if by_time else 0, each.number, _incoming(topic, each)) for each in entries]
                )
        return [message for _, _, message in heapq.merge(*found)]


def _incoming(topic: str, entry: Entry) -> Incoming:
    return Incoming(topic, entry.offset, entry.key, entry.data, entry.timestamp_ms, entry.attributes)


def _is_assertion(error: Exception) -> bool:
    if isinstance(error, ExceptionGroup):
        return cast("ExceptionGroup[Exception]", error).subgroup(AssertionError) is not None
    return isinstance(error, AssertionError)


class Tester:
    """Groups on logs in memory; see the module.

    :param groups: any number, which feed each other through their topics.
    :param partitions: of every topic.
    :param start: the time of the clock at the start.
    :param limit: the most messages that one call may cause.
    :raises ConfigurationError: there is no group, two have one name, or an option is invalid.
    """

    # pytest takes classes named Test... for tests.
    __test__ = False

    def __init__(self, *groups: Group, partitions: int = 1, start: datetime = _START, limit: int = 10_000) -> None:
        if not groups:
            raise ConfigurationError("Tester was given no group", advice="Pass one or more")
        names = Counter(group.name for group in groups)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ConfigurationError(f"Tester was given two groups named {twice[0]!r}", advice="Rename one of them")
        check_count("partitions", partitions)
        check_count("limit", limit)
        self.clock: Final = Clock(start, self._advance)
        self._limit = limit
        self._held = 0
        self._last: str | None = None
        self._loop = _EventLoop(self.clock)
        self._topics = _Topics(groups, partitions, self.clock)
        self._members = [
            _Member(group, partition, self._topics, self._loop) for group in groups for partition in range(partitions)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the event loop; tasks that callbacks have started are cancelled."""
        self._loop.close()

    # -- messages ------------------------------------------------------------------------------------------

    def publish(
        self,
        topic: str,
        *,
        key: str | None = None,
        value: object = None,
        data: bytes | None = None,
        attributes: Mapping[str, str] | None = None,
        timestamp: datetime | float | None = None,
        partition: int | None = None,
        codec: Codec[Any] | None = None,
    ) -> None:
        """Publish a message, and return when everything that it causes has been handled.

        :param topic: any topic of a group: an input, the loop, a joined table.
        :param value: encoded by the codec of the groups that read the topic; None is a tombstone.
        :param data: bytes to publish as they are, instead of a value.
        :param timestamp: a timezone-aware datetime, or seconds since 1970; by default the time of the clock.
        :param partition: by default that of the key, or 0 without a key.
        :param codec: for the value, where groups read the topic by codecs that differ.
        :raises ConfigurationError: no group has this topic, or an argument is invalid.
        :raises InvalidMessage: the codec cannot encode the value.
        :raises StreamFailed: a message failed, and the policy of its edge is to stop.
        :raises EndlessLoop: the message causes more than `limit` others.
        """
        found = self._topics[topic]
        if value is not None:
            if data is not None:
                raise ConfigurationError(f"publish({topic!r}) was given value= and data=", advice="Pass one of them")
            data = (codec or _codec_of(found)).encode(value)
        message = OutboundMessage(data, None if key is None else keys.encode(key), attributes)
        if partition is None:
            partition = found.partition_of(message.key)
        self._check_partition(partition)
        self._topics.append(topic, partition, message, _as_ms(timestamp))
        self._last = topic
        self._settle()

    @overload
    def published(self, topic: Output[T]) -> list[Published[T]]: ...
    @overload
    def published(self, topic: str) -> list[Published[Any]]: ...
    def published(self, topic: str | Output[Any]) -> list[Published[Any]]:
        """What groups have published to a topic since the start, or since `clear`, in order.

        :param topic: the edge, or the name of the topic.
        :raises ConfigurationError: no group has this topic.
        :raises DecodeError: the codec cannot read a message.
        """
        name = _name_of(topic)
        written_by = self._topics[name].written_by
        codec = topic.codec if isinstance(topic, Output) else next(iter(written_by), None)
        return [
            Published(
                key=None if entry.key is None else keys.decode(entry.key),
                value=entry.data if codec is None or entry.data is None else codec.decode(entry.data),
                attributes=entry.attributes,
                timestamp=datetime.fromtimestamp(entry.timestamp_ms / 1000, UTC),
                partition=partition,
                id=emit_id,
            )
            for partition, entry, emit_id in self._topics.published[name]
        ]

    def clear(self, topic: str | Output[Any]) -> None:
        """Let `published` return what is published from now on.

        :raises ConfigurationError: no group has this topic.
        """
        name = _name_of(topic)
        self._topics[name]
        self._topics.published[name].clear()

    def duplicate_last(self, topic: str | None = None) -> None:
        """Append the last message of a topic once more, as a new record, as from a producer that repeats itself.

        :param topic: by default that of the last `publish`.
        :raises ConfigurationError: there is no such message.
        :raises StreamFailed, EndlessLoop: as `publish`.
        """
        name = topic or self._last
        if name is None:
            raise ConfigurationError("There is no message to duplicate", advice="Call publish(...) first")
        last = [(log.entries[-1], partition) for partition, log in enumerate(self._topics[name].logs) if log.entries]
        if not last:
            raise ConfigurationError(f"There is no message to duplicate in {name!r}", advice="Publish one first")
        entry, partition = max(last)
        self._topics.append(
            name, partition, OutboundMessage(entry.data, entry.key, entry.attributes), entry.timestamp_ms
        )
        self._settle()

    # -- tables --------------------------------------------------------------------------------------------

    def __getitem__(self, table: str) -> Mapping[str, Any]:
        """The decoded rows of a table, as its topic has them now: those of the last checkpoints.

        :raises ConfigurationError: no group has this table.
        :raises DecodeError: the codec cannot read a row.
        """
        return self.rows(table)

    def rows(self, table: str, partition: int | None = None) -> Mapping[str, Any]:
        """The same, of one partition."""
        codec = self._topics.codec_of(table)
        logs = self._topics[table].logs
        if partition is not None:
            self._check_partition(partition)
            logs = [logs[partition]]
        rows = MemoryTable(logs).items()
        return MappingProxyType({keys.decode(key): codec.decode(data) for key, data in rows})

    def set_row(self, table: str, key: str, value: object) -> None:
        """Write a row of a table; None deletes it. A group's own table is brought to a checkpoint before.

        :raises ConfigurationError: no group has this table.
        :raises InvalidMessage: the codec cannot encode the value, or the key is reserved.
        """
        codec = self._topics.codec_of(table)
        row, data = keys.encode(key), None if value is None else codec.encode(value)
        keys.check(row)
        partition = self._topics[table].partition_of(row)
        for member in self._members:
            if member.group.table == table and member.partition == partition:
                member.set_row(row, data)
                break
        else:
            self._topics.append(table, partition, OutboundMessage(data, row))
        self._settle()

    def view(self, table: str, codec: Codec[T]) -> TableView[T]:
        """A table as a reader elsewhere has it. It is up to date unless `lag` keeps it behind.

        :raises ConfigurationError: no group has this table.
        """
        self._topics.table(table)
        return TableView(self._topics.read(table), codec)

    def lag(self, table: str, records: int) -> None:
        """Keep the readers of a table behind: joins, lookups and views miss the last rows written to each partition.

        :param records: how many; 0 lets them catch up.
        :raises ConfigurationError: no group has this table, or `records` is invalid.
        """
        self._topics.table(table)
        if not is_whole(records) or records < 0:
            raise refused("records", records, "an int of 0 or more")
        self._topics.lags[table].records = records

    def compact(self, table: str | None = None) -> None:
        """Compact a table, or all: of each key the last record stays.

        :raises ConfigurationError: no group has this table.
        """
        for name in self._topics.tables if table is None else [table]:
            for log in self._topics.table(name).logs:
                log.compact()

    # -- checkpoints and faults ----------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Take a checkpoint of every partition, and let groups handle what it publishes.

        :raises StreamFailed, EndlessLoop: as `publish`.
        """
        for member in self._members:
            self._work(member, member.checkpoint)
        self._settle()

    @contextmanager
    def hold_checkpoints(self) -> Generator[None]:
        """Take no checkpoint inside the `with` block, and one of every partition at its end.

        What groups emit stays unpublished meanwhile, and `crash` loses what they have handled.
        """
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if not self._held:
            self.checkpoint()

    def crash(self, partition: int | None = None, *, group: str | None = None) -> None:
        """Lose everything since the last checkpoint, recover from the table topics, and handle the messages again.

        :param partition: the one that crashes, of every group; by default all.
        :param group: the name of the group that crashes; by default all.
        :raises ConfigurationError: there is no such partition or group.
        :raises StreamFailed, EndlessLoop: as `publish`.
        """
        for member in self._chosen(partition, group):
            member.recover()
        self._settle()

    def rebalance(self, partition: int | None = None, *, group: str | None = None) -> None:
        """Move partitions to another instance: a last checkpoint, then rebuild engine and store from the table topic.

        Parameters and errors as of `crash`.
        """
        for member in self._chosen(partition, group):
            self._work(member, member.checkpoint)
            member.recover()
        self._settle()

    def fail_next_publish(self, topic: str) -> None:
        """Let the next checkpoint that writes to a topic fail: it writes nothing, and the partition starts again.

        :param topic: an output, the loop or the table of a group.
        :raises ConfigurationError: no group has this topic.
        """
        self._topics[topic]
        self._topics.failing[topic] += 1

    def visit(self, name: str, meta: object = None, *, group: str | None = None) -> int:
        """Call a visitor for every key of its group's table; return the number of calls.

        :param group: the name of the group; by default every group that has such a visitor.
        :raises ConfigurationError: no group has it.
        :raises StreamFailed, EndlessLoop: as `publish`.
        """
        members = self._chosen(None, group)
        found = [(each, visitor) for each in members for visitor in each.group.visitors if visitor.name == name]
        if not found:
            known = sorted({visitor.name for each in self._members for visitor in each.group.visitors})
            raise ConfigurationError(
                f"There is no visitor {name!r}", advice=f"The visitors are {', '.join(known)}" if known else ""
            )
        visited = sum([self._work(member, partial(member.visit, visitor, meta)) for member, visitor in found])
        self._settle()
        return visited

    # -- work ----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Let the partitions take turns until none has anything to do."""
        handled = Counter[str]()
        while True:
            before = handled.total()
            for member in self._members:
                handled[member.group.name] += self._work(member, member.handle)
            if handled.total() == before:
                return
            if before > self._limit:
                counts = ", ".join(f"{name}: {count}" for name, count in handled.most_common())
                raise EndlessLoop(f"One call has caused {handled.total()} messages, by group: {counts}")

    def _work(self, member: _Member, work: Callable[[], T]) -> T:
        """Let a partition work, and take a checkpoint of it."""
        try:
            result = work()
        except BaseException:
            if not self._held:
                # As a processor does that stops: what it handled before that message is kept.
                with suppress(StreamFailed):
                    member.checkpoint()
            member.recover()
            raise
        if member.changed and not self._held:
            member.checkpoint()
        return result

    def _advance(self, target: float) -> None:
        moments = 0
        while (due := self._next_due()) is not None and due <= target:
            moments = 0 if due > self.clock.time() else moments + 1
            if moments > self._limit:
                raise EndlessLoop(f"Timers that are due at once were set {moments} times in a row")
            self.clock.move_to(due)
            self._fire()
        self.clock.move_to(target)
        self._settle()

    def _next_due(self) -> float | None:
        return min([due for member in self._members if (due := member.engine.next_due()) is not None], default=None)

    def _fire(self) -> None:
        for member in self._members:
            due = member.engine.next_due()
            if due is not None and due <= self.clock.time():
                self._work(member, member.advance)
        self._settle()

    # -- arguments -----------------------------------------------------------------------------------------

    def _chosen(self, partition: int | None, group: str | None) -> list[_Member]:
        if partition is not None:
            self._check_partition(partition)
        found = [
            member
            for member in self._members
            if partition in (None, member.partition) and group in (None, member.group.name)
        ]
        if not found:
            names = dict.fromkeys(member.group.name for member in self._members)
            raise ConfigurationError(f"The tester has no group {group!r}", advice=f"It has {', '.join(names)}")
        return found

    def _check_partition(self, partition: int) -> None:
        count = self._topics.partitions
        if not is_whole(partition) or not 0 <= partition < count:
            raise refused("partition", partition, f"an int from 0 to {count - 1}: the tester has partitions={count}")


def _name_of(topic: str | Output[Any]) -> str:
    return topic.topic if isinstance(topic, Output) else topic


def _codec_of(topic: MemoryTopic) -> Codec[Any]:
    """The codec by which a test publishes to a topic."""
    codecs = topic.read_by or topic.written_by
    if not codecs:
        raise ConfigurationError(f"No group reads {topic.name!r}, so it has no codec", advice="Pass data=, or codec=")
    if any(codec != codecs[0] for codec in codecs):
        raise ConfigurationError(
            f"Groups read {topic.name!r} by codecs that differ: {', '.join(dict.fromkeys(map(repr, codecs)))}",
            advice="Choose one: publish(..., codec=...)",
        )
    return codecs[0]


def _as_ms(timestamp: datetime | float | None) -> int | None:
    if timestamp is None:
        return None
    if isinstance(timestamp, datetime):
        if timestamp.tzinfo is None:
            raise ConfigurationError(f"timestamp is {timestamp!r}", advice="Use a datetime with a timezone, or seconds")
        return round(timestamp.timestamp() * 1000)
    if not is_finite(timestamp):
        raise refused("timestamp", timestamp, "a datetime with a timezone, or seconds since 1970")
    return round(timestamp * 1000)
