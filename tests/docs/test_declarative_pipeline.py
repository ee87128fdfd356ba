"""The project of Spark Declarative Pipelines that docs/spark.md shows, run by `spark-pipelines`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from broker.blocking import connect
from tests.docs.test_docs import ROOT, blocks, make_spark_quick, replaced
from tests.servers.spark_java import use_archive
from tests.servers.spark_python import quick_python

PAGE = ROOT / "docs" / "spark.md"
NAMED = re.compile(r"# (spark-pipeline\.yml|transformations/\w+\.py)\n")


def rows_of(table: Path) -> list[dict[str, Any]]:
    """The rows of a table that Spark keeps in files."""
    assert table.is_dir(), sorted(table.parent.rglob("*"))
    return [row for file in table.rglob("*.parquet") for row in pyarrow.parquet.read_table(file).to_pylist()]


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("spark-docs")
def test_the_shown_project_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"embedded://{tmp_path}/broker"
    places = {"embedded:///var/lib/app": url, "file:///var/lib/app": f"file://{tmp_path}/storage"}
    project = tmp_path / "project"
    files = {match[1]: block.code for block in blocks(PAGE) if (match := NAMED.match(block.code))}
    assert files.keys() == {"spark-pipeline.yml", "transformations/cafe.py"}
    for name, text in files.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(replaced(text, places), encoding="utf-8")
    make_spark_quick(tmp_path, monkeypatch)
    use_archive()
    with connect(url) as bus:
        for topic in ("cafe-orders", "large-rounds"):
            bus.admin.ensure_topic(topic)
        good = [b'{"table": %d, "coffees": %d}' % (number % 5, number) for number in range(20)]
        bus.topic("cafe-orders").publish_batch([*good, b'{"table": "bar"}'])
        with quick_python():
            done = subprocess.run(
                [Path(sys.executable).parent / "spark-pipelines", "run"],
                cwd=project,
                # The server of Spark Connect takes a free port of the loopback.
                env={**os.environ, "SPARK_TESTING": "1", "SPARK_LOCAL_IP": "127.0.0.1"},
                capture_output=True,
                text=True,
                check=False,
            )
        reported = done.stdout + done.stderr
        assert done.returncode == 0, reported[-6000:]
        tables = project / "spark-warehouse"
        assert sorted(row["coffees"] for row in rows_of(tables / "rounds")) == list(range(20)), reported[-6000:]
        (letter,) = rows_of(tables / "dead_rounds")
        assert (letter["value"], letter["reason"]) == (
            b'{"table": "bar"}',
            "Expected `int`, got `str` - at `$.table`",
        )
        read = bus.log.read("large-rounds", 0)
        assert sorted(json.loads(record.data or b"")["coffees"] for batch in read for record in batch) == list(
            range(10, 20)
        )
