"""What waits for a marker topic that is too small: its order, its pauses, its end."""

from __future__ import annotations

from typing import Any

from broker.driver.contract import TopicPartition
from broker_kafka.queue.consumer.queue_client import OversizedStarts
from broker_kafka.queue.consumer.start_builder import FetchedRecord

HERE, THERE = TopicPartition("orders", 0), TopicPartition("orders", 1)
RAW: Any = None


def taken(place: TopicPartition, *offsets: int) -> list[FetchedRecord]:
    return [FetchedRecord(place, 1, RAW, offset, (), None) for offset in offsets]


def offsets(taken: list[FetchedRecord]) -> list[tuple[int, int]]:
    return [(each.place.partition, each.offset) for each in taken]


def test_the_first_of_each_partition_is_tried_again_ever_more_seldom() -> None:
    aside = OversizedStarts()
    assert aside.add(HERE, taken(HERE, 5, 6, 7), 0.0)
    assert aside.add(THERE, taken(THERE, 1), 0.0)
    tries: list[float] = []
    now = 0.0
    while len(tries) < 7:
        heads = aside.due(now)
        if heads:
            assert offsets(heads)[0] == (0, 5)
            assert not aside.add(HERE, heads[:1], now)
            if offsets(heads[1:]) == [(1, 1)]:
                assert not aside.add(THERE, heads[1:], now)
            tries.append(now)
        now += 1.0
    assert tries == [1, 3, 7, 15, 31, 61, 91]


def test_the_rest_goes_on_in_order_behind_the_first() -> None:
    aside = OversizedStarts()
    aside.add(HERE, taken(HERE, 5, 6, 7), 0.0)
    assert offsets(aside.due(1.0)) == [(0, 5)]
    assert offsets(aside.remove(HERE)) == [(0, 6), (0, 7)]
    assert not aside
    assert aside.remove(HERE) == []


def test_what_is_tried_with_its_first_goes_back_before_the_rest() -> None:
    aside = OversizedStarts()
    aside.add(HERE, taken(HERE, 5, 6, 7), 0.0)
    aside.add(HERE, aside.due(1.0) + aside.due(1.0), 1.0)
    assert offsets(aside.due(3.0) + aside.remove(HERE)) == [(0, 5), (0, 6), (0, 7)]


def test_partitions_that_went_are_forgotten() -> None:
    aside = OversizedStarts()
    aside.add(HERE, taken(HERE, 5), 0.0)
    assert HERE in aside
    assert aside.forget([HERE, THERE]) == [HERE]
    assert HERE not in aside
    assert aside.due(100.0) == []
