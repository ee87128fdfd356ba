"""Where contexts are read from and written to."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry import propagate
from opentelemetry.baggage import get_all
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from broker.otel.propagation import Propagation, span_of

FOREIGN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *((backend, "traceparent") for backend in ("kafka", "jetstream", "pubsub", "pulsar", "servicebus", "inmem")),
        ("kafka", "Traceparent"),
        ("jetstream", "Xraceparent"),
        ("pubsub", "googclient_traceparent"),
        ("servicebus", "Diagnostic-Id"),
    ],
)
def test_contexts_are_read_as_native_clients_write_them(backend: str, name: str) -> None:
    propagation = Propagation(propagate.get_global_textmap(), backend)
    found = span_of(propagation.read({"own": "x", name: FOREIGN}))
    assert (found.trace_id, found.span_id) == (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)


def test_names_of_other_brokers_are_attributes_like_any_other() -> None:
    propagation = Propagation(propagate.get_global_textmap(), "kafka")
    assert propagation.read({"googclient_traceparent": FOREIGN, "Diagnostic-Id": FOREIGN}) is None


def test_our_own_context_counts_more_than_a_native_one() -> None:
    propagation = Propagation(propagate.get_global_textmap(), "servicebus")
    found = span_of(propagation.read({"Diagnostic-Id": FOREIGN, "traceparent": FOREIGN.replace("b7ad", "c7ad")}))
    assert found.span_id == 0xC7AD6B7169203331


def test_baggage_travels_with_the_configured_propagator() -> None:
    propagation = Propagation(propagate.get_global_textmap(), "kafka")
    context = propagation.read({"traceparent": FOREIGN, "baggage": "tenant=7"})
    assert get_all(context) == {"tenant": "7"}
    assert Propagation(W3CBaggagePropagator(), "kafka").read({"baggage": "tenant=7"}) is None


def test_what_is_written_is_read() -> None:
    propagation = Propagation(TraceContextTextMapPropagator(), "kafka")
    context = propagation.read({"traceparent": FOREIGN, "tracestate": "vendor=1"})
    assert context is not None
    written = propagation.written({"own": "kept"}, context)
    assert written == {"own": "kept", "traceparent": FOREIGN, "tracestate": "vendor=1"}
    assert span_of(propagation.read(written)) == span_of(context)


def test_the_api_alone_is_needed() -> None:
    code = "import sys, broker.otel; sys.exit(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_the_api_the_error_has_the_command() -> None:
    code = "import sys; sys.modules['opentelemetry'] = None; import broker.otel"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert "MissingClient: OpenTelemetry is not installed. Run: pip install 'anybroker[otel]'" in found.stderr
