"""When a tracker may rely on the position of a message's readers: once it has read what they wrote before."""

from __future__ import annotations

from broker_kafka.queue.markers.wire import TIME_MARKER, write_marker
from broker_kafka.queue.tracker.partition_state import PartitionState
from broker_kafka.queue.tracker.redelivery_checks import _KnownPositions


def test_everything_below_a_looked_up_end_is_read() -> None:
    partition = PartitionState(0, 0, at=0)
    assert partition.read_at < 0
    partition.log_end_known(0, at=10)
    assert partition.read_at == 10
    # Under load each answer comes when more was written.
    partition.log_end_known(2, at=20)
    partition.log_end_known(4, at=30)
    assert partition.read_at == 10
    for offset in range(2):
        partition.read(offset, 1_000, write_marker(TIME_MARKER), at=31)
    assert partition.read_at == 20
    partition.log_end_known(5, at=40)
    # The rest of these is not shown.
    partition.moved(5)
    assert partition.read_at == 40
    partition.log_end_known(5, at=50)
    assert partition.read_at == 50
    # An answer that was overtaken.
    partition.log_end_known(4, at=45)
    assert partition.read_at == 50


def test_a_position_is_known_since_it_was_first_learned() -> None:
    known = _KnownPositions()
    assert known.since(0) is None
    known.add(-1001, 1)
    assert known.since(0) is None
    known.add(5, 10)
    known.add(5, 20)
    known.add(7, 30)
    assert [known.since(offset) for offset in (0, 4, 5, 6, 7)] == [10, 10, 30, 30, None]
    for number in range(20):
        known.add(8 + number, 100 + number)
    # What is forgotten counts as known later, never sooner.
    assert 100 <= (known.since(0) or 0) <= 119
    assert known.since(27) is None
    known.add(3, 200)
    assert [known.since(offset) for offset in (2, 3)] == [200, None]
