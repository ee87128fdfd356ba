"""The metrics of OpenTelemetry's conventions, from the events of a bus and the handlers that tracing wraps."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.metrics import Meter

from broker.hooks import Event, HandedOver, Published, Received, RecordsReceived, Settled
from broker.otel import names
from broker.receipts import Receipt

__all__ = ["ClientMetrics", "first_error", "of_consumer"]


class ClientMetrics:
    """Counts and times operations; each measurement has system, operation and destination.

    :param backend: the name of the backend.
    """

    def __init__(self, meter: Meter, backend: str) -> None:
        self._system = names.SYSTEMS.get(backend, backend)
        bounds = names.SECONDS_BUCKETS
        self._operations = meter.create_histogram(
            names.OPERATION_SECONDS,
            "s",
            "Seconds that publishing, receiving and settling took.",
            explicit_bucket_boundaries_advisory=bounds,
        )
        self._handlers = meter.create_histogram(
            names.PROCESS_SECONDS, "s", "Seconds that handlers took.", explicit_bucket_boundaries_advisory=bounds
        )
        self._sent = meter.create_counter(names.SENT, "{message}", "Messages that were published, or failed to be.")
        self._consumed = meter.create_counter(names.CONSUMED, "{message}", "Messages and records that were fetched.")

    def processed(
        self, topic: str, seconds: float, error: BaseException | None, subscription: str | None, group: str | None
    ) -> None:
        """A handler has ended."""
        attributes = self._consumer("process", topic, subscription, group)
        _add_error(attributes, error)
        self._handlers.record(seconds, attributes)

    def event(self, event: Event) -> None:
        """The listener."""
        if isinstance(event, Published):
            attributes = self._attributes("send", event.topic)
            _add_error(attributes, first_error(event.outcomes))
            self._operations.record(event.seconds, attributes)
            self._sent.add(len(event.outcomes), attributes)
        elif isinstance(event, Received):
            attributes = self._consumer("receive", event.topic, event.subscription, event.group)
            self._consumed.add(len(event.messages), attributes)
        elif isinstance(event, RecordsReceived):
            self._consumed.add(event.count, self._attributes("receive", event.topic))
        elif isinstance(event, HandedOver):
            attributes = self._consumer("receive", event.topic, event.subscription, event.group)
            self._operations.record(event.seconds, attributes)
        elif isinstance(event, Settled):
            for name, count in (("ack", event.acked), ("nack", event.nacked), ("release", event.released)):
                if count:
                    attributes = self._consumer(name, event.topic, event.subscription, event.group)
                    self._operations.record(event.seconds, attributes)

    def _attributes(self, operation: str, topic: str) -> dict[str, str]:
        return {names.SYSTEM: self._system, names.OPERATION: operation, names.DESTINATION: topic}

    def _consumer(self, operation: str, topic: str, subscription: str | None, group: str | None) -> dict[str, str]:
        return self._attributes(operation, topic) | of_consumer(subscription, group)


def of_consumer(subscription: str | None, group: str | None) -> dict[str, str]:
    """The attributes of a consumer."""
    attributes: dict[str, str] = {}
    if subscription is not None:
        attributes[names.SUBSCRIPTION] = subscription
    if group is not None:
        attributes[names.GROUP] = group
    return attributes


def first_error(outcomes: Sequence[Receipt | BaseException | None]) -> BaseException | None:
    """The error of the first message that failed, if one did."""
    return next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)


def _add_error(attributes: dict[str, str], error: BaseException | None) -> None:
    if error is not None:
        attributes[names.ERROR_TYPE] = type(error).__qualname__
