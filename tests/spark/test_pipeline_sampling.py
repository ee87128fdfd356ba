"""A few rows of a pipeline: which they are, what it makes of them, and that nothing is changed."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from broker.blocking import Bus
from broker.cli import main
from broker.errors import ConfigurationError, Unsupported
from broker.outbound import OutboundMessage
from broker_spark.pipeline import CallSink, FileSink, Source, TopicSink, sample
from tests.servers import pubsub
from tests.spark.conftest import MakeTopic
from tests.spark.test_pipeline import Order, make, orders


def publish(bus: Bus, topic: str, bodies: list[bytes]) -> None:
    """Into one partition, in order."""
    bus.topic(topic).publish_batch([OutboundMessage(body, "key") for body in bodies])


def shown(found: Any) -> list[int]:
    return [row["number"] for row in found.rows]


@pytest.mark.deep
def test_the_newest_rows_are_shown_and_nothing_is_changed(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path
) -> None:
    source, target, dead = make_topic(), make_topic(), make_topic()
    publish(bus, source, [*orders(30), b'{"number": 30}'])
    called: list[int] = []
    sinks = {
        "topic": TopicSink(target, key="number"),
        "files": FileSink(str(tmp_path / "files")),
        "red": CallSink(lambda _, batch: called.append(batch), where="colour = 'red'"),
    }
    pipeline = make(url, source, tmp_path, sinks=sinks, dead_letters=TopicSink(dead))
    before = (sorted(map(str, bus.admin.topics())), sorted(tmp_path.rglob("*")))
    found = sample(pipeline, spark=spark, rows=5)
    assert found.rows_in == {"orders": 5}
    assert shown(found) == [26, 27, 28, 29]
    assert (found.rows_out, found.columns) == ({"topic": 4, "files": 4, "red": 2}, ["key", "number", "colour"])
    (letter,) = found.dead
    assert (letter["topic"], letter["reason"]) == (source, "Object missing required field `colour`")
    assert (sorted(map(str, bus.admin.topics())), sorted(tmp_path.rglob("*")), called) == (*before, [])
    for topic in (target, dead):
        assert all(each.first == each.next for each in bus.log.bounds(topic).values())


@pytest.mark.deep
def test_rows_are_read_from_a_position(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path
) -> None:
    source = make_topic()
    publish(bus, source, orders(10))
    (middle,) = (
        record
        for part in bus.log.partitions(source)
        for batch in bus.log.read(source, part)
        for record in batch
        if record.data == orders(1, 4)[0]
    )
    pipeline = make(url, source, tmp_path)
    assert shown(sample(pipeline, spark=spark, rows=3, start="earliest")) == [0, 1, 2]
    at = {str(middle.partition): middle.offset}
    for start in (at, json.dumps(at), {source: at}):
        assert shown(sample(pipeline, spark=spark, rows=3, start=start)) == [4, 5, 6]
    assert shown(sample(pipeline, spark=spark, rows=3, start=datetime(2020, 1, 1, tzinfo=UTC))) == [0, 1, 2]
    nothing = sample(pipeline, spark=spark, start="latest")
    assert (nothing.rows_in, nothing.rows, nothing.dead) == ({"orders": 0}, [], [])
    for start, expected in (
        ("soon", "Option start is 'soon'. It takes"),
        ("2026-01-31T12:00:00", "which has no timezone"),
        ({"nowhere": {"0": 1}}, "start has offsets of 'nowhere', which no source reads. The sources read"),
        ({"7": 1}, "sources.orders: Option start names partition 7"),
    ):
        with pytest.raises(ConfigurationError, match=expected):
            sample(pipeline, spark=spark, start=start)


@pytest.mark.deep
def test_a_queue_is_read_from_the_log_of_its_topic(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path
) -> None:
    source = make_topic()
    publish(bus, source, orders(3))
    options = {"subscription": "tried", "spool": str(tmp_path / "spool")}
    pipeline = make(url, source, tmp_path, sources={"orders": Source(source, Order, options=options)})
    assert shown(sample(pipeline, spark=spark)) == [0, 1, 2]
    assert not (tmp_path / "spool").exists()
    assert "tried" not in bus.admin.subscriptions(source)


def test_a_broker_without_a_log_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    options = {"subscription": "tried", "spool": str(tmp_path / "spool")}
    pipeline = make(
        pubsub.shared_server().url, "orders", tmp_path, sources={"orders": Source("orders", Order, options=options)}
    )
    with pytest.raises(Unsupported, match=r"sources.orders: pubsub has no log that can be read again. `broker peek"):
        sample(pipeline, spark=spark)


@pytest.mark.deep
@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
def test_the_command_shows_rows_letters_and_the_plan(
    spark: SparkSession,
    url: str,
    bus: Bus,
    make_topic: MakeTopic,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    del spark  # the command finds this session
    source = make_topic()
    publish(bus, source, [*orders(2), b"\x1b?"])
    (tmp_path / "tried.py").write_text("from tests.spark.test_pipeline import Order, numbers\n")
    file = tmp_path / "tried.toml"
    file.write_text(f"""
name = "tried"
url = "{url}"
checkpoint = "checkpoint"
transform = "tried:numbers"
[sources.orders]
topic = "{source}"
decode = "tried:Order"
[sinks.files]
path = "files"
[dead_letters]
path = "dead"
""")
    assert main(["pipeline", "dry-run", str(file)]) == 0
    said = capsys.readouterr().out
    for line in (
        r"sources.orders +3",
        r"sinks.files +2",
        r"dead_letters +1",
        r"KEY +NUMBER +COLOUR",
        r"key +1 +red",
        r"JSON is malformed: invalid character \(byte 0\) +\\x1b\?",
        r"checkpoint +.*/checkpoint",
        r"== Physical Plan ==",
    ):
        assert re.search(f"^.*{line}", said, re.MULTILINE), (line, said)
    assert main(["pipeline", "dry-run", str(file), "--json", "--rows", "1", "--from", "earliest"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows_in"], found["rows_out"], found["dead"]) == ({"orders": 1}, {"files": 1}, [])
    assert found["rows"] == [{"key": "key", "number": 0, "colour": "blue"}]
    assert sorted(each.name for each in tmp_path.iterdir() if each.name != "__pycache__") == ["tried.py", "tried.toml"]
