"""How long a partition rests after doubts in a row, and when that is told."""

from __future__ import annotations

from broker_kafka.queue.tracker.tracked_partition import FailureBackoff


def test_doubts_in_a_row_have_it_rest_ever_longer_up_to_a_minute() -> None:
    doubts, now, rests = FailureBackoff(), 100.0, list[float]()
    for _ in range(12):
        rests.append(doubts.add("why", now))
        now += rests[-1] + 1.0
    assert rests == [0, 0, 0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_they_are_told_once_and_are_trouble_until_there_are_none_for_a_while() -> None:
    doubts, now, told, rest = FailureBackoff(), 100.0, 0, 0.0
    for count in range(1, 9):
        now += rest
        rest = doubts.add(f"why {count}", now)
        told += doubts.is_warning_due
        assert doubts.trouble(now) == (f"why {count}" if count >= 5 else "")
    assert told == 1
    assert doubts.trouble(now + rest + 29) == "why 8"
    assert doubts.trouble(now + rest + 30) == ""
    # It is told again when it comes again.
    now += rest + 31
    assert doubts.add("anew", now) == 0
    assert doubts.trouble(now) == ""


def test_one_now_and_then_costs_no_rest() -> None:
    doubts = FailureBackoff()
    assert [doubts.add("why", 40.0 * number) for number in range(20)] == [0.0] * 20
