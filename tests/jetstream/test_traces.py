"""One trace over two processes, a dead letter and its redrive."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import broker
from broker import Message, Retry
from broker.otel import instrument
from tests.servers.nats import NatsServer


async def test_one_trace_over_two_processes_a_dead_letter_and_its_redrive(nats_server: NatsServer, topic: str) -> None:
    invoices, letters = f"{topic}.invoices", f"{topic}.dead"
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with broker.connect(nats_server.url) as bus:
        for name in (topic, invoices, letters):
            await bus.admin.ensure_topic(name)
        instrument(bus, tracer_provider=provider)
        await bus.topic(topic).publish(b"one coffee")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.jetstream.traced_process", nats_server.url, topic, invoices),
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 0
        tries: list[bytes | None] = []

        async def fail_once(message: Message) -> None:
            tries.append(message.data)
            inbox.stop()
            if len(tries) == 1:
                raise ValueError("no paper")

        options: dict[str, Any] = {"retry": Retry(max_attempts=1), "dead_letter": letters}
        async with bus.messages(invoices, subscription="sending", **options) as inbox:
            await inbox.receive(fail_once)
        assert await bus.admin.redrive(letters, to=[invoices])
        async with bus.messages(invoices, subscription="sending", **options) as inbox:
            await inbox.receive(fail_once)
    assert tries == [b"invoice"] * 2
    there = {tuple(line.split(" ", 1)) for line in said.decode().splitlines()}
    here = {(f"{span.context.trace_id:032x}", span.name) for span in exporter.get_finished_spans() if span.context}
    named = {f"send {topic}", f"process {topic}", f"send {invoices}", f"process {invoices}", f"send {letters}"}
    (trace_id,) = {found for found, name in here if name == f"send {topic}"}
    assert {name for found, name in here | there if found == trace_id} >= named
    # Nothing that sends or handles is outside of the trace.
    assert not {name for found, name in here | there if found != trace_id} & named
