"""Figures of a processor, at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from broker_streams.partition import PartitionState
from broker_streams.recovery import RecoveryStats

__all__ = ["InputStats", "PartitionStats", "ProcessorState", "ProcessorStats", "RecoveryStats", "TableStats"]


class ProcessorState(StrEnum):
    """What a processor is doing."""

    IDLE = "idle"
    """It was not started."""
    STARTING = "starting"
    """It prepares topics and tables, and joins its group."""
    RUNNING = "running"
    """It is a member of its group."""
    STOPPING = "stopping"
    """It writes its last checkpoint."""
    STOPPED = "stopped"
    """It has ended, perhaps with an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputStats:
    """Messages of a topic that were handled and are part of a checkpoint.

    :ivar position: the next offset to handle; None before the first message.
    """

    count: int = 0
    bytes: int = 0
    position: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStats:
    """The copy of a table.

    :ivar rows: rows that were read since the start.
    :ivar recovery_seconds: how long its recovery took; None until that has ended.
    :ivar staleness: seconds since it was known to be up to date.
    """

    rows: int
    recovery_seconds: float | None
    staleness: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStats:
    """One partition of this member.

    :ivar inputs: by topic.
    :ivar counts: how many messages were skipped, late, dead-lettered and so on.
    :ivar backlog: messages that wait for the partition.
    :ivar checkpoints: the number of checkpoints that were written.
    :ivar published: outputs, messages of the loop and dead letters that were published with them.
    :ivar rows: rows that were written with them.
    :ivar store_bytes: the size of the store.
    :ivar stream_time: event time, in milliseconds since 1970.
    """

    state: PartitionState
    inputs: Mapping[str, InputStats]
    counts: Mapping[str, int]
    backlog: int
    checkpoints: int
    published: int
    rows: int
    store_bytes: int
    stream_time: int
    table: TableStats
    joins: Mapping[str, TableStats]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorStats:
    """A member of a group.

    :ivar guarantee: what holds here, and `how` it is had.
    :ivar partitions: by number, once they handle messages.
    :ivar recovering: the tables of partitions that are recovered, by number.
    :ivar standby: the partitions that are kept up to date for other members.
    :ivar checkpoint_seconds: how long the last checkpoint took; None before the first.
    :ivar failed_checkpoints: how many were undone and done again.
    """

    state: ProcessorState
    guarantee: str
    how: str
    partitions: Mapping[int, PartitionStats]
    recovering: Mapping[int, RecoveryStats]
    lookups: Mapping[str, TableStats]
    standby: tuple[int, ...]
    checkpoint_seconds: float | None
    failed_checkpoints: int
