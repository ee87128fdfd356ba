"""Helpers for tests of pipelines: typed rows without a broker, and whole runs on an embedded server.

    pytest_plugins = ["broker_spark.testing"]        # in conftest.py

adds the fixtures `pipeline_session`, one quick Spark session for all tests of the process, and `run_pipeline`, which
runs a pipeline over messages from end to end. Define fixtures of the same names to override them.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from broker.blocking import BlockingRecord, Bus, connect
from broker.codecs import Json
from broker.outbound import OutboundMessage
from broker_spark.common.schema import spark_schema
from broker_spark.decode.decoding import PAYLOAD, decode
from broker_spark.pipeline.definition import AVAILABLE_NOW, FileSink, Pipeline, Sink, Source, TableSink, TopicSink
from broker_spark.pipeline.running import BatchReport, run
from broker_spark.session import session

__all__ = ["QUICK", "PipelineRun", "payloads", "pipeline_session", "run_pipeline"]

_STREAMING: Final = "org.apache.spark.sql.execution.streaming"
QUICK: Final = {
    "spark.driver.memory": "1g",
    "spark.ui.enabled": False,
    "spark.log.level": "ERROR",
    "spark.default.parallelism": 2,
    "spark.sql.shuffle.partitions": 2,
    "spark.sql.session.timeZone": "UTC",
    # Halves the start time, and forks a third of the processes for each micro-batch.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.streaming.checkpointFileManagerClass": (
        f"{_STREAMING}.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}
"""Settings of a session that starts in half the time and logs only errors."""


def payloads(spark: SparkSession, type: Any, rows: Sequence[Any], **columns: Sequence[Any]) -> DataFrame:
    """The frame that a transform receives for these payloads: objects of the type, or JSON.

    :param columns: other columns of a source by name, such as `key=[b"a", b"b"]`; columns not given are null.
    :raises ValueError: a row does not decode.
    """
    codec = Json(type)
    values = [each if isinstance(each, (bytes, str)) else codec.encode(each) for each in rows]
    given = {**columns, "value": [each.encode() if isinstance(each, str) else each for each in values]}
    schema = spark_schema()
    table = [
        tuple(given[name][index] if name in given else None for name in schema.names) for index in range(len(rows))
    ]
    decoded = decode(spark.createDataFrame(table, schema), type)
    for letter in decoded.dead.take(1):
        raise ValueError(f"A row does not decode: {letter['reason']}: {letter['value']}")
    assert PAYLOAD in decoded.rows.columns
    return decoded.rows


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """The results of a pipeline run.

    :ivar reports: one per batch.
    :ivar pipeline: the pipeline that ran, with the URL and directories of the test.
    """

    pipeline: Pipeline
    bus: Bus
    spark: SparkSession
    reports: list[BatchReport] = field(default_factory=list[BatchReport])

    @property
    def dead(self) -> DataFrame:
        """The rows of the dead-letter sink."""
        assert self.pipeline.dead_letters is not None, "the pipeline has dead letters"
        return self._read(self.pipeline.dead_letters)

    def rows(self, sink: str) -> DataFrame:
        """The rows of a sink: a topic has the columns of a source; files without rows have no columns."""
        return self._read(self.pipeline.sinks[sink])

    def records(self, topic: str) -> list[BlockingRecord[bytes]]:
        """The records of a topic, partition by partition."""
        log = self.bus.log
        return [record for part in log.partitions(topic) for batch in log.read(topic, part) for record in batch]

    def _read(self, sink: Sink) -> DataFrame:
        match sink:
            case TopicSink(topic=topic):
                return self.spark.read.format("broker").options(url=self.pipeline.url, topic=topic).load()
            case FileSink(path=path, format=format):
                try:
                    return self.spark.read.format(format).load(path)
                except AnalysisException as error:
                    if error.getCondition() not in {"PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA"}:
                        raise
                    return self.spark.createDataFrame([], StructType())
            case TableSink(table=table):
                return self.spark.table(table)
            case _:
                raise ValueError("The rows of a function sink cannot be read back")


RunPipeline = Callable[..., PipelineRun]


@pytest.fixture(scope="session")
def pipeline_session() -> Iterator[SparkSession]:
    """The active Spark session, or one new session for all tests of this process."""
    active = SparkSession.getActiveSession()
    made = session("tests", master="local[2,3]", config=QUICK)
    yield made
    if active is None:
        made.stop()


@pytest.fixture
def run_pipeline(pipeline_session: SparkSession, tmp_path: Path) -> Iterator[RunPipeline]:
    """`run_pipeline(pipeline, {"orders": [b"...", OutboundMessage(...)]})`: publish, run to the end, return results.

    The pipeline runs on an embedded nats-server of the test, with a checkpoint, spools, files and tables of the test,
    until nothing is left to read. A call with the pipeline of an earlier run continues from its checkpoint.
    """
    url = f"embedded://{tmp_path}/server"
    tables: list[str] = []
    with connect(url) as bus:

        def go(pipeline: Pipeline, messages: Mapping[str, Sequence[bytes | OutboundMessage]]) -> PipelineRun:
            here = pipeline if pipeline.url == url else _moved(pipeline, url, tmp_path / uuid.uuid4().hex)
            sinks = here.all_sinks().values()
            for topic in {*messages, *(sink.topic for sink in sinks if isinstance(sink, TopicSink))}:
                bus.admin.ensure_topic(topic)
            for source in here.sources.values():
                for topic in filter(None, source.topic.split(",")):
                    bus.admin.ensure_topic(topic.strip())
            for topic, bodies in messages.items():
                bus.topic(topic).publish_batch(
                    [each if isinstance(each, OutboundMessage) else OutboundMessage(each) for each in bodies]
                )
            tables.extend(sink.table for sink in sinks if isinstance(sink, TableSink))
            found = PipelineRun(here, bus, pipeline_session)
            run(here, spark=pipeline_session, on_batch=found.reports.append)
            return found

        try:
            yield go
        finally:
            for table in dict.fromkeys(tables):
                pipeline_session.sql("DROP TABLE IF EXISTS IDENTIFIER({t})", t=table)


def _moved(pipeline: Pipeline, url: str, directory: Path) -> Pipeline:
    """The same pipeline with the URL and directories of the test."""

    def source(name: str, here: Source) -> Source:
        options = {
            key: str(directory / "spools" / name) if key.lower() == "spool" else value
            for key, value in here.options.items()
            # The embedded server is not Kafka.
            if key.lower() != "connector"
        }
        return dataclasses.replace(here, url=None, options=options)

    def sink(name: str, here: Sink) -> Sink:
        if isinstance(here, FileSink):
            return dataclasses.replace(here, path=str(directory / name))
        if isinstance(here, TableSink):
            database, dot, table = here.table.rpartition(".")
            return dataclasses.replace(here, table=f"{database}{dot}{table.strip('`')}_{directory.name}")
        return dataclasses.replace(here, url=None) if isinstance(here, TopicSink) else here

    dead = pipeline.dead_letters
    return dataclasses.replace(
        pipeline,
        url=url,
        checkpoint=str(directory / "checkpoint"),
        trigger=AVAILABLE_NOW,
        sources={name: source(name, each) for name, each in pipeline.sources.items()},
        sinks={name: sink(f"sinks-{name}", each) for name, each in pipeline.sinks.items()},
        dead_letters=None if dead is None else sink("dead_letters", dead),
    )
