"""`BatchMetrics`: counts the batches of pipelines, for Prometheus.

    metrics = BatchMetrics()
    pipeline = Pipeline(..., on_batch=metrics)
    metrics.text()

*Concurrency.* May be called and read in any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from broker.exposition import CONTENT_TYPE, Histogram, Series, prometheus_text
from broker_spark.pipeline.running import BatchReport

__all__ = ["CONTENT_TYPE", "HELP", "BatchMetrics"]

_PREFIX: Final = "anybroker_pipeline_"
HELP: Final[Mapping[str, str]] = MappingProxyType(
    {
        _PREFIX + name: text
        for name, text in {
            "batches_total": "Batches that were committed.",
            "rows_in_total": "Rows that were read, of all sources.",
            "rows_out_total": "Rows that were written, by sink.",
            "dead_rows_total": "Rows that became dead letters.",
            "failed_rows_total": "Rows that failed an expectation, by source and expectation.",
            "late_rows_total": "Rows that came after the watermark and were dropped.",
            "batch_seconds": "Time from the plan of a batch to its commit.",
            "lag_rows": "Offsets behind the ends of all sources when the last batch was planned.",
            "last_batch": "The number of the last committed batch.",
        }.items()
    }
)
"""The name and description of every metric."""


class BatchMetrics:
    """Counts the batches that it is called with. One object may be the `on_batch` of several pipelines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[Series, float | Histogram] = {}

    @property
    def help(self) -> Mapping[str, str]:
        """The description of each metric by name."""
        return HELP

    def __call__(self, report: BatchReport) -> None:
        """Count a committed batch."""
        name = report.pipeline
        with self._lock:
            self._add("batches_total", 1, pipeline=name)
            self._add("rows_in_total", report.rows_in, pipeline=name)
            for sink, rows in report.rows_out.items():
                self._add("rows_out_total", rows, pipeline=name, sink=sink)
            self._add("dead_rows_total", report.dead, pipeline=name)
            for failed, rows in report.failed.items():
                source, _, expectation = failed.partition(".")
                self._add("failed_rows_total", rows, pipeline=name, source=source, expectation=expectation)
            self._add("late_rows_total", report.late, pipeline=name)
            seconds: Any = self._found.setdefault(Series.of(f"{_PREFIX}batch_seconds", pipeline=name), Histogram())
            seconds.add(report.seconds)
            self._found[Series.of(f"{_PREFIX}lag_rows", pipeline=name)] = report.lag
            self._found[Series.of(f"{_PREFIX}last_batch", pipeline=name)] = report.batch

    def read(self) -> dict[Series, float | Histogram]:
        """The metrics by name and labels."""
        with self._lock:
            return {
                series: Histogram(value.bounds, list(value.counts), value.sum)
                if isinstance(value, Histogram)
                else value
                for series, value in self._found.items()
            }

    def text(self) -> str:
        """The metrics as text for Prometheus, to be served with `CONTENT_TYPE`."""
        return prometheus_text(self.read(), HELP)

    def _add(self, name: str, count: int, **labels: str) -> None:
        series = Series.of(_PREFIX + name, **labels)
        before: Any = self._found.get(series, 0)
        self._found[series] = before + count
