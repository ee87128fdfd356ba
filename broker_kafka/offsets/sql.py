"""`SqlOffsetStore`: positions in a database, so that results and offsets commit in one transaction of it.

    with engine.begin() as tx:
        tx.execute(insert(results), rows)
        store.save(tx, owner, {partition: StoredOffset(batch[-1].offset + 1)})

`save` raises if a newer member has claimed the partition, which rolls the results back as well: their effect is exactly
once, whichever process is killed. It relies on `claim` at the assignment, which the group consumer calls.

*Concurrency.* Any number of tasks, threads, processes and machines. Rows are locked in one order, so that two commits
do not deadlock. With a synchronous engine each call runs in a thread; with an asynchronous one, on the loop.
*Cancellation.* A cancelled call of a synchronous engine continues in its thread. *Failure.* A commit of several
partitions is one transaction; a refused partition does not keep the others from being stored, except in `save`, which
is all or nothing. A database that cannot be reached is an error of every partition, never "no position". A worker that
is frozen within a transaction keeps its rows locked, and its successor waits: set a limit in the database, such as
PostgreSQL's idle_in_transaction_session_timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    DateTime,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    and_,
    inspect,
    or_,
    true,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, ProgrammingError, SQLAlchemyError

from broker import BrokerError, Closed, ConfigurationError, SettleError, TopicPartition
from broker.driver import create_private_file, refused
from broker_kafka.offsets import fencing
from broker_kafka.offsets.arguments import check_claim, check_commit, check_fetch, check_group, check_reset
from broker_kafka.offsets.fencing import UNCLAIMED, Entry
from broker_kafka.offsets.protocol import CommitResults, FetchResults, GroupMember, StoredOffset

if TYPE_CHECKING:
    # An import at run time would need greenlet, which synchronous engines do without.
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
    from sqlalchemy.orm import Session

__all__ = ["SqlOffsetStore"]


R = TypeVar("R")

_TABLE: Final = "anybroker_offsets"
_SQLITE_ERROR: Final = 1
"""SQLite's code for a statement that cannot work, for instance on a missing table; other databases raise a
ProgrammingError."""

_QUIET_INSERTS: Final[dict[str, Callable[[Table], Any]]] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}
"""Databases that can skip an existing row; others use a savepoint."""


class SqlOffsetStore:
    """Implements `OffsetStore` over a SQLAlchemy engine, which stays the caller's to dispose of.

    :param engine: synchronous or asynchronous.
    :param table: name of the table.
    :param schema: where the table is; None is the connection's own.
    :raises ConfigurationError: this is no engine, or no name of a table or schema.
    """

    def __init__(self, engine: Engine | AsyncEngine, *, table: str = _TABLE, schema: str | None = None) -> None:
        asynchronous = getattr(engine, "sync_engine", None)
        if not isinstance(asynchronous or engine, Engine):
            raise ConfigurationError(
                f"engine is {type(engine).__name__}",
                advice="Give what sqlalchemy.create_engine or create_async_engine returns",
            )
        for what, name in (("table", table), ("schema", "any" if schema is None else schema)):
            if not (isinstance(name, str) and name):
                raise refused(what, name, "a name")
        self._engine = engine
        self._closed = False
        self._table = Table(
            table,
            MetaData(schema=schema),
            Column("group_name", String(255), primary_key=True),
            Column("topic", String(249), primary_key=True),
            Column("topic_partition", Integer, primary_key=True, autoincrement=False),
            Column("next_offset", BigInteger, nullable=True),
            Column("note", Text, nullable=False),
            Column("generation", BigInteger, nullable=False),
            Column("member", String(255), nullable=False),
            Column("topic_id", String(64), nullable=False),
            Column("changed_at", DateTime(timezone=True), nullable=False),
        )

    @property
    def table(self) -> Table:
        """The table, for migrations and for queries of your own.

        `next_offset` is the next offset to read, or null if the partition was claimed and nothing was committed;
        `topic_id` is empty if the id of the topic is unknown.
        """
        return self._table

    async def create_table(self) -> None:
        """Create the table if it is missing. A file of SQLite that it creates is for the own user alone.

        :raises ConfigurationError: there is one of that name which is no table of offsets.
        :raises SettleError: the database refuses it.
        """

        def run(tx: Connection) -> set[str]:
            self._table.metadata.create_all(tx, checkfirst=True)
            there = inspect(tx).get_columns(self._table.name, self._table.schema)
            return {column.name for column in self._table.c}.difference(column["name"] for column in there)

        self._create_file()
        missing = await self._in_transaction(run)
        if isinstance(missing, SettleError):
            raise missing
        if missing:
            raise ConfigurationError(
                f"Table {self._table.fullname!r} exists and has no column {', '.join(sorted(missing))}",
                advice="Give the store the name of another table, or drop this table",
            )

    def _create_file(self) -> None:
        """SQLite would create it for all to read, and its journal with the same mode."""
        url = self._engine.url
        database = url.database
        if url.get_backend_name() != "sqlite" or not database or database.startswith((":", "file:")):
            return
        # An existing one is the application's, and SQLite reports a directory that is missing.
        with suppress(OSError):
            create_private_file(Path(database)).close()

    def save(
        self,
        tx: Connection | Session,
        owner: GroupMember,
        positions: Mapping[TopicPartition, StoredOffset],
        *,
        rewind: bool = False,
    ) -> None:
        """Store positions in a transaction of the caller; they take effect with its commit.

        :raises LeaseLost: a newer member has claimed a partition; let the error roll the transaction back.
        :raises SettleError: a position is below the stored one.
        :raises ConfigurationError: a position cannot be stored.
        :raises sqlalchemy.exc.SQLAlchemyError: the database failed, as for any other statement of the transaction.
        """
        check_commit(owner, positions)
        connection = _connection_of(tx)
        for partition in sorted(positions):
            error = self._store(connection, owner, partition, positions[partition], rewind)
            if error is not None:
                raise error

    async def save_async(
        self,
        tx: AsyncConnection | AsyncSession,
        owner: GroupMember,
        positions: Mapping[TopicPartition, StoredOffset],
        *,
        rewind: bool = False,
    ) -> None:
        """`save`, in a transaction of an asynchronous engine."""

        if not callable(getattr(tx, "run_sync", None)):
            raise refused("tx", tx, "an AsyncConnection or AsyncSession; a synchronous one goes to save")

        def run(inner: Any) -> None:
            self.save(inner, owner, positions, rewind=rewind)

        await tx.run_sync(run)

    async def fetch(self, group: str, partitions: Sequence[TopicPartition]) -> FetchResults:
        check_fetch(group, partitions)

        def run(tx: Connection) -> dict[TopicPartition, StoredOffset | None]:
            rows = self._read_all(tx, group)
            return {partition: rows.get(partition, Entry()).position for partition in partitions}

        found = await self._in_transaction(run)
        return dict.fromkeys(partitions, found) if isinstance(found, SettleError) else found

    async def claim(
        self, owner: GroupMember, partitions: Sequence[TopicPartition], *, restarted: bool = False
    ) -> FetchResults:
        check_claim(owner, partitions)

        def run(tx: Connection) -> dict[TopicPartition, StoredOffset | BrokerError | None]:
            return {partition: self._claim(tx, owner, partition, restarted) for partition in sorted(partitions)}

        found = await self._in_transaction(run)
        return dict.fromkeys(partitions, found) if isinstance(found, SettleError) else found

    async def commit(
        self, owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], *, rewind: bool = False
    ) -> CommitResults:
        check_commit(owner, positions)

        def run(tx: Connection) -> dict[TopicPartition, BrokerError | None]:
            return {
                partition: self._store(tx, owner, partition, positions[partition], rewind)
                for partition in sorted(positions)
            }

        found = await self._in_transaction(run)
        return dict.fromkeys(positions, found) if isinstance(found, SettleError) else found

    async def reset(self, group: str, positions: Mapping[TopicPartition, StoredOffset]) -> CommitResults:
        check_reset(group, positions)

        def run(tx: Connection) -> None:
            for partition in sorted(positions):
                position = positions[partition]
                values = {**_values_of(position), "member": ""}
                if not self._update(tx, group, partition, true(), values) and not self._add(
                    tx, group, partition, values | {"generation": UNCLAIMED}
                ):
                    self._update(tx, group, partition, true(), values)

        return dict.fromkeys(positions, await self._in_transaction(run))

    async def stored(self, group: str) -> FetchResults:
        check_group(group)
        found = await self._in_transaction(lambda tx: self._read_all(tx, group))
        if isinstance(found, SettleError):
            raise found
        return {partition: entry.position for partition, entry in sorted(found.items()) if entry.offset is not None}

    async def close(self) -> None:
        """Refuse further calls; the engine is not disposed of."""
        self._closed = True

    def _claim(
        self, tx: Connection, owner: GroupMember, partition: TopicPartition, restarted: bool
    ) -> StoredOffset | BrokerError | None:
        columns = self._table.c
        condition = true() if restarted else columns.generation <= owner.generation
        values = {"generation": owner.generation, "member": owner.member}
        for _ in range(2):
            if self._update(tx, owner.group, partition, condition, values):
                # The row is locked until the transaction ends, so this reads what it holds.
                return self._read(tx, owner.group, partition).position
            if self._add(tx, owner.group, partition, values | {"next_offset": None, "note": "", "topic_id": ""}):
                return None
        entry = self._read(tx, owner.group, partition)
        return fencing.check_claim(partition, entry, owner, restarted) or _busy(partition)

    def _store(
        self, tx: Connection, owner: GroupMember, partition: TopicPartition, position: StoredOffset, rewind: bool
    ) -> SettleError | None:
        columns = self._table.c
        ours = or_(
            columns.generation == UNCLAIMED,
            and_(columns.generation <= owner.generation, columns.member == owner.member),
        )
        forward = true() if rewind else or_(columns.next_offset.is_(None), columns.next_offset <= position.offset)
        values = {**_values_of(position), "generation": owner.generation, "member": owner.member}
        for _ in range(2):
            if self._update(tx, owner.group, partition, and_(ours, forward), values):
                return None
            if self._add(tx, owner.group, partition, values):
                return None
        # The condition refused the row, or another transaction wrote it between the two statements.
        entry = self._read(tx, owner.group, partition)
        return fencing.check_commit(partition, entry, owner, position.offset, rewind) or _busy(partition)

    def _update(
        self, tx: Connection, group: str, partition: TopicPartition, condition: Any, values: Mapping[str, Any]
    ) -> bool:
        statement = (
            self._table.update()
            .where(self._row_of(group, partition), condition)
            .values({**values, "changed_at": datetime.now(UTC)})
        )
        return tx.execute(statement).rowcount > 0

    def _add(self, tx: Connection, group: str, partition: TopicPartition, values: Mapping[str, Any]) -> bool:
        """Insert a row; False, and nothing done, if there is one already. The transaction stays usable."""
        row = {
            "group_name": group,
            "topic": partition.topic,
            "topic_partition": partition.partition,
            "changed_at": datetime.now(UTC),
            **values,
        }
        insert = _QUIET_INSERTS.get(tx.dialect.name)
        if insert is not None:
            return tx.execute(insert(self._table).values(row).on_conflict_do_nothing()).rowcount > 0
        try:
            with tx.begin_nested():
                tx.execute(self._table.insert().values(row))
        except IntegrityError:
            return False
        return True

    def _read(self, tx: Connection, group: str, partition: TopicPartition) -> Entry:
        """The entry of one partition; empty if there is no row."""
        row = tx.execute(self._table.select().where(self._row_of(group, partition))).one_or_none()
        return Entry() if row is None else _entry(row)

    def _read_all(self, tx: Connection, group: str) -> dict[TopicPartition, Entry]:
        rows = tx.execute(self._table.select().where(self._table.c.group_name == group))
        return {TopicPartition(row.topic, row.topic_partition): _entry(row) for row in rows}

    def _row_of(self, group: str, partition: TopicPartition) -> ColumnElement[bool]:
        columns = self._table.c
        return and_(
            columns.group_name == group,
            columns.topic == partition.topic,
            columns.topic_partition == partition.partition,
        )

    async def _in_transaction(self, work: Callable[[Connection], R]) -> R | SettleError:
        if self._closed:
            raise Closed("The offset store is closed")
        engine = self._engine
        try:
            if isinstance(engine, Engine):
                return await asyncio.to_thread(_run, engine, work)
            async with engine.begin() as tx:
                return await tx.run_sync(work)
        except (SQLAlchemyError, OSError) as error:
            return _failed(error)


def _connection_of(tx: Any) -> Connection:
    """The connection of the caller's transaction."""
    if isinstance(tx, Connection):
        return tx
    if hasattr(tx, "run_sync"):
        raise refused("tx", tx, "a Connection or Session; an asynchronous one goes to save_async")
    if not callable(getattr(tx, "connection", None)):
        raise refused("tx", tx, "a Connection or Session of SQLAlchemy")
    return tx.connection()


def _run(engine: Engine, work: Callable[[Connection], R]) -> R:
    with engine.begin() as tx:
        return work(tx)


def _entry(row: Any) -> Entry:
    return Entry(row.next_offset, row.note, row.generation, row.member, row.topic_id)


def _values_of(position: StoredOffset) -> dict[str, Any]:
    return {"next_offset": position.offset, "note": position.metadata, "topic_id": position.topic_id}


def _busy(partition: TopicPartition) -> SettleError:
    return SettleError(
        f"The row of {partition.topic!r}[{partition.partition}] was changed by another transaction meanwhile",
        retriable=True,
    )


def _failed(error: Exception) -> SettleError:
    reason = str(error.orig) if isinstance(error, DBAPIError) and error.orig is not None else str(error)
    retriable = isinstance(error, (OperationalError, OSError)) or (
        isinstance(error, DBAPIError) and error.connection_invalidated
    )
    cannot_work = isinstance(error, ProgrammingError)
    if isinstance(error, OperationalError) and getattr(error.orig, "sqlite_errorcode", None) == _SQLITE_ERROR:
        retriable, cannot_work = False, True
    if cannot_work:
        advice = "Create the table with `await store.create_table()` if it is missing; see `native`"
    elif retriable:
        advice = "Retry when the database can be reached and is not locked; see `native`"
    else:
        advice = "See `native`"
    return SettleError(
        f"The database refused the offsets: {' '.join(reason.split())}",
        native=error,
        retriable=retriable,
        advice=advice,
    )
