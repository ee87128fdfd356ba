"""The contiguous offset tracker: examples, then properties over random histories."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.driver.as_messages.partition import OffsetTracker

OFFSETS = st.lists(st.integers(0, 1_000_000), unique=True, min_size=1, max_size=60).map(sorted)


def test_nothing_is_committable_before_something_is_finished() -> None:
    tracker = OffsetTracker()
    assert tracker.committable() is None
    tracker.started(0)
    assert tracker.committable() is None
    assert tracker.first_unfinished == 0


def test_position_is_one_above_the_highest_contiguous_offset_of_a_sparse_log() -> None:
    tracker = OffsetTracker()
    for offset in (1, 5, 9, 14):
        tracker.started(offset)
    assert tracker.finished(5) is False
    assert tracker.committable() is None
    assert tracker.gap == 1
    assert tracker.finished(1) is True
    assert tracker.committable() == 6
    tracker.committed(6)
    assert tracker.committable() is None
    tracker.finished(14)
    assert tracker.committable() is None
    tracker.finished(9)
    assert tracker.committable() == 15
    assert tracker.gap == 0
    assert tracker.first_unfinished is None


def test_a_lower_commit_does_not_undo_a_higher_one() -> None:
    tracker = OffsetTracker()
    tracker.started(3)
    tracker.finished(3)
    tracker.committed(4)
    tracker.committed(2)
    assert tracker.committable() is None


def test_finishing_twice_is_harmless() -> None:
    tracker = OffsetTracker()
    for offset in (0, 1, 2):
        tracker.started(offset)
    tracker.finished(2)
    tracker.finished(2)
    assert tracker.gap == 1
    tracker.finished(0)
    tracker.finished(0)
    assert tracker.committable() == 1
    assert tracker.unfinished == 1


def test_misuse_is_refused_and_changes_nothing() -> None:
    tracker = OffsetTracker()
    tracker.started(7)
    with pytest.raises(ValueError, match="7 was started after offset 7"):
        tracker.started(7)
    with pytest.raises(ValueError, match="8 was not started"):
        tracker.finished(8)
    assert tracker.unfinished == 1
    assert tracker.committable() is None


@given(offsets=OFFSETS, data=st.data())
def test_never_passes_an_unfinished_offset_and_never_falls(offsets: list[int], data: st.DataObject) -> None:
    tracker = OffsetTracker()
    waiting = list(offsets)
    unfinished: set[int] = set()
    done: set[int] = set()
    highest = -1
    while waiting or unfinished:
        if waiting and (not unfinished or data.draw(st.booleans(), label="start")):
            offset = waiting.pop(0)
            tracker.started(offset)
            unfinished.add(offset)
        else:
            offset = data.draw(st.sampled_from(sorted(unfinished)), label="finish")
            tracker.finished(offset)
            unfinished.discard(offset)
            done.add(offset)
        position = tracker.committable()
        if position is not None:
            assert position > highest, "only growth is committable"
            assert all(open_offset >= position for open_offset in unfinished)
            assert position - 1 in done, "the position is one above a finished offset"
            if data.draw(st.booleans(), label="commit"):
                tracker.committed(position)
                highest = position
        assert tracker.unfinished == len(unfinished)
        assert tracker.first_unfinished == min(unfinished, default=None)
    final = tracker.committable()
    assert (final or highest) == offsets[-1] + 1
    assert tracker.gap == 0


@given(offsets=OFFSETS, data=st.data())
def test_restarts_lose_nothing(offsets: list[int], data: st.DataObject) -> None:
    """A crash at any moment starts again from the committed position: every offset is finished in the end."""
    position = 0
    finished_ever: set[int] = set()
    for _ in range(data.draw(st.integers(0, 4), label="crashes")):
        tracker = OffsetTracker()
        batch = [offset for offset in offsets if offset >= position]
        for offset in batch:
            tracker.started(offset)
        for offset in data.draw(st.lists(st.sampled_from(batch), unique=True), label="finished") if batch else []:
            tracker.finished(offset)
            finished_ever.add(offset)
        position = tracker.committable() or position
    skipped = {offset for offset in offsets if offset < position} - finished_ever
    assert not skipped


@settings(deadline=None)
@given(stuck=st.integers(0, 5))
def test_thousands_of_offsets_above_a_stuck_one_stay_cheap(stuck: int) -> None:
    tracker = OffsetTracker()
    count = 50_000
    for offset in range(count):
        tracker.started(offset)
    began = time.thread_time()
    for offset in range(count):
        if offset != stuck:
            tracker.finished(offset)
    assert tracker.gap == count - 1 - stuck
    tracker.finished(stuck)
    assert tracker.committable() == count
    assert time.thread_time() - began < 20, "quadratic work would take minutes"
