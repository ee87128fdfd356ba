"""Where the positions of consumer groups live: in Kafka, in a database beside the results, or in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from broker import MissingClient
from broker_kafka.offsets.kafka import GroupOffsetStore, MemberOffsetStore
from broker_kafka.offsets.memory import MemoryOffsetStore
from broker_kafka.offsets.migrate import Move, migrate_offsets
from broker_kafka.offsets.protocol import CommitResults, FetchResults, GroupMember, OffsetStore, StoredOffset

if TYPE_CHECKING:
    from broker_kafka.offsets.sql import SqlOffsetStore

__all__ = [
    "CommitResults",
    "FetchResults",
    "GroupMember",
    "GroupOffsetStore",
    "MemberOffsetStore",
    "MemoryOffsetStore",
    "Move",
    "OffsetStore",
    "SqlOffsetStore",
    "StoredOffset",
    "migrate_offsets",
]


def __getattr__(name: str) -> Any:
    # SQLAlchemy is an extra, and is imported by those who use the store that needs it.
    if name == "SqlOffsetStore":
        try:
            from broker_kafka.offsets.sql import SqlOffsetStore
        except ImportError as error:
            raise MissingClient(
                "Offsets in a database need SQLAlchemy, which is not installed",
                native=error,
                advice="Run: pip install 'anybroker[kafka,sql]'",
            ) from None
        return SqlOffsetStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
