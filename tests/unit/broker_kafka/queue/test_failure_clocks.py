"""Failure cases of markers queues about time: clocks that are wrong (E), or run on while nothing is heard (F)."""

from __future__ import annotations

import pytest

from broker_kafka.queue.markers.wire import Kind, Marker, MessageId, write_marker
from broker_kafka.queue.tracker.partition_state import LogClock
from tests.unit.broker_kafka.queue.simulation import FAR, TOPIC, expire, leased_queue


def test_e_times_of_several_producers_never_move_the_clock_backwards() -> None:
    clock = LogClock(at=0)
    seen = [clock.read(time, at) for at, time in enumerate([1_000, 5_000, 200, 4_999, 6_000])]
    assert seen == [1_000, 5_000, 5_000, 5_000, 6_000]


def test_e_a_lease_of_a_producer_with_a_slow_clock_is_not_due_at_once() -> None:
    queue = leased_queue()
    queue.send("late")
    held = MessageId(TOPIC, 0, 1)
    queue.position = 2
    queue.write(Marker(kind=Kind.START, id=held, after_ms=500), timestamp=queue.now - 100_000)
    queue.read()
    assert queue.tracker.due(10) == []
    queue.now += 499
    queue.read()
    assert queue.tracker.due(10) == []
    queue.now += 1
    queue.read()
    assert [lease.id for lease in queue.tracker.due(10)] == [held]


@pytest.mark.parametrize("period", [20_000, 600_000])
def test_e_one_marker_from_the_far_future_does_not_expire_everything(period: int) -> None:
    # What is left of a lease of 30 s when it is renewed, and a long one.
    queue = leased_queue(3, period=period)
    queue.now += 1_000
    queue.read()
    queue.append(write_marker(Marker(kind=Kind.END, id=MessageId(TOPIC, 9, 9))), timestamp=queue.now + 10**9)
    queue.append(write_marker(Marker(kind=Kind.END, id=MessageId(TOPIC, 9, 9))), timestamp=queue.now + 10**9)
    queue.read()
    assert queue.redeliver() == []
    now = queue.tracker.clock.now
    assert now is not None
    assert now <= queue.now + FAR.max_jump_ms


def test_f_the_clock_stops_while_the_log_is_not_read() -> None:
    queue = leased_queue()
    queue.now += 3_600_000
    assert queue.redeliver() == []
    queue.keep(queue.held[0])
    queue.read()
    assert queue.redeliver() == []
    expire(queue)
    assert len(queue.redeliver()) == 1


def test_f_an_end_written_during_a_cut_is_read_before_anything_is_due() -> None:
    queue = leased_queue(2)
    slow, _ = queue.held
    queue.now += 20_000
    queue.append(b"", timestamp=queue.now)
    queue.append(write_marker(Marker(kind=Kind.KEEPALIVE, id=MessageId(TOPIC, 9, 9))))
    queue.ack(slow)
    queue.now += 1
    for record in queue.log[2:4]:
        queue.tracker.read(record.offset, record.timestamp, record.data, queue.now)
        assert queue.tracker.due(10) == []
    assert queue.tracker.needs_end
    queue.tracker.log_end_known(len(queue.log), queue.now)
    assert queue.tracker.due(10) == []
    queue.read()
    assert [lease.id.offset for lease in queue.tracker.due(10)] == [1]


def test_f_unnoticed_silence_is_not_counted() -> None:
    clock = LogClock(at=0, stall_ms=10_000)
    clock.read(1_000, at=0)
    clock.caught_up(at=9_000)
    assert clock.now == 10_000
    clock.caught_up(at=60_000)
    assert clock.now == 10_000
    clock.caught_up(at=61_000)
    assert clock.now == 11_000


def test_f_the_clock_reports_its_lag() -> None:
    clock = LogClock(at=0)
    assert clock.lag(at=5_000) == 0
    clock.read(1_000, at=0)
    assert (clock.lag(at=0), clock.lag(at=5_000)) == (0, 5_000)
    clock.caught_up(at=6_000)
    assert clock.lag(at=6_000) == 0


def test_f_a_quiet_topic_does_not_delay_redelivery() -> None:
    queue = leased_queue()
    for _ in range(4):
        queue.now += 250
        queue.read()
    assert len(queue.redeliver()) == 1
