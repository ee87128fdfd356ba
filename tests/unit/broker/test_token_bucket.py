"""The rate that a token bucket allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker.token_bucket import TokenBucket


def test_tokens_come_at_the_rate() -> None:
    bucket = TokenBucket(2.0, 100.0)
    assert bucket.delay(100.0) == 0
    bucket.take(1, 100.0)
    assert bucket.delay(100.0) == 0.5
    assert bucket.delay(100.25) == 0.25
    assert bucket.delay(100.5) == 0


def test_a_tenth_of_a_second_is_saved_up() -> None:
    bucket = TokenBucket(50.0, 0.0)
    now = 1000.0
    for _ in range(5):
        assert bucket.delay(now) == 0
        bucket.take(1, now)
    assert bucket.delay(now) > 0


def test_a_batch_is_paid_for_by_the_next_tokens() -> None:
    bucket = TokenBucket(10.0, 0.0)
    bucket.take(100, 0.0)
    assert bucket.delay(0.0) == 10.0
    assert bucket.delay(10.0) == 0


@given(
    st.floats(0.01, 1e6),
    st.floats(0, 1e9),
    st.lists(st.tuples(st.integers(1, 100), st.floats(0, 10)), min_size=1, max_size=50),
)
def test_the_average_holds_for_every_history(rate: float, began: float, takes: list[tuple[int, float]]) -> None:
    bucket = TokenBucket(rate, began)
    now, taken, last = began, 0, 0
    for count, pause in takes:
        now += pause
        while (delay := bucket.delay(now)) > 0:
            now += delay
        bucket.take(count, now)
        taken, last = taken + count, count
    assert taken - last <= 1.01 * (rate * (now - began) + max(1.0, rate / 10)) + 1
