"""Compaction of a partition's log, with transactions and tombstones."""

from __future__ import annotations

import pytest

from broker import OutboundMessage, TopicNotFound, Unsupported, connect
from broker_inmem import Broker, BrokerOptions, InmemSettings, ManualClock
from broker_inmem.entries import Entry, TransactionState
from broker_inmem.partition_log import PartitionLog


def entry(key: str, data: bytes | None, time: float = 0.0, transaction: TransactionState | None = None) -> Entry:
    return Entry("table", 0, -1, -1, key.encode(), data, {}, None, None, time, 1, transaction=transaction)


def log_of(*entries: Entry) -> PartitionLog:
    log = PartitionLog()
    for each in entries:
        log.append(each)
    return log


def shown(log: PartitionLog) -> list[tuple[int, bytes | None, bytes | None]]:
    return [(each.offset, each.key, each.data) for each in log.entries]


def test_the_last_entry_of_each_key_stays_at_its_offset() -> None:
    log = log_of(entry("a", b"1"), entry("b", b"1"), entry("a", b"2"), entry("c", None))
    log.compact(tombstones_before=0.0)
    assert shown(log) == [(1, b"b", b"1"), (2, b"a", b"2"), (3, b"c", None)]
    assert log.bounds() == (0, 4)
    log.append(entry("b", b"2"))
    log.compact(tombstones_before=1.0)
    assert shown(log) == [(2, b"a", b"2"), (4, b"b", b"2")]
    found, position = log.read(1, 10, 1000, 0.0, committed=True)
    assert [each.offset for each in found] == [2, 4]
    assert position == 5


def test_an_open_transaction_supersedes_nothing_and_an_aborted_one_never_does() -> None:
    state = TransactionState()
    log = log_of(entry("a", b"1"), entry("a", b"2"), entry("a", b"3", transaction=state), entry("b", b"1"))
    log.compact(0.0)
    assert shown(log) == [(1, b"a", b"2"), (2, b"a", b"3"), (3, b"b", b"1")]
    state.open = False
    log.end_transaction(state)
    log.compact(0.0)
    assert shown(log) == [(1, b"a", b"2"), (3, b"b", b"1")]


async def test_tombstones_go_when_they_are_old() -> None:
    clock = ManualClock()
    server = Broker(BrokerOptions(tombstone_seconds=60.0), clock=clock)
    async with connect(InmemSettings(broker=server)) as bus:
        await bus.admin.ensure_topic("table", partitions=1, compacted=True)
        await bus.topic("table").publish_batch([OutboundMessage(b"1", "a"), OutboundMessage(None, "a")])
        server.compact("table")
        assert (await bus.admin.describe_topic("table")).messages == 1
        clock.advance(61.0)
        server.compact("table")
        assert (await bus.admin.describe_topic("table")).messages == 0


async def test_only_compacted_topics_are_compacted() -> None:
    server = Broker()
    async with connect(InmemSettings(broker=server)) as bus:
        await bus.admin.ensure_topic("log")
        with pytest.raises(Unsupported, match="log"):
            server.compact("log")
        with pytest.raises(TopicNotFound, match="missing"):
            server.compact("missing")
