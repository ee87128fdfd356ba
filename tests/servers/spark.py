"""A real standalone cluster of Spark: a master and two workers, from the wheel of PySpark. Blocking."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

import pyspark

from broker_spark.runtime.local import home_without_archive
from tests.servers.process import ChildProcess
from tests.servers.server_process import Servers

__all__ = ["SparkCluster"]

_DEPLOY = "org.apache.spark.deploy"
_START_SECONDS = 240.0
_MASTER = re.compile(r"Starting Spark master at (spark://\S+)")
_REGISTERED = re.compile("Successfully registered with master")


class SparkCluster(Servers):
    """`with SparkCluster() as cluster:`; `cluster.url` is the master's. Ports are free ones, on loopback.

    :param workers: each has one core.
    :ivar home: Spark's, for drivers too.
    """

    def __init__(self, workers: int = 2) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="anybroker-test-spark-"))
        # Drivers and executors start Python repeatedly.
        real = Path(pyspark.__file__).parent
        self.home = home_without_archive(real, self.directory) or real
        self.url = ""
        self._workers = workers
        self._children: list[ChildProcess] = []

    def start(self) -> Self:
        self._run("master", "master.Master", "--port", "0", "--webui-port", "0")
        self.url = self._wait("master", _MASTER)[1]
        for number in range(self._workers):
            place = self.directory / f"work-{number}"
            options = ("--cores", "1", "--memory", "1g", "--port", "0", "--webui-port", "0", "--work-dir", str(place))
            self._run(f"worker-{number}", "worker.Worker", *options, self.url)
        for number in range(self._workers):
            self._wait(f"worker-{number}", _REGISTERED)
        return self

    def close(self) -> None:
        """Stop it and remove its data."""
        for child in reversed(self._children):
            child.end(signal.SIGTERM, 20)
        shutil.rmtree(self.directory, ignore_errors=True)

    def executor_log(self) -> str:
        """The log of the executors."""
        return "\n".join(path.read_text(errors="replace") for path in self.directory.glob("work-*/*/*/stderr"))

    def _run(self, name: str, main: str, *options: str) -> None:
        # Both exec Java, so that it is our child.
        command = ["env", f"SPARK_HOME={self.home}", "SPARK_LOCAL_IP=127.0.0.1", f"PYSPARK_PYTHON={sys.executable}"]
        command += ["SPARK_DAEMON_MEMORY=256m", str(self.home / "bin" / "spark-class"), f"{_DEPLOY}.{main}"]
        env = shutil.which("env") or "/usr/bin/env"
        self._children.append(ChildProcess([env, *command[1:], "--host", "127.0.0.1", *options], self.directory / name))

    def _wait(self, name: str, wanted: re.Pattern[str]) -> re.Match[str]:
        deadline = time.monotonic() + _START_SECONDS
        path = self.directory / name
        while True:
            log = path.read_text(errors="replace") if path.exists() else ""
            if (found := wanted.search(log)) is not None:
                return found
            if time.monotonic() > deadline or self._children[-1].return_code is not None:
                raise RuntimeError(f"Spark's {name} did not start: {log[-3000:]}")
            time.sleep(0.05)
