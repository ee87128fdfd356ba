"""What a Python worker of Spark prints when Spark closes its connection before it has sent its rows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyspark.sql import SparkSession

from broker_spark.runtime.workers import leave_out_broken_pipes


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.deep
@pytest.mark.parametrize("quiet", [True, False])
def test_a_worker_behind_a_limit_prints_nothing(spark: SparkSession, tmp_path: Path, quiet: bool) -> None:
    printed, started, go_on = (str(tmp_path / name) for name in ("printed", "started", "go on"))
    prepare = leave_out_broken_pipes if quiet else int

    def rows(batches: Iterator[Any]) -> Iterator[Any]:
        for _ in batches:
            os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT), 2)
            Path(started).write_text(str(os.getpid()))
            prepare()
            # More than the buffer of a worker, so that Spark gets it at once.
            yield pyarrow.RecordBatch.from_arrays([pyarrow.array(["x" * 100_000])], names=["x"])
            while not Path(go_on).exists():
                time.sleep(0.02)
            yield pyarrow.RecordBatch.from_arrays([pyarrow.array(["y"])], names=["x"])

    (row,) = spark.range(0, 1, 1, 1).mapInArrow(rows, "x string").limit(1).collect()
    assert len(row.x) == 100_000
    # Spark has closed the connection.
    Path(go_on).touch()
    worker = int(Path(started).read_text())
    while is_alive(worker):
        time.sleep(0.02)
    found = Path(printed).read_text()
    assert ("BrokenPipeError" in found) is not quiet
    assert not (quiet and found)
