"""Failure cases of markers queues that are known by letter, each as a test that a tracker without the remedy fails.

A gate is missing (A), START twice while on its way (C), an old deadline (D), a hung handler (G), a close with messages
in hand (I), what cannot be sent (K), a storm (L), poison and lost headers (N), a marker topic that grew (O). Those of
clocks (E, F) are in `test_failure_clocks.py`.
"""

from __future__ import annotations

import pytest

from broker_kafka.queue.consumer.start_builder import marker_partition
from broker_kafka.queue.markers.redelivery import ATTEMPTS, attempts_of, origin_of, redelivery
from broker_kafka.queue.markers.wire import Content, Kind, Marker, MessageId, Origin, read_content, write_marker
from broker_kafka.queue.tracker.partition_state import PartitionOptions, PartitionState
from tests.unit.broker_kafka.queue.simulation import FAR, TOPIC, Simulation, expire, leased_queue


def names(queue: Simulation) -> list[bytes | None]:
    return [message.value for message in queue.messages]


# -- A: a tracker that starts again ----------------------------------------------------------------------------


def test_a_a_restart_repeats_no_redelivery_whose_end_follows_its_deadline() -> None:
    queue = leased_queue(3)
    expire(queue)
    queue.append(b"")
    queue.now += 5_000
    queue.redeliver()
    assert len(queue.messages) == 6
    queue.restart()
    for _ in queue.log:
        queue.read(1)
        assert queue.redeliver() == []
    assert len(queue.messages) == 6


@pytest.mark.deep
def test_a_a_restart_over_a_hundred_thousand_ended_messages_redelivers_none() -> None:
    partition = PartitionState(0, 200_000, at=0, options=FAR)
    for number in range(100_000):
        message = MessageId(TOPIC, 0, number)
        start = write_marker(Marker(kind=Kind.START, id=message, after_ms=10))
        partition.read(2 * number, 1_000 + 100 * number, start, at=1)
        assert not partition.due(1)
        end = write_marker(Marker(kind=Kind.END, id=message))
        partition.read(2 * number + 1, 1_050 + 100 * number, end, at=1)
    partition.log_end_known(200_000, at=2)
    assert partition.is_open
    assert not partition.due(1)
    assert partition.to_commit() == 200_000
    assert len(partition.markers) == partition.markers.bytes == 0


def test_a_the_gate_of_an_empty_partition_is_open() -> None:
    assert PartitionState(0, 0, at=0).is_open
    assert PartitionState(7, 7, at=0).is_open
    assert not PartitionState(6, 7, at=0).is_open


def test_a_invisible_records_of_transactions_open_the_gate() -> None:
    partition = PartitionState(0, 3, at=0)
    partition.read(0, 1_000, None, at=1)
    assert not partition.is_open
    partition.moved(3)
    assert partition.is_open
    assert partition.to_commit() == 3


# -- C, D: one message that is started twice -------------------------------------------------------------------


def test_c_the_end_of_a_redelivery_closes_a_second_start() -> None:
    queue = leased_queue()
    queue.now += queue.period
    queue.read()
    (lease,) = queue.tracker.due(1)
    queue.position = 0
    queue.take()
    queue.read()
    assert not queue.tracker.due(1)
    queue.write(Marker(kind=Kind.END, id=lease.id))
    queue.read()
    assert len(queue.tracker.markers) == 0


def test_c_a_redelivery_that_fails_after_a_second_start_is_retried() -> None:
    queue = leased_queue()
    expire(queue)
    (lease,) = queue.tracker.due(1)
    queue.position = 0
    queue.take()
    queue.read()
    queue.tracker.failed(lease, 100)
    assert not queue.tracker.due(1)
    queue.now += 100
    queue.read()
    assert queue.tracker.due(1) == [lease]


def test_c_a_second_start_counts_although_the_first_was_due() -> None:
    queue = Simulation(options=FAR)
    queue.send("later")
    queue.take(commits=False, delay=1000)
    queue.read()
    expire(queue)
    (lease,) = queue.tracker.due(1)
    held = queue.take()
    assert held is not None
    queue.read()
    queue.tracker.failed(lease, lease.after_ms)
    queue.now += 900
    queue.keep(held)
    queue.now += 900
    queue.read()
    assert not queue.tracker.due(1)
    queue.now += 100
    queue.read()
    assert queue.tracker.due(1) == [lease]


def test_d_start_end_start_counts_from_the_second_start() -> None:
    queue = leased_queue()
    queue.now += 900
    queue.ack(queue.held[0])
    queue.position = 0
    queue.take()
    queue.read()
    queue.now += 999
    queue.read()
    assert queue.redeliver() == []
    queue.now += 1
    queue.read()
    assert len(queue.redeliver()) == 1


def test_each_queue_of_a_topic_tracks_its_own_leases() -> None:
    queue = leased_queue()
    other = MessageId(TOPIC, 0, 0, "other")
    queue.write(Marker(kind=Kind.START, id=other, after_ms=1000))
    queue.write(Marker(kind=Kind.END, id=other))
    expire(queue)
    assert [lease.id.queue for lease in queue.redeliver()] == ["q"]


# -- G: a handler that hangs -----------------------------------------------------------------------------------


def test_g_a_lease_that_is_renewed_forever_does_not_pin_the_log() -> None:
    queue = Simulation(options=PartitionOptions(renew_distance=10))
    queue.send("hung")
    hung = queue.take()
    assert hung is not None
    for number in range(200):
        queue.keep(hung)
        queue.send(f"m{number}")
        held = queue.take()
        assert held is not None
        queue.ack(held)
        queue.read()
        queue.renew()
        queue.renewals_arrive()
        queue.read()
        queue.commit()
        assert queue.committed >= len(queue.log) - 20
    queue.restart()
    queue.read()
    assert [lease.id for lease in queue.tracker.markers] == [hung.id]
    assert queue.tracker.due(1) == []
    expire(queue)
    queue.redeliver()
    assert names(queue)[-1] == b"hung"


def test_g_renewals_do_not_postpone_the_lease_of_a_dead_holder() -> None:
    queue = Simulation(options=PartitionOptions(renew_distance=2))
    queue.send("orphan")
    queue.take()
    begun = queue.now
    while len(queue.messages) == 1:
        queue.now += 100
        for _ in range(3):
            queue.append(write_marker(Marker(kind=Kind.END, id=MessageId(TOPIC, 9, 9))))
        queue.read()
        queue.renew()
        queue.renewals_arrive()
        queue.redeliver()
        assert queue.now <= begun + 1_100


# -- I: a close with messages in hand --------------------------------------------------------------------------


def test_i_a_message_released_at_a_close_is_due_at_once_and_costs_no_attempt() -> None:
    queue = leased_queue()
    queue.release(queue.held[0], 0, counts=False)
    queue.read()
    queue.redeliver()
    held = queue.take()
    assert held is not None
    assert held.attempt == 1


def test_i_a_late_keepalive_does_not_change_a_delay() -> None:
    queue = leased_queue()
    held = queue.held[0]
    queue.release(held, 5_000)
    queue.keep(held)
    queue.read()
    queue.now += 4_999
    queue.read()
    assert queue.redeliver() == []
    queue.restart()
    queue.now += 1
    queue.read()
    assert queue.redeliver() == []
    queue.read()
    queue.redeliver()
    again = queue.take()
    assert again is not None
    assert (again.sending.value, again.attempt) == (b"m0", 2)


# -- K, L: sending ---------------------------------------------------------------------------------------------


def test_k_a_failed_redelivery_is_retried_and_stays_pinned() -> None:
    queue = leased_queue(2)
    expire(queue)
    for _ in range(5):
        assert len(queue.redeliver(fails=True)) == 2
        assert queue.redeliver() == []
        queue.now += 100
        queue.read()
        assert queue.tracker.to_commit() is None
    assert len(queue.redeliver()) == 2


def test_k_a_retry_is_due_since_its_first_deadline_until_a_marker_moves_it() -> None:
    queue = leased_queue(2)
    expire(queue)
    due = queue.now
    for _ in range(3):
        assert [lease.due_since for lease in queue.redeliver(fails=True)] == [due, due]
        queue.now += 100
        queue.read()
    queue.keep(queue.held[0])
    expire(queue)
    assert [lease.due_since for lease in queue.redeliver()] == [due, queue.now]


def test_l_many_due_leases_are_taken_in_batches_and_in_order() -> None:
    queue = leased_queue(1_000)
    expire(queue)
    for begin in range(0, 1_000, 100):
        assert [lease.id.offset for lease in queue.redeliver(100)] == list(range(begin, begin + 100))
    assert queue.redeliver() == []


# -- N: headers and poison -------------------------------------------------------------------------------------


def test_n_a_redelivery_keeps_key_headers_and_origin_and_counts() -> None:
    content = Content(key=b"k", value=b"v", headers=(("a", b"1"), ("a", None)), origin=None)
    queue = leased_queue()
    lease = next(iter(queue.tracker.markers))
    first = redelivery(lease, content)
    assert (first.topic, first.key, first.value) == (TOPIC, b"k", b"v")
    assert first.headers[:2] == (("a", b"1"), ("a", None))
    assert attempts_of(first.headers) == 1
    assert origin_of(first.headers, TOPIC) == Origin(TOPIC, 0, 0, 0)
    lease.attempt = 2
    lease.id = MessageId(TOPIC, 3, 99, "q")
    second = redelivery(lease, Content(headers=first.headers, origin=origin_of(first.headers, TOPIC)))
    assert attempts_of(second.headers) == 2
    assert origin_of(second.headers, TOPIC) == Origin(TOPIC, 0, 0, 0)
    assert [name for name, _ in second.headers].count(ATTEMPTS) == 1


def test_n_a_poison_message_is_dead_lettered_whole() -> None:
    queue = leased_queue(max_attempts=3)
    for _ in range(3):
        queue.read()
        expire(queue)
        queue.redeliver()
        queue.take()
    assert len(queue.messages) == 3
    (letter,) = queue.dead
    assert (letter.topic, letter.key, letter.value) == ("dead", b"key", b"m0")
    assert dict(letter.headers) == {
        "dead-letter-reason": b"delivered too often",
        "dead-letter-attempts": b"3",
        "dead-letter-topic": b"orders",
        "dead-letter-subscription": b"q",
        "dead-letter-id": b"m0",
        "dead-letter-time": b"1970-01-01T00:16:43+00:00",
        # Of the first record, and not of the one that was sent last.
        "dead-letter-partition": b"0",
        "dead-letter-offset": b"0",
    }
    queue.read()
    assert len(queue.tracker.markers) == 0


def test_n_an_invalid_attempt_count_is_ignored() -> None:
    for value in (b"", b"-1", b"x", b"9" * 30, None):
        assert attempts_of(((ATTEMPTS, value),)) == 0


def test_n_an_attempt_count_never_falls() -> None:
    for count in (10**9, 2**31 - 2, 2**31 - 1):
        queue = leased_queue()
        lease = next(iter(queue.tracker.markers))
        lease.attempt = count
        delivery = attempts_of(redelivery(lease, Content()).headers) + 1
        assert lease.attempt <= delivery < 2**31
        # It fits into the START of that delivery.
        write_marker(Marker(kind=Kind.START, id=lease.id, attempt=delivery))
    assert attempts_of(((ATTEMPTS, b"9" * 10),)) + 1 == 2**31 - 1


# -- O: more marker partitions ---------------------------------------------------------------------------------


def test_o_a_queue_is_spread_over_the_marker_partitions() -> None:
    places = {marker_partition(MessageId(TOPIC, number, 5, "q"), 8) for number in range(8)}
    assert places == set(range(8))


def test_o_markers_of_a_source_partition_share_a_partition() -> None:
    assert len({marker_partition(MessageId(TOPIC, 3, offset, "q"), 8) for offset in range(100)}) == 1


# -- wire ------------------------------------------------------------------------------------------------------


def test_what_is_no_marker_is_passed_over_and_counted() -> None:
    queue = leased_queue()
    queue.append(b"garbage")
    queue.append(b"")
    queue.ack(queue.held[0])
    queue.read()
    assert queue.tracker.unknown == 2
    assert queue.tracker.to_commit() == len(queue.log)


def test_v1_markers_are_redelivered_too() -> None:
    queue = Simulation(options=FAR)
    message = MessageId("", 4, 7)
    content = Content(key=b"queue", value=b"payload")
    queue.append(write_marker(Marker(kind=Kind.START, id=message, after_ms=1000), content, v1=True))
    queue.read()
    queue.now += 1000
    queue.read()
    (lease,) = queue.tracker.due(10)
    sending = redelivery(lease, read_content(lease.data))
    assert (sending.key, sending.value, attempts_of(sending.headers)) == (b"queue", b"payload", 1)


def test_a_marker_may_name_many_messages() -> None:
    queue = leased_queue(3)
    first, second, third = [held.id for held in queue.held]
    queue.now += 900
    queue.write(Marker(kind=Kind.KEEPALIVE, id=first, more=(second.offset, third.offset), after_ms=1000))
    queue.read()
    queue.now += 999
    queue.read()
    assert queue.redeliver() == []
    queue.write(Marker(kind=Kind.END, id=second, more=(third.offset,)))
    queue.now += 1
    queue.read()
    assert [lease.id for lease in queue.redeliver()] == [first]
