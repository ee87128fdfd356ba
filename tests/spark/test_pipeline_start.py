"""Sources whose Python process starts later than Spark waits."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from broker.blocking import Bus
from broker_spark.pipeline import FileSink, Pipeline, Source, run, running
from tests.spark.conftest import MakeTopic
from tests.spark.support import numbered, publish, values

pytestmark = [pytest.mark.deep, pytest.mark.parametrize("url", ["jetstream"], indirect=True)]

LATE = """#!/bin/sh
case "$*" in *streaming_source_runner*) if rm "$0.late"; then exec sleep 15; fi;; esac
exec "{python}" "$@"
"""
"""A Python whose process of a streaming source does not connect to Spark, once if there is a file beside it."""


@pytest.fixture
def late_python(tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "late-python"
    program.write_text(LATE.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(program))
    return program


def copied(url: str, topic: str, directory: Path) -> Pipeline:
    return Pipeline(
        name="late",
        sources={"numbers": Source(topic)},
        sinks={"files": FileSink(str(directory / "files"))},
        checkpoint=str(directory / "checkpoint"),
        url=url,
        trigger="available-now",
    )


def test_a_source_that_starts_too_late_is_restarted(
    spark: SparkSession,
    url: str,
    bus: Bus,
    make_topic: MakeTopic,
    tmp_path: Path,
    late_python: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = make_topic()
    publish(bus, topic, numbered(20))
    late_python.with_name("late-python.late").touch()
    with caplog.at_level(logging.WARNING, "broker"):
        assert run(copied(url, topic, tmp_path), spark=spark) == 1
    assert "late: a source did not start within Spark's ten seconds; starting again" in caplog.messages
    assert sorted(values(spark.read.parquet(str(tmp_path / "files")))) == sorted(numbered(20))


def test_a_source_that_never_starts_raises(
    spark: SparkSession,
    url: str,
    make_topic: MakeTopic,
    tmp_path: Path,
    late_python: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each start waits for ten seconds.
    monkeypatch.setattr(running, "_STARTS", 1)
    late_python.with_name("late-python.late").touch()
    with pytest.raises(StreamingQueryException, match="failed to connect back"):
        run(copied(url, make_topic(), tmp_path), spark=spark)
    assert not late_python.with_name("late-python.late").exists()
