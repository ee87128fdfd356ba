"""Spans of everything that a bus does, by the conventions of OpenTelemetry."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

import broker
from broker import Message, MessageBatch, OutboundMessage, Retry
from broker.hooks import Event, HandedOver
from broker.otel import instrument, names
from broker.testing.harness import unique
from broker.testing.waiting import eventually
from tests.unit.broker.otel.spans import Traced, context_id, linked, parent_id, traced_bus

FOREIGN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
FOREIGN_ID = (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)


async def handled(bus: broker.Bus, topic: str, handler: Any, count: int = 1, **options: Any) -> None:
    """Run the handler until it was called so often."""
    calls = 0

    async def count_calls(message: Message) -> None:
        nonlocal calls
        calls += 1
        await handler(message)

    async with bus.messages(topic, subscription="readers", **options) as inbox:
        work = asyncio.create_task(inbox.receive(count_calls))
        await eventually(lambda: calls >= count, 30)
        inbox.stop()
        await work


async def nothing(message: Message) -> None: ...


async def test_a_message_carries_the_span_that_sent_it() -> None:
    async with traced_bus("orders") as (bus, traced):
        with traced.tracer.start_as_current_span("order") as order:
            receipt = await bus.topic("orders").publish(b"one", id="order-1", attributes={"own": "kept"})
        async with bus.messages("orders", subscription="readers") as inbox:
            message = await inbox.next_message(timeout=30)
            assert message is not None
        send = traced.span("send orders")
        assert parent_id(send) == (order.get_span_context().trace_id, order.get_span_context().span_id)
        assert send.kind is SpanKind.PRODUCER
        assert send.attributes == {
            names.SYSTEM: "anybroker_inmem",
            names.OPERATION: "send",
            names.OPERATION_TYPE: "send",
            names.DESTINATION: "orders",
            names.MESSAGE_ID: "order-1",
            names.PARTITION: str(receipt.partition),
        }
        trace_id, span_id = context_id(send)
        assert message.attributes["own"] == "kept"
        assert message.attributes["traceparent"].split("-")[1:3] == [f"{trace_id:032x}", f"{span_id:016x}"]
        assert send.instrumentation_scope is not None
        assert send.instrumentation_scope.schema_url == "https://opentelemetry.io/schemas/1.44.0"


async def test_each_message_of_a_batch_has_a_span() -> None:
    async with traced_bus("orders") as (bus, traced):
        await bus.topic("orders").publish_batch([b"one", OutboundMessage(b"two", attributes={"traceparent": FOREIGN})])
        create, send = traced.span("create orders"), traced.span("send orders")
        assert (create.kind, send.kind) == (SpanKind.PRODUCER, SpanKind.CLIENT)
        assert linked(send) == [FOREIGN_ID, context_id(create)]
        assert send.attributes is not None
        assert send.attributes[names.BATCH_COUNT] == 2
        async with bus.messages("orders", subscription="readers") as inbox:
            found = {}
            while len(found) < 2:
                message = await inbox.next_message(timeout=30)
                assert message is not None
                found[message.data] = message.attributes["traceparent"]
        assert found[b"two"] == FOREIGN
        assert found[b"one"].split("-")[2] == f"{context_id(create)[1]:016x}"


async def test_create_spans_can_be_left_out() -> None:
    async with traced_bus("orders", create_spans=False) as (bus, traced):
        await bus.topic("orders").publish_batch([b"one", b"two"])
        send = traced.span("send orders")
        assert (send.kind, linked(send)) == (SpanKind.PRODUCER, [])
        assert [span.name for span in traced.spans()] == ["send orders"]


async def test_one_trace_over_a_handler_that_publishes() -> None:
    async with traced_bus("orders", "invoices") as (bus, traced):
        await bus.topic("orders").publish(b"one")

        async def bill(message: Message) -> None:
            await bus.topic("invoices").publish(b"invoice")

        await handled(bus, "orders", bill)
        await handled(bus, "invoices", nothing)
        sent, processed, sent_on, processed_on = (
            traced.span(name) for name in ("send orders", "process orders", "send invoices", "process invoices")
        )
        assert parent_id(processed) == context_id(sent)
        assert parent_id(sent_on) == context_id(processed)
        assert parent_id(processed_on) == context_id(sent_on)
        assert processed.kind is SpanKind.CONSUMER
        assert processed.attributes is not None
        assert processed.attributes[names.SUBSCRIPTION] == "readers"


async def test_linked_traces() -> None:
    async with traced_bus("orders", same_trace=False) as (bus, traced):
        await bus.topic("orders").publish(b"one")
        await handled(bus, "orders", nothing)
        send, process = traced.span("send orders"), traced.span("process orders")
        assert process.parent is None
        assert linked(process) == [context_id(send)]


async def test_a_span_around_the_consumer_is_kept() -> None:
    async with traced_bus("orders") as (bus, traced):
        await bus.topic("orders").publish(b"one")
        with traced.tracer.start_as_current_span("service") as service:
            await handled(bus, "orders", nothing)
        process = traced.span("process orders")
        assert parent_id(process) == context_id(traced.span("send orders"))
        assert [each[1] for each in linked(process)] == [service.get_span_context().span_id]


async def test_a_failed_handler_is_an_error() -> None:
    async with traced_bus("orders", "orders.dead") as (bus, traced):
        await bus.topic("orders").publish(b"one")

        async def fail(message: Message) -> None:
            raise ValueError("too strong")

        await handled(bus, "orders", fail, retry=Retry(max_attempts=1), dead_letter="orders.dead")
        process = traced.span("process orders")
        assert process.status.status_code is StatusCode.ERROR
        assert process.attributes is not None
        assert process.attributes[names.ERROR_TYPE] == "ValueError"
        assert [event.name for event in process.events] == ["exception"]


async def test_one_trace_over_a_dead_letter_and_its_redrive() -> None:
    async with traced_bus("orders", "orders.dead") as (bus, traced):
        await bus.topic("orders").publish(b"one")

        async def fail(message: Message) -> None:
            raise ValueError("too strong")

        await handled(bus, "orders", fail, retry=Retry(max_attempts=1), dead_letter="orders.dead")
        await eventually(lambda: traced.spans("send orders.dead"), 30)
        await bus.admin.redrive("orders.dead", to=["orders"])
        await handled(bus, "orders", nothing)
        letter, (sent, redriven) = traced.span("send orders.dead"), traced.spans("send orders")
        failed, again = traced.spans("process orders")
        assert {context_id(span)[0] for span in (letter, sent, redriven, failed, again)} == {context_id(sent)[0]}
        assert (letter.kind, parent_id(letter), linked(letter)) == (
            SpanKind.CLIENT, context_id(sent), [context_id(sent)],
        )  # fmt: skip
        assert parent_id(again) == context_id(sent)


async def test_batches_link_to_their_messages() -> None:
    async with traced_bus("orders") as (bus, traced):
        await bus.topic("orders").publish_batch([b"one", b"two"])
        seen: list[int] = []
        current: list[int] = []

        async def handle(batch: MessageBatch) -> None:
            seen.append(len(batch))
            current.append(trace.get_current_span().get_span_context().span_id)

        async with bus.messages("orders", subscription="readers") as inbox:
            work = asyncio.create_task(inbox.receive_batches(handle, max_wait=0.2))
            await eventually(lambda: sum(seen) == 2, 30)
            inbox.stop()
            await work
        processed = traced.spans("process orders")
        created = {context_id(span) for span in traced.spans("create orders")}
        assert {link for span in processed for link in linked(span) or [parent_id(span)]} == created
        assert current == [context_id(span)[1] for span in processed]


async def test_what_is_handed_over_and_settled_has_spans() -> None:
    async with traced_bus("orders") as (bus, traced):
        await bus.topic("orders").publish(b"one")
        async with bus.messages("orders", subscription="readers") as inbox:
            message = await inbox.next_message(timeout=30)
            assert message is not None
            async with message:
                assert trace.get_current_span().get_span_context().span_id
        send, receive, process, ack = (traced.span(f"{name} orders") for name in ("send", "receive", "process", "ack"))
        assert (receive.kind, linked(receive)) == (SpanKind.CLIENT, [context_id(send)])
        assert (ack.kind, linked(ack)) == (SpanKind.CLIENT, [context_id(send)])
        assert ack.attributes is not None
        assert (ack.attributes[names.OPERATION], ack.attributes[names.OPERATION_TYPE]) == ("ack", "settle")
        assert parent_id(process) == context_id(send)
        assert ack.start_time is not None
        assert ack.end_time is not None
        assert ack.start_time <= ack.end_time


async def test_transactions_are_traced() -> None:
    async with traced_bus("orders") as (bus, traced), bus.transactional_publisher("billing") as publisher:
        async with publisher.transaction() as transaction:
            await transaction.publish("orders", b"one")
        assert traced.span("send orders").kind is SpanKind.PRODUCER


async def test_records_as_messages_are_traced() -> None:
    async with traced_bus("orders") as (bus, traced):
        await bus.topic("orders").publish(b"one")
        async with bus.records("orders", group="audit").as_messages() as inbox:
            message = await inbox.next_message(timeout=30)
            assert message is not None
            async with message:
                pass
        process = traced.span("process orders")
        assert process.attributes is not None
        assert process.attributes[names.GROUP] == "audit"
        assert names.PARTITION in process.attributes


async def test_a_failed_publish_is_an_error() -> None:
    async with traced_bus() as (bus, traced):
        with pytest.raises(broker.TopicNotFound):
            await bus.topic("missing").publish(b"one")
        send = traced.span("send missing")
        assert send.attributes is not None
        assert (send.status.status_code, send.attributes[names.ERROR_TYPE]) == (StatusCode.ERROR, "TopicNotFound")


@pytest.mark.parametrize("malformed", ["", "00-zz-1-01", "ff-" + "0" * 32 + "-" + "0" * 16 + "-00", "\x00", "x" * 5000])
async def test_a_malformed_context_of_a_foreign_producer_is_ignored(malformed: str) -> None:
    async with traced_bus("orders") as (bus, traced):
        await bus.topic("orders").publish(b"one", attributes={"traceparent": malformed})
        await handled(bus, "orders", nothing)
        assert linked(traced.span("process orders")) == []


async def test_a_propagator_that_raises_stops_nothing() -> None:
    class Broken:
        fields = frozenset({"traceparent"})

        def inject(self, *_: object, **__: object) -> None:
            raise RuntimeError("broken propagator")

        def extract(self, *_: object, **__: object) -> None:
            raise RuntimeError("broken propagator")

    broken: Any = Broken()
    async with traced_bus("orders", propagator=broken) as (bus, _):
        await bus.topic("orders").publish(b"one", attributes={"traceparent": FOREIGN})
        await bus.topic("orders").publish(b"two")
        await handled(bus, "orders", nothing, 2)
        assert (await bus.admin.lag("orders", "readers")).waiting == 0


async def test_without_an_sdk_nothing_is_traced_and_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with broker.connect(f"inmem://{unique('traces')}") as bus:
        await bus.admin.ensure_topic("orders")
        with caplog.at_level(logging.WARNING):
            instrument(bus)()
        assert "No OpenTelemetry SDK is set up" in caplog.text
        await bus.topic("orders").publish(b"one")
        assert not bus.hooks.listening


async def test_undone_it_traces_nothing() -> None:
    traced = Traced()
    async with broker.connect(f"inmem://{unique('traces')}") as bus:
        await bus.admin.ensure_topic("orders")
        instrument(bus, tracer_provider=traced.provider)()
        await bus.topic("orders").publish(b"one")
        assert traced.spans() == []


async def test_metrics() -> None:
    async with traced_bus("orders") as (bus, traced):
        await bus.topic("orders").publish_batch([b"one", b"two"])
        await handled(bus, "orders", nothing, 2)
        metrics = traced.metrics()
        (sent,) = metrics[names.SENT]
        assert (sent.value, sent.attributes[names.DESTINATION]) == (2, "orders")
        assert sum(point.value for point in metrics[names.CONSUMED]) == 2
        (processed,) = metrics[names.PROCESS_SECONDS]
        assert (processed.count, processed.explicit_bounds) == (2, names.SECONDS_BUCKETS)
        operations = {point.attributes[names.OPERATION] for point in metrics[names.OPERATION_SECONDS]}
        assert operations == {"send", "ack"}


async def test_a_hand_over_is_an_event() -> None:
    seen: list[HandedOver] = []
    async with broker.connect(f"inmem://{unique('traces')}") as bus:
        await bus.admin.ensure_topic("orders")
        bus.hooks.listen(lambda event: isinstance(event, HandedOver) and seen.append(event))
        await bus.topic("orders").publish(b"one")
        async with bus.messages("orders", subscription="readers") as inbox:
            message = await inbox.next_message(timeout=30)
            await bus.topic("orders").publish(b"two")
            batch = await inbox.next_batch(timeout=30)
    assert [list(event.messages) for event in seen] == [[message], list(batch)]
    assert [(event.topic, event.subscription, event.group) for event in seen] == [("orders", "readers", None)] * 2
    assert all(0 <= event.seconds < 30 for event in seen)


async def test_a_listener_hears_the_kinds_that_it_asks_for() -> None:
    seen: list[Event] = []
    async with broker.connect(f"inmem://{unique('traces')}") as bus:
        await bus.admin.ensure_topic("orders")
        remove = bus.hooks.listen(seen.append, kinds=(HandedOver,))
        assert (bus.hooks.listening, bus.hooks.hears_publishes) == (True, False)
        await bus.topic("orders").publish(b"one")
        async with bus.messages("orders", subscription="readers") as inbox:
            assert await inbox.next_message(timeout=30) is not None
        assert [type(event) for event in seen] == [HandedOver]
        also = bus.hooks.listen(seen.append)
        assert bus.hooks.hears_publishes
        also()
        remove()
        assert (bus.hooks.listening, bus.hooks.hears_publishes) == (False, False)
