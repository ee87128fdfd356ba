"""Replays of a pipeline: what they read, where they write, and that a second run replaces the first."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from broker.blocking import Bus, connect
from broker.cli import main
from broker.errors import ConfigurationError
from broker.outbound import OutboundMessage
from broker_spark.pipeline import CallSink, Expect, FileSink, Replay, Source, TableSink, TopicSink, replay, run
from broker_spark.pipeline.inspecting import status
from broker_spark.pipeline.replaying import _moved_sink
from tests.servers import nats
from tests.spark.conftest import SETTINGS, MakeTopic
from tests.spark.support import log, publish
from tests.spark.test_pipeline import Order, make, orders

EARLY = datetime(2020, 1, 1, tzinfo=UTC)


def numbers_in(spark: SparkSession, directory: Path) -> list[int]:
    return sorted(row.number for row in spark.read.parquet(str(directory)).collect())


def places(bus: Bus, topic: str) -> dict[bytes, tuple[int, int]]:
    """Partition and offset of each body."""
    return {
        record.data or b"": (record.partition, record.offset)
        for part in bus.log.partitions(topic)
        for batch in bus.log.read(topic, part)
        for record in batch
    }


@pytest.mark.deep
def test_a_replay_ends_where_the_pipeline_goes_on(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path
) -> None:
    source = make_topic()
    publish(bus, source, [*orders(20), b"?"])
    pipeline = make(url, source, tmp_path)
    assert run(pipeline, spark=spark) == 1
    before = status(pipeline)
    publish(bus, source, [*orders(20, 20), b"!"])
    # To where the pipeline is, which then reads what is new: together they have each row once.
    report = replay(pipeline, name="again", start="earliest", spark=spark)
    assert (report.rows_in, report.rows_out, report.dead) == (21, {"files": 20}, 1)
    assert str(report).startswith("orders, replay again: batch 0: 21 rows in, 20 to files, 1 dead")
    assert numbers_in(spark, tmp_path / "files-again") == list(range(20))
    assert (tmp_path / "files-again" / "batch=0").is_dir()
    assert [bytes(row.value) for row in spark.read.parquet(str(tmp_path / "dead-again")).collect()] == [b"?"]
    # As in the rows that the pipeline has written.
    live, again = (spark.read.parquet(str(tmp_path / name)).drop("batch") for name in ("files", "files-again"))
    assert live.exceptAll(again).isEmpty()
    assert again.exceptAll(live).isEmpty()
    after = status(pipeline)
    assert (after.committed, after.places[0].next) == (before.committed, before.places[0].next)
    assert run(pipeline, spark=spark) == 1
    assert numbers_in(spark, tmp_path / "files") == list(range(40))
    # A later end, under the same name: what was there is replaced.
    report = replay(pipeline, name="again", start=EARLY, end="latest", spark=spark)
    assert (report.rows_in, report.rows_out, report.dead) == (42, {"files": 40}, 2)
    assert numbers_in(spark, tmp_path / "files-again") == list(range(40))
    assert spark.read.parquet(str(tmp_path / "dead-again")).count() == 2


@pytest.mark.deep
def test_a_replay_of_offsets_that_failed_is_done_again_under_its_name(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path
) -> None:
    source, target, dead = make_topic(), make_topic(), make_topic()
    bus.topic(source).publish_batch([OutboundMessage(body, "key") for body in [*orders(10), b"?"]])
    fails = [True]
    seen: list[tuple[int, int]] = []

    def call(frame: Any, batch: int) -> None:
        seen.append((batch, frame.count()))
        if fails.pop():
            raise OSError("not now")
        fails.append(False)

    table = f"replayed_{target.rpartition('.')[2]}"
    sinks = {
        "topic": TopicSink(target, key="number"),
        "table": TableSink(table, where="number >= 5"),
        "call": CallSink(call),
    }
    pipeline = make(url, source, tmp_path, sinks=sinks, dead_letters=TopicSink(dead))
    at = places(bus, source)
    (partition, first), (_, last) = at[orders(1, 3)[0]], at[b"?"]
    wanted: dict[str, Any] = {"start": {source: {str(partition): first}}, "end": {source: {str(partition): last + 1}}}
    try:
        with pytest.raises(OSError, match="not now"):
            replay(pipeline, name="from-3", spark=spark, **wanted)
        fails[:] = [False]
        report = replay(pipeline, name="from-3", spark=spark, **wanted)
        assert (report.rows_in, report.dead) == (8, 1)
        assert report.rows_out == {"topic": 7, "table": 5, "call": 7}
        assert seen == [(0, 7), (0, 7)]
        assert sorted(row.number for row in spark.table(f"{table}_from_3").collect()) == [5, 6, 7, 8, 9]
        # The broker drops what it has already, or the ids tell.
        written, letters = log(bus, target), log(bus, dead)
        assert len({identity for identity, _ in written}) == 7
        assert len({identity for identity, _ in letters}) == 1
        assert sorted({json.loads(body)["number"] for _, body in written}) == list(range(3, 10))
        (letter,) = {(each.data, each.topic) for each in bus.admin.list_dead(dead)}
        assert letter == (b"?", source)
        # Another replay has ids of its own.
        replay(pipeline, name="other", spark=spark, **wanted)
        assert len({identity for identity, _ in log(bus, target)}) == 14
        assert not Path(pipeline.checkpoint).exists()
    finally:
        for name in ("from_3", "other"):
            spark.sql(f"drop table if exists {table}_{name}")


@pytest.mark.deep
@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
def test_a_replay_judges_by_the_expectations_of_its_pipeline(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path
) -> None:
    source = make_topic()
    publish(bus, source, [*orders(10), b"?"])
    expect = {"large": Expect("payload.number >= 3", "dead"), "even": Expect("payload.number % 2 = 0")}
    pipeline = make(url, source, tmp_path, sources={"orders": Source(source, Order, expect=expect)})
    report = replay(pipeline, name="judged", start="earliest", spark=spark)
    assert (report.rows_in, report.rows_out, report.dead) == (11, {"files": 7}, 4)
    assert report.failed == {"orders.large": 3, "orders.even": 5}
    letters = spark.read.parquet(str(tmp_path / "dead-judged")).where("reason like 'Expectation%'")
    assert {row.reason for row in letters.collect()} == {"Expectation 'large' failed: payload.number >= 3"}
    assert letters.count() == 3
    lineage = json.loads((tmp_path / "files-judged" / "_anybroker" / "lineage" / "0.json").read_text())
    assert (lineage["rows"], {each["topic"] for each in lineage["offsets"]}) == (7, {source})


@pytest.mark.deep
@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
def test_a_replay_of_a_queue_reads_the_log_of_its_topic(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path
) -> None:
    source = make_topic()
    publish(bus, source, [*orders(4), b"?"])
    options = {"subscription": "replayed", "spool": str(tmp_path / "spool"), "tasks": 2}
    pipeline = make(url, source, tmp_path, sources={"orders": Source(source, Order, options=options)})
    assert replay(pipeline, name="log", start="earliest", spark=spark).rows_out == {"files": 4}
    assert spark.read.parquet(str(tmp_path / "dead-log")).count() == 1
    assert not (tmp_path / "spool").exists()
    assert "replayed" not in bus.admin.subscriptions(source)


@pytest.mark.deep
@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
def test_only_what_the_transform_uses_is_read(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path
) -> None:
    one, other = make_topic(), make_topic()
    publish(bus, one, orders(7))
    publish(bus, other, orders(5))
    seen: list[tuple[int, int]] = []
    pipeline = make(
        url,
        one,
        tmp_path,
        sources={"orders": Source(one, Order), "refunds": Source(other)},
        transform=lambda orders, refunds: orders,
        sinks={"call": CallSink(lambda frame, batch: seen.append((batch, frame.count())))},
    )
    report = replay(pipeline, name="one", start="earliest", spark=spark)
    assert (report.rows_in, report.rows_out, report.dead, seen) == (7, {"call": 7}, 0, [(0, 7)])
    with pytest.raises(ConfigurationError, match="start has offsets without a topic, and the pipeline reads"):
        replay(pipeline, name="one", start={"0": 1}, spark=spark)
    report = replay(pipeline, name="none", start="latest", spark=spark)
    assert (report.rows_in, report.rows_out, seen) == (0, {"call": 0}, [(0, 7)])


@pytest.mark.deep
@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
def test_a_stopped_replay_starts_no_more_jobs(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path
) -> None:
    source = make_topic()
    publish(bus, source, orders(7))
    # It is stopped between two jobs.
    sinks = {"call": CallSink(lambda *_: stopped.stop()), "files": FileSink(str(tmp_path / "files"))}
    pipeline = make(url, source, tmp_path, sinks=sinks)
    stopped = Replay(pipeline, spark, name="stopped", start="earliest")
    assert sum(each.stop - each.start for each in stopped.ranges["orders"]) >= 7
    with pytest.raises(Exception, match="cancelled"):
        stopped.execute()
    assert not list((tmp_path / "files-stopped").glob("batch=*/*.parquet"))
    assert spark.range(3).count() == 3
    assert replay(
        dataclasses.replace(pipeline, sinks={"files": sinks["files"]}), name="stopped", start="earliest", spark=spark
    ).rows_out == {"files": 7}


@pytest.mark.deep
@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
def test_what_cannot_be_replayed_is_refused_before_anything_is_written(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path
) -> None:
    source = make_topic()
    publish(bus, source, orders(4))
    pipeline = make(url, source, tmp_path)
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"name": "a b", "start": "earliest"}, "name is 'a b'. It takes a letter"),
        ({"name": "../x", "start": "earliest"}, "name is '../x'. It takes a letter"),
        ({"name": "a", "start": "soon"}, "Option start is 'soon'. It takes"),
        ({"name": "a", "start": "2026-01-31T12:00:00"}, "which has no timezone"),
        ({"name": "a", "start": "earliest", "end": "tomorrow"}, "Option end is 'tomorrow'. It takes"),
        ({"name": "a", "start": "latest", "end": EARLY}, "sources.orders: Options start and end mean"),
        ({"name": "a", "start": "earliest", "end": {"x": {"0": 1}}}, "end has offsets of 'x', which no source reads"),
        ({"name": "a", "start": {"0": 10**9}}, "sources.orders: Option start has offset 1000000000"),
    )
    for given, expected in refused:
        with pytest.raises(ConfigurationError, match=re.escape(expected)):
            replay(pipeline, spark=spark, **given)
    assert not list(tmp_path.iterdir())
    # Files of another pipeline.
    (tmp_path / "files-taken" / "batch=0").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match=r"sinks\.files: .*files-taken.* has batches of no known pipeline"):
        replay(pipeline, name="taken", start="earliest", spark=spark)


def test_tables_and_paths_of_a_replay_have_its_name(tmp_path: Path) -> None:
    table = TableSink("shop.`large rounds`", options={"path": str(tmp_path / "rounds/"), "compression": "zstd"})
    assert _moved_sink(table, "may-1") == dataclasses.replace(
        table,
        table="shop.`large rounds_may_1`",
        options={"path": f"{tmp_path}/rounds-may-1", "compression": "zstd"},
    )
    assert _moved_sink(FileSink("s3a://bucket/rounds/"), "may-1") == FileSink("s3a://bucket/rounds-may-1")


@pytest.mark.deep
@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
def test_the_command_shows_what_it_reads_and_where_it_goes(
    spark: SparkSession,
    url: str,
    bus: Bus,
    make_topic: MakeTopic,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, target = make_topic(partitions=1), make_topic()
    publish(bus, source, orders(6))
    (tmp_path / "replayed.py").write_text("from tests.spark.test_pipeline import Order, numbers\n")
    file = tmp_path / "replayed.toml"
    file.write_text(f"""
name = "rounds"
url = "{url}"
checkpoint = "checkpoint"
transform = "replayed:numbers"
[sources.orders]
topic = "{source}"
decode = "replayed:Order"
[sinks.files]
path = "files"
[sinks.topic]
topic = "{target}"
[dead_letters]
path = "dead"
""")
    options = ["--from", "earliest", "--name", "may"]
    assert main(["pipeline", "replay", str(file), *options]) == 0
    said = capsys.readouterr()
    for line in (
        rf"{re.escape(source)}\[0\] +\d+ +\d+ +6",
        r"sinks.files +parquet in .*/files-may/batch=N",
        "/dead-may",
    ):
        assert re.search(line, said.out), (line, said.out)
    assert "rounds, replay may: batch 0: 6 rows in, 6 to files, 6 to topic, 0 dead" in said.err
    assert main(["pipeline", "replay", str(file), *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["pipeline"], report["rows_in"]) == ("rounds, replay may", 6)
    assert numbers_in(spark, tmp_path / "files-may") == list(range(6))
    assert len({identity for identity, _ in log(bus, target)}) == 6
    assert main(["pipeline", "replay", str(file), "--from", "soon", "--name", "may"]) != 0
    assert "Option start is 'soon'" in capsys.readouterr().err


GATED = """
from pathlib import Path

def gate(frame, batch):
    # Opens where the parent writes to it.
    Path(__file__).with_name("gate").read_text()
"""


@pytest.mark.deep
def test_ctrl_c_ends_the_command_before_its_next_job(tmp_path: Path) -> None:
    url, topic, module = nats.shared_server().url, f"spark.{uuid.uuid4().hex[:12]}", f"gated_{uuid.uuid4().hex[:8]}"
    file, gate = tmp_path / "gated.toml", tmp_path / "gate"
    settings = "\n".join(f'"{name}" = {json.dumps(value)}' for name, value in SETTINGS.items())
    file.write_text(
        f'name = "gated"\nurl = "{url}"\ncheckpoint = "checkpoint"\nmaster = "local[2]"\n'
        f'[sources.rows]\ntopic = "{topic}"\n[sinks.gate]\ncall = "{module}:gate"\n[sinks.files]\npath = "files"\n'
        f"[spark]\n{settings}\n"
    )
    (tmp_path / f"{module}.py").write_text(GATED)
    os.mkfifo(gate)
    with connect(url) as bus:
        bus.admin.ensure_topic(topic, partitions=1)
        publish(bus, topic, orders(5))
    command = [Path(sys.executable).with_name("broker"), "pipeline", "replay", str(file)]
    with subprocess.Popen(
        [*command, "--name", "late", "--from", "earliest"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        # Waits for the function.
        with gate.open("w"):
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            before = list(takewhile(lambda line: "replay late stops" not in line, process.stderr))
        shown, said = process.communicate()
        said = "".join(before) + said
    assert process.returncode == 130, said
    assert f"{topic}[0]" in shown
    assert "files-late" in shown
    assert "Traceback" not in said
    assert not list(tmp_path.glob("files-late/batch=*/*.parquet"))
