"""`broker pipeline run --listen`: health and metrics over HTTP while the pipeline runs."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from broker.blocking import connect
from broker.cli import main
from broker.cli.session import Session
from broker_spark.pipeline import CallSink, Pipeline, Run, Source
from tests.prometheus_text import read_text
from tests.servers import nats
from tests.spark.support import numbered, publish

LOOK = """
import time
import urllib.request
from pathlib import Path

def look(frame, batch):
    url = Path(__file__).with_name("url").read_text()

    def get(page):
        return urllib.request.urlopen(url + page, timeout=300).read().decode()

    assert get("/health") == "ok\\n"
    # The report of the batch before comes from another thread.
    while batch and "batches_total" not in get("/metrics"):
        time.sleep(0.1)
    Path(__file__).with_name(f"metrics{batch}").write_text(get("/metrics"))
"""


@pytest.mark.deep
def test_metrics_are_served_while_the_pipeline_runs(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del spark  # the command finds this session
    url = nats.shared_server().url
    topic, module = f"spark.{uuid.uuid4().hex[:12]}", f"looking_{uuid.uuid4().hex[:8]}"
    (tmp_path / f"{module}.py").write_text(LOOK)
    file = tmp_path / "copy.toml"
    file.write_text(
        f'name = "copy"\nurl = "{url}"\ncheckpoint = "checkpoint"\ntrigger = "available-now"\n'
        f'[sources.rows]\ntopic = "{topic}"\nmaxRows = 100\n'
        "expect.'not five' = { condition = \"cast(value as string) <> '5'\", action = 'drop' }\n"
        f'[sinks.look]\ncall = "{module}:look"\n'
    )
    noted = Session.note

    def note(session: Session, text: str) -> None:
        if text.startswith("Health and metrics are at "):
            (tmp_path / "url").write_text(text.rpartition(" ")[2])
        noted(session, text)

    monkeypatch.setattr(Session, "note", note)
    with connect(url) as bus:
        bus.admin.ensure_topic(topic, partitions=1)
        publish(bus, topic, numbered(150))
    assert main(["pipeline", "run", "--listen", "0", str(file)]) == 0
    assert (tmp_path / "metrics0").read_text() == ""
    families = read_text((tmp_path / "metrics1").read_text())
    labels = {("pipeline", "copy"), ("source", "rows"), ("expectation", "not five")}
    failed = families["anybroker_pipeline_failed_rows_total"]
    assert failed.samples == {("anybroker_pipeline_failed_rows_total", frozenset(labels)): 1}
    read = families["anybroker_pipeline_rows_in_total"]
    assert read.samples == {("anybroker_pipeline_rows_in_total", frozenset({("pipeline", "copy")})): 100}


def test_an_address_that_cannot_be_used_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "none.toml"
    assert main(["pipeline", "run", "--listen", "host:port", str(file)]) == 2
    assert capsys.readouterr().err.startswith("broker: --listen is 'host:port'")


def test_health_tells_why_no_batch_is_processed(tmp_path: Path) -> None:
    under_way = Run(
        Pipeline(
            name="idle",
            url="nats://127.0.0.1:4222",
            sources={"rows": Source("rows")},
            sinks={"nothing": CallSink(lambda *_: None)},
            checkpoint=str(tmp_path),
        )
    )
    assert under_way.trouble() == "The pipeline starts"
    under_way._id_known.set()
    assert under_way.trouble() == ""
    under_way.stop()
    assert under_way.trouble() == "The pipeline stops"
