"""Counting and cutting batches at scattered positions."""

from __future__ import annotations

import pytest

from broker.driver.optional import Span
from broker_spark.log.ranges import after, batches_in, below, cut

LEDGERS = [Span(100, 140, 10), Span(1000, 1025, 10)]
"""Four batches, and three whose last one is not full."""


def test_batches_are_counted():
    assert batches_in(LEDGERS) == 7
    assert batches_in([]) == 0
    # From inside a batch, only the next batches count; the rest of a batch counts if it is alone.
    assert batches_in([Span(104, 140, 10)]) == 3
    assert batches_in([Span(104, 110, 10)]) == 1
    assert batches_in(below(LEDGERS, 1001)) == 5


@pytest.mark.parametrize(
    ("batches", "position"), [(1, 110), (3, 130), (4, 140), (5, 1010), (6, 1020), (7, 1025), (9, 1025)]
)
def test_the_position_after_a_number_of_batches(batches: int, position: int):
    assert after(LEDGERS, batches, 1025) == position


def test_cuts_lie_between_batches_and_cover_the_range():
    assert cut(LEDGERS, 100, 1025, 1) == [100]
    assert cut(LEDGERS, 100, 1025, 2) == [100, 130]
    assert cut(LEDGERS, 100, 1025, 50) == [100, 110, 120, 130, 140, 1010, 1020]
    # The range that retention removed belongs to the first task, which reports it.
    assert cut(LEDGERS, 7, 1025, 2) == [7, 130]
    assert cut([], 7, 1025, 4) == [7]
