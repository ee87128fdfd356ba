"""The spool, called as Spark calls its reader but without Spark, so that each step can be checked."""

from __future__ import annotations

import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyarrow.fs import LocalFileSystem
from pyspark.sql.streaming.datasource import ReadAllAvailable

import broker_spark
from broker.blocking import Bus, connect
from broker.errors import BackendError, ConfigurationError
from broker.messages import Message
from broker_spark.common.files import StoredFiles
from broker_spark.spool import lease, receiver, source
from tests.servers import nats
from tests.spark.conftest import MakeTopic
from tests.spark.spool_query import SECONDS, MakeQuery, Query, segments, settled
from tests.spark.support import numbered, publish


@pytest.fixture
def url() -> str:
    """Short leases, so that messages of a killed process are soon redelivered."""
    return f"{nats.shared_server().url}?lease_seconds=2"


def test_a_queue_is_drained_in_bounded_batches(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery, tmp_path: Path
) -> None:
    topic = make_topic()
    bus.admin.ensure_subscription(topic, "spark")
    publish(bus, topic, numbered(500))
    query = make_query(topic, maxRows=120, tasks=2)
    batches = list(query.begin(drain=True).batches())
    assert sorted(row for batch in batches for row in batch) == sorted(numbered(500))
    assert max(map(len, batches)) <= 120
    assert settled(bus, topic)
    # The spool has all of the batch that Spark may run again, and nothing of committed ones.
    assert query.at["next"] >= 5
    query.reader.commit(query.at)
    assert segments(tmp_path / "spool") == []

    query.reader.stop()
    publish(bus, topic, numbered(50, start=500))
    assert [row for batch in query.begin(drain=True).batches() for row in batch] == numbered(50, start=500)


def test_columns_are_those_of_a_message(bus: Bus, make_topic: MakeTopic, make_query: MakeQuery) -> None:
    topic = make_topic()
    bus.admin.ensure_subscription(topic, "spark")
    publish(bus, topic, [b"one"])
    query = make_query(topic).begin(drain=True)
    end = query.reader.latestOffset(query.at, ReadAllAvailable())
    (rows,) = query.tables(query.at, end)
    assert list(rows) == list(broker_spark.COLUMNS)
    assert (rows["topic"], rows["key"], rows["value"], rows["delivery_attempt"]) == ([topic], [b"one"], [b"one"], [1])
    assert rows["offset"] == [1]
    assert rows["partition"] == [None]
    assert rows["broker_time"][0] >= rows["publish_time"][0]
    assert broker_spark.lag({"sources": [{"endOffset": query.at, "latestOffset": query.reader.reportLatestOffset()}]})
    few = make_query(topic, query.options.spool, columns="key,value")
    query.reader.stop()
    few.begin()
    (rows,) = few.tables(few.at, end)
    assert rows == {"key": [b"one"], "value": [b"one"]}


def test_receiving_continues_during_a_batch_up_to_a_limit(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A segment is full before it ends, whatever is held up.
    monkeypatch.setattr(receiver, "LINGER", SECONDS)
    topic = make_topic()
    bus.admin.ensure_subscription(topic, "spark")
    publish(bus, topic, numbered(1000))
    query = make_query(topic, maxRows=50, aheadRows=150).begin()
    first = query.until(50)
    assert len(first) == 50
    # No batch is requested, as while Spark works: the spool fills up to the limit, and the rest stays at the broker.
    spool = query.reader._spool
    assert spool is not None
    with spool.changed:
        assert spool.changed.wait_for(lambda: spool.next - query.at["next"] == 3, SECONDS)
        assert not spool.changed.wait(0.5)
    assert spool.ahead()[0] == 150
    assert sorted(first + query.until(950)) == sorted(numbered(1000))


def test_only_messages_of_an_earlier_query_are_warned_of(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery, caplog: pytest.LogCaptureFixture
) -> None:
    topic = make_topic()
    bus.admin.ensure_subscription(topic, "spark")
    query = make_query(topic).begin()
    publish(bus, topic, numbered(5))
    spool = query.reader._spool
    assert spool is not None
    with spool.changed:
        assert spool.changed.wait_for(lambda: spool.added == 5, SECONDS)
    # Spark calls it again before the first batch.
    assert query.reader.initialOffset()["next"] == 0
    assert caplog.messages == []
    query.reader.stop()
    assert make_query(topic, query.options.spool).begin().at["next"] == 0
    (warning,) = caplog.messages
    assert "are read again" in warning


def test_few_rows_wait_for_more(bus: Bus, make_topic: MakeTopic, make_query: MakeQuery, tmp_path: Path) -> None:
    topic = make_topic()
    query = make_query(topic, minRows=10, maxDelay=3600).begin()
    publish(bus, topic, numbered(9))
    assert settled(bus, topic)
    assert query.batch() is None
    publish(bus, topic, numbered(1, 9))
    assert sorted(query.until(10)) == sorted(numbered(10))
    query.reader.stop()
    hasty = make_query(topic, minRows=10, maxDelay=0.001)
    hasty.at = query.at
    hasty.begin()
    publish(bus, topic, numbered(3))
    assert sorted(hasty.until(3)) == sorted(numbered(3))


def test_one_query_owns_a_spool_until_it_ends(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LOCAL_WAIT_SECONDS", 0.3)
    topic = make_topic()
    first = make_query(topic).begin()
    with pytest.raises(
        ConfigurationError, match=r"belongs to another query: process \d+ on .*Stop that query, or give"
    ):
        make_query(topic).begin()
    publish(bus, topic, numbered(3))
    assert sorted(first.until(3)) == sorted(numbered(3))
    first.reader.stop()
    second = make_query(topic)
    second.at = first.at
    publish(bus, topic, numbered(2, 3))
    assert sorted(second.begin().until(2)) == sorted(numbered(2, 3))


def test_an_owner_declared_dead_acks_nothing_more(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = make_topic()
    first = make_query(topic).begin()
    publish(bus, topic, numbered(5))
    before = first.until(5)
    # It is blocked so long that another host considers it dead.
    monkeypatch.setattr(lease, "_is_dead", lambda *_: True)
    second = make_query(topic)
    second.at = first.at
    second.begin()
    publish(bus, topic, numbered(200, 5))
    got = second.until(1)
    with pytest.raises(ConfigurationError, match="Another query took over this spool: process"):
        for _ in range(20):
            first.batch()
    first.reader.commit(first.at)
    while len(got) < 200:
        got += second.until(1)
    assert sorted(before + got) == sorted(numbered(205))
    assert settled(bus, topic)


def test_an_owner_on_another_machine_is_dead_without_heartbeats(
    make_topic: MakeTopic, make_query: MakeQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "HEARTBEAT_SECONDS", 0.1)
    topic = make_topic()
    first = make_query(topic).begin()
    monkeypatch.setattr(lease, "_machine", lambda: "another")
    beating = make_query(topic)
    with pytest.raises(ConfigurationError, match="belongs to another query"):
        beating.begin()
    assert first.batch() is None
    monkeypatch.setattr(lease, "DEAD_AFTER_SECONDS", 0.3)
    assert first.reader._receiver is not None
    first.reader._receiver.stop()
    beating.begin()


def kill_forgetfully(server: nats.NatsServer) -> None:
    """Restart it without the acks and deliveries that it confirmed before it wrote them."""
    server.kill()
    states = list(server.directory.glob("store/**/o.dat"))
    assert states
    for state in states:
        state.unlink()
    server.start()


def rows_kept(spool: Path) -> int:
    """The rows in the files of a spool."""
    return sum(int(name.split("-")[2]) for name in segments(spool))


def test_redeliveries_of_a_broker_that_forgot_acks_are_dropped(tmp_path: Path) -> None:
    with nats.NatsServer() as server, connect(server.url) as bus:
        bus.admin.ensure_topic("jobs", partitions=2)
        query = Query(f"{server.url}?lease_seconds=2", "jobs", tmp_path / "spool").begin()
        try:
            publish(bus, "jobs", numbered(50))
            assert sorted(query.until(50)) == sorted(numbered(50))
            assert settled(bus, "jobs")
            kill_forgetfully(server)
            publish(bus, "jobs", numbered(10, 50))
            assert sorted(query.until(10)) == sorted(numbered(10, 50))
            assert settled(bus, "jobs")
            assert query.batch() is None
            assert query.reader._receiver is not None
            assert query.reader._receiver._dropped == 50
            # No duplicates either if the query ended with the broker: the spool recognizes its rows.
            query.reader.stop()
            kept = rows_kept(tmp_path / "spool")
            assert kept
            kill_forgetfully(server)
            publish(bus, "jobs", numbered(5, 60))
            assert len(query.begin().until(65 - kept)) == 65 - kept
            assert settled(bus, "jobs")
            assert query.batch() is None
        finally:
            query.reader.stop()


def test_a_new_checkpoint_begins_with_what_the_spool_holds(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery
) -> None:
    topic = make_topic()
    query = make_query(topic, maxRows=10, aheadRows=100).begin()
    publish(bus, topic, numbered(30))
    assert settled(bus, topic)
    query.reader.stop()
    assert sorted(make_query(topic).begin().until(30)) == sorted(numbered(30))


def test_a_spool_on_another_file_system(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_files(place: str) -> StoredFiles:
        return StoredFiles(LocalFileSystem(), place)

    monkeypatch.setattr(source, "open_files", open_files)
    topic = make_topic()
    query = make_query(topic, maxRows=10).begin()
    publish(bus, topic, numbered(30))
    assert sorted(query.until(30)) == sorted(numbered(30))
    query.reader.stop()
    publish(bus, topic, numbered(10, 30))
    assert sorted(query.begin().until(10)) == sorted(numbered(10, 30))
    query.reader.stop()
    query.begin().reader.commit(query.at)
    assert segments(tmp_path / "spool") == []


def test_a_directory_without_room_is_named_and_loses_nothing(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery, tmp_path: Path
) -> None:
    topic = make_topic()
    bus.admin.ensure_subscription(topic, "spark")
    bodies = [b"%04d" % number + bytes(500) for number in range(1000)]
    publish(bus, topic, bodies)
    query = make_query(topic)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A larger write fails like one on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(
            BackendError, match=rf"The spool {tmp_path}/spool cannot be written: .*File too large.*free space"
        ):
            list(query.begin(drain=True).batches())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    query.reader.stop()
    assert segments(tmp_path / "spool") == []
    assert sorted(row for batch in query.begin(drain=True).batches() for row in batch) == bodies
    assert settled(bus, topic)


def test_several_topics_are_drained_together(bus: Bus, make_topic: MakeTopic, make_query: MakeQuery) -> None:
    one, two = make_topic(), make_topic()
    for number, topic in enumerate((one, two)):
        bus.admin.ensure_subscription(topic, "spark")
        publish(bus, topic, numbered(10, 10 * number))
    query = make_query(f"{one},{two}").begin(drain=True)
    assert sorted(row for batch in query.batches() for row in batch) == sorted(numbered(20))
    assert settled(bus, one)
    assert settled(bus, two)


def test_a_segment_being_written_when_a_query_stops_is_acked(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, go_on, write = make_topic(), threading.Event(), receiver.Receiver._write
    bus.admin.ensure_subscription(topic, "spark")
    publish(bus, topic, numbered(60))

    def late(receiver: receiver.Receiver, messages: list[Message[bytes]]) -> Any:
        assert go_on.wait(SECONDS)
        return write(receiver, messages)

    monkeypatch.setattr(receiver.Receiver, "_write", late)
    query = make_query(topic, maxRows=30, aheadRows=100).begin()
    # It holds one more segment while the one before is written.
    deadline = time.monotonic() + SECONDS
    while (running := query.reader._receiver) is None or running._received < 60:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(query.reader.stop)
        time.sleep(0.2)
        go_on.set()
        stopped.result()
    # The others were released.
    left = bus.admin.lag(topic, "spark")
    assert left.waiting + (left.unsettled or 0) == 30
