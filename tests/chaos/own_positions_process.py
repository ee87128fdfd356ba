"""A member of a group that keeps its positions with its results, in one SQLite database that all members share.

`python -m tests.chaos.own_positions_process URL TOPICS GROUP DATABASE SEED` reads until it is killed or gets SIGTERM,
and prints a JSON line for each action. All records are in the first topic; several topics are copartitioned. Rows and
the position after them are one transaction, with a fence: each time that a member takes a partition, its generation
rises, and only the latest one may write. What `commit_positions` stores on the broker is advice that nobody reads.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import random
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import broker
from broker.driver.contract import TopicPartition
from broker.errors import BrokerError, Closed, LeaseLost

_BUSY_SECONDS = 120.0
"""A frozen member may hold the database."""
_TABLES = """
CREATE TABLE partitions (number INTEGER PRIMARY KEY, generation INTEGER NOT NULL, position INTEGER);
CREATE TABLE results (id INTEGER PRIMARY KEY, number INTEGER, generation INTEGER, at INTEGER, body TEXT);
"""
"""The results have no unique key: a record that took effect twice has two rows."""
_TAKE = """
INSERT INTO partitions (number, generation, position) VALUES (?, 1, NULL)
ON CONFLICT (number) DO UPDATE SET generation = generation + 1 RETURNING generation, position
"""
_MOVE = "UPDATE partitions SET position = ? WHERE number = ? AND generation = ?"


class Taken(NamedTuple):
    """A partition that a member may write, until another takes it.

    :ivar position: the next offset to read; None before the first result.
    """

    generation: int
    position: int | None


class Result(NamedTuple):
    """What became of one record.

    :ivar at: its offset.
    :ivar generation: of the member that wrote it.
    """

    at: int
    body: str
    generation: int


class Store:
    """Results and positions. Its calls block; any thread."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, _BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        # Killed processes lose nothing that they have written, and the machine stays up.
        self._database.execute("PRAGMA synchronous = OFF")

    @classmethod
    def create(cls, path: Path) -> Store:
        """A new database."""
        store = cls(path)
        store._database.execute("PRAGMA journal_mode = WAL")
        store._database.executescript(_TABLES)
        return store

    def close(self) -> None:
        self._database.close()

    def take(self, numbers: Iterable[int]) -> dict[int, Taken]:
        """Fence earlier owners of these partitions, and read their positions."""

        def change() -> dict[int, Taken]:
            return {number: Taken(*self._database.execute(_TAKE, (number,)).fetchone()) for number in numbers}

        return self._transact(change)

    def save(self, number: int, generation: int, rows: Sequence[tuple[int, str]], position: int) -> bool:
        """Write rows, and the position after them; False if another member has taken the partition."""

        def change() -> bool:
            if not self._database.execute(_MOVE, (position, number, generation)).rowcount:
                return False
            self._database.executemany(
                "INSERT INTO results (number, generation, at, body) VALUES (?, ?, ?, ?)",
                [(number, generation, *row) for row in rows],
            )
            return True

        return self._transact(change)

    def count(self) -> int:
        """How many results there are."""
        with self._lock:
            return self._database.execute("SELECT COUNT(*) FROM results").fetchone()[0]

    def results(self, number: int) -> list[Result]:
        """The results of a partition, in the order in which they were written."""
        with self._lock:
            rows = self._database.execute(
                "SELECT at, body, generation FROM results WHERE number = ? ORDER BY id", (number,)
            )
            return [Result(*row) for row in rows]

    def positions(self) -> dict[int, int | None]:
        with self._lock:
            return dict(self._database.execute("SELECT number, position FROM partitions"))

    def _transact(self, change: Callable[[], Any]) -> Any:
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                done = change()
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")
            return done


class Member:
    """One member.

    :param say: called with a word and its details at each action.
    """

    def __init__(
        self, bus: broker.Bus, topics: Sequence[str], group: str, store: Store, seed: int, say: Callable[..., object]
    ) -> None:
        self._topic = topics[0]
        self._store = store
        self._random = random.Random(seed)
        self._say = say
        self._log = bus.records(
            topics,
            group=group,
            copartitioned=len(topics) > 1,
            on_assigned=self._assigned,
            on_revoking=self._revoking,
            on_lost=self._lost,
        )
        self._given: set[int] = set()
        """Partitions of an `on_assigned` that neither `on_revoking` nor `on_lost` has followed."""
        self._taken: dict[int, int] = {}
        """The generation of each partition."""
        self._positions: dict[int, int] = {}
        self._taking = asyncio.Lock()
        self._working = asyncio.Lock()
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Read until `stop`."""
        async with self._log:
            self._say("ready")
            closing_log = asyncio.create_task(self._close_when_told())
            try:
                while True:
                    batch = await self._log.next_batch(self._random.randint(1, 300))
                    # What was handed over belongs to the generation of now.
                    taken = dict(self._taken)
                    async with self._working:
                        refused = await self._work(batch, taken)
                    for number in refused:
                        await self._take_again(number, taken[number])
            except Closed:
                if not self._stopping.is_set():
                    raise
            finally:
                closing_log.cancel()
        self._say("left")

    def stop(self) -> None:
        """Leave the group; what was handed over is worked off."""
        self._say("stopping")
        self._stopping.set()

    async def _close_when_told(self) -> None:
        await self._stopping.wait()
        await self._log.close()

    async def _work(self, batch: broker.RecordBatch, taken: dict[int, int]) -> list[int]:
        """Write the results of a batch; returns the partitions that others have taken."""
        refused: list[int] = []
        for place, part in batch.by_partition().items():
            number = place.partition
            rows = [(record.offset, (record.data or b"").decode()) for record in part]
            position = rows[-1][0] + 1
            await asyncio.sleep(self._random.random() / 50)
            if await asyncio.to_thread(self._store.save, number, taken[number], rows, position):
                self._positions[number] = position
                self._say("saved", count=len(rows))
                if self._random.random() < 0.3:
                    await self._advise([number])
            else:
                self._say("refused", partition=number, count=len(rows))
                refused.append(number)
        return refused

    async def _take_again(self, number: int, generation: int) -> None:
        """Another member has taken the partition: one that was the owner, or one that woke up and believed so."""
        async with self._taking:
            if self._taken.get(number) == generation and (self._topic, number) in self._log.assignment():
                self._say("again", partition=number)
                try:
                    await self._take([number])
                except LeaseLost:
                    self._say("gone", partition=number)

    async def _take(self, numbers: Sequence[int]) -> None:
        """:raises LeaseLost: a partition is not assigned any more."""
        taken = await asyncio.to_thread(self._store.take, numbers)
        self._taken.update((number, each.generation) for number, each in taken.items())
        positions = {(self._topic, number): each.position for number, each in taken.items()}
        while True:
            try:
                await self._log.seek(positions)
                return
            except BrokerError as error:
                if not error.retriable or isinstance(error, LeaseLost):
                    raise
                self._say("repeated", error=repr(error))
                await asyncio.sleep(0.1)

    async def _advise(self, numbers: Iterable[int]) -> None:
        positions = {
            TopicPartition(self._topic, number): self._positions[number]
            for number in numbers
            if number in self._positions
        }
        try:
            await self._log.commit_positions(positions)
        except BrokerError as error:
            self._say("unadvised", error=type(error).__name__, text=str(error))

    async def _assigned(self, partitions: Sequence[TopicPartition]) -> None:
        numbers = numbers_of(partitions)
        self._say("assigned", partitions=numbers)
        if again := self._given.intersection(numbers):
            self._say("broken", text=f"{sorted(again)} were assigned twice, and not taken away between")
        self._given.update(numbers)
        try:
            async with self._taking:
                await self._take(numbers)
        except (LeaseLost, asyncio.CancelledError):
            # Some went: the call begins again with the others.
            self._given.difference_update(numbers)
            raise
        self._say("taken", partitions=numbers)

    async def _revoking(self, partitions: Sequence[TopicPartition]) -> None:
        numbers = numbers_of(partitions)
        self._say("revoking", partitions=numbers)
        self._given.difference_update(numbers)
        if self._random.random() < 0.5:
            async with self._working:
                await self._advise(numbers)

    async def _lost(self, partitions: Sequence[TopicPartition]) -> None:
        numbers = numbers_of(partitions)
        self._say("lost", partitions=numbers)
        self._given.difference_update(numbers)


def numbers_of(partitions: Sequence[TopicPartition]) -> list[int]:
    return sorted({place.partition for place in partitions})


def say(word: str, **more: Any) -> None:
    print(json.dumps({"say": word, **more}), flush=True)


def show_tasks() -> None:
    for task in asyncio.all_tasks():
        task.print_stack()


async def main(url: str, topics: str, group: str, database: str, seed: str) -> None:
    store, loop, opened = Store(Path(database)), asyncio.get_running_loop(), False

    def hear(word: str, **more: Any) -> None:
        nonlocal opened
        opened = opened or word == "ready"
        say(word, **more)

    while True:
        try:
            async with broker.connect(url) as bus:
                member = Member(bus, topics.split(","), group, store, int(seed), hear)
                loop.add_signal_handler(signal.SIGTERM, member.stop)
                loop.add_signal_handler(signal.SIGUSR2, show_tasks)
                await member.run()
                return
        except BaseException as error:
            if opened or not isinstance(error, BrokerError) or not error.retriable:
                say("broken", text=repr(error))
                raise
            # A broker of a busy machine may not answer in time.
            say("repeated", error=repr(error))


if __name__ == "__main__":
    # What each thread does, for a parent that waits in vain.
    faulthandler.register(signal.SIGUSR1)
    asyncio.run(main(*sys.argv[1:]))
