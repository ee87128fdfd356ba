"""The partition of a key: by the hash of Kafka's Java client, or by the user's function.

Pure functions, safe from any thread. Keys are hashed by librdkafka's own `murmur2_random`, which agrees with the Java
client; `partition_of` computes the same in advance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from confluent_kafka import KafkaError, KafkaException

from broker import InvalidMessage

__all__ = ["Partitioner", "choose_partition", "murmur2", "partition_of"]

Partitioner = Callable[[str, bytes | None, int], int]
"""Chooses a partition: topic, key and the number of partitions."""

_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """The 32-bit hash of a key by Kafka's Java client, unsigned."""
    length = len(data)
    whole = length & ~3
    h = _SEED ^ length
    for at in range(0, whole, 4):
        k = int.from_bytes(data[at : at + 4], "little") * _M & _MASK
        k = (k ^ k >> 24) * _M & _MASK
        h = h * _M & _MASK ^ k
    if whole < length:
        h = (h ^ int.from_bytes(data[whole:], "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    return h ^ h >> 15


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key with the default `partitioner` and no `partition_function`."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


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
