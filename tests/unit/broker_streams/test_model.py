"""Crash schedules over the real engine and a simulated broker: which ways to write a checkpoint are exact.

A schedule publishes messages to a random graph and lets an owner per partition handle them. Between any two steps of a
checkpoint the owner may crash, be replaced while it goes on as a zombie, be told to repeat a write, or lose its local
store; tables are compacted, and messages of the loop duplicated. In the end everything is handled without further
faults. Then the rows, and the outputs without repetitions of their ids, must be those of a plain fold.

A *lax* broker, as Pulsar is, fences less: writes that an owner has under way when the next one comes may still be
stored, until that one has written something. Its compaction removes tombstones, too, so only the whole log tells a
store that was closed before.

A recipe is a way to write a checkpoint. The wrong ones are here, too: a model that cannot fail proves nothing.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import pytest

from broker import CHECKPOINT_KEY, Json, OutboundMessage, Text
from broker_streams import keys, redo
from broker_streams.checkpoint import Checkpoint
from broker_streams.context import Context, Incoming, Window, moment_of
from broker_streams.effects import Effects
from broker_streams.engine import PartitionEngine
from broker_streams.failures import DeadLetter
from broker_streams.graph import Group, Hopping, Input, Join, Loop, Output, Persist, Session, Timer, Tumbling
from broker_streams.stores.memory import Memory
from broker_streams.stores.store import Store

T = TypeVar("T")

NOW: Final = 1e9
PARTITIONS: Final = 2
KEYS: Final = tuple("abcdef")
TTL_MS: Final = 1500
REDO_BYTES: Final = 60
NAMES: Final = {key.encode(): key.upper().encode() for key in KEYS[:4]}


def partition_of(key: str) -> int:
    return KEYS.index(key) % PARTITIONS


# --- graphs, and the plain fold of each -------------------------------------------------------------------------------


class Sent(NamedTuple):
    """A message of an input, in the order of its partition."""

    topic: str
    partition: int
    key: str
    number: int
    timestamp_ms: int

    def message(self) -> OutboundMessage:
        return OutboundMessage(b"%d" % self.number, self.key, publish_time=moment_of(self.timestamp_ms))


Expected = tuple[dict[str, dict[str, list[int]]], Counter[str]]
"""Rows by key, and outputs as text."""


@dataclass(frozen=True)
class Shape:
    """A random graph: rows remember, by topic, the numbers that were handled, so that one too many or too few shows."""

    inputs: int
    loops: bool
    joins: bool
    fails: bool
    deletes: bool
    windows: bool
    timers: bool

    @classmethod
    def draw(cls, random: Random) -> Shape:
        # Only with one input and no loop is the order of all messages given, on which deletions and times depend.
        single = random.random() < 0.5
        return cls(
            inputs=1 if single else random.randint(1, 2),
            loops=not single,
            joins=random.random() < 0.5,
            fails=random.random() < 0.5,
            deletes=single and random.random() < 0.5,
            windows=single and random.random() < 0.5,
            timers=single and random.random() < 0.5,
        )

    @property
    def topics(self) -> list[str]:
        return [f"input-{number}" for number in range(self.inputs)]

    def name_of(self, key: str) -> str | None:
        return NAMES.get(key.encode(), b"").decode() or None if self.joins else None

    def goes_on(self, key: str, number: int) -> tuple[str, int] | None:
        """Where a message goes on by the loop, and as which number."""
        if not self.loops or number % 3 or number >= 3000:
            return None
        return KEYS[(KEYS.index(key) + number // 3) % len(KEYS)], number + 999

    def failing(self, number: int) -> bool:
        return self.fails and number % 5 == 4

    def deleting(self, number: int) -> bool:
        return self.deletes and number % 7 == 0

    def group(self) -> Group:
        rows = Persist(Json(dict[str, list[int]]), ttl=TTL_MS / 1000 if self.timers else None)
        names = Join("names", Text())
        seen = Output("seen", Json(list[Any]))

        def handle(ctx: Context, number: int) -> None:
            row = ctx[rows] or {}
            row.setdefault(ctx.topic, []).append(number)
            ctx[rows] = row
            ctx.emit(seen, key=ctx.key, value=[number, 0 if ctx.topic == "loop" else len(row[ctx.topic]), name(ctx)])
            if self.deleting(number):
                del ctx[rows]
            if (further := self.goes_on(ctx.key, number)) is not None:
                ctx.loop(again, key=further[0], value=further[1])
            for edge in windows:
                for window in ctx.windows(edge):
                    window.value = (window.value or 0) + number
            if self.timers:
                ctx.set_timer(alarm, after=number % 4 / 2)
            if self.failing(number):
                raise ValueError(number)

        def name(ctx: Context) -> str | None:
            return ctx[names] if self.joins else None

        def close(ctx: Context, window: Window[int]) -> None:
            ctx.emit(seen, key=ctx.key, value=[window.edge.name, window.start_ms, window.end_ms, window.value])

        def late(ctx: Context, window: Window[int]) -> None:
            ctx.emit(seen, key=ctx.key, value=["late", window.start_ms, ctx.payload])

        def ring(ctx: Context) -> None:
            row = ctx[rows]
            ctx.emit(seen, key=ctx.key, value=["alarm", ctx.timestamp_ms, row])
            if row is not None:
                row.setdefault("alarm", []).append(ctx.timestamp_ms)
                ctx[rows] = row

        again = Loop(Json(int), handle, on_error=DeadLetter("letters"))
        alarm = Timer("alarm", ring)
        windows: list[Any] = []
        if self.windows:
            windows = [
                Tumbling("tumbling", Json(int), size=1, on_close=close, on_late=late),
                Hopping("hopping", Json(int), size=2, advance=0.5, grace=0.5, on_close=close),
                Session("session", Json(int), gap=0.7, merge=int.__add__, on_close=close),
            ]
        edges: list[Any] = [Input(self.topics, Json(int), handle, on_error=DeadLetter("letters")), rows, seen, *windows]
        edges += [again] if self.loops else []
        edges += [names] if self.joins else []
        edges += [alarm] if self.timers else []
        return Group("model", *edges, loop="loop", table="table", order="arrival")

    def expected(self, group: Group, sent: list[Sent]) -> Expected:
        """The rows and outputs of these messages: by a plain fold, or by an engine that nobody disturbs where the time
        matters. What that engine does with time has tests of its own."""
        return undisturbed(group, sent) if self.windows or self.timers else self.fold(sent)

    def fold(self, sent: list[Sent]) -> Expected:
        """The same without streams."""
        rows: dict[str, dict[str, list[int]]] = {}
        outputs = Counter[str]()
        todo = deque((each.topic, each.key, each.number) for each in sent)
        while todo:
            topic, key, number = todo.popleft()
            if self.failing(number):
                outputs[str([key, "letter", number])] += 1
                continue
            row = rows.setdefault(key, {})
            row.setdefault(topic, []).append(number)
            outputs[str([key, number, 0 if topic == "loop" else len(row[topic]), self.name_of(key)])] += 1
            if self.deleting(number):
                del rows[key]
            if (further := self.goes_on(key, number)) is not None:
                todo.append(("loop", *further))
        return rows, outputs


def undisturbed(group: Group, sent: list[Sent]) -> Expected:
    """What engines make of the messages that handle them without a checkpoint."""
    rows: dict[str, dict[str, list[int]]] = {}
    outputs = Counter[str]()
    for partition in range(PARTITIONS):
        engine = new_engine(group, partition, Memory().open(None, "undisturbed"), None)
        mine = [each for each in sent if each.partition == partition]
        drive(engine.handle([incoming(each.topic, offset, each.message()) for offset, each in enumerate(mine)]))
        effects = engine.take()
        rows |= decoded(effects.rows)
        outputs += Counter(shown(topic, message) for topic, message in effects.outputs)
    return rows, outputs


def decoded(rows: Mapping[bytes, bytes | None]) -> dict[str, dict[str, list[int]]]:
    """The rows of the application; those of the loop sorted, since it has no order across partitions."""
    found: dict[str, dict[str, list[int]]] = {}
    for key, data in rows.items():
        if data is not None and not keys.is_reserved(key):
            row = found[key.decode()] = json.loads(data)
            if "loop" in row:
                row["loop"].sort()
    return found


def shown(topic: str, message: OutboundMessage) -> str:
    """An output as text."""
    key, value = (message.key or b"").decode(), json.loads(message.data or b"")
    return str([key, "letter", value] if topic == "letters" else [key, *value])


# --- the broker -------------------------------------------------------------------------------------------------------


class Fenced(Exception):
    """A newer owner has the partition."""


class TableRecord(NamedTuple):
    """A record of the table.

    :ivar former: the value that the row had at the last checkpoint.
    """

    offset: int
    key: bytes
    data: bytes | None
    former: bytes | None


class Broker:
    """What survives a crash: topics, the partitions of the table, their fences, and the positions of the group.

    :ivar tables: as compaction left them.
    :ivar logs: all that was written to the tables.
    :ivar wrote: by partition the last owner that has written.
    """

    def __init__(self, lax: bool = False) -> None:
        self.lax = lax
        self.topics: dict[tuple[str, int], list[OutboundMessage]] = defaultdict(list)
        self.tables: list[list[TableRecord]] = [[] for _ in range(PARTITIONS)]
        self.logs: list[list[TableRecord]] = [[] for _ in range(PARTITIONS)]
        self.fences = [0] * PARTITIONS
        self.wrote = [0] * PARTITIONS
        self.positions: list[dict[str, int]] = [{} for _ in range(PARTITIONS)]
        self._offset = 0

    def fence(self, partition: int) -> int:
        self.fences[partition] += 1
        return self.fences[partition]

    def publish(self, topic: str, message: OutboundMessage) -> None:
        assert message.key is not None
        self.topics[topic, partition_of(message.key.decode())].append(message)

    def write(self, partition: int, key: bytes, data: bytes | None, former: bytes | None = None) -> int:
        """Write a record of the table; return its offset."""
        self._offset += 1
        record = TableRecord(self._offset, key, data, former)
        self.tables[partition].append(record)
        self.logs[partition].append(record)
        return self._offset

    def compact(self, partition: int, random: Random) -> None:
        """Remove most records that have a later one of their key; a lax broker removes keys that were deleted, too."""
        last = {record.key: record for record in self.tables[partition]}
        gone = {key for key, record in last.items() if record.data is None} if self.lax else set[bytes]()
        self.tables[partition] = [
            record
            for record in self.tables[partition]
            if record.key not in gone and (record is last[record.key] or random.random() < 0.3)
        ]


# --- recipes ----------------------------------------------------------------------------------------------------------

Steps = Generator[None, None, None]
"""The writes of a checkpoint; each `yield` is a moment at which the process may end."""


@dataclass(frozen=True)
class Recipe:
    """A way to write a checkpoint.

    :ivar fences: a new owner fences the older ones before it recovers.
    :ivar by_checkpoint: a new owner reads on at the positions of the checkpoint row; otherwise at those of the group.
    :ivar reverses: every row is written with the value that it had at the last checkpoint, so that the rows of a
        checkpoint that was not finished can be reversed.
    :ivar redoes: a new owner takes rows that the table may lack from redo records.
    :ivar claims: a new owner writes the checkpoint that it has found, and those rows, before anything else.
    :ivar by_token: only redo records that the checkpoint names.
    :ivar names_senders: messages of the loop name their sender, so that repetitions are dropped.
    :ivar lax: on a lax broker.
    :ivar repeats: a refused checkpoint may be written again as it is, since nothing of it was written.
    :ivar takes_fence_again: such a repetition is made in the present generation of the group, without asking whether
        the partition was another owner's meanwhile.
    """

    name: str
    write: Callable[[Owner, Effects], Steps]
    fences: bool = True
    by_checkpoint: bool = True
    reverses: bool = False
    redoes: bool = False
    claims: bool = False
    by_token: bool = True
    names_senders: bool = True
    lax: bool = False
    repeats: bool = False
    takes_fence_again: bool = False

    def __str__(self) -> str:
        return self.name


def write_outputs(owner: Owner, effects: Effects) -> Steps:
    for topic, message in effects.outputs:
        if not owner.recipe.names_senders:
            message = message.replace(attributes={})
        owner.broker.publish(topic, message)
        yield
        if owner.random.random() < 0.1:
            # The answer was lost, and the message is sent again.
            owner.broker.publish(topic, message)
            yield


def write_rows(owner: Owner, effects: Effects) -> Steps:
    rows = owner.reversals | effects.rows if owner.recipe.reverses else effects.rows
    owner.begin()
    for key, data in rows.items():
        owner.write(key, data, former=owner.store.get(keys.ROWS, key))
        yield


def write_checkpoint(owner: Owner, effects: Effects) -> Steps:
    owner.begin()
    owner.written_up_to = owner.write(CHECKPOINT_KEY, effects.checkpoint.pack())
    owner.reversals = {}
    owner.may_abort = False
    yield


def write_redo(owner: Owner, effects: Effects) -> Steps:
    """Redo records, and the checkpoint that names them."""
    token = str(owner.random.random())
    owner.begin()
    for key, data in redo.pack(effects.rows, token, most_bytes=REDO_BYTES).items():
        owner.write(key, data)
        yield
    owner.begin()
    owner.write(CHECKPOINT_KEY, effects.checkpoint.pending(token).pack())
    owner.may_abort = False
    yield


def write_claim(owner: Owner, rows: Mapping[bytes, bytes | None], checkpoint: Checkpoint) -> Steps:
    """What a new owner has found, so that nothing of an older one can come after it."""
    owner.begin()
    for key, data in rows.items():
        owner.write(key, data)
        yield
    owner.begin()
    owner.write(CHECKPOINT_KEY, checkpoint.settled().pack())
    yield


def write_store(owner: Owner, effects: Effects) -> Steps:
    """What ends every checkpoint: the local store, and the positions of the group."""
    owner.store.write({keys.ROWS: effects.rows, keys.DUE: effects.due}, {"written-up-to": b"%d" % owner.written_up_to})
    owner.engine.settled(effects)
    yield
    owner.broker.positions[owner.partition] = dict(effects.checkpoint.positions)


def at_once(*steps: Steps) -> None:
    for each in steps:
        for _ in each:
            pass


def in_a_transaction(owner: Owner, effects: Effects) -> Steps:
    yield
    owner.begin()
    at_once(write_outputs(owner, effects), write_rows(owner, effects), write_checkpoint(owner, effects))
    yield
    yield from write_store(owner, effects)


def rows_and_checkpoint_at_once(owner: Owner, effects: Effects) -> Steps:
    yield from write_outputs(owner, effects)
    owner.begin()
    at_once(write_rows(owner, effects), write_checkpoint(owner, effects))
    yield
    yield from write_store(owner, effects)


def rows_before_checkpoint(owner: Owner, effects: Effects) -> Steps:
    yield from write_outputs(owner, effects)
    yield from write_rows(owner, effects)
    yield from write_checkpoint(owner, effects)
    yield from write_store(owner, effects)


def redo_before_rows(owner: Owner, effects: Effects) -> Steps:
    yield from write_outputs(owner, effects)
    yield from write_redo(owner, effects)
    yield from write_rows(owner, effects)
    yield from write_checkpoint(owner, effects)
    yield from write_store(owner, effects)


def rows_before_redo(owner: Owner, effects: Effects) -> Steps:
    yield from write_outputs(owner, effects)
    yield from write_rows(owner, effects)
    yield from write_redo(owner, effects)
    yield from write_checkpoint(owner, effects)
    yield from write_store(owner, effects)


def positions_before_rows(owner: Owner, effects: Effects) -> Steps:
    yield from write_outputs(owner, effects)
    owner.broker.positions[owner.partition] = dict(effects.checkpoint.positions)
    yield from write_rows(owner, effects)
    yield from write_store(owner, effects)


def store_before_table(owner: Owner, effects: Effects) -> Steps:
    yield from write_store(owner, effects)
    yield from write_outputs(owner, effects)
    at_once(write_rows(owner, effects), write_checkpoint(owner, effects))


def rows_before_positions(owner: Owner, effects: Effects) -> Steps:
    yield from write_rows(owner, effects)
    yield from write_outputs(owner, effects)
    yield from write_store(owner, effects)


TRANSACTION: Final = Recipe("transaction", in_a_transaction, repeats=True)
ATOMIC: Final = Recipe("atomic", rows_and_checkpoint_at_once)
WRITE_AHEAD: Final = Recipe("write-ahead", redo_before_rows, redoes=True, claims=True, lax=True)
REVERSIBLE: Final = Recipe("reversible", rows_before_checkpoint, reverses=True)
IN_ORDER: Final = Recipe("in-order", rows_before_checkpoint)
EXACT: Final = (TRANSACTION, ATOMIC, WRITE_AHEAD, REVERSIBLE)
WRONG: Final = (
    IN_ORDER,
    Recipe("rows-then-positions", rows_before_positions, by_checkpoint=False),
    Recipe("positions-then-rows", positions_before_rows, by_checkpoint=False),
    Recipe("store-then-table", store_before_table),
    Recipe("atomic-without-fence", rows_and_checkpoint_at_once, fences=False),
    Recipe("reversible-without-fence", rows_before_checkpoint, fences=False, reverses=True),
    Recipe("atomic-without-senders", rows_and_checkpoint_at_once, names_senders=False),
    replace(WRITE_AHEAD, name="write-ahead-without-fence", fences=False),
    Recipe("transaction-in-a-new-generation", in_a_transaction, repeats=True, takes_fence_again=True),
)
RARELY_WRONG: Final = {
    replace(WRITE_AHEAD, name="rows-before-redo", write=rows_before_redo): range(150),
    replace(WRITE_AHEAD, name="write-ahead-without-redo", redoes=False): range(300),
    replace(WRITE_AHEAD, name="write-ahead-without-claim", claims=False): range(500),
    replace(WRITE_AHEAD, name="write-ahead-without-token", by_token=False): range(500, 1000),
    replace(REVERSIBLE, name="reversible-on-a-lax-broker", lax=True): range(1000, 2000),
}
"""With schedules among which are some that show it."""


# --- owners -----------------------------------------------------------------------------------------------------------


class Names:
    """The joined table."""

    def get(self, key: bytes) -> bytes | None:
        return NAMES.get(key)


class Owner:
    """A process that has a partition, with the real engine: it handles messages and takes checkpoints step by step."""

    def __init__(
        self, broker: Broker, group: Group, partition: int, recipe: Recipe, random: Random, store: Store | None
    ) -> None:
        self.broker = broker
        self.partition = partition
        self.recipe = recipe
        self.random = random
        self._topics = list(group.consumed)
        self._fence = broker.fence(partition) if recipe.fences else 0
        self.store = Memory().open(None, "model") if store is None else store
        self.reversals: dict[bytes, bytes | None] = {}
        """Rows of a checkpoint that was not finished, which the next one writes back."""
        self._found: Checkpoint | None = None
        self._redone: dict[bytes, bytes | None] = {}
        """Rows that the table may lack."""
        self.written_up_to = int(self.store.meta("written-up-to") or 0)
        self.engine = new_engine(group, partition, self.store, self._recover(), most_rows=random.choice([None, 4]))
        self._next = self.engine.positions
        self._writing: tuple[Effects, Steps] | None = None
        self.may_abort = False
        """The checkpoint under way is not in the table yet."""
        self._claiming = write_claim(self, self._redone, self._found or Checkpoint()) if recipe.claims else None
        self._under_way = False

    def _recover(self) -> Checkpoint | None:
        """Bring the store up to date with the table; return the last checkpoint."""
        broker = self.broker
        table = (broker.logs if broker.lax and self.written_up_to else broker.tables)[self.partition]
        ends = [record for record in table if record.key == CHECKPOINT_KEY]
        finished = ends[-1].offset if ends else 0
        rows: dict[bytes, bytes | None] = {}
        for record in table:
            if record.key == CHECKPOINT_KEY or record.offset <= self.written_up_to:
                continue
            rows[record.key] = record.data
            if self.recipe.reverses and record.offset > finished:
                rows[record.key] = self.reversals[record.key] = record.former
        found = Checkpoint.unpack(ends[-1].data or b"") if ends else None
        if self.recipe.redoes and found is not None and found.redo:
            self.store.write({keys.ROWS: {key: data for key, data in rows.items() if key.startswith(keys.REDO)}})
            self._redone = self._redo(found.redo)
            rows |= self._redone
        due: dict[bytes, bytes | None] = {}
        for row, data in rows.items():
            if (key := keys.user_key(row)) is not None:
                due |= keys.due_changes(key, self.store.get(keys.ROWS, row), data)
        self.written_up_to = max(self.written_up_to, finished)
        self.store.write({keys.ROWS: rows, keys.DUE: due}, {"written-up-to": b"%d" % self.written_up_to})
        if not self.recipe.by_checkpoint:
            return Checkpoint(positions=self.broker.positions[self.partition])
        self._found = found
        return found

    def _redo(self, token: str) -> dict[bytes, bytes | None]:
        if self.recipe.by_token:
            return redo.stored_redo(self.store, token)
        records = [data for _, data in self.store.items(keys.ROWS, prefix=keys.REDO)]
        return {key: row for data in records for key, row in msgspec.msgpack.decode(data)[1].items()}

    @property
    def _fenced(self) -> bool:
        return self.recipe.fences and self._fence != self.broker.fences[self.partition]

    def begin(self) -> None:
        """Before records that are sent together: what was sent before them has been confirmed."""
        if self._fenced:
            raise Fenced
        self._under_way = True

    def write(self, key: bytes, data: bytes | None, former: bytes | None = None) -> int:
        broker, partition = self.broker, self.partition
        if self._fenced:
            if not (broker.lax and self._under_way and broker.wrote[partition] <= self._fence):
                raise Fenced
        else:
            broker.wrote[partition] = self._fence
        return broker.write(partition, key, data, former)

    @property
    def writes(self) -> bool:
        """Whether a checkpoint, or the claim, is under way."""
        return self._writing is not None or self._claiming is not None

    def unread(self) -> list[str]:
        return [
            topic for topic in self._topics if self._next.get(topic, 0) < len(self.broker.topics[topic, self.partition])
        ]

    def handle(self, most: int) -> None:
        """Handle some messages of one topic."""
        if self._claiming is not None or not (topics := self.unread()):
            return
        topic = self.random.choice(topics)
        begin = self._next.get(topic, 0)
        messages = self.broker.topics[topic, self.partition][begin : begin + most]
        handled = drive(self.engine.handle([incoming(topic, begin + at, each) for at, each in enumerate(messages)]))
        # Fewer if a checkpoint has to come first.
        self._next[topic] = begin + handled

    @property
    def is_behind(self) -> bool:
        """Whether something is left to do since a checkpoint had no room for it."""
        due = self.engine.next_due()
        return due is not None and due <= NOW

    def advance(self) -> None:
        if self._claiming is None:
            drive(self.engine.advance())

    def step(self) -> None:
        """Begin a checkpoint, or carry out the next step of the claim, or of the checkpoint under way."""
        if self._claiming is not None:
            if next(self._claiming, "ended") == "ended":
                self._claiming = None
            return
        if self._writing is None:
            effects = self.engine.take()
            self._writing = effects, self.recipe.write(self, effects)
            self.may_abort = True
        if next(self._writing[1], "ended") == "ended":
            self._writing = None

    def finish(self) -> None:
        """Carry out a checkpoint to its end."""
        self.step()
        while self.writes:
            self.step()

    def write_again(self) -> None:
        """The broker has refused the transaction, for whatever reason: write the same again."""
        assert self._writing is not None
        effects, _ = self._writing
        if self.recipe.takes_fence_again:
            self._fence = self.broker.fences[self.partition]
        self._writing = effects, self.recipe.write(self, effects)

    def abort(self) -> None:
        """The broker has refused to write the checkpoint: do the work again."""
        assert self._writing is not None
        effects, _ = self._writing
        self._writing = None
        self.reversals |= {key: self.store.get(keys.ROWS, key) for key in effects.rows}
        self.engine.rollback()
        self._next = self.engine.positions


def new_engine(
    group: Group, partition: int, store: Store, checkpoint: Checkpoint | None, most_rows: int | None = None
) -> PartitionEngine:
    return PartitionEngine(
        group,
        partition,
        store,
        joins={"names": Names()},
        checkpoint=checkpoint,
        now=lambda: NOW,
        sleep=never,
        most_rows=most_rows,
    )


async def never(seconds: float) -> None:
    raise AssertionError("the model does not retry")


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that does not wait."""
    try:
        coroutine.send(None)
    except StopIteration as result:
        return result.value
    raise AssertionError("the engine waits")


def incoming(topic: str, offset: int, message: OutboundMessage) -> Incoming:
    time = message.publish_time
    milliseconds = None if time is None else round(time.timestamp() * 1000)
    return Incoming(topic, offset, message.key, message.data, milliseconds, message.attributes)


# --- schedules --------------------------------------------------------------------------------------------------------


class Schedule:
    """One run of a recipe; the seed decides everything."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self.random = random = Random(seed)
        self.recipe = recipe
        self.shape = Shape.draw(random)
        self.group = self.shape.group()
        self.broker = Broker(recipe.lax)
        self.stores: list[Store] = []
        """Of owners that are gone, as they left them."""
        self.zombies: list[Owner] = []
        self.sent: list[Sent] = []
        self.owners = [self._own(partition) for partition in range(PARTITIONS)]

    def _own(self, partition: int) -> Owner:
        mine = [store for store in self.stores if store.meta("partition") == b"%d" % partition]
        store = self.random.choice([*mine, None])
        if store is not None:
            self.stores.remove(store)
        owner = Owner(self.broker, self.group, partition, self.recipe, self.random, store)
        owner.store.write({}, {"partition": b"%d" % partition})
        return owner

    def run(self) -> None:
        random = self.random
        to_send = random.randint(4, 14)
        while to_send or random.random() < 0.9:
            if to_send and random.random() < 0.4:
                to_send -= 1
                self._send()
            self._act(random.choice(self.owners))
            if self.zombies and random.random() < 0.5:
                self._let(random.choice(self.zombies))
        self._drain()
        for zombie in self.zombies[:]:
            while zombie in self.zombies and (zombie.unread() or zombie.writes):
                self._let(zombie)
        self.stores.clear()
        self.owners = [self._own(partition) for partition in range(PARTITIONS)]
        self._drain()

    def _send(self) -> None:
        random = self.random
        number, key, topic = len(self.sent), random.choice(KEYS), random.choice(self.shape.topics)
        time = max(0, 250 * (number + random.randint(-4, 1)))
        self.sent.append(Sent(topic, partition_of(key), key, number, time))
        self.broker.publish(topic, self.sent[-1].message())

    def _act(self, owner: Owner) -> None:
        """Let an owner do something, or something happen to it."""
        random, partition = self.random, owner.partition
        chance = random.random()
        if chance < 0.4:
            owner.handle(random.randint(1, 3))
            if owner.is_behind:
                owner.advance()
        elif chance < 0.8:
            owner.step()
        elif chance < 0.85:
            self.broker.compact(partition, random)
        elif chance < 0.9 and owner.writes and owner.may_abort:
            if self.recipe.repeats and random.random() < 0.5:
                owner.write_again()
            else:
                owner.abort()
        elif chance < 0.95:
            # A crash: its machine may come back later, with its store.
            self.stores.append(owner.store)
            self.owners[partition] = self._own(partition)
        else:
            self.zombies.append(owner)
            self.owners[partition] = self._own(partition)

    def _let(self, zombie: Owner) -> None:
        """Let a former owner go on, until it is refused."""
        try:
            if self.random.random() < 0.5:
                zombie.handle(self.random.randint(1, 3))
            if self.recipe.repeats and zombie.writes and zombie.may_abort and self.random.random() < 0.3:
                zombie.write_again()
            zombie.step()
        except Fenced:
            self.zombies.remove(zombie)
            self.stores.append(zombie.store)

    def _drain(self) -> None:
        """Handle everything, without another fault."""
        for owner in self.owners:
            while owner.writes:
                owner.step()
        while any(owner.unread() or owner.is_behind for owner in self.owners):
            for owner in self.owners:
                owner.handle(100)
                owner.advance()
                owner.finish()

    # -- what came of it ---------------------------------------------------------------------------------

    def rows(self) -> dict[str, dict[str, list[int]]]:
        """The rows as a new owner finds them."""
        return {key: row for owner in self.owners for key, row in decoded(dict(owner.store.items(keys.ROWS))).items()}

    def outputs(self) -> Counter[str]:
        """What was published, without repetitions of an id."""
        by_id = {
            message.id: shown(topic, message)
            for topic in ("seen", "letters")
            for partition in range(PARTITIONS)
            for message in self.broker.topics[topic, partition]
        }
        return Counter(by_id.values())

    def is_exact(self) -> bool:
        rows, outputs = self.shape.expected(self.group, self.sent)
        for row in rows.values():
            if "loop" in row:
                row["loop"].sort()
        return (self.rows(), self.outputs()) == (rows, outputs)

    def is_complete(self) -> bool:
        """Whether every message counts at least once. Rows that are deleted, or expire, do not show it."""
        found, (rows, outputs) = self.rows(), self.shape.expected(self.group, self.sent)
        lasting = {} if self.shape.deletes or self.shape.timers else rows
        return set(map(first_words, outputs)) <= set(map(first_words, self.outputs())) and all(
            set(numbers) <= set(found.get(key, {}).get(topic, ()))
            for key, row in lasting.items()
            for topic, numbers in row.items()
        )


def first_words(output: str) -> tuple[str, ...]:
    """What of an output does not depend on the row: the key, and the number or the kind."""
    return tuple(output.split(", ")[:2])


def run(recipe: Recipe, seed: int) -> Schedule:
    schedule = Schedule(recipe, seed)
    schedule.run()
    return schedule


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Every message that goes to the dead letters is logged."""
    caplog.set_level(logging.ERROR, logger="broker_streams")


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", EXACT, ids=str)
def test_exact_recipes(recipe: Recipe) -> None:
    wrong = [seed for seed in range(300) if not run(recipe, seed).is_exact()]
    assert wrong == []


@pytest.mark.parametrize("recipe", WRONG, ids=str)
def test_wrong_recipes_are_caught(recipe: Recipe) -> None:
    wrong = (seed for seed in range(150) if not run(recipe, seed).is_exact())
    assert len(list(islice(wrong, 10))) == 10


@pytest.mark.parametrize("recipe", RARELY_WRONG, ids=str)
def test_recipes_that_are_rarely_wrong_are_caught(recipe: Recipe) -> None:
    assert any(not run(recipe, seed).is_exact() for seed in RARELY_WRONG[recipe])


def test_rows_in_order_count_every_message_at_least_once() -> None:
    missing = [seed for seed in range(300) if not run(IN_ORDER, seed).is_complete()]
    assert missing == []


CHUNK: Final = 1000


@pytest.mark.deep
@pytest.mark.parametrize("chunk", range(34))
@pytest.mark.parametrize("recipe", EXACT, ids=str)
def test_a_hundred_thousand_schedules(recipe: Recipe, chunk: int) -> None:
    seeds = range(1000 + chunk * CHUNK, 1000 + (chunk + 1) * CHUNK)
    assert [seed for seed in seeds if not run(recipe, seed).is_exact()] == []
