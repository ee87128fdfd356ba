"""The rows of `SqlOffsetStore`, one per group, topic and partition; statements in a transaction of the caller's.

Nothing here begins or ends a transaction. Errors of the database are SQLAlchemy's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Table, and_, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from broker import TopicPartition
from broker_kafka.offsets.fencing import Entry

__all__ = ["add_row", "place", "read_row", "read_rows"]


_QUIET_INSERTS: Final[dict[str, Callable[[Table], Any]]] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}
"""Databases that can skip an existing row; others use a savepoint."""


def place(table: Table, group: str, partition: TopicPartition) -> ColumnElement[bool]:
    """The condition that names one row."""
    columns = table.c
    return and_(
        columns.group_name == group,
        columns.topic == partition.topic,
        columns.topic_partition == partition.partition,
    )


def read_row(tx: Connection, table: Table, group: str, partition: TopicPartition) -> Entry:
    """The entry of one partition; empty if there is no row."""
    row = tx.execute(_select(table).where(place(table, group, partition))).one_or_none()
    return Entry() if row is None else _entry(row)


def read_rows(tx: Connection, table: Table, group: str) -> dict[TopicPartition, Entry]:
    """The entries of a group."""
    rows = tx.execute(_select(table).where(table.c.group_name == group))
    return {TopicPartition(row.topic, row.topic_partition): _entry(row) for row in rows}


def add_row(tx: Connection, table: Table, row: Mapping[str, Any]) -> bool:
    """Insert a row; False, and nothing done, if there is one already. The transaction stays usable."""
    insert = _QUIET_INSERTS.get(tx.dialect.name)
    if insert is not None:
        return tx.execute(insert(table).values(row).on_conflict_do_nothing()).rowcount > 0
    try:
        with tx.begin_nested():
            tx.execute(table.insert().values(row))
    except IntegrityError:
        return False
    return True


def _entry(row: Any) -> Entry:
    return Entry(row.next_offset, row.note, row.generation, row.member, row.topic_id)


def _select(table: Table) -> Any:
    columns = table.c
    return select(
        columns.topic,
        columns.topic_partition,
        columns.next_offset,
        columns.note,
        columns.generation,
        columns.member,
        columns.topic_id,
    )
