"""What works with Spark Connect: `connect_process JARS URL SOURCE TARGET KAFKA TOPIC DIRECTORY` prints it as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from pyspark.sql import functions as F  # noqa: N812

import broker_spark
from broker.errors import Unsupported
from broker_spark.pipeline import CallSink, Pipeline, Source, run
from broker_spark.pipeline.inspecting import explain
from tests.spark.conftest import SETTINGS


@dataclass
class Row:
    number: int


def main(jars: str, url: str, source: str, target: str, kafka: str, topic: str, directory: str) -> None:
    spark = broker_spark.session("connect", remote="local[2]", config={**SETTINGS, "spark.jars": jars})
    found: dict[str, Any] = {
        "mode": type(spark).__module__,
        "the same": broker_spark.session("another") is spark,
        "state": str(spark.conf.get("spark.sql.streaming.stateStore.providerClass")).rpartition(".")[2],
        "batch": broker_spark.read(spark, url=url, topic=source).count(),
    }
    # The connector's columns are the server's, ours are read by its Python.
    for connector in ("always", "never", "auto"):
        frame = broker_spark.read(spark, connector=connector, url=kafka, topic=topic)
        found[connector] = [sorted(bytes(row.value).decode() for row in frame.collect()), frame.columns[:3]]
    frame = broker_spark.read_stream(spark, url=url, topic=source, maxRows=4)
    query = (
        frame.drop("id")
        .writeStream.format("broker")
        .options(url=url, topic=target, checkpointLocation=f"{directory}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    found["rows of batches"] = [each.numInputRows for each in query.recentProgress]
    found["lags"] = [sum(broker_spark.lag(each)[source].values()) for each in query.recentProgress]
    values = spark.range(2).select(F.concat(F.lit("x"), F.col("id")).alias("value"))
    values.write.format("broker").options(url=url, topic=target).mode("append").save()
    decoded = broker_spark.decode(broker_spark.read(spark, url=url, topic=target), Row)
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
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
