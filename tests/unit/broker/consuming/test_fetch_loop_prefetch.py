"""The prefetch is about two seconds of measured throughput."""

from __future__ import annotations

from broker.consuming.fetch_loop import Prefetch


def drive(rate: float, seconds: float, limit: int = 10_000) -> Prefetch:
    prefetch = Prefetch(limit)
    prefetch.update(0.0)
    now = 0.0
    while now < seconds:
        now += max(1 / rate, 0.01)
        prefetch.requested(max(1, round(0.01 * rate)), 1)
        prefetch.update(now)
    return prefetch


def test_a_slow_consumer_prefetches_little() -> None:
    assert drive(1, 20).target <= 3


def test_a_fast_consumer_prefetches_two_seconds() -> None:
    assert 1500 <= drive(1000, 10).target <= 2500


def test_the_prefetch_is_limited() -> None:
    assert drive(1_000_000, 3, limit=500).target == 500


def test_it_starts_at_one_and_at_most_doubles() -> None:
    prefetch = Prefetch(1000)
    assert prefetch.update(0.0) == 1
    prefetch.requested(1, 1)
    prefetch.requested(1000, 1)
    assert prefetch.update(0.001) == 2
    assert prefetch.update(0.002) == 2
    prefetch.requested(1, 1)
    assert prefetch.update(0.003) == 4


def test_first_messages_of_idle_workers_do_not_count() -> None:
    prefetch = Prefetch(1000)
    prefetch.update(0.0)
    for _ in range(8):
        prefetch.requested(1, 8)
        assert prefetch.update(0.001) == 1
    prefetch.requested(1, 8)
    assert prefetch.update(0.002) == 2


def test_it_shrinks_when_the_consumer_slows_down() -> None:
    prefetch = drive(1000, 5)
    now = 5.0
    for _ in range(10):
        now += 1.0
        prefetch.requested(2, 1)
        prefetch.update(now)
    assert prefetch.target <= 8
