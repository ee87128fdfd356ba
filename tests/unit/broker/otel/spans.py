"""A bus in memory with spans and metrics that a test reads."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import broker
from broker.otel import instrument
from broker.testing.harness import unique


class Traced:
    """:ivar tracer: for spans of the application."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")
        self._reader = InMemoryMetricReader()
        self.meters = MeterProvider([self._reader])

    def spans(self, *names: str) -> list[ReadableSpan]:
        """The ended spans, in the order of their ends; only those of these names."""
        found = self._exporter.get_finished_spans()
        return [span for span in found if not names or span.name in names]

    def span(self, name: str) -> ReadableSpan:
        (found,) = self.spans(name)
        return found

    def metrics(self) -> dict[str, Sequence[Any]]:
        """The data points by the name of their metric."""
        data = self._reader.get_metrics_data()
        found: dict[str, Sequence[Any]] = {}
        for resource in [] if data is None else data.resource_metrics:
            for scope in resource.scope_metrics:
                found |= {metric.name: metric.data.data_points for metric in scope.metrics}
        return found


@asynccontextmanager
async def traced_bus(
    *topics: str, traced: Traced | None = None, **options: Any
) -> AsyncGenerator[tuple[broker.Bus, Traced]]:
    """A bus with these topics that is instrumented."""
    traced = traced or Traced()
    async with broker.connect(f"inmem://{unique('traces')}") as bus:
        for topic in topics:
            await bus.admin.ensure_topic(topic)
        undo = instrument(bus, tracer_provider=traced.provider, meter_provider=traced.meters, **options)
        try:
            yield bus, traced
        finally:
            undo()


def context_id(span: ReadableSpan) -> tuple[int, int]:
    """The trace and the span."""
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


def linked(span: ReadableSpan) -> list[tuple[int, int]]:
    """The traces and spans that a span links to."""
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def parent_id(span: ReadableSpan) -> tuple[int, int] | None:
    """The trace and span of the parent."""
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)
