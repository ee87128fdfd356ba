"""What the calls of a group consumer take. Each raises ConfigurationError, with argument, value and mend. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from broker import Record, TopicPartition
from broker.driver import as_partitions, refused
from broker_kafka.offsets.arguments import check_positions
from broker_kafka.offsets.protocol import StoredOffset

__all__ = ["check_kind", "check_record", "read_positions", "read_records"]

_RECORD = "a Record that this consumer handed over"


def check_record(record: object) -> None:
    """:raises ConfigurationError: it is no record."""
    if not isinstance(record, Record):
        raise refused("record", record, _RECORD)


def read_records(records: Iterable[Record[Any]]) -> Collection[Record[Any]]:
    """The records, which can be looked at more than once.

    :raises ConfigurationError: one is none.
    """
    if not _is_iterable(records):
        raise refused("records", records, "a batch, or a list of records")
    several = records if isinstance(records, Collection) else list(records)
    for record in several:
        if type(record) is not Record:
            check_record(record)
    return several


def read_positions(
    positions: Mapping[TopicPartition, int] | Mapping[tuple[str, int], int],
) -> dict[TopicPartition, int]:
    """The next offset to read of each partition.

    :raises ConfigurationError: they are no positions of partitions.
    """
    if not _is_mapping(positions):
        raise refused("positions", positions, "a mapping of (topic, number) to the next offset to read")
    found = dict(zip(as_partitions(positions), positions.values(), strict=True))
    check_positions({place: StoredOffset(position) for place, position in found.items()})
    return found


def check_kind(name: str, value: object, kind: type, takes: str) -> None:
    """:raises ConfigurationError: it is of another kind."""
    if not isinstance(value, kind):
        raise refused(name, value, takes)


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_iterable(value: object) -> bool:
    return isinstance(value, Iterable)
