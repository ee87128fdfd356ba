"""CPU that traces add to publishing and handling in memory, next to a bare loop of OpenTelemetry's own calls.

Spans go nowhere: what an exporter costs is the application's choice. The bare loops make the same span with the same
attributes, and write or read the same context.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count as counting

from opentelemetry import context as contexts
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON
from opentelemetry.trace import SpanKind

import broker
from benchmarks.measure import Series, Spread, Variant, in_pairs
from benchmarks.null_backend import BODY
from benchmarks.receiving import receive
from benchmarks.report import Finding, Section
from broker.otel import instrument

__all__ = ["measure_tracing"]

_TOPIC = "bench.traced"
_READERS = "readers"
_numbers = counting()

_Work = Callable[[broker.Bus, int], Awaitable[object]]


async def measure_tracing(scale: float, rounds: int) -> Section:
    """Measure without an SDK, not sampled and recording."""
    section = Section(
        "What traces cost",
        "CPU microseconds per message that `instrument(bus)` adds in memory, to `publish` and to `receive` with an "
        "empty handler; and what is left of that above a loop that makes the same spans by OpenTelemetry's own calls.",
        "added CPU, µs per message",
    )
    count = max(500, int(20_000 * scale))
    providers = {
        "without an SDK": None,
        "not sampled": TracerProvider(sampler=ALWAYS_OFF),
        "recording": TracerProvider(sampler=ALWAYS_ON),
    }
    works: dict[str, tuple[_Work, Callable[[TracerProvider, int], None]]] = {
        "publish": (_publish, _bare_sends),
        "receive(handler)": (_receive, _bare_handlings),
    }
    for name, (work, bare) in works.items():
        traced = {kind: _on_bus(work, count, provider) for kind, provider in providers.items()}
        untraced = _on_bus(work, count, None, instrumented=False)
        found = await in_pairs(untraced, traced, count=count, rounds=rounds)
        for kind, (with_traces, without) in found.items():
            added = with_traces.cost_above(without)
            provider = providers[kind]
            at_most = {"without an SDK": 2.0, "not sampled": 15.0}.get(kind)
            section.findings.append(Finding(f"`{name}`, {kind}", added, "µs", at_most=at_most))
            if provider is not None:
                alone = await _bare(bare, provider, count, rounds)
                section.findings.append(
                    Finding(f"`{name}`, {kind}: bare calls", alone.cost, "µs"),
                )
                if kind == "recording":
                    above = Spread(*(each - alone.cost.median for each in (added.median, added.least, added.most)))
                    section.findings.append(Finding(f"`{name}`, {kind}: above bare calls", above, "µs", at_most=8.0))
    return section


async def _bare(
    loop: Callable[[TracerProvider, int], None], provider: TracerProvider, count: int, rounds: int
) -> Series:
    @asynccontextmanager
    async def variant(work: Callable[[], Awaitable[object]]) -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        yield work

    async def run() -> None:
        loop(provider, count)

    async def nothing() -> None: ...

    found = await in_pairs(partial(variant, nothing), {"bare": partial(variant, run)}, count=count, rounds=rounds)
    return found["bare"][0]


def _on_bus(work: _Work, count: int, provider: TracerProvider | None, *, instrumented: bool = True) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with broker.connect(f"inmem://bench-traced-{next(_numbers)}") as bus:
            await bus.admin.ensure_topic(_TOPIC)
            if instrumented:
                instrument(bus, tracer_provider=provider)
            if work is _receive:
                await bus.admin.ensure_subscription(_TOPIC, _READERS)
                for _ in range(count):
                    await bus.topic(_TOPIC).publish(BODY)
            yield partial(work, bus, count)

    return variant


async def _publish(bus: broker.Bus, count: int) -> None:
    topic = bus.topic(_TOPIC)
    for _ in range(count):
        await topic.publish(BODY)


async def _receive(bus: broker.Bus, count: int) -> None:
    await receive(bus, _TOPIC, _READERS, count)


def _attributes(operation: str) -> dict[str, str]:
    return {
        "messaging.system": "anybroker_inmem",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": _TOPIC,
    }


def _bare_sends(provider: TracerProvider, count: int) -> None:
    tracer, inject = provider.get_tracer("bench"), propagate.get_global_textmap().inject
    for _ in range(count):
        span = tracer.start_span(f"send {_TOPIC}", None, SpanKind.PRODUCER, _attributes("send"))
        inject({}, trace.set_span_in_context(span))
        if span.is_recording():
            span.set_attributes({"messaging.message.id": "a", "messaging.destination.partition.id": "1"})
        span.end()


def _bare_handlings(provider: TracerProvider, count: int) -> None:
    tracer, extract = provider.get_tracer("bench"), propagate.get_global_textmap().extract
    carrier = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    for _ in range(count):
        found = extract(carrier, Context())
        span = tracer.start_span(f"process {_TOPIC}", found, SpanKind.CONSUMER, _attributes("process"))
        if span.is_recording():
            span.set_attributes(
                {
                    "messaging.destination.subscription.name": _READERS,
                    "messaging.message.id": "a",
                    "messaging.destination.partition.id": "1",
                }
            )
        token = contexts.attach(trace.set_span_in_context(span, found))
        contexts.detach(token)
        span.end()
