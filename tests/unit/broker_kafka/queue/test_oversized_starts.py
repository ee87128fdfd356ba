"""Records whose START is larger than the marker topic takes: their order, retries and end."""

from __future__ import annotations

from typing import Any

from broker.driver.contract import TopicPartition
from broker_kafka.queue.consumer.queue_client import OversizedStarts
from broker_kafka.queue.consumer.start_builder import FetchedRecord

HERE, THERE = TopicPartition("orders", 0), TopicPartition("orders", 1)
RAW: Any = None
EARLY, LATE = 0.79, 1.21
"""Factors of a pause, outside its jitter."""


def fetched(place: TopicPartition, *offsets: int) -> list[FetchedRecord]:
    return [FetchedRecord(place, 1, RAW, offset, (), None) for offset in offsets]


def offsets(records: list[FetchedRecord]) -> list[tuple[int, int]]:
    return [(each.place.partition, each.offset) for each in records]


def test_the_first_record_is_retried_after_growing_pauses() -> None:
    oversized, now = OversizedStarts(), 0.0
    assert oversized.add(HERE, fetched(HERE, 5, 6, 7), now)
    for pause in (1, 2, 4, 8, 16, 30, 30):
        assert oversized.due(now + EARLY * pause) == []
        now += LATE * pause
        head = oversized.due(now)
        assert offsets(head) == [(0, 5)]
        assert not oversized.add(HERE, head, now)


def test_the_first_record_of_each_partition_is_retried() -> None:
    oversized = OversizedStarts()
    oversized.add(HERE, fetched(HERE, 5, 6), 0.0)
    oversized.add(THERE, fetched(THERE, 1), 0.0)
    assert offsets(oversized.due(LATE)) == [(0, 5), (1, 1)]


def test_later_records_follow_the_first_in_order() -> None:
    oversized = OversizedStarts()
    oversized.add(HERE, fetched(HERE, 5, 6, 7), 0.0)
    assert offsets(oversized.due(LATE)) == [(0, 5)]
    assert offsets(oversized.remove(HERE)) == [(0, 6), (0, 7)]
    assert not oversized
    assert oversized.remove(HERE) == []


def test_records_that_are_put_back_stay_before_the_rest() -> None:
    oversized = OversizedStarts()
    oversized.add(HERE, fetched(HERE, 5, 6, 7), 0.0)
    oversized.add(HERE, oversized.due(LATE) + oversized.due(LATE), LATE)
    assert offsets(oversized.due(LATE + 2 * LATE) + oversized.remove(HERE)) == [(0, 5), (0, 6), (0, 7)]


def test_removed_partitions_are_forgotten() -> None:
    oversized = OversizedStarts()
    oversized.add(HERE, fetched(HERE, 5), 0.0)
    assert HERE in oversized
    assert oversized.forget([HERE, THERE]) == [HERE]
    assert HERE not in oversized
    assert oversized.due(100.0) == []
