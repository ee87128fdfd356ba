"""Records, the log and transactions without await."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

import broker.blocking
from broker.consumer_state import ConsumerState
from broker.driver.contract import TopicPartition
from tests.unit.broker.blocking.common import TOPIC, publish


def test_records_one_by_one_by_batch_and_committed(bus: broker.blocking.Bus) -> None:
    publish(bus, 10)
    with bus.records(TOPIC, group="audit") as log:
        first = log.next_record()
        assert first is not None
        assert (first.partition, first.offset, first.key, first.data, first.payload) == (0, 0, b"k", b"0", b"0")
        first.commit()
        assert log.committed() == {(TOPIC, 0): 1}
        batch = log.next_batch(4, timeout=5)
        assert [record.offset for record in batch] == list(range(1, 1 + len(batch)))
        batch.commit()
        assert batch.to_arrow().num_rows == len(batch)
        ((place, part),) = batch.by_partition().items()
        assert (place, [record.offset for record in part]) == ((TOPIC, 0), [record.offset for record in batch])
        for record in log:
            if record.offset == 9:
                break
        log.commit()
        assert log.assignment() == [(TOPIC, 0)]
        log.seek({(TOPIC, 0): 8})
        log.pause()
        assert log.next_record(timeout=0.01) is None
        log.resume()
        assert [record.offset for record in log.next_batch(10, timeout=5)] == [8, 9]
    assert log.closed
    with bus.records(TOPIC, group="audit", stop_when_idle=0.2) as log:
        assert list(log.batches()) == []


def test_records_as_messages(bus: broker.blocking.Bus) -> None:
    publish(bus, 10)
    seen: list[bytes | None] = []
    with bus.records(TOPIC, group="audit").as_messages(stop_when_idle=0.2) as inbox:
        for message in inbox:
            with message:
                seen.append(message.data)
    assert seen == [b"%d" % n for n in range(10)]
    assert bus.admin.lag(TOPIC, "audit").waiting == 0


def test_log_reader_reads_without_a_group(bus: broker.blocking.Bus) -> None:
    publish(bus, 10)
    assert list(bus.log.partitions(TOPIC)) == [0]
    batches = bus.log.read(TOPIC, 0, 2, 7, max_records=2)
    assert [record.offset for batch in batches for record in batch] == [2, 3, 4, 5, 6]
    for batch in bus.log.read(TOPIC, 0, max_records=3):
        assert [record.data for record in batch] == [b"0", b"1", b"2"]
        break


def test_transaction_publishes_all_or_nothing(bus: broker.blocking.Bus) -> None:
    bus.admin.ensure_topic("totals", partitions=1)
    publish(bus, 4)
    with (
        bus.records(TOPIC, group="sums") as log,
        bus.transactional_publisher("sums-1") as publisher,
    ):
        with pytest.raises(ZeroDivisionError), publisher.transaction(log) as tx:
            assert len(log.next_batch(10, timeout=5)) >= 1
            tx.publish("totals", b"half")
            raise ZeroDivisionError
        total = 0
        while total < 4:
            with publisher.transaction(log) as tx:
                batch = log.next_batch(10, timeout=5)
                bodies = [record.data or b"" for record in batch]
                assert len(tx.publish_batch("totals", bodies[:1])) == 1
                tx.publish_batch("totals", bodies[1:], receipts=False)
                total += len(batch)
    with bus.records("totals", group="reader", stop_when_idle=0.2) as results:
        assert [record.data for record in results] == [b"0", b"1", b"2", b"3"]
    assert bus.admin.lag(TOPIC, "sums").waiting == 0


def test_revoking_callback_runs_in_a_thread_and_may_commit(bus: broker.blocking.Bus) -> None:
    bus.admin.ensure_topic("pairs", partitions=2)
    publish(bus, 1, topic="pairs")
    revoked: list[TopicPartition] = []
    done = threading.Event()

    def on_revoking(partitions: Sequence[TopicPartition]) -> None:
        first.commit()
        revoked.extend(partitions)
        done.set()

    first = bus.records("pairs", group="audit", on_revoking=on_revoking)
    with first:
        record = first.next_record()
        assert record is not None
        assert first.state is ConsumerState.RUNNING
        with bus.records("pairs", group="audit") as second:
            second.next_record(timeout=0.01)
            assert done.wait(timeout=10)
            assert len(revoked) == 1
    assert bus.admin.lag("pairs", "audit").waiting == 0


def test_on_assigned_runs_in_a_thread_and_may_seek(bus: broker.blocking.Bus) -> None:
    publish(bus, 4)
    called: list[TopicPartition] = []

    def on_assigned(partitions: Sequence[TopicPartition]) -> None:
        log.seek(dict.fromkeys(partitions, 2))
        called.extend(partitions)

    log = bus.records(TOPIC, group="states", on_assigned=on_assigned, stop_when_idle=0.2)
    with log:
        assert [record.offset for record in log] == [2, 3]
    assert [partition.topic for partition in called] == [TOPIC]


def test_an_error_of_on_assigned_is_raised_by_the_next_call(bus: broker.blocking.Bus) -> None:
    publish(bus, 1)

    def on_assigned(_: Sequence[TopicPartition]) -> None:
        raise ZeroDivisionError

    with bus.records(TOPIC, group="states", on_assigned=on_assigned) as log, pytest.raises(ZeroDivisionError):
        log.next_record()


def test_some_records_are_committed(bus: broker.blocking.Bus) -> None:
    publish(bus, 3)
    with bus.records(TOPIC, group="some") as log:
        first, second, _ = [log.next_record(timeout=5) for _ in range(3)]
        assert first is not None
        assert second is not None
        log.commit_records([first, second])
        (partition,) = log.assignment()
        assert log.committed() == {partition: second.offset + 1}


def test_own_positions_are_committed(bus: broker.blocking.Bus) -> None:
    bus.admin.ensure_topic("totals", partitions=1)
    publish(bus, 10)
    done: dict[TopicPartition, int] = {}
    with bus.records(TOPIC, group="sums") as log, bus.transactional_publisher("sums-1") as publisher:
        assert len([log.next_record(timeout=5) for _ in range(10)]) == 10
        (partition,) = log.assignment()
        log.commit_positions({partition: 2})
        assert log.committed() == {partition: 2}
        with publisher.transaction(log, positions=lambda: done) as tx:
            tx.publish("totals", b"1")
            done[partition] = 4
        assert log.committed() == {partition: 4}
        with pytest.raises(ZeroDivisionError), publisher.transaction(log, positions=lambda: done[1 // 0]):  # type: ignore[index]
            pass
        with publisher.transaction(log, positions={partition: 4}) as tx:
            tx.publish("totals", b"2")
    with bus.records("totals", group="reader", stop_when_idle=0.2) as results:
        assert [record.data for record in results] == [b"1", b"2"]
