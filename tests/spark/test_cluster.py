"""The same program on executors of their own: a real standalone cluster of two workers, and Spark's pretended one.

On the real one an executor is killed while its task writes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyspark
import pytest

from broker.blocking import Bus
from broker_spark.runtime.local import home_without_archive
from tests.fault_matrix import Books
from tests.servers.spark import SparkCluster
from tests.spark.conftest import MakeTopic
from tests.spark.support import log, numbered, publish

ROWS = 200
EACH = list(range(ROWS))
ROOT = Path(__file__).parents[2]


@pytest.fixture
def cluster() -> Iterator[SparkCluster]:
    with SparkCluster() as cluster:
        yield cluster


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Of Spark, where no cluster has one."""
    real = Path(pyspark.__file__).parent
    return home_without_archive(real, tmp_path / "homes") or real


def run(home: Path, master: str, url: str, topics: Sequence[str], directory: Path, step: str = "") -> dict[str, object]:
    """Run the program in a driver of its own, since this process has a session already.

    :param step: where an executor is killed; "" kills none.
    """
    program = [sys.executable, "-m", "tests.spark.cluster_program"]
    command = [*program, master, url, *topics, str(directory), step]
    here = {"PYSPARK_PYTHON": sys.executable, "SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1"}
    environment = {**os.environ, **here}
    with (
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        ) as driver,
        ThreadPoolExecutor(1) as pool,
    ):
        try:
            said = pool.submit(driver.communicate, timeout=240)
            if step:
                os.kill(executor_of(wait_for(directory / "halted", driver)), signal.SIGKILL)
            output, errors = said.result()
        finally:
            driver.kill()
    assert driver.returncode == 0, errors[-6000:]
    return json.loads(output.splitlines()[-1])


def wait_for(halted: Path, driver: subprocess.Popen[str]) -> int:
    """The halted Python worker."""
    while not halted.exists() or not halted.stat().st_size:
        assert driver.poll() is None, "the program ended before"
        time.sleep(0.02)
    return int(halted.read_text())


def executor_of(worker: int) -> int:
    """The JVM of a Python worker."""
    while Path(f"/proc/{worker}/comm").read_text().strip() != "java":
        worker = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    return worker


@pytest.mark.deep
@pytest.mark.parametrize("url", ["kafka"], indirect=True)
def test_a_pretended_cluster_of_two_executors(
    home: Path, bus: Bus, url: str, make_topic: MakeTopic, tmp_path: Path
) -> None:
    topics = source, target, orders, dead = [make_topic() for _ in range(4)]
    publish(bus, source, numbered(ROWS))
    publish(bus, orders, [b'{"number": %d}' % number for number in range(60)] + [b"?"])
    found = run(home, "local-cluster[2,1,1024]", url, topics, tmp_path)
    assert found == {"rows": ROWS, "tasks": 4, "copied": [ROWS, 0], "orders": 61, "files": 30, "spooled": EACH}
    assert sorted(data for _, data in log(bus, target)) == sorted(numbered(ROWS))
    assert [data for _, data in log(bus, dead)] == [b"?"]


@pytest.mark.deep
@pytest.mark.parametrize("url", ["kafka"], indirect=True)
def test_a_standalone_cluster_of_two_workers(
    cluster: SparkCluster, bus: Bus, url: str, make_topic: MakeTopic, tmp_path: Path, books: Books
) -> None:
    topics = source, target, orders, dead = [make_topic() for _ in range(4)]
    publish(bus, source, numbered(ROWS))
    bad = [b"?", b'{"number": "x"}']
    publish(bus, orders, [b'{"number": %d}' % number for number in range(60)] + bad)
    found = run(cluster.home, cluster.url, url, topics, tmp_path, "half")
    assert found == {"rows": ROWS, "tasks": 4, "copied": [ROWS, 0], "orders": 62, "files": 30, "spooled": EACH}
    assert sorted(data for _, data in log(bus, dead)) == sorted(bad)
    ids, rows = zip(*log(bus, target), strict=True)
    fault = "SIGKILL of an executor: half; a standalone cluster"
    why = "the task is run again"
    books.balance(fault, bus.capabilities.backend, numbered(ROWS), rows, ids=ids, twice=ROWS // 2, why=why)
    executors = {path.parent.name for path in cluster.directory.glob("work-*/*/*/stderr")}
    # One more to replace the killed one.
    assert executors == {"0", "1", "2"}
