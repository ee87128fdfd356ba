"""How many messages a tracker may send again: as many as in a second at once, and then by the clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_kafka.queue.tracker.redeliverer import RedeliveryRate


def test_a_burst_of_one_second_and_then_the_rate() -> None:
    rate = RedeliveryRate(1000)
    assert (rate.room(5.0), rate.pause(5.0)) == (1000, 0.0)
    rate.spend(1000)
    assert rate.room(5.0) == 0
    assert rate.pause(5.0) == pytest.approx(0.05)
    assert rate.room(5.0625) == 62
    rate.spend(62)
    # What was not used for long is no more than that of a second.
    assert rate.room(3600.0) == 1000


def test_the_lowest_rate_is_one_a_second() -> None:
    rate = RedeliveryRate(1)
    rate.spend(rate.room(0.0))
    assert rate.pause(0.0) == 1.0
    assert rate.room(1.0) == 1


@given(st.integers(1, 10_000), st.lists(st.tuples(st.floats(0, 2), st.integers(0, 20_000)), max_size=50))
def test_no_more_is_sent_than_a_burst_and_the_rate(per_second: int, turns: list[tuple[float, int]]) -> None:
    rate, now, sent = RedeliveryRate(per_second), 0.0, 0
    rate.room(now)
    for seconds, wanted in turns:
        now += seconds
        count = min(wanted, rate.room(now))
        rate.spend(count)
        sent += count
        assert sent <= per_second * (now + 1) + 1
        if rate.room(now) == 0:
            assert rate.room(now + rate.pause(now) + 1e-9) >= 1
