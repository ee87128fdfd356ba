"""The number of tasks after a pipeline's reads, while the executors of a cluster register one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from broker_spark.pipeline import running as tasks
from broker_spark.pipeline.running import task_count


class _Cluster:
    """A session whose executors, of two cores each, register at these seconds."""

    def __init__(self, master: str, *comes: float, parallelism: int | None = None) -> None:
        self.now = 0.0
        self.master = master
        self._comes = comes
        self._set = parallelism
        self.sparkContext = self
        self._jsc = self

    def getConf(self) -> Any:  # noqa: N802  # as Spark calls it
        return SimpleNamespace(contains=lambda name: name == "spark.default.parallelism" and self._set is not None)

    def sc(self) -> Any:
        size = 1 + self._there
        return SimpleNamespace(getExecutorMemoryStatus=lambda: SimpleNamespace(size=lambda: size))

    @property
    def _there(self) -> int:
        return sum(each <= self.now for each in self._comes)

    @property
    def defaultParallelism(self) -> int:  # noqa: N802  # as Spark calls it
        return self._set or max(2, 2 * self._there)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("cluster", "found", "waited"),
    [
        (_Cluster("local"), 2, 0),
        (_Cluster("local[8]", parallelism=8), 8, 0),
        (_Cluster("spark://host:7077", 1, 2, 3, parallelism=5), 5, 0),
        (_Cluster("spark://host:7077", 0, 0, 0), 6, 2),
        (_Cluster("spark://host:7077", 4, 5, 6.5), 6, 8.5),
        (_Cluster("local-cluster[2,1,1024]", 1, 1), 4, 3),
        (_Cluster("yarn"), 2, 30),
    ],
)
def test_a_cluster_is_counted_when_its_executors_have_registered(
    cluster: Any, found: int, waited: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "time", SimpleNamespace(monotonic=lambda: cluster.now, sleep=cluster.sleep))
    assert task_count(cluster) == found
    assert cluster.now == pytest.approx(waited, abs=0.25)
    assert ("No executor registered" in caplog.text) is (cluster.now > 29)
