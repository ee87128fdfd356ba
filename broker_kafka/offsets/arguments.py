"""Checks of the arguments of offset stores, shared so that all stores refuse the same values.

Each raises ConfigurationError with the argument, its value and what to give instead, and nothing else. Arguments are
checked before anything is read or stored. Pure.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any, Final

from broker import ConfigurationError, TopicPartition
from broker.driver import is_whole, refused
from broker_kafka.offsets.protocol import GroupMember, StoredOffset

__all__ = [
    "check_claim",
    "check_commit",
    "check_fetch",
    "check_group",
    "check_metadata",
    "check_positions",
    "check_reset",
    "check_store",
    "is_offset",
    "is_partition",
]

_LARGEST: Final = 2**63 - 1
_LARGEST_PARTITION: Final = 2**31 - 1
_LONGEST_TOPIC: Final = 249
"""Characters, as in the brokers."""
_CALLS: Final = ("fetch", "claim", "commit", "reset", "stored", "close")


def check_fetch(group: object, partitions: object) -> None:
    """The arguments of `OffsetStore.fetch`."""
    check_group(group)
    _check_partitions(partitions)


def check_claim(owner: object, partitions: object) -> None:
    """The arguments of `OffsetStore.claim`."""
    _check_owner(owner)
    _check_partitions(partitions)


def check_commit(owner: object, positions: object) -> None:
    """The arguments of `OffsetStore.commit`."""
    _check_owner(owner)
    check_positions(positions)


def check_reset(group: object, positions: object) -> None:
    """The arguments of `OffsetStore.reset`."""
    check_group(group)
    check_positions(positions)


def check_group(group: object) -> None:
    """:raises ConfigurationError: not the name of a group."""
    if not (_is_text(group) and group):
        raise refused("group", group, "a group's name: text without NUL and without lone surrogates")


def _check_owner(owner: object) -> None:
    """:raises ConfigurationError: not a `GroupMember` that a store can keep."""
    if not isinstance(owner, GroupMember):
        raise refused("owner", owner, "a GroupMember(group, generation, member)")
    check_group(owner.group)
    if not (is_whole(owner.generation) and -1 <= owner.generation <= _LARGEST):
        raise refused("generation of the owner", owner.generation, "an int, -1 or more")
    if not _is_text(owner.member):
        raise refused("member of the owner", owner.member, "a member's id: text without NUL")


def _check_partition(partition: object) -> None:
    """:raises ConfigurationError: not a possible `TopicPartition`."""
    if not isinstance(partition, TopicPartition):
        raise refused("partition", partition, "a TopicPartition(topic, partition)")
    topic, number = partition
    if not (_is_text(topic) and 0 < len(topic) <= _LONGEST_TOPIC):
        raise refused("topic", topic, f"a topic's name, of at most {_LONGEST_TOPIC} characters")
    if not is_partition(number):
        raise refused(f"partition of {topic!r}", number, "its number, an int of 0 or more")


def _check_partitions(partitions: object) -> None:
    """:raises ConfigurationError: not a list of partitions."""
    if not isinstance(partitions, Collection) or isinstance(partitions, str | bytes):
        raise refused("partitions", partitions, "a list of TopicPartition(topic, partition)")
    for partition in _each(partitions):
        _check_partition(partition)


def check_positions(positions: object) -> None:
    """:raises ConfigurationError: not a mapping of partitions to positions that every store can keep."""
    if not isinstance(positions, Mapping):
        raise refused("positions", positions, "a mapping of TopicPartition to StoredOffset")
    for partition, position in _items(positions):
        _check_partition(partition)
        where = f"{partition.topic!r}[{partition.partition}]"
        if not isinstance(position, StoredOffset):
            raise refused(f"The position of {where}", position, "a StoredOffset(offset, metadata)")
        if not is_offset(position.offset):
            raise refused(f"The offset of {where}", position.offset, "the next offset to read, 0 or more")
        check_metadata(partition, position.metadata)


def is_offset(value: object) -> bool:
    """Whether this can be the next offset to read."""
    return is_whole(value) and 0 <= value <= _LARGEST


def is_partition(value: object) -> bool:
    """Whether this can be the number of a partition."""
    return is_whole(value) and 0 <= value <= _LARGEST_PARTITION


def check_metadata(partition: tuple[str, int], metadata: object) -> None:
    """:raises ConfigurationError: not a text, or a text with NUL or lone surrogates."""
    if _is_text(metadata):
        return
    where = f"{partition[0]!r}[{partition[1]}]"
    if not isinstance(metadata, str):
        raise refused(f"The metadata of {where}", metadata, "text")
    raise ConfigurationError(
        f"The metadata of {where} is {metadata[:40]!r}",
        advice="It takes text without NUL and without lone surrogates; encode bytes as base64",
    )


def check_store(name: str, store: object) -> None:
    """:raises ConfigurationError: not an offset store."""
    calls = [getattr(store, call, None) for call in _CALLS]
    if inspect.isclass(store) or not all(map(callable, calls)):
        raise refused(name, store, f"an OffsetStore, which has {', '.join(_CALLS)}")


def _is_text(value: object) -> bool:
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


# The arguments of callers have no types yet.


def _each(values: Any) -> Collection[Any]:
    return values


def _items(values: Any) -> Collection[tuple[Any, Any]]:
    return values.items()
