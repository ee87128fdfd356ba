"""A spool on an object store, here a double of S3; pyarrow and Spark's processes are real."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from pyspark.sql import SparkSession

from broker.blocking import connect
from broker.errors import ConfigurationError
from broker_spark.common.files import StoredFiles, open_files
from broker_spark.common.options import SourceOptions
from tests.servers import nats
from tests.servers.s3 import S3Double
from tests.spark.support import numbered, publish


@pytest.fixture(scope="module")
def store() -> Iterator[S3Double]:
    with S3Double() as store:
        yield store


def test_files_of_a_store(store: S3Double) -> None:
    files = open_files(store.url("files/one"))
    assert isinstance(files, StoredFiles)
    assert files.names("segments") == []
    for name, content in (("segments/a", b"first"), ("segments/b", b"x" * (6 << 20)), ("segments/a", b"second")):
        files.write(name, lambda file, content=content: file.write(content))
    assert files.names("segments") == ["a", "b"]
    assert files.names("") == []
    assert (files.read("segments/a"), len(files.read("segments/b"))) == (b"second", 6 << 20)
    with files.open("segments/b") as file:
        file.seek((6 << 20) - 3)
        assert file.read() == b"xxx"
    assert 0 <= files.age("segments/a") < 60

    def fail(file: io.BytesIO) -> None:
        file.write(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        files.write("segments/c", fail)
    for _ in range(2):
        files.delete("segments/a")
    assert files.names("segments") == ["b"]
    with pytest.raises(FileNotFoundError):
        files.read("segments/a")


def test_a_secret_in_the_directory_is_not_shown(store: S3Double) -> None:
    options = {"url": "nats://127.0.0.1:1", "topic": "orders", "subscription": "billing"}
    with pytest.raises(ConfigurationError) as caught:
        SourceOptions.parse({**options, "spool": store.url("a") + "&colour=red"})
    assert "colour" in str(caught.value)
    assert "pass" not in str(caught.value)


@pytest.mark.deep
def test_a_stream_of_spark_over_a_store(spark: SparkSession, store: S3Double, tmp_path: Path) -> None:
    url, topic = nats.shared_server().url, f"spark.{uuid4().hex[:12]}"
    spool = store.url("spools/stream")

    def run() -> None:
        options = {"url": url, "topic": topic, "subscription": "spark", "spool": spool, "maxRows": 200}
        query = (
            spark.readStream.format("broker")
            .options(**options)
            .load()
            .writeStream.format("parquet")
            .options(path=str(tmp_path / "out"), checkpointLocation=str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    with connect(url) as bus:
        bus.admin.ensure_topic(topic)
        bus.admin.ensure_subscription(topic, "spark")
        for start in (0, 300):
            publish(bus, topic, numbered(300, start))
            run()
        assert bus.admin.lag(topic, "spark").waiting == 0
    found = [bytes(row.value) for row in spark.read.parquet(str(tmp_path / "out")).collect()]
    assert sorted(found) == sorted(numbered(600))
    # Committed batches are deleted, except the last one.
    assert 1 <= len(open_files(spool).names("segments")) <= 3
