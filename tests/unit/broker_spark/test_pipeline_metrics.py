"""`BatchMetrics`: its numbers, its text for Prometheus, and its table in the docs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from broker.hooks import Hooks
from broker.metrics import Metrics, Series
from broker_spark.pipeline import BatchMetrics, BatchReport
from broker_spark.pipeline.metrics import HELP
from tests.prometheus_text import read_text


def report(batch: int, **changes: Any) -> BatchReport:
    fields: dict[str, Any] = {
        "pipeline": "shop",
        "batch": batch,
        "rows_in": 10,
        "rows_out": {"topic": 7, "archive": 6},
        "dead": 2,
        "lag": 5,
        "seconds": 0.5,
        "failed": {"orders.some coffee": 3},
        "late": 1,
    }
    return BatchReport(**(fields | changes))


def test_batches_are_counted_by_pipeline_sink_and_expectation() -> None:
    metrics = BatchMetrics()
    assert (metrics.read(), metrics.text()) == ({}, "")
    metrics(report(3))
    metrics(report(4, lag=0, failed={"orders.some coffee": 0}, seconds=2.0))
    metrics(report(0, pipeline="other", rows_out={}, failed={}))
    families = read_text(metrics.text())
    shop = ("pipeline", "shop")

    def value(name: str, *labels: tuple[str, str]) -> float:
        family = families[f"anybroker_pipeline_{name}"]
        assert family.help
        return family.samples[f"anybroker_pipeline_{name}", frozenset({shop, *labels})]

    assert value("batches_total") == 2
    assert value("rows_in_total") == 20
    assert value("rows_out_total", ("sink", "archive")) == 12
    assert value("dead_rows_total") == 4
    assert value("failed_rows_total", ("source", "orders"), ("expectation", "some coffee")) == 3
    assert value("late_rows_total") == 2
    assert value("lag_rows") == 0
    assert value("last_batch") == 4
    seconds = families["anybroker_pipeline_batch_seconds"]
    assert seconds.samples["anybroker_pipeline_batch_seconds_sum", frozenset({shop})] == 2.5
    assert (
        families["anybroker_pipeline_batches_total"].samples[
            "anybroker_pipeline_batches_total", frozenset({("pipeline", "other")})
        ]
        == 1
    )
    # What was read stays as it was.
    before = metrics.read()
    metrics(report(5))
    assert before != metrics.read()


def test_a_bus_may_show_them() -> None:
    hooks, metrics = Hooks(), BatchMetrics()
    hooks.show_metrics(metrics)
    metrics(report(3))
    everything = Metrics(hooks)
    assert everything.read()[Series.of("anybroker_pipeline_last_batch", pipeline="shop")] == 3
    assert read_text(everything.text())["anybroker_pipeline_last_batch"].help == HELP["anybroker_pipeline_last_batch"]


def test_every_metric_is_documented() -> None:
    metrics = BatchMetrics()
    metrics(report(0))
    assert {series.name for series in metrics.read()} == HELP.keys()
    text = (Path(__file__).parents[3] / "docs" / "pipelines.md").read_text()
    table = text[text.index("| metric | what |") :].partition("\n\n")[0]
    documented = {name for line in table.splitlines()[2:] for name in re.findall("`([^`]+)`", line.split("|")[1])}
    assert {f"anybroker_pipeline_{name}" for name in documented} == HELP.keys()
