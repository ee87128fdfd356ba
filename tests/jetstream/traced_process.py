"""A process that bills orders; it writes the trace and span ids of its spans to standard output, one span per line.

Arguments: the URL, the topic to consume, the topic to publish to.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

import broker
from broker.otel import instrument


class Printed(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            context = span.get_span_context()
            assert context is not None
            sys.stdout.write(f"{context.trace_id:032x} {span.name}\n")
        sys.stdout.flush()
        return SpanExportResult.SUCCESS


async def main(url: str, orders: str, invoices: str) -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(Printed()))
    async with broker.connect(url) as bus:
        instrument(bus, tracer_provider=provider)

        async def bill(message: broker.Message) -> None:
            await bus.topic(invoices).publish(b"invoice")
            inbox.stop()

        async with bus.messages(orders, subscription="billing") as inbox:
            await inbox.receive(bill)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
