"""`instrument`: connects a bus to the providers of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from opentelemetry import metrics, propagate, trace
from opentelemetry.metrics import MeterProvider
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import TracerProvider

from broker.hooks import HandedOver, Settled, logger
from broker.otel.metrics import ClientMetrics
from broker.otel.names import SCHEMA_URL
from broker.otel.propagation import Propagation
from broker.otel.tracing import Tracing

if TYPE_CHECKING:
    from broker.blocking import Bus as BlockingBus
    from broker.bus import Bus

__all__ = ["instrument"]

_NAME: Final = "anybroker"


def instrument(
    bus: Bus | BlockingBus,
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    propagator: TextMapPropagator | None = None,
    same_trace: bool = True,
    create_spans: bool = True,
) -> Callable[[], None]:
    """Trace and measure what the bus does from now on; return the function that ends this. Set up the SDK before.

    | operation | span | kind |
    |---|---|---|
    | `publish`, `enqueue`, also in a transaction | `send TOPIC`, whose context the message carries | producer |
    | `publish_batch` | `create TOPIC` for each message, and a `send TOPIC` that links to them | producer, client |
    | `next_message`, `next_batch`, iteration | `receive TOPIC`, when messages are handed over | client |
    | a handler, or an `async with message` block | `process TOPIC`, current within | consumer |
    | acks, nacks and releases | `ack TOPIC` and so on, for each batch that the client sends | client |
    | dead letters, retries and redrives | `send TOPIC`; the message keeps the context that it carries | client |

    Records that are read as records have metrics, and no spans. A message that carries a context when it is published
    keeps it. Conventions: semantic conventions 1.44.0, in development, pinned in `broker.otel.names`.

    :param tracer_provider: by default the global one, like `meter_provider`. Without an SDK nothing is traced, which a
        warning says.
    :param propagator: by default the global one. What native clients write is read, too.
    :param same_trace: handling a message continues the trace of its publishing. False links the two only, as the
        conventions have by default; handling a batch always links.
    :param create_spans: False leaves out the `create` spans: all messages of a batch carry the context of `send`.
    """
    backend = bus.capabilities.backend
    traces = tracer_provider or trace.get_tracer_provider()
    meters = meter_provider or metrics.get_meter_provider()
    measures = not _goes_nowhere(meters)
    if _goes_nowhere(traces) and not measures:
        logger.warning("No OpenTelemetry SDK is set up, so nothing is traced: call set_tracer_provider() before")
        return lambda: None
    measured = ClientMetrics(meters.get_meter(_NAME, schema_url=SCHEMA_URL), backend) if measures else None
    tracing = Tracing(
        traces.get_tracer(_NAME, schema_url=SCHEMA_URL),
        Propagation(propagator or propagate.get_global_textmap(), backend),
        measured,
        backend,
        same_trace=same_trace,
        create_spans=create_spans,
    )
    hooks = bus.hooks
    removals = [
        hooks.around_publishing(tracing.publishing),
        hooks.around_handling(tracing.handling),
        hooks.around_batch(tracing.batch),
        hooks.listen(tracing.event, kinds=(HandedOver, Settled)),
    ]
    if measured is not None:
        removals.append(hooks.listen(measured.event))

    def undo() -> None:
        for remove in removals:
            remove()

    return undo


def _goes_nowhere(provider: TracerProvider | MeterProvider) -> bool:
    """Whether the provider is one of the API's own, because no SDK was set up."""
    return type(provider).__module__.startswith(("opentelemetry.trace", "opentelemetry.metrics"))
