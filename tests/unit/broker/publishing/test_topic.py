"""`bus.topic(...)`: publishing one message, or a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from broker.bus import Bus
from broker.capabilities import Limits
from broker.codecs import Json, Text
from broker.errors import (
    BackendError,
    BrokerError,
    Closed,
    ConnectionFailed,
    InvalidMessage,
    MessageTooLarge,
    PublishError,
    TopicNotFound,
    Unsupported,
)
from broker.hooks import Event, Hooks, PublishCall, Published, publishing_as
from broker.outbound import OutboundMessage, OutboundPayload
from broker.protocols import Topic
from broker.publishing.topic import TopicFacade
from broker.receipts import Receipt
from tests.unit.broker.consuming.scripted_target import ScriptedTarget, capabilities, topic_of


async def test_opens_at_the_first_publish_and_only_once() -> None:
    opened: list[ScriptedTarget] = []

    def factory() -> ScriptedTarget:
        opened.append(ScriptedTarget())
        return opened[-1]

    topic = TopicFacade("orders", factory, None, capabilities(), Hooks())
    assert topic.name == "orders"
    assert not opened
    await topic.publish(b"1")
    await topic.publish_batch([b"2"])
    (await topic.enqueue(b"3")).add_done_callback(lambda _: None)
    await topic.flush()
    assert len(opened) == 1
    assert opened[0].bodies == [b"1", b"2", b"3"]


async def test_facade_is_a_topic_and_returns_the_receipt() -> None:
    target = ScriptedTarget()
    topic: Topic[bytes] = topic_of(target)
    receipt = await topic.publish(b"body", key="42", attributes={"type": "created"})
    assert receipt == Receipt("1", offset=1)
    (message,) = target.published
    assert (message.data, message.key, dict(message.attributes)) == (b"body", b"42", {"type": "created"})


async def test_outbound_message_is_published_unchanged() -> None:
    target = ScriptedTarget()
    message = OutboundMessage(b"body", key=b"", id="order-1")
    assert (await topic_of(target).publish(message)).id == "order-1"
    assert target.published == [message]


FIELDS: dict[str, Any] = {
    "key": b"k",
    "attributes": {"a": "b"},
    "id": "1",
    "deliver_at": datetime(2030, 1, 31, tzinfo=UTC),
    "ttl": 60.0,
    "partition": 0,
}
"""Every field that goes with a payload."""


@pytest.mark.parametrize("extra", [{"key": b""}, {"attributes": {}}, *({name: FIELDS[name]} for name in FIELDS)])
@pytest.mark.parametrize("kind", [OutboundMessage, OutboundPayload])
async def test_fields_beside_an_outbound_message_are_refused(
    kind: type[OutboundMessage | OutboundPayload[bytes]], extra: dict[str, Any]
) -> None:
    target = ScriptedTarget()
    topic = topic_of(target)
    for publish in (topic.publish, topic.enqueue):
        with pytest.raises(InvalidMessage, match=f"{next(iter(extra))}= given together with an {kind.__name__}"):
            await publish(kind(b""), **extra)
    assert not target.calls


class Order(msgspec.Struct):
    number: int


async def test_codec_encodes_payloads_but_not_outbound_messages() -> None:
    target = ScriptedTarget()
    topic = TopicFacade("orders", lambda: target, Json(Order), capabilities(), Hooks())
    await topic.publish(Order(1))
    await topic.publish_batch([Order(2), OutboundMessage(b"raw")])
    await topic.enqueue(Order(3))
    await topic.flush()
    assert target.bodies == [b'{"number":1}', b'{"number":2}', b"raw", b'{"number":3}']


async def test_a_typed_payload_goes_with_every_field() -> None:
    target = ScriptedTarget()
    able = capabilities(deliver_at=True, ttl=True, partitions=True)
    topic = TopicFacade("orders", lambda: target, Json(Order), able, Hooks())
    await topic.publish(Order(1), **FIELDS)
    await topic.publish(OutboundPayload(Order(1), **FIELDS))
    await topic.publish_batch([OutboundPayload(Order(1), **FIELDS)])
    await topic.enqueue(Order(1), **FIELDS)
    await topic.enqueue(OutboundPayload(Order(1), **FIELDS))
    await topic.flush()
    assert len(target.published) == 5
    for message in target.published:
        assert message.data == b'{"number":1}'
        assert {name: getattr(message, name) for name in FIELDS} == FIELDS


async def test_an_outbound_payload_without_a_codec_takes_bytes() -> None:
    target = ScriptedTarget()
    await topic_of(target).publish(OutboundPayload(b"x", id="1"))
    assert [(message.data, message.id) for message in target.published] == [(b"x", "1")]
    wrong: Any = OutboundPayload(Order(1), id="2")
    with pytest.raises(InvalidMessage, match="data is Order"):
        await topic_of(target).publish(wrong)


async def test_a_payload_of_a_batch_that_cannot_be_encoded_fails_alone() -> None:
    target = ScriptedTarget()
    topic: TopicFacade[Any] = TopicFacade("orders", lambda: target, Text(), capabilities(), Hooks())
    with pytest.raises(PublishError) as raised:
        await topic.publish_batch([OutboundPayload("a", id="1"), OutboundPayload(7, id="2"), "c"])
    assert [type(outcome) for outcome in raised.value.outcomes] == [Receipt, InvalidMessage, Receipt]


async def test_payload_that_the_codec_cannot_encode_is_an_invalid_message() -> None:
    class Broken:
        def encode(self, payload: object) -> bytes:
            return {}[payload]

        def decode(self, data: bytes | None) -> object:
            return data

    target = ScriptedTarget()
    text: TopicFacade[Any] = TopicFacade("orders", lambda: target, Text(), capabilities(), Hooks())
    with pytest.raises(InvalidMessage):
        await text.publish(7)
    broken: TopicFacade[Any] = TopicFacade("orders", lambda: target, Broken(), capabilities(), Hooks())
    with pytest.raises(InvalidMessage, match="cannot encode a payload of type int") as raised:
        await broken.publish(7)
    assert isinstance(raised.value.native, KeyError)
    bare: TopicFacade[Any] = topic_of(target)
    with pytest.raises(InvalidMessage, match="codec"):
        await bare.publish({"number": 1})
    assert not target.calls


async def test_unsupported_messages_are_refused_before_sending() -> None:
    target = ScriptedTarget()
    topic = topic_of(target, able=capabilities(Limits(body=3)))
    for publish in (topic.publish, topic.enqueue):
        with pytest.raises(MessageTooLarge, match="4 bytes; test takes 3"):
            await publish(b"xxxx")
        with pytest.raises(Unsupported, match="tombstones"):
            await publish(OutboundMessage(None))
        with pytest.raises(Unsupported, match="ttl"):
            await publish(OutboundMessage(b"", ttl=1))
    assert not target.calls


async def test_errors_of_the_backend_are_raised_unchanged() -> None:
    target = ScriptedTarget()
    topic = topic_of(target)
    refused = InvalidMessage("no")
    target.answer = lambda _: refused
    with pytest.raises(InvalidMessage) as raised:
        await topic.publish(b"")
    assert raised.value is refused
    target.error = TopicNotFound("Topic 'orders' does not exist")
    with pytest.raises(TopicNotFound):
        await topic.publish(b"")
    with pytest.raises(TopicNotFound):
        await topic.publish_batch([b""])
    with pytest.raises(TopicNotFound):
        await (await topic.enqueue(b""))


async def test_publish_is_tried_once() -> None:
    target = ScriptedTarget()
    target.answer = lambda _: ConnectionFailed("gone")
    with pytest.raises(ConnectionFailed):
        await topic_of(target).publish(b"")
    assert len(target.calls) == 1


async def test_batch_keeps_order_and_returns_a_receipt_each() -> None:
    target = ScriptedTarget()
    receipts = await topic_of(target).publish_batch([b"%d" % n for n in range(100)])
    assert [receipt.offset for receipt in receipts] == list(range(1, 101))
    assert target.bodies == [b"%d" % n for n in range(100)]
    assert len(target.calls) == 1
    assert await topic_of(target).publish_batch([]) == []


async def test_invalid_messages_do_not_fail_the_rest_of_the_batch() -> None:
    target = ScriptedTarget()
    topic: TopicFacade[Any] = topic_of(target, able=capabilities(Limits(body=3)))
    target.answer = lambda message: ConnectionFailed("gone") if message.data == b"2" else None
    with pytest.raises(PublishError) as raised:
        await topic.publish_batch([b"0", b"xxxx", b"1", b"2", 5, b"3"])
    outcomes = raised.value.outcomes
    kinds = [type(outcome) for outcome in outcomes]
    assert kinds == [Receipt, MessageTooLarge, Receipt, ConnectionFailed, InvalidMessage, Receipt]
    assert target.bodies == [b"0", b"1", b"3"]
    assert not raised.value.retriable


async def test_without_receipts_failures_are_told_all_the_same() -> None:
    receipts_of_calls: list[bool] = []

    class Terse(ScriptedTarget):
        async def publish(self, messages: Sequence[OutboundMessage], *, receipts: bool = True) -> Sequence[Any]:
            receipts_of_calls.append(receipts)
            return [each if isinstance(each, Exception) else None for each in await super().publish(messages)]

    target = Terse()
    topic: TopicFacade[Any] = topic_of(target, able=capabilities(Limits(body=3)))
    await topic.publish_batch([b"0", b"1"], receipts=False)
    await topic.publish_batch([], receipts=False)
    target.answer = lambda message: ConnectionFailed("gone") if message.data == b"2" else None
    with pytest.raises(PublishError) as raised:
        await topic.publish_batch([b"0", b"xxxx", b"1", b"2", 5, b"3"], receipts=False)
    kinds = [type(outcome) for outcome in raised.value.outcomes]
    assert kinds == [type(None), MessageTooLarge, type(None), ConnectionFailed, InvalidMessage, type(None)]
    assert receipts_of_calls == [False, False]


async def test_a_backend_may_return_receipts_that_were_not_requested() -> None:
    target = ScriptedTarget()
    await topic_of(target).publish_batch([b"0", b"1"], receipts=False)
    target.answer = lambda message: ConnectionFailed("gone") if message.data == b"2" else None
    with pytest.raises(PublishError, match="1 of 2"):
        await topic_of(target).publish_batch([b"1", b"2"], receipts=False)


async def test_batch_of_bad_messages_only_sends_nothing() -> None:
    target = ScriptedTarget()
    with pytest.raises(PublishError, match="2 of 2"):
        await topic_of(target, able=capabilities(Limits(body=0))).publish_batch([b"1", b"2"])
    assert not target.calls


@pytest.mark.parametrize(
    "batch",
    [
        b"abc",
        bytearray(b"abc"),
        memoryview(b"abc"),
        "abc",
        None,
        5,
        {"a": b"1"},
        OutboundMessage(b"x"),
        (b for b in ()),
    ],
    ids=lambda batch: type(batch).__name__,
)
async def test_anything_but_a_list_of_messages_is_refused(batch: Any) -> None:
    target = ScriptedTarget()
    with pytest.raises(InvalidMessage, match="It takes a list of messages") as raised:
        await topic_of(target).publish_batch(batch)
    assert type(batch).__name__ in raised.value.message
    assert raised.value.advice
    assert not target.calls


async def test_backend_that_returns_too_few_outcomes_raises() -> None:
    class Forgetful(ScriptedTarget):
        async def publish(
            self, messages: Sequence[OutboundMessage], *, receipts: bool = True
        ) -> Sequence[Receipt | BrokerError]:
            return (await super().publish(messages))[1:]

    with pytest.raises(BackendError, match="1 outcomes for 2"):
        await topic_of(Forgetful()).publish_batch([b"1", b"2"])


async def test_publish_follows_messages_enqueued_before_it() -> None:
    target = ScriptedTarget()
    topic = topic_of(target)
    for n in range(3):
        await topic.enqueue(b"%d" % n, key=b"k")
    await topic.publish(b"3", key=b"k")
    await topic.enqueue(b"4", key=b"k")
    await topic.publish_batch([OutboundMessage(b"5", b"k")])
    assert target.bodies == [b"0", b"1", b"2", b"3", b"4", b"5"]


async def test_after_close_every_call_raises_closed() -> None:
    target = ScriptedTarget()
    topic = topic_of(target)
    await topic.publish(b"")
    await topic.close()
    await topic.close()
    assert target.closed == 1
    for call in (topic.publish(b""), topic.publish_batch([b""]), topic.enqueue(b"")):
        with pytest.raises(Closed):
            await call
    unopened = topic_of(target)
    await unopened.close()
    with pytest.raises(Closed):
        await unopened.publish(b"")
    assert target.closed == 1


async def test_close_lets_running_calls_end() -> None:
    target = ScriptedTarget()
    topic = topic_of(target)
    target.gate.clear()
    call = asyncio.create_task(topic.publish(b"1"))
    await target.called.wait()
    closing = asyncio.create_task(topic.close())
    await asyncio.sleep(0)
    assert not target.closed
    target.gate.set()
    await closing
    assert (await call).offset == 1
    assert target.closed == 1


async def test_close_does_not_wait_beyond_its_timeout() -> None:
    target = ScriptedTarget()
    topic = topic_of(target)
    target.gate.clear()
    call = asyncio.create_task(topic.publish(b"1"))
    await target.called.wait()
    await topic.close(timeout=0.01)
    assert target.closed == 1
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_cancelling_one_publish_does_not_affect_others() -> None:
    target = ScriptedTarget()
    topic = topic_of(target)
    target.gate.clear()
    first, second = (asyncio.create_task(topic.publish(body)) for body in (b"1", b"2"))
    await target.called.wait()
    await asyncio.sleep(0)
    assert target.running == 2
    first.cancel()
    target.gate.set()
    assert (await second).offset == 1
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_interceptors_replace_messages_in_order_and_count_against_the_limits() -> None:
    hooks, target = Hooks(), ScriptedTarget()
    topic = topic_of(target, hooks=hooks, able=capabilities(Limits(attributes=2)))
    seen: list[str] = []

    def add(name: str) -> Any:
        @contextmanager
        def interceptor(call: PublishCall) -> Generator[None]:
            seen.append(call.topic)
            call.messages = [
                message.replace(attributes={**message.attributes, name: str(len(message.attributes))})
                for message in call.messages
            ]
            yield

        return interceptor

    hooks.around_publishing(add("first"))
    remove = hooks.around_publishing(add("second"))
    await topic.publish(b"1")
    await topic.publish_batch([b"2"])
    await topic.enqueue(b"3")
    await topic.flush()
    assert [dict(message.attributes) for message in target.published] == [{"first": "0", "second": "1"}] * 3
    assert set(seen) == {"orders"}
    with pytest.raises(InvalidMessage, match="The message has 3 attributes"):
        await topic.publish(b"4", attributes={"own": ""})
    remove()
    await topic.publish(b"5", attributes={"own": ""})


async def test_batch_is_intercepted_as_a_whole() -> None:
    hooks, target = Hooks(), ScriptedTarget()
    topic: TopicFacade[Any] = topic_of(target, hooks=hooks)
    sizes: list[int] = []

    @contextmanager
    def interceptor(call: PublishCall) -> Generator[None]:
        sizes.append(len(call.messages))
        yield

    hooks.around_publishing(interceptor)
    await topic.publish_batch([b"1", b"2", b"3"])
    with pytest.raises(PublishError):
        await topic.publish_batch([b"4", 5, b"6"])
    assert sizes == [3, 2]
    assert target.bodies == [b"1", b"2", b"3", b"4", b"6"]


async def test_failing_interceptors_do_not_stop_the_message(caplog: pytest.LogCaptureFixture) -> None:
    hooks, target = Hooks(), ScriptedTarget()

    @contextmanager
    def loses(call: PublishCall) -> Generator[None]:
        call.messages = []
        yield

    @contextmanager
    def fails_after(call: PublishCall) -> Generator[None]:
        yield
        raise RuntimeError("after")

    hooks.around_publishing(loses)
    hooks.around_publishing(fails_after)
    await topic_of(target, hooks=hooks).publish(b"1")
    assert target.bodies == [b"1"]
    assert "An interceptor failed before publishing to topic 'orders'" in caplog.text
    assert "1 messages became 0" in caplog.text
    assert "An interceptor failed after publishing to topic 'orders'" in caplog.text


async def test_interceptors_are_left_with_the_outcomes() -> None:
    hooks, target = Hooks(), ScriptedTarget()
    topic: TopicFacade[Any] = topic_of(target, hooks=hooks)
    left: list[tuple[str, ...]] = []

    @contextmanager
    def interceptor(call: PublishCall) -> Generator[None]:
        assert not call.outcomes
        yield
        left.append(tuple(type(outcome).__name__ for outcome in call.outcomes))

    hooks.around_publishing(interceptor)
    await topic.publish(b"1")
    await (await topic.enqueue(b"2"))
    await asyncio.sleep(0)
    target.answer = lambda message: TopicNotFound("no such topic") if message.data == b"bad" else None
    with pytest.raises(PublishError):
        await topic.publish_batch([b"3", b"bad", OutboundMessage(b"4", ttl=5)])
    with pytest.raises(TopicNotFound):
        await topic.publish(b"bad")
    target.error = ConnectionFailed("cut")
    with pytest.raises(ConnectionFailed):
        await topic.publish(b"5")
    with pytest.raises(Unsupported):
        await topic.enqueue(OutboundMessage(b"6", ttl=5))
    assert left == [
        ("Receipt",),
        ("Receipt",),
        ("Receipt", "TopicNotFound", "Unsupported"),
        ("TopicNotFound",),
        ("ConnectionFailed",),
        ("Unsupported",),
    ]


async def test_the_failure_of_an_intercepted_enqueue_is_still_raised_by_flush() -> None:
    hooks, target = Hooks(), ScriptedTarget()
    topic = topic_of(target, hooks=hooks)
    seen: list[Any] = []

    @contextmanager
    def interceptor(call: PublishCall) -> Generator[None]:
        yield
        seen.extend(call.outcomes)

    hooks.around_publishing(interceptor)
    target.answer = lambda _: TopicNotFound("no such topic")
    await topic.enqueue(b"1")
    with pytest.raises(PublishError):
        await topic.flush()
    await asyncio.sleep(0)
    assert [type(outcome) for outcome in seen] == [TopicNotFound]


async def test_interceptors_know_who_publishes() -> None:
    hooks, target = Hooks(), ScriptedTarget()
    topic = topic_of(target, hooks=hooks)
    origins: list[str] = []

    @contextmanager
    def interceptor(call: PublishCall) -> Generator[None]:
        origins.append(call.origin)
        yield

    hooks.around_publishing(interceptor)
    await topic.publish(b"1")
    with publishing_as("relay"):
        await topic.publish(b"2")
    await topic.publish(b"3")
    assert origins == ["application", "relay", "application"]


async def test_every_call_to_the_backend_is_an_event_with_a_listener() -> None:
    hooks, target = Hooks(), ScriptedTarget()
    events: list[Event] = []
    topic = topic_of(target, hooks=hooks)
    await topic.publish(b"unheard")
    remove = hooks.listen(events.append)
    receipt = await topic.publish(b"1")
    await topic.publish_batch([b"2", b"3"])
    error = target.error = TopicNotFound("gone")
    with pytest.raises(TopicNotFound):
        await topic.publish(b"4")
    remove()
    target.error = None
    await topic.publish(b"unheard")
    published = [event for event in events if isinstance(event, Published)]
    assert [len(event.outcomes) for event in published] == [1, 2, 1]
    assert list(published[0].outcomes) == [receipt]
    assert list(published[2].outcomes) == [error]
    assert all(event.topic == "orders" and event.seconds >= 0 for event in published)


async def test_the_first_duplicate_of_a_topic_is_logged(broker_bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    await broker_bus.admin.ensure_topic("orders")
    topic = broker_bus.topic("orders")
    again = OutboundMessage(b"x", id="same")
    await topic.publish(again)
    assert not caplog.records
    await topic.enqueue(again)
    await topic.enqueue(again)
    await topic.flush()
    await topic.publish(again)
    await topic.publish_batch([again], receipts=False)
    (record,) = caplog.records
    assert "dropped 2 of 2 messages published to topic 'orders'" in record.getMessage()
    assert "message.replace(id=None)" in record.getMessage()
