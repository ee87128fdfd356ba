"""Uses Spark Connect: `connect_process JARS URL SOURCE TARGET KAFKA TOPIC QUEUE DIRECTORY` prints JSON.

The queue is a topic of the broker at `URL`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.connect.client import SparkConnectClient
from pyspark.sql.streaming.query import StreamingQuery

import broker_spark
from broker.errors import Unsupported
from broker_spark.kafka_connector import _is_loadable_by_server
from broker_spark.pipeline import CallSink, Pipeline, Source, run
from broker_spark.pipeline.inspecting import explain
from tests.spark.conftest import SETTINGS


@dataclass
class Row:
    number: int


def main(jars: str, url: str, source: str, target: str, kafka: str, topic: str, queue: str, directory: str) -> None:
    spark = broker_spark.session("connect", remote="local[2]", config={**SETTINGS, "spark.jars": jars})
    found: dict[str, Any] = {
        "mode": type(spark).__module__,
        "the same": broker_spark.session("another") is spark,
        "state": str(spark.conf.get("spark.sql.streaming.stateStore.providerClass")).rpartition(".")[2],
        "batch": broker_spark.read(spark, url=url, topic=source).count(),
        "missing class": _is_loadable_by_server(spark, "no.such.Provider"),
    }
    # The server's JVM reads the connector's columns, its Python those of our source.
    for connector in ("always", "never", "auto"):
        frame = broker_spark.read(spark, connector=connector, url=kafka, topic=topic)
        found[connector] = [sorted(bytes(row.value).decode() for row in frame.collect()), frame.columns[:3]]
    frame = broker_spark.read_stream(spark, url=url, topic=source, maxRows=4)
    query = copy(frame, url, target, f"{directory}/checkpoint")
    found["rows of batches"] = [each.numInputRows for each in query.recentProgress]
    found["lags"] = [sum(broker_spark.lag(each)[source].values()) for each in query.recentProgress]
    values = spark.range(2).select(F.concat(F.lit("x"), F.col("id")).alias("value"))
    values.write.format("broker").options(url=url, topic=target).mode("append").save()
    frame = broker_spark.read(spark, url=url, topic=target)
    with asking_nothing():
        decoded = broker_spark.decode(frame, Row)
    found["decoded"] = sorted(row.payload.number for row in decoded.rows.collect())
    found["dead"] = sorted(row.reason for row in decoded.dead.collect())
    pipeline = Pipeline(
        name="refused",
        url=url,
        sources={"rows": Source(source)},
        sinks={"nowhere": CallSink(print)},
        checkpoint=f"{directory}/refused",
    )
    for name, call in (("run", run), ("explain", lambda pipeline, spark: explain(pipeline, spark))):
        try:
            call(pipeline, spark=spark)
        except Unsupported as error:
            found[name] = str(error)
    # Each is started twice: a second run finds nothing new.
    streams: dict[str, tuple[dict[str, Any], str, str]] = {
        "connector": ({"connector": "always", "url": kafka, "topic": topic, "maxRows": 2}, kafka, f"{topic}.copy"),
        "spool": (
            {"url": url, "topic": queue, "subscription": "spark", "spool": f"{directory}/spool", "maxRows": 4},
            url,
            f"{queue}.copy",
        ),
    }
    for name, (options, to, copied) in streams.items():
        for _ in range(2):
            frame = broker_spark.read_stream(spark, **options)
            query = copy(frame, to, copied, f"{directory}/{name}")
            rows = [each.numInputRows for each in query.recentProgress if each.numInputRows]
            sources = {source.description for each in query.recentProgress for source in each.sources}
            found.setdefault(name, []).append({"rows": rows, "columns": frame.columns, "sources": sorted(sources)})
    try:
        broker_spark.read_stream(spark, checkpoint=f"{directory}/connector", **streams["connector"][0])
    except Unsupported as error:
        found["ids"] = str(error)
    print(json.dumps(found))


@contextmanager
def asking_nothing() -> Generator[None]:
    """No plan is analyzed: a declarative pipeline forbids that."""
    analyze = SparkConnectClient._analyze

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a plan was analyzed")

    SparkConnectClient._analyze = refuse
    yield
    SparkConnectClient._analyze = analyze


def copy(frame: DataFrame, url: str, target: str, checkpoint: str) -> StreamingQuery:
    """Copies what is there now, and ends."""
    query = (
        frame.drop("id")
        .writeStream.format("broker")
        .options(url=url, topic=target, checkpointLocation=checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return query


if __name__ == "__main__":
    main(*sys.argv[1:])
