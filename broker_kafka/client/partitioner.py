"""The partition of a key: by a hash of librdkafka, or by the user's function.

Pure functions, safe from any thread. Keys are hashed by librdkafka itself, by default with `murmur2_random`, which
agrees with the Java client; `partition_of` and `partition_of_key` compute the same in advance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

from confluent_kafka import KafkaError, KafkaException

from broker import InvalidMessage, Unsupported
from broker.driver import murmur2, partition_by

__all__ = ["Partitioner", "choose_partition", "partition_of", "partition_of_key"]

Partitioner = Callable[[str, bytes | None, int], int]
"""Chooses a partition: topic, key and the number of partitions."""

_Hash = Literal["murmur2", "crc32", "fnv1a"]
_HASHES: Final[Mapping[str, _Hash]] = {
    "murmur2": "murmur2",
    "murmur2_random": "murmur2",
    "consistent": "crc32",
    "consistent_random": "crc32",
    "fnv1a": "fnv1a",
    "fnv1a_random": "fnv1a",
}
"""By librdkafka's names, which say what happens to messages without a key."""


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key with the default `partitioner` and no `partition_function`."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def partition_of_key(name: str, topic: str, key: bytes, partitions: int) -> int:
    """The partition of a key with this `partitioner` of librdkafka and no `partition_function`.

    :raises Unsupported: this partitioner spreads the key at random.
    """
    if name not in _HASHES or (name == "consistent_random" and not key):
        raise Unsupported(
            f"partitioner={name} sends key {key!r} to any partition",
            advice="Set another partitioner, such as murmur2_random",
        )
    return partition_by(_HASHES[name], topic, key, partitions)


def choose_partition(partitioner: Partitioner, topic: str, key: bytes | None, partitions: int) -> int:
    """Call the user's function.

    :raises InvalidMessage: the function raised, or returned no partition of the topic; the cause is a KafkaException if
        the topic may have that partition by now.
    """
    try:
        partition = partitioner(topic, key, partitions)
    except Exception as error:
        raise InvalidMessage(
            f"partition_function raised {error!r} for topic {topic!r} and key {key!r}",
            native=error,
            advice="It must return a partition for every key, also for None",
        ) from error
    if type(partition) is not int or not 0 <= partition < partitions:
        beyond = type(partition) is int and partition >= partitions
        raise InvalidMessage(
            f"partition_function returned {partition!r} for topic {topic!r} and key {key!r}",
            advice=f"Return an int from 0 to {partitions - 1}",
        ) from (KafkaException(KafkaError(KafkaError._UNKNOWN_PARTITION)) if beyond else None)
    return partition
