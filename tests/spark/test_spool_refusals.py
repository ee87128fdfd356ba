"""Checkpoints and spools that do not belong together, or are incomplete, are refused, with the fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from broker.blocking import Bus, connect
from broker.errors import ConfigurationError, OffsetOutOfRange, TopicNotFound
from tests.servers import nats
from tests.spark.conftest import MakeTopic
from tests.spark.spool_query import MakeQuery, Query, segments, settled
from tests.spark.support import numbered, publish


@pytest.fixture
def url() -> str:
    """Short leases, so that messages of a killed process are soon redelivered."""
    return f"{nats.shared_server().url}?lease_seconds=2"


def test_other_checkpoints_and_spools_are_refused(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery, tmp_path: Path
) -> None:
    topic, other = make_topic(), make_topic()
    query = make_query(topic).begin()
    publish(bus, topic, numbered(5))
    assert len(query.until(5)) == 5
    stranger = make_query(topic, tmp_path / "another", subscription="another")
    stranger.at = query.at
    with pytest.raises(ConfigurationError, match=r"The checkpoint belongs to spool .*Give this query the spool of its"):
        stranger.begin().batch()
    with pytest.raises(ConfigurationError, match="another kind of source"):
        query.reader.latestOffset({"source": "broker-log"}, ReadAllAvailable())
    for given, expected in (
        ({"topic": other}, f"is for topics {topic}, and this query is for {other}"),
        ({"topic": topic, "subscription": "another"}, "is for subscription spark, and this query is for another"),
    ):
        with pytest.raises(ConfigurationError, match=expected):
            make_query(**given).begin()
    with pytest.raises(TopicNotFound):
        make_query("spark.missing", tmp_path / "missing").begin()


def test_a_spool_and_checkpoint_of_another_broker_or_queue_are_refused(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery, tmp_path: Path
) -> None:
    topic = make_topic()
    query = make_query(topic).begin()
    publish(bus, topic, numbered(5))
    assert len(query.until(5)) == 5
    query.reader.stop()
    refused = rf"of another broker, or topic '{topic}' was deleted and recreated \(.* now\).* Give this query a"
    with nats.NatsServer() as server, connect(server.url) as elsewhere:
        elsewhere.admin.ensure_topic(topic)
        publish(elsewhere, topic, numbered(3))
        moved = Query(server.url, topic, tmp_path / "spool")
        with pytest.raises(ConfigurationError, match=refused):
            moved.begin()
        # A planned batch does not run again either.
        moved.at = query.at
        with pytest.raises(ConfigurationError, match=refused):
            moved.rows(query.at, query.at)
        # No message of the other queue was received.
        assert elsewhere.admin.subscriptions(topic) == []
    bus.admin.delete_topic(topic)
    bus.admin.ensure_topic(topic)
    publish(bus, topic, numbered(7, 5))
    with pytest.raises(ConfigurationError, match=rf"{refused}.*remove 'identities' from its spool\.json"):
        query.begin().batch()
    # Users who want to continue with the new queue edit the file.
    file = tmp_path / "spool" / "spool.json"
    metadata = json.loads(file.read_text())
    del metadata["identities"]
    file.write_text(json.dumps(metadata))
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
        OffsetOutOfRange, match=r"The checkpoint needs segment 0, and the spool has .*from the same time"
    ):
        query.batch()


def test_a_checkpoint_that_is_newer_than_the_spool_is_refused(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery
) -> None:
    topic = make_topic()
    query = make_query(topic).begin()
    query.at = {**query.at, "next": 7}
    with pytest.raises(OffsetOutOfRange, match="needs segment 7, and the spool has 0 to -1"):
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
    with pytest.raises(OffsetOutOfRange, match="Restore the file in owners/"):
        make_query(topic).begin()
    assert segments(tmp_path / "spool") == before


def test_missing_segments_raise(bus: Bus, make_topic: MakeTopic, make_query: MakeQuery, tmp_path: Path) -> None:
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
    with pytest.raises(OffsetOutOfRange, match=r"ends with segment \d, but segment \d was written.*nowhere else"):
        make_query(topic).begin()


def test_columns_missing_in_the_spool_are_refused(bus: Bus, make_topic: MakeTopic, make_query: MakeQuery) -> None:
    topic = make_topic()
    query = make_query(topic, columns="value").begin()
    publish(bus, topic, numbered(3))
    assert settled(bus, topic)
    query.reader.stop()
    with pytest.raises(ConfigurationError, match=r"have no column 'key', only value.*Run the query with these columns"):
        make_query(topic, columns="value,key").begin()


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/spool"])
def test_a_spool_that_cannot_be_written_is_named(
    make_topic: MakeTopic, make_query: MakeQuery, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").touch()
    spool = tmp_path / place
    with pytest.raises(
        ConfigurationError,
        match=rf"Option spool is '{spool}', which cannot be used: .*It takes a writable directory",
    ):
        make_query(make_topic(), spool).begin()
