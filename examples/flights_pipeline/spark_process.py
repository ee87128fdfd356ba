"""Runs the three pipelines in one session of Spark: `spark_process URL DIRECTORY ROWS TRIGGER`.

Prints a line of JSON per committed batch. Ends when all pipelines have ended, with status 1 and a line with the reason
if one failed. Ends at once when its standard input ends: then the parent process is gone.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final

import msgspec
from pyspark.sql import SparkSession

from broker_spark import session
from broker_spark.pipeline import BatchReport, Run
from broker_spark.testing import QUICK
from examples.flights_pipeline.pipelines import make_pipelines

_COMING_UP: Final = "Initializing sources"
_LOOK_SECONDS: Final = 0.1
_TEMPORARY: Final = tempfile.gettempdir()
_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
_SETTINGS: Final = {
    # The demo starts Spark twice, so a quick start matters.
    **QUICK,
    _JAVA_OPTIONS: f'{QUICK[_JAVA_OPTIONS]} "-Djava.io.tmpdir={_TEMPORARY}"',
    "spark.driver.memory": "1536m",
    "spark.local.dir": _TEMPORARY,
    "spark.scheduler.mode": "FAIR",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}


def main(url: str, directory: str, rows: str, trigger: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    pipelines = make_pipelines(url, Path(directory), rows=int(rows), trigger=trigger)
    spark = session("flights", master="local[2,3]", config=_SETTINGS)
    _tell({"ready": f"Spark {spark.version}"})
    runs = [Run(pipeline, _tell) for pipeline in pipelines.values()]
    with ThreadPoolExecutor(len(runs)) as threads:
        running = [_start(threads, run, name, spark) for name, run in zip(pipelines, runs, strict=True)]
        if wait(running, return_when=FIRST_EXCEPTION).not_done:
            for run in runs:
                run.stop()
    for each in running:
        failure = each.exception()
        if failure is not None:
            _tell({"failed": str(failure)})
            raise failure


def _start(threads: ThreadPoolExecutor, run: Run, name: str, spark: SparkSession) -> Future[int]:
    """Run a pipeline in a thread. Returns when its sources are up.

    Spark gives a source ten seconds to start; on a busy machine three starting at once would exceed that.
    """
    running = threads.submit(run.execute, spark)
    while not running.done():
        query = next((query for query in spark.streams.active if query.name == name), None)
        if query is not None and query.status["message"] != _COMING_UP:
            break
        wait((running,), _LOOK_SECONDS)
    return running


def _tell(what: BatchReport | dict[str, str]) -> None:
    # One write per line: the threads of three pipelines share the pipe.
    os.write(sys.stdout.fileno(), msgspec.json.encode(what) + b"\n")


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
