"""Partitioners: which partition a key belongs to, by the hashes of Kafka's clients or a function. Pure; any thread.

| partitioner | the same as |
|---|---|
| `murmur2` | Kafka's Java client, franz-go, KafkaJS; `murmur2_random` of librdkafka |
| `crc32` | `consistent` of librdkafka; its default, `consistent_random`, does the same with keys that are not empty |
| `fnv1a` | Sarama's default and goka; `fnv1a_random` of librdkafka |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal
from zlib import crc32

from broker.checks import check_accepts, is_async, name_of, refused
from broker.errors import ConfigurationError, InvalidMessage

__all__ = ["PartitionFunction", "Partitioner", "check_partitioner", "fnv1a", "murmur2", "partition_by"]

PartitionFunction = Callable[[str, bytes, int], int]
"""Chooses a partition: called with topic, key and the number of partitions."""
Partitioner = Literal["broker", "murmur2", "crc32", "fnv1a"] | PartitionFunction
"""How a key selects a partition; "broker" leaves that to the backend and its settings."""

_MASK: Final = 0xFFFFFFFF
_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_FNV_OFFSET: Final = 0x811C9DC5
_FNV_PRIME: Final = 0x01000193


def murmur2(key: bytes) -> int:
    """The 32-bit hash of a key by Kafka's Java client, unsigned. The client drops the highest bit."""
    length = len(key)
    whole = length & ~3
    h = _SEED ^ length
    for at in range(0, whole, 4):
        k = int.from_bytes(key[at : at + 4], "little") * _M & _MASK
        k = (k ^ k >> 24) * _M & _MASK
        h = h * _M & _MASK ^ k
    if whole < length:
        h = (h ^ int.from_bytes(key[whole:], "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    return h ^ h >> 15


def fnv1a(key: bytes) -> int:
    """The 32-bit FNV-1a hash of a key, unsigned. Sarama takes it as a signed number, without the sign."""
    h = _FNV_OFFSET
    for byte in key:
        h = (h ^ byte) * _FNV_PRIME & _MASK
    return h


def _fnv1a_without_sign(key: bytes) -> int:
    h = fnv1a(key)
    return h if h < 0x80000000 else 0x100000000 - h


_HASHES: Final[Mapping[str, Callable[[bytes], int]]] = {
    "murmur2": lambda key: murmur2(key) & 0x7FFFFFFF,
    "crc32": crc32,
    "fnv1a": _fnv1a_without_sign,
}


def check_partitioner(partitioner: Any) -> None:
    """:raises ConfigurationError: it is neither the name of a partitioner nor a function of three arguments."""
    if is_async(partitioner):
        raise ConfigurationError(
            f"partitioner {name_of(partitioner)} is a coroutine function", advice="Pass a plain function"
        )
    if callable(partitioner):
        check_accepts("partitioner", partitioner, "topic", "key", "number of partitions")
    elif not isinstance(partitioner, str) or (partitioner != "broker" and partitioner not in _HASHES):
        raise refused("partitioner", partitioner, f'"broker", {", ".join(map(repr, _HASHES))} or a function')


def partition_by(partitioner: Partitioner, topic: str, key: bytes, partitions: int) -> int:
    """The partition of a key by a partitioner other than "broker".

    :raises InvalidMessage: the function raised, or returned no partition of the topic.
    """
    if isinstance(partitioner, str):
        return _HASHES[partitioner](key) % partitions
    try:
        partition = partitioner(topic, key, partitions)
    except Exception as error:
        raise InvalidMessage(
            f"The partitioner raised {error!r} for topic {topic!r} and key {key!r}",
            native=error,
            advice="It must return a partition for every key",
        ) from error
    if type(partition) is not int or not 0 <= partition < partitions:
        raise InvalidMessage(
            f"The partitioner returned {partition!r} for topic {topic!r} and key {key!r}",
            advice=f"Return an int from 0 to {partitions - 1}",
        )
    return partition
