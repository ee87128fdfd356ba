"""Helpers of the tests in this folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

import broker_spark
from broker.blocking import Bus
from broker.outbound import OutboundMessage
from broker_spark.common.options import SourceOptions
from broker_spark.log.ranges import Range
from broker_spark.log.reading import read_range

__all__ = ["copy", "copying", "log", "numbered", "plan_of", "publish", "read", "rows_of", "values"]


def read(spark: SparkSession, url: str, topic: str, **options: Any) -> DataFrame:
    """A batch read of one topic."""
    return spark.read.format("broker").options(url=url, topic=topic, **options).load()


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(start, start + count)]


def publish(bus: Bus, topic: str, values: Sequence[bytes]) -> None:
    """Publish values, each with its own key, so that they spread over the partitions."""
    bus.topic(topic).publish_batch([OutboundMessage(value, value) for value in values])


def values(frame: DataFrame) -> list[bytes]:
    """The values of column `value`."""
    return [bytes(row.value) for row in frame.select("value").collect()]


def rows_of(options: SourceOptions, wanted: Range) -> list[bytes]:
    """The values that a task reads, in this process."""
    return [value or b"" for batch in read_range(options, wanted) for value in batch.column("value").to_pylist()]


def copy(spark: SparkSession, url: str, source: str, target: str, checkpoint: Path, **options: Any) -> StreamingQuery:
    """Copy what is there now, and end."""
    query = copying(spark, url, source, target, checkpoint, **options).trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def copying(
    spark: SparkSession, url: str, source: str, target: str, checkpoint: Path, *, halt: str = "", **options: Any
) -> DataStreamWriter:
    """A copy that is not started.

    :param halt: where it halts, see `tests.spark.halting`; with Spark's connector only at a write.
    """
    name, halts = ("halting", {"halt": halt}) if halt else ("broker", {})
    if "connector" in options:
        frame = broker_spark.read_stream(spark, url=url, topic=source, checkpoint=str(checkpoint), **options)
    else:
        frame = spark.readStream.format(name).options(url=url, topic=source, **halts, **options).load()
    return (
        frame.drop("id")
        .writeStream.format(name)
        .options(url=url, topic=target, checkpointLocation=str(checkpoint), **halts)
    )


def log(bus: Bus, topic: str) -> list[tuple[str, bytes]]:
    """Ids and bodies."""
    return [
        (record.id, record.data or b"")
        for partition in bus.log.partitions(topic)
        for batch in bus.log.read(topic, partition)
        for record in batch
    ]


def plan_of(frame: Any) -> list[str]:
    """The steps of a frame, in a classic session; steps with the same number after a star are one method."""
    plan: str = frame._jdf.queryExecution().executedPlan().toString()
    return [line.lstrip(" +-:") for line in plan.splitlines()]
