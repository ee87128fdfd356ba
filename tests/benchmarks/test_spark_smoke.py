"""Benchmarks of Spark run on few messages and report their figures. Speed is not tested here.

Only the one that reads, since every query costs seconds; `make bench-spark ARGS=--quick` runs all.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.spark.crossover import crossing
from tests.servers.spark_python import quick_python

pytestmark = pytest.mark.deep

EXPECTED = (
    "jetstream, 100 B: broker, five / LogReader, five | ≥ 0.7 x",
    "kafka, 100 B: broker, all / LogReader, all | ≥ 0.7 x",
    "jetstream, 100 B: broker, five / row-wise, five | ≥ 3 x",
    "kafka, 100 B: broker by connector, five / connector, five | ≥ 0.95 x",
    "kafka, 100 B: broker by connector / connector | ≥ 0.95 x",
)


@pytest.mark.xdist_group("spark")
def test_it_runs_and_writes_its_page(tmp_path: Path) -> None:
    # A subprocess, since it stops and starts sessions, and this process may have one.
    with quick_python():
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.spark", "reading", "--quick", "--output", str(tmp_path)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-5000:]
    page = (tmp_path / "performance-spark.md").read_text()
    assert [what for what in EXPECTED if what not in page] == []
    assert "![Measured against the bars](performance-spark.png)" in page
    assert (tmp_path / "performance-spark.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("plain", "spark", "expected"),
    [
        ([2.0, 4.0], [1.0, 2.0], "under 1,000"),
        ([1.0, 4.0], [2.0, 3.0], "1,500"),
        ([1.0, 3.0], [5.0, 6.0], "about 5,000"),
        ([1.0, 2.0], [5.0, 7.0], "never"),
    ],
)
def test_where_two_lines_cross(plain: list[float], spark: list[float], expected: str) -> None:
    rows = (1000.0, 2000.0)
    assert crossing([*zip(rows, plain, strict=True)], [*zip(rows, spark, strict=True)]) == expected
