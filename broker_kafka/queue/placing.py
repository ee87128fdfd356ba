"""In which marker partition the markers of a message lie. Pure.

All markers of a message lie in one partition, which is chosen when its START is written and kept by who holds it: a
marker topic that grows in between moves nothing.
"""

from __future__ import annotations

from zlib import crc32

from broker_kafka.queue.wire import MessageId

__all__ = ["marker_partition"]


def marker_partition(id: MessageId, partitions: int) -> int:
    """The partition for a START: one for each queue and partition of messages, so that a queue's load is shared."""
    return (crc32(f"{id.queue}\0{id.topic}".encode()) + id.partition) % partitions
