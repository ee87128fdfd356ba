"""Trace context in the attributes of messages: written by the propagator, read also as native clients write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, cast

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import SpanContext

__all__ = ["Propagation"]

_TRACEPARENT: Final = "traceparent"
_NATIVE: Final = {
    # A server of NATS 2.11 to 2.13 renames the header of a message that it stores.
    "jetstream": "Xraceparent",
    "pubsub": "googclient_traceparent",
    "servicebus": "Diagnostic-Id",
}
"""Where native clients and servers put a `traceparent`, by backend."""
_EMPTY: Final = Context()


class Propagation:
    """:param propagator: reads and writes contexts.
    :param backend: the name of the backend, whose native clients are understood.
    """

    def __init__(self, propagator: TextMapPropagator, backend: str) -> None:
        # The API's own default of `setter` is not of the type that it declares.
        self._inject = cast("Callable[..., None]", propagator.inject)
        self._propagator = propagator
        self._fields = frozenset(propagator.fields)
        self._native = _NATIVE.get(backend)

    def written(self, attributes: Mapping[str, str], context: Context) -> dict[str, str]:
        """The attributes with the context."""
        found = dict(attributes)
        self._inject(found, context)
        return found

    def read(self, attributes: Mapping[str, str]) -> Context | None:
        """The context that the attributes carry, if any; one that is malformed is none."""
        if not attributes:
            return None
        carrier: Mapping[str, str] = attributes
        if self._fields.isdisjoint(attributes):
            # Names may come in any case.
            carrier = {name.lower(): text for name, text in attributes.items()}
            native = self._native
            if native is not None and _TRACEPARENT not in carrier and native in attributes:
                carrier[_TRACEPARENT] = attributes[native]
            if self._fields.isdisjoint(carrier):
                return None
        context = self._propagator.extract(carrier, _EMPTY)
        return context if span_of(context).is_valid else None


def span_of(context: Context | None) -> SpanContext:
    """The span that a context names."""
    return trace.get_current_span(context).get_span_context()
