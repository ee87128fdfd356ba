"""How long a partition pauses after unknown outcomes in a row, and when operators are warned."""

from __future__ import annotations

import pytest

from broker_kafka.queue.tracker.tracked_partition import FailureBackoff

JITTER = 0.21
"""The relative spread of a pause, and a little for rounding."""


def test_pauses_grow_up_to_a_minute() -> None:
    failures, now, pauses = FailureBackoff(), 100.0, list[float]()
    for _ in range(12):
        pauses.append(failures.add("why", now))
        now += pauses[-1] + 1.0
    assert pauses == pytest.approx([0, 0, 0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60], rel=JITTER)


def test_operators_are_warned_once_per_row() -> None:
    failures, now, warnings, seconds = FailureBackoff(), 100.0, 0, 0.0
    for count in range(1, 9):
        now += seconds
        seconds = failures.add(f"why {count}", now)
        warnings += failures.is_warning_due
        assert failures.trouble(now) == (f"why {count}" if count >= 5 else "")
    assert warnings == 1
    assert failures.trouble(now + seconds + 29) == "why 8"
    assert failures.trouble(now + seconds + 30) == ""
    now += seconds + 31
    assert failures.add("another row", now) == 0
    assert failures.trouble(now) == ""


def test_a_single_failure_now_and_then_costs_no_pause() -> None:
    failures = FailureBackoff()
    assert [failures.add("why", 40.0 * number) for number in range(20)] == [0.0] * 20
