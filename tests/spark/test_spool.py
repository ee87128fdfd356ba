"""The spool, called as Spark calls its reader but without Spark, so that each step can be looked at."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow.fs import LocalFileSystem
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

import broker_spark
from broker.blocking import Bus, connect
from broker.errors import ConfigurationError, OffsetOutOfRange, TopicNotFound
from broker_spark.files import StoredFiles
from broker_spark.options import SourceOptions
from broker_spark.spool import lease, receiver, source
from broker_spark.spool.source import SpoolPart, SpoolStreamReader
from tests.servers import nats
from tests.spark.conftest import MakeTopic
from tests.spark.support import numbered, publish

Position = dict[str, Any]
SECONDS = 20.0


class Query:
    """Calls a reader in Spark's order; a new reader for each run, as a restart makes one."""

    def __init__(self, url: str, topic: str, spool: Path | str, **options: Any) -> None:
        given = {"url": url, "topic": topic, "subscription": "spark", "spool": str(spool), **options}
        self.options = SourceOptions.parse({name: str(value) for name, value in given.items()}).for_stream()
        self.reader = SpoolStreamReader(self.options)
        self.at: Position = {}

    def begin(self, *, drain: bool = False) -> Query:
        """Start a run, from the checkpoint if there is one."""
        self.reader = SpoolStreamReader(self.options)
        if drain:
            self.reader.prepareForTriggerAvailableNow()
        self.at = self.at or self.reader.initialOffset()
        return self

    def batch(self, limit: ReadLimit | None = None) -> list[bytes] | None:
        """The next one, or None if there is none."""
        # Spark keeps offsets as JSON text.
        end = json.loads(json.dumps(self.reader.latestOffset(self.at, limit or self.reader.getDefaultReadLimit())))
        if end == self.at:
            return None
        self.reader.commit(self.at)
        found = self.rows(self.at, end)
        self.at = end
        return found

    def batches(self) -> Iterator[list[bytes]]:
        while (found := self.batch()) is not None:
            yield found

    def rows(self, start: Position, end: Position) -> list[bytes]:
        return [value for table in self.tables(start, end) for value in table["value"]]

    def tables(self, start: Position, end: Position) -> list[dict[str, list[Any]]]:
        found: list[dict[str, list[Any]]] = []
        for part in self.reader.partitions(start, end):
            assert isinstance(part, SpoolPart)
            found += [batch.to_pydict() for batch in self.reader.read(part)]
        return found

    def until(self, count: int) -> list[bytes]:
        """Batches until there are so many rows."""
        found: list[bytes] = []
        deadline = time.monotonic() + SECONDS
        while len(found) < count:
            assert time.monotonic() < deadline, len(found)
            found += self.batch() or []
        return found


@pytest.fixture
def url() -> str:
    """Leases that are soon over, for what a process held that was killed."""
    return f"{nats.shared_server().url}?lease_seconds=2"


@pytest.fixture
def make_query(url: str, tmp_path: Path) -> Iterator[Callable[..., Query]]:
    made: list[Query] = []

    def make(topic: str, spool: Path | str = tmp_path / "spool", **options: Any) -> Query:
        made.append(Query(url, topic, spool, **options))
        return made[-1]

    yield make
    for query in made:
        query.reader.stop()


MakeQuery = Callable[..., Query]


def segments(spool: Path) -> list[str]:
    return sorted(path.name for path in (spool / "segments").iterdir())


def settled(bus: Bus, topic: str) -> bool:
    """Whether the broker has nothing left."""
    deadline = time.monotonic() + SECONDS
    while (lag := bus.admin.lag(topic, "spark")).waiting or lag.unsettled:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


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
    # Of the batch that Spark may run again all is there, and of what it committed nothing.
    assert query.at["next"] == 5
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


def test_receiving_goes_on_while_a_batch_is_worked_on_but_not_for_ever(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery
) -> None:
    topic = make_topic()
    bus.admin.ensure_subscription(topic, "spark")
    query = make_query(topic, maxRows=50, aheadRows=150).begin()
    publish(bus, topic, numbered(1000))
    first = query.batch()
    assert first is not None
    assert len(first) == 50
    # Nothing asks for more, as while Spark works; then there is as much ahead as may be, and the rest stays away.
    spool = query.reader._spool
    assert spool is not None
    with spool.changed:
        assert spool.changed.wait_for(lambda: spool.next - query.at["next"] == 3, SECONDS)
        assert not spool.changed.wait(0.5)
    assert spool.ahead()[0] == 150
    assert sorted(first + query.until(950)) == sorted(numbered(1000))


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
    monkeypatch.setattr(lease, "PATIENCE", 0.3)
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


def test_who_was_taken_for_dead_acks_nothing_more(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = make_topic()
    first = make_query(topic).begin()
    publish(bus, topic, numbered(5))
    before = first.until(5)
    # It stands still, so long that another host takes it for dead.
    monkeypatch.setattr(lease, "_is_dead", lambda *_: True)
    second = make_query(topic)
    second.at = first.at
    second.begin()
    publish(bus, topic, numbered(200, 5))
    got = second.until(1)
    with pytest.raises(ConfigurationError, match="Another query took this spool over: process"):
        for _ in range(20):
            first.batch()
    first.reader.commit(first.at)
    while len(got) < 200:
        got += second.until(1)
    assert sorted(before + got) == sorted(numbered(205))
    assert settled(bus, topic)


def test_an_owner_on_another_machine_has_to_be_silent_to_be_dead(
    make_topic: MakeTopic, make_query: MakeQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "BEAT", 0.1)
    topic = make_topic()
    first = make_query(topic).begin()
    monkeypatch.setattr(lease, "_machine", lambda: "another")
    beating = make_query(topic)
    with pytest.raises(ConfigurationError, match="belongs to another query"):
        beating.begin()
    assert first.batch() is None
    monkeypatch.setattr(lease, "SILENCE", 0.3)
    assert first.reader._receiver is not None
    first.reader._receiver.stop()
    beating.begin()


def test_other_checkpoints_and_spools_are_refused(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery, tmp_path: Path
) -> None:
    topic, other = make_topic(), make_topic()
    query = make_query(topic).begin()
    publish(bus, topic, numbered(5))
    assert len(query.until(5)) == 5
    stranger = make_query(topic, tmp_path / "another", subscription="another")
    stranger.at = query.at
    with pytest.raises(ConfigurationError, match=r"The checkpoint is of spool .*Give this query the spool of its"):
        stranger.begin().batch()
    with pytest.raises(ConfigurationError, match="another kind of source"):
        query.reader.latestOffset({"source": "broker-log"}, ReadAllAvailable())
    for given, told in (
        ({"topic": other}, f"is for topics {topic}, and this query is for {other}"),
        ({"topic": topic, "subscription": "another"}, "is for subscription spark, and this query is for another"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            make_query(**given).begin()
    with pytest.raises(TopicNotFound):
        make_query("spark.missing", tmp_path / "missing").begin()


def test_what_comes_again_from_a_broker_that_forgot_acks_is_dropped(tmp_path: Path) -> None:
    with nats.NatsServer() as server, connect(server.url) as bus:
        bus.admin.ensure_topic("jobs", partitions=2)
        query = Query(f"{server.url}?lease_seconds=2", "jobs", tmp_path / "spool").begin()
        try:
            publish(bus, "jobs", numbered(50))
            assert sorted(query.until(50)) == sorted(numbered(50))
            assert settled(bus, "jobs")
            server.kill()
            # It writes them a moment later than it confirms them, and so what it has delivered.
            states = list(server.directory.glob("store/**/o.dat"))
            assert states
            for state in states:
                state.unlink()
            server.start()
            publish(bus, "jobs", numbered(10, 50))
            assert sorted(query.until(10)) == sorted(numbered(10, 50))
            assert settled(bus, "jobs")
            assert query.batch() is None
            assert query.reader._receiver is not None
            assert query.reader._receiver._dropped == 50
        finally:
            query.reader.stop()


def test_a_spool_and_checkpoint_of_another_broker_or_queue_are_refused(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery, tmp_path: Path
) -> None:
    topic = make_topic()
    query = make_query(topic).begin()
    publish(bus, topic, numbered(5))
    assert len(query.until(5)) == 5
    query.reader.stop()
    refused = rf"of another broker, or topic '{topic}' was deleted and made anew since \(.* now\).* Give this query a"
    with nats.NatsServer() as server, connect(server.url) as elsewhere:
        elsewhere.admin.ensure_topic(topic)
        publish(elsewhere, topic, numbered(3))
        moved = Query(server.url, topic, tmp_path / "spool")
        with pytest.raises(ConfigurationError, match=refused):
            moved.begin()
        # A batch that was planned is not run again either.
        moved.at = query.at
        with pytest.raises(ConfigurationError, match=refused):
            moved.rows(query.at, query.at)
        # Nothing of the other queue was taken.
        assert elsewhere.admin.subscriptions(topic) == []
    bus.admin.delete_topic(topic)
    bus.admin.ensure_topic(topic)
    publish(bus, topic, numbered(7, 5))
    with pytest.raises(ConfigurationError, match=rf"{refused}.*remove 'identities' from spool\.json there"):
        query.begin().batch()
    # Who wants to go on with the new queue says so.
    file = tmp_path / "spool" / "spool.json"
    told = json.loads(file.read_text())
    del told["identities"]
    file.write_text(json.dumps(told))
    assert sorted(query.begin().until(7)) == sorted(numbered(7, 5))
    assert json.loads(file.read_text())["identities"] == {topic: bus.admin.describe_topic(topic).identity}


def test_a_checkpoint_that_is_older_than_the_spool_is_refused(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery
) -> None:
    topic = make_topic()
    query = make_query(topic, maxRows=10).begin()
    old = query.at
    publish(bus, topic, numbered(30))
    assert len(query.until(30)) == 30
    query.reader.commit(query.at)
    query.at = old
    with pytest.raises(
        OffsetOutOfRange, match=r"The checkpoint asks for segment 0, and the spool has .*not of the same time"
    ):
        query.batch()


def test_a_checkpoint_that_is_newer_than_the_spool_is_refused(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery
) -> None:
    topic = make_topic()
    query = make_query(topic).begin()
    query.at = {**query.at, "next": 7}
    with pytest.raises(OffsetOutOfRange, match="asks for segment 7, and the spool has 0 to -1"):
        query.batch()


def test_segments_without_an_owner_are_not_deleted(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery, tmp_path: Path
) -> None:
    topic = make_topic()
    query = make_query(topic).begin()
    publish(bus, topic, numbered(3))
    assert settled(bus, topic)
    query.reader.stop()
    for path in (tmp_path / "spool" / "owners").iterdir():
        path.unlink()
    before = segments(tmp_path / "spool")
    with pytest.raises(OffsetOutOfRange, match="Bring the file in owners/ back"):
        make_query(topic).begin()
    assert segments(tmp_path / "spool") == before


def test_a_new_checkpoint_begins_with_what_the_spool_holds(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery
) -> None:
    topic = make_topic()
    query = make_query(topic, maxRows=10, aheadRows=100).begin()
    publish(bus, topic, numbered(30))
    assert settled(bus, topic)
    query.reader.stop()
    assert sorted(make_query(topic).begin().until(30)) == sorted(numbered(30))


def test_segments_are_missed(bus: Bus, make_topic: MakeTopic, make_query: MakeQuery, tmp_path: Path) -> None:
    topic = make_topic()
    query = make_query(topic, maxRows=10, aheadRows=100).begin()
    publish(bus, topic, numbered(30))
    assert settled(bus, topic)
    end = query.reader.latestOffset(query.at, ReadAllAvailable())
    (part, *_) = query.reader.partitions(query.at, end)
    names = segments(tmp_path / "spool")
    (tmp_path / "spool" / "segments" / names[0]).unlink()
    with pytest.raises(OffsetOutOfRange, match="a directory that driver and executors all see"):
        list(query.reader.read(part))
    query.reader.stop()
    (tmp_path / "spool" / "segments" / names[-1]).unlink()
    with pytest.raises(OffsetOutOfRange, match=r"ends with segment \d, and \d was written.*nowhere else"):
        make_query(topic).begin()


def test_columns_that_the_spool_has_not_are_refused(bus: Bus, make_topic: MakeTopic, make_query: MakeQuery) -> None:
    topic = make_topic()
    query = make_query(topic, columns="value").begin()
    publish(bus, topic, numbered(3))
    assert settled(bus, topic)
    query.reader.stop()
    with pytest.raises(ConfigurationError, match=r"has no column 'key', but value.*Run the query with those columns"):
        make_query(topic, columns="value,key").begin()


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


def test_several_topics_and_patterns(bus: Bus, make_topic: MakeTopic, make_query: MakeQuery, tmp_path: Path) -> None:
    one, two = make_topic(), make_topic()
    for number, topic in enumerate((one, two)):
        bus.admin.ensure_subscription(topic, "spark")
        publish(bus, topic, numbered(10, 10 * number))
    query = make_query(f"{one},{two}").begin(drain=True)
    assert sorted(row for batch in query.batches() for row in batch) == sorted(numbered(20))
