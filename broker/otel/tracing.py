"""Spans of what a bus does, made by interceptors and a listener of its hooks.

*Concurrency.* On the loop of the bus. *Failure.* What raises here is logged by the hooks, and the messages go on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Final

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer

from broker.hooks import Event, HandedOver, PublishCall, Settled
from broker.messages import Message
from broker.otel import names
from broker.otel.metrics import ClientMetrics, first_error, of_consumer
from broker.otel.propagation import Propagation, span_of
from broker.outbound import OutboundMessage
from broker.receipts import Receipt

__all__ = ["Tracing"]

_ROOT: Final = Context()
_MOST_SHARED: Final = 1000
_MOST_LINKS: Final = 128
"""The most links that SDKs keep in a span by default."""

Attributes = dict[str, str | int | bool]


class Tracing:
    """Makes the spans.

    :param backend: the name of the backend.
    :param same_trace: whether handling a message continues the trace of its publishing; else both are only linked.
    :param create_spans: whether each message of a batch gets a span of its own.
    """

    def __init__(
        self,
        tracer: Tracer,
        propagation: Propagation,
        metrics: ClientMetrics | None,
        backend: str,
        *,
        same_trace: bool,
        create_spans: bool,
    ) -> None:
        self.tracer = tracer
        self.metrics = metrics
        self.propagation = propagation
        self.same_trace = same_trace
        self.create_spans = create_spans
        self._backend = backend
        self._system = names.SYSTEMS.get(backend, backend)
        self._shared: dict[tuple[str, str], Attributes] = {}

    def publishing(self, call: PublishCall) -> _Publishing:
        """The interceptor of calls that publish."""
        return _Publishing(self, call)

    def handling(self, message: Message[object]) -> _Processing:
        """The interceptor of handlers of single messages."""
        return _Processing(self, (message,))

    def batch(self, messages: Sequence[Message[object]]) -> _Processing:
        """The interceptor of handlers of batches."""
        return _Processing(self, messages)

    def event(self, event: Event) -> None:
        """The listener: messages that were handed over and settled."""
        if isinstance(event, HandedOver):
            attributes = self.of_received(event.messages)
            self._ended("receive", "receive", event.topic, attributes, event.messages, event.seconds)
        elif isinstance(event, Settled):
            for name, count in (("ack", event.acked), ("nack", event.nacked), ("release", event.released)):
                if count:
                    attributes: Attributes = {**of_consumer(event.subscription, event.group)}
                    if count > 1:
                        attributes[names.BATCH_COUNT] = count
                    handled = event.handled if name == "ack" else ()
                    self._ended(name, "settle", event.topic, attributes, handled, event.seconds)

    def _ended(
        self,
        name: str,
        kind: str,
        topic: str,
        attributes: Attributes,
        messages: Sequence[Message[object]],
        seconds: float,
    ) -> None:
        """Make the span of an operation that has just ended."""
        now = time.time_ns()
        self.tracer.start_span(
            f"{name} {topic}",
            _ambient_or_root(trace.get_current_span()),
            SpanKind.CLIENT,
            self.shared(name, kind, topic) | attributes,
            self.links(message.attributes for message in messages),
            now - int(seconds * 1e9),
        ).end(now)

    # -- attributes and links ------------------------------------------------------------------------------

    def shared(self, name: str, kind: str, topic: str) -> Attributes:
        """What all spans of an operation have; not to be changed."""
        found = self._shared.get((name, topic))
        if found is None:
            if len(self._shared) == _MOST_SHARED:
                self._shared.clear()
            found = self._shared[name, topic] = {
                names.SYSTEM: self._system,
                names.OPERATION: name,
                names.OPERATION_TYPE: kind,
                names.DESTINATION: topic,
            }
        return found

    def of_sent(self, message: OutboundMessage) -> Attributes:
        """What is known of one message before it is sent."""
        attributes: Attributes = {}
        if message.id is not None:
            attributes[names.MESSAGE_ID] = message.id
        self._add_content(attributes, message.key, message.data)
        return attributes

    def of_receipt(self, receipt: Receipt) -> Attributes:
        """What a receipt says about one message."""
        attributes: Attributes = {names.MESSAGE_ID: receipt.id}
        self._add_place(attributes, receipt.partition, receipt.offset)
        return attributes

    def of_received(self, messages: Sequence[Message[object]]) -> Attributes:
        """What is known of received messages."""
        first = messages[0]
        attributes: Attributes = {**of_consumer(first.subscription, first.group)}
        if len(messages) > 1:
            attributes[names.BATCH_COUNT] = len(messages)
            return attributes
        attributes[names.MESSAGE_ID] = first.id
        self._add_content(attributes, first.key, first.data)
        # Not by isinstance, which is slow for a protocol.
        place = None if (find := getattr(first.view, "place", None)) is None else find(first.raw)
        if place is not None:
            self._add_place(attributes, place.partition, place.offset)
        if self._backend in _ATTEMPT and (attempt := first.delivery_attempt) is not None:
            attributes[_ATTEMPT[self._backend]] = attempt
        return attributes

    def carrying(self, message: OutboundMessage, span: Span) -> OutboundMessage:
        """The message with the context of a span."""
        attributes = self.propagation.written(message.attributes, trace.set_span_in_context(span))
        if message.plain:
            return OutboundMessage(message.data, message.key, attributes)
        return message.replace(attributes=attributes)

    def links(self, carriers: Iterable[Mapping[str, str]]) -> list[Link]:
        """Links to the contexts that messages carry."""
        found: list[Link] = []
        for attributes in carriers:
            context = self.propagation.read(attributes)
            if context is not None:
                found.append(Link(span_of(context)))
                if len(found) == _MOST_LINKS:
                    break
        return found

    def _add_content(self, attributes: Attributes, key: bytes | None, data: bytes | None) -> None:
        if key is not None and (name := _KEY.get(self._backend)) is not None:
            attributes[name] = key.decode(errors="replace")
        if data is None and self._backend == "kafka":
            attributes[names.KAFKA_TOMBSTONE] = True

    def _add_place(self, attributes: Attributes, partition: int | None, offset: int | None) -> None:
        if partition is not None:
            attributes[names.PARTITION] = str(partition)
        if offset is not None and self._backend == "kafka":
            attributes[names.KAFKA_OFFSET] = offset


_KEY: Final = {"kafka": names.KAFKA_KEY, "pubsub": names.PUBSUB_KEY}
_ATTEMPT: Final = {"pubsub": names.PUBSUB_ATTEMPT, "servicebus": names.SERVICEBUS_ATTEMPT}


class _Publishing:
    """A call that publishes: a `send` span, and a `create` span for each message of a batch.

    A message that carries a context already keeps it, and the `send` span links to it.
    """

    __slots__ = ("_call", "_span", "_tracing")

    def __init__(self, tracing: Tracing, call: PublishCall) -> None:
        self._tracing = tracing
        self._call = call

    def __enter__(self) -> None:
        tracing, call = self._tracing, self._call
        messages = call.messages
        attributes = tracing.shared("send", "send", call.topic)
        if len(messages) == 1 and call.origin == "application" and not messages[0].attributes:
            # The same as below, for the common case.
            self._span = span = tracing.tracer.start_span(f"send {call.topic}", None, SpanKind.PRODUCER, attributes)
            call.messages = (tracing.carrying(messages[0], span),)
            if span.is_recording():
                span.set_attributes(tracing.of_sent(messages[0]))
            return
        carried = [tracing.propagation.read(message.attributes) for message in messages]
        own = [number for number, context in enumerate(carried) if context is None]
        created: dict[int, Span] = {}
        if len(messages) == 1:
            attributes = attributes | tracing.of_sent(messages[0])
        else:
            attributes = attributes | {names.BATCH_COUNT: len(messages)}
            if tracing.create_spans and call.origin == "application":
                created = {number: self._create(messages[number]) for number in own}
        links = [Link(span_of(context)) for context in carried if context is not None]
        links += [Link(span.get_span_context()) for span in created.values()]
        # What follows a message, such as its dead letter, continues its trace and not that of its consumer's opening.
        parent = None if call.origin == "application" else _ROOT
        if parent is not None and len(messages) == 1 and tracing.same_trace and carried[0] is not None:
            parent = carried[0]
        makes_contexts = bool(own) and not created
        self._span = span = tracing.tracer.start_span(
            f"send {call.topic}",
            parent,
            SpanKind.PRODUCER if makes_contexts else SpanKind.CLIENT,
            attributes,
            links[:_MOST_LINKS],
        )
        if own:
            changed = list(messages)
            for number in own:
                changed[number] = tracing.carrying(messages[number], created.get(number, span))
            call.messages = changed

    def _create(self, message: OutboundMessage) -> Span:
        tracing, topic = self._tracing, self._call.topic
        attributes = tracing.shared("create", "create", topic)
        span = tracing.tracer.start_span(f"create {topic}", None, SpanKind.PRODUCER, attributes)
        if span.is_recording():
            span.set_attributes(tracing.of_sent(message))
            span.end()
        return span

    def __exit__(self, *_: object) -> None:
        span, outcomes = self._span, self._call.outcomes
        if span.is_recording():
            failure = first_error(outcomes)
            if failure is not None:
                _failed(span, failure)
            elif len(outcomes) == 1 and isinstance(outcomes[0], Receipt):
                span.set_attributes(self._tracing.of_receipt(outcomes[0]))
            span.end()


class _Processing:
    """A handler at work on one message, or on a batch: a `process` span that is current in the handler."""

    __slots__ = ("_began", "_messages", "_span", "_token", "_tracing")

    def __init__(self, tracing: Tracing, messages: Sequence[Message[object]]) -> None:
        self._tracing = tracing
        self._messages = messages

    def __enter__(self) -> None:
        tracing, messages = self._tracing, self._messages
        # The span that was current when the consumer was opened has ended, unless the application wants its spans here.
        ambient = trace.get_current_span()
        parent = _ambient_or_root(ambient)
        baggage: Context | None = None
        if len(messages) > 1:
            links = tracing.links(message.attributes for message in messages)
        else:
            baggage = tracing.propagation.read(messages[0].attributes)
            links = [] if baggage is None else [Link(span_of(baggage))]
            if baggage is not None and tracing.same_trace:
                links = [Link(ambient.get_span_context())] if parent is None else []
                parent = baggage
        self._span = tracing.tracer.start_span(
            f"process {messages[0].topic}",
            parent,
            SpanKind.CONSUMER,
            tracing.shared("process", "process", messages[0].topic),
            links,
        )
        if self._span.is_recording():
            self._span.set_attributes(tracing.of_received(messages))
        self._token = contexts.attach(trace.set_span_in_context(self._span, baggage))
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._began
        contexts.detach(self._token)
        if self._span.is_recording():
            if error is not None:
                _failed(self._span, error)
            self._span.end()
        if self._tracing.metrics is not None:
            first = self._messages[0]
            self._tracing.metrics.processed(first.topic, seconds, error, first.subscription, first.group)


def _ambient_or_root(ambient: Span) -> Context | None:
    """The context for `start_span`: None is the current one, if the application is in a span of its own there."""
    return None if ambient.is_recording() else _ROOT


def _failed(span: Span, error: BaseException) -> None:
    kind = type(error)
    span.set_attribute(names.ERROR_TYPE, kind.__qualname__)
    span.set_status(Status(StatusCode.ERROR, str(error)))
    span.record_exception(error)
