"""`BatchSpans`: a span of OpenTelemetry for each batch of a pipeline, with its counts. Needs the extra `otel`.

    pipeline = Pipeline(..., on_batch=BatchSpans())

*Concurrency.* May be called in any thread.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from broker.errors import MissingClient
from broker_spark.pipeline.running import BatchReport

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

__all__ = ["BatchSpans"]

_PREFIX = "anybroker.pipeline."


class BatchSpans:
    """Makes the span of each batch that it is called with, once the batch is committed.

    :param tracer_provider: by default the global one.
    :raises MissingClient: OpenTelemetry is not installed.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise MissingClient(
                "OpenTelemetry is not installed", native=error, advice="Run: pip install 'anybroker[otel]'"
            ) from None
        self._tracer = (tracer_provider or trace.get_tracer_provider()).get_tracer("anybroker")

    def __call__(self, report: BatchReport) -> None:
        """Trace a committed batch."""
        end = time.time_ns()
        counts = {
            "batch": report.batch,
            "rows_in": report.rows_in,
            **{f"rows_out.{sink}": rows for sink, rows in report.rows_out.items()},
            "dead_rows": report.dead,
            "late_rows": report.late,
            **{f"failed_rows.{name}": rows for name, rows in report.failed.items()},
            "lag_rows": report.lag,
        }
        self._tracer.start_span(
            f"batch {report.pipeline}",
            attributes={f"{_PREFIX}name": report.pipeline, **{_PREFIX + name: each for name, each in counts.items()}},
            start_time=end - int(report.seconds * 1e9),
        ).end(end)
