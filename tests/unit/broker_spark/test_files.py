"""Files of a spool: durable, complete, and masked in errors. Without Spark."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from broker.errors import ConfigurationError, OffsetOutOfRange
from broker_spark.common import files
from broker_spark.common.files import LocalFiles, StoredFiles
from broker_spark.common.options import SourceOptions
from broker_spark.pipeline import FileSink, Pipeline, Source, TopicSink
from broker_spark.pipeline.inspecting import parts, status
from broker_spark.session import configured
from broker_spark.sink.sink import SinkOptions
from broker_spark.spool.positions import SpoolPosition, rows_behind
from broker_spark.spool.segments import Segment, columns_of, identities_of, read
from broker_spark.spool.spool import Spool

METADATA = {"backend": "jetstream", "subscription": "spark", "topics": ["orders"]}


def test_every_created_directory_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(files, "_sync_directory", synced.append)
    LocalFiles(str(tmp_path / "spools" / "shop" / "orders")).write("segments/one", lambda file: file.write(b"1"))
    shop = tmp_path / "spools" / "shop"
    assert {tmp_path, tmp_path / "spools", shop, shop / "orders", shop / "orders" / "segments"} == set(synced)


def test_incomplete_objects_on_azure_have_another_name() -> None:
    azure: Any = getattr(fs, "AzureFileSystem", None)
    assert not StoredFiles(azure(account_name="shop", sas_token="sv=1"), "spools")._atomic


def test_hdfs_without_its_client_is_reported_with_the_fix(tmp_path: Path) -> None:
    # In a process of its own, whose environment has no client, and which loads it once.
    place = "hdfs://name:secret@127.0.0.1:1/spools/jobs"
    program = f"""
from broker.errors import ConfigurationError
from broker_spark.common.files import check_place
for _ in range(2):
    try:
        check_place({place!r})
    except ConfigurationError as error:
        print(str(error))
"""
    environment = {
        name: value for name, value in os.environ.items() if name not in {"HADOOP_HOME", "ARROW_LIBHDFS_DIR"}
    }
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    first, second = ran.stdout.splitlines()
    for printed in (first, second):
        assert printed.startswith("Option spool is 'hdfs://")
        assert "HDFS needs libhdfs, Hadoop's client and Java on every node: set HADOOP_HOME" in printed
        assert "secret" not in printed


def test_an_incomplete_owner_is_named(tmp_path: Path) -> None:
    place = LocalFiles(str(tmp_path))
    place.write("owners/00000001-abc.json", lambda file: file.write(b'{"epoch": 1, "tok'))
    with pytest.raises(ConfigurationError, match=r"owners/00000001-abc\.json is incomplete.*Start again"):
        Spool.open(place, str(tmp_path), METADATA)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "it is empty"),
        (b'{"spool": "6f', "it ends after 13 characters, in the middle of its JSON"),
        (b"\xff\xfe\0", "it is not UTF-8 text"),
        (b'{"version": 1}', "it has no 'spool'"),
    ],
)
def test_incomplete_metadata_is_reported(tmp_path: Path, text: bytes, expected: str) -> None:
    place = LocalFiles(str(tmp_path))
    place.write("spool.json", lambda file: file.write(text))
    for look in (
        lambda: Spool.open(place, str(tmp_path), METADATA),
        lambda: rows_behind(place, str(tmp_path), SpoolPosition("6f1c", 3)),
    ):
        with pytest.raises(ConfigurationError) as caught:
            look()
        assert f"spool.json of the spool {tmp_path} is incomplete: {expected}. Restore the file" in str(caught.value)


def test_an_incomplete_segment_is_named(tmp_path: Path) -> None:
    place, segment = LocalFiles(str(tmp_path)), Segment(7, "abc", 1, 10)
    place.write(segment.name, lambda file: file.write(b"ARROW1\0\0half of it"))
    for look in (columns_of, identities_of, lambda files, each: list(read(files, "", each, ["value"]))):
        with pytest.raises(OffsetOutOfRange, match=r"segments/000000000007-abc-1-10\.arrow of the spool is incomplete"):
            look(place, segment)


def test_a_heartbeat_does_not_read_segments_while_they_change(tmp_path: Path) -> None:
    spool = Spool.open(LocalFiles(str(tmp_path)), str(tmp_path), METADATA)
    looked: list[bool] = []

    class Watched(dict[Any, Any]):
        def __iter__(self) -> Any:
            # Of the lock under a condition: whether this thread has it.
            looked.append(spool.changed._is_owned())  # pyright: ignore[reportAttributeAccessIssue]
            return super().__iter__()

    spool._segments = Watched(spool._segments)
    spool.beat()
    spool.release()
    assert looked == [True]


@pytest.mark.parametrize("line", ["spark.master  spark://host:7077", " spark.master=spark://host:7077 "])
def test_the_master_of_spark_defaults_takes_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.delenv("PYSPARK_SUBMIT_ARGS", raising=False)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert "spark.master" not in configured()
    (tmp_path / "spark-defaults.conf").write_text(f"# spark.master local\nspark.masters x\n{line}\n")
    assert configured()["spark.master"] == "spark://host:7077"
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--master local[2] pyspark-shell")
    assert configured()["spark.master"] == "local[2]"


def test_nothing_shows_a_password(tmp_path: Path) -> None:
    url, store = "nats://app:hunter2@127.0.0.1:4222", "s3://AKIA:hunter2@bucket"
    queue = {"subscription": "spark", "spool": f"{store}/spool?region=eu-west-1"}
    pipeline = Pipeline(
        name="shop",
        url=url,
        sources={"orders": Source("orders", url=url, options=queue)},
        sinks={"topic": TopicSink("copy", url=url), "files": FileSink(f"{store}/files")},
        checkpoint="nowhere://AKIA:hunter2@bucket/checkpoint",
        config={"spark.hadoop.fs.s3a.secret.key": "hunter2"},
    )
    with pytest.raises(ConfigurationError) as caught:
        status(pipeline)
    options = {"url": url, "topic": "orders", **queue}
    shown = [
        repr(pipeline),
        repr(SourceOptions.parse(options)),
        repr(SinkOptions(url=url, topic="copy", ids=True, columns=("value",))),
        repr(parts(pipeline)),
        str(caught.value),
    ]
    assert not [each for each in shown if "hunter2" in each]
