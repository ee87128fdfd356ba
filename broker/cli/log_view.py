"""Reads the end, or a stretch, of a topic's log over all of its partitions, for `peek` and `dead`. Reads only.

Offsets of a partition are not dense, so the end is searched backwards in windows that double.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from broker.cli.exits import Exit, Failure
from broker.driver.contract import Bounds
from broker.protocols import LogReader
from broker.records import Record

__all__ = ["read_from", "read_last"]


async def read_last(reader: LogReader, topic: str, partition: int | None, count: int) -> list[Record[bytes]]:
    """The last `count` records, oldest first, of one partition or of all.

    :raises Failure: there is no such partition.
    """
    bounds = _chosen(await reader.bounds(topic), topic, partition)
    found: list[Record[bytes]] = []
    for number, bound in bounds.items():
        found += await _tail(reader, topic, number, bound, count)
    found.sort(key=_age)
    return found[-count:]


async def read_from(
    reader: LogReader, topic: str, positions: Mapping[int, int], partition: int | None, count: int
) -> list[Record[bytes]]:
    """The first `count` records at or behind these positions, oldest first.

    :raises Failure: there is no such partition.
    """
    bounds = _chosen(await reader.bounds(topic), topic, partition)
    found: list[Record[bytes]] = []
    for number, bound in bounds.items():
        start = max(bound.first, positions.get(number, bound.first))
        taken = 0
        if start < bound.next:
            async for batch in reader.read(topic, number, start, bound.next, max_records=count):
                found += batch[: count - taken]
                taken += len(batch)
                if taken >= count:
                    break
    found.sort(key=_age)
    return found[:count]


async def _tail(reader: LogReader, topic: str, partition: int, bound: Bounds, count: int) -> list[Record[bytes]]:
    window = count
    while True:
        start = max(bound.first, bound.next - window)
        last: deque[Record[bytes]] = deque(maxlen=count)
        if start < bound.next:
            async for batch in reader.read(topic, partition, start, bound.next):
                last.extend(batch)
        if len(last) == count or start == bound.first:
            return list(last)
        window *= 4


def _chosen(bounds: Mapping[int, Bounds], topic: str, partition: int | None) -> Mapping[int, Bounds]:
    if partition is None:
        return bounds
    if partition not in bounds:
        known = ", ".join(map(str, sorted(bounds)))
        raise Failure(f"Topic {topic!r} has no partition {partition}", advice=f"It has {known}", code=Exit.NOT_FOUND)
    return {partition: bounds[partition]}


def _age(record: Record[Any]) -> tuple[float, int, int]:
    moment = record.broker_time or record.publish_time
    return (moment.timestamp() if moment else 0.0, record.partition, record.offset)
