"""Spans of batches."""

from __future__ import annotations

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from broker_spark.pipeline import BatchReport, BatchSpans


def test_a_batch_is_a_span_with_its_counts() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    report = BatchReport(
        "shop", 7, 20, {"archive": 15, "alarms": 2}, dead=3, lag=100, seconds=1.5, failed={"orders.paid": 1}, late=4
    )
    BatchSpans(provider)(report)
    (span,) = exporter.get_finished_spans()
    assert span.name == "batch shop"
    assert span.attributes is not None
    assert {name.removeprefix("anybroker.pipeline."): value for name, value in span.attributes.items()} == {
        "name": "shop",
        "batch": 7,
        "rows_in": 20,
        "rows_out.archive": 15,
        "rows_out.alarms": 2,
        "dead_rows": 3,
        "late_rows": 4,
        "failed_rows.orders.paid": 1,
        "lag_rows": 100,
    }
    assert span.end_time is not None
    assert span.start_time is not None
    assert span.end_time - span.start_time == 1_500_000_000
