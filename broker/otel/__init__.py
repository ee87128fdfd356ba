"""Traces and metrics by OpenTelemetry's conventions for messaging: `instrument(bus)`. Extra `otel`.

Stands on `opentelemetry-api` alone; the application brings the SDK and its exporters.
"""

from broker.errors import MissingClient

try:
    from broker.otel.instrumentation import instrument
except ImportError as error:
    raise MissingClient(
        "OpenTelemetry is not installed", native=error, advice="Run: pip install 'anybroker[otel]' opentelemetry-sdk"
    ) from None

__all__ = ["instrument"]
