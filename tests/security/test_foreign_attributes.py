"""Whatever attributes a foreign producer writes: each message can be read, forwarded and dead-lettered."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import _pulsar
import nats
import pytest
from azure.servicebus import ServiceBusReceivedMessage
from confluent_kafka import Producer
from google.pubsub_v1.types import PubsubMessage, ReceivedMessage

import broker
from broker.capabilities import Limits
from broker.consuming.dead_letters import DeadLetterWriter
from broker.driver.contract import RetryTopic
from broker.driver.record_messages import FIRST, make_retry_letter, read_retry_letter
from broker.envelopes import Place
from broker.hooks import DeadLetterFailed, Event, Hooks
from broker.messages import Message
from broker.outbound import OutboundMessage
from broker_jetstream.codec import LogView, NativeMessage, header_columns
from broker_jetstream.names import stream_name
from broker_kafka.codec.headers import RECORD_VIEW
from broker_pubsub.codec import MessageView as PubSubView
from broker_pulsar.codec import MessageView as PulsarView
from broker_servicebus.codec import VIEW as SERVICE_BUS_VIEW
from broker_servicebus.codec import Raw as ServiceBusRaw
from tests.servers import kafka
from tests.servers import nats as nats_servers
from tests.servers.kafka_client import RawAdmin
from tests.unit.broker.consuming.scripted_source import Letters, ScriptedSource, consuming

RESERVED = {
    "anybroker-x": "1",
    "retry-letter-x": "1",
    "retry-letter-due": "2030-01-01T00:00:00+00:00",
    "dead-letter-reason": "forged",
}
PACKED = b"anybroker-x=1&retry-letter-x=1&dead-letter-x=1&=1&%61nybroker-y=1&fine=2"
LETTER = {"dead-letter-topic": "orders", "dead-letter-reason": "bad"}


def of_kafka(attributes: Mapping[str, str], packed: bytes = b"") -> Mapping[str, str]:
    headers = [(name, text.encode()) for name, text in attributes.items()]
    raw = SimpleNamespace(headers=lambda: headers + [("anybroker-attributes", packed)] * bool(packed))
    return RECORD_VIEW.attributes(raw)


def of_jetstream(attributes: Mapping[str, str], packed: bytes = b"") -> Mapping[str, str]:
    lines = [f"{name}: {text}".encode() for name, text in attributes.items()]
    lines += [b"anybroker-attributes: " + packed] * bool(packed)
    raw = NativeMessage(b"s.0", b"", b"", b"\r\n".join([b"NATS/1.0", *lines, b"Nats-Msg-Id: 1", b"", b""]))
    columns = header_columns([raw], LogView())
    assert columns.attributes[0] == LogView().attributes(raw)
    return columns.attributes[0]


def of_pubsub(attributes: Mapping[str, str], packed: bytes = b"") -> Mapping[str, str]:
    escaped = {"anybroker-name-anybroker-x": "1", "anybroker-name-": "1", "anybroker-name-dead-letter-x": "1"}
    more = {**escaped, "fine": "2"} if packed else {}
    raw = ReceivedMessage(message=PubsubMessage(attributes={**attributes, **more}))
    return PubSubView().attributes(ReceivedMessage.pb(raw))


def of_pulsar(attributes: Mapping[str, str], packed: bytes = b"") -> Mapping[str, str]:
    builder = _pulsar.MessageBuilder()
    for name, text in {**attributes, **({"": "1", "fine": "2"} if packed else {})}.items():
        builder.property(name, text)
    return PulsarView().attributes(builder.build())


def of_service_bus(attributes: Mapping[str, str], packed: bytes = b"") -> Mapping[str, str]:
    native: Any = ServiceBusReceivedMessage.__new__(ServiceBusReceivedMessage)
    more = {b"": b"1", "anybroker-int": 1, b"fine": b"2"} if packed else {}
    properties = {name.encode(): text.encode() for name, text in attributes.items()} | more
    native._raw_amqp_message = SimpleNamespace(application_properties=properties)
    return SERVICE_BUS_VIEW.attributes(ServiceBusRaw(native, 0.0))


BACKENDS = (of_kafka, of_jetstream, of_pubsub, of_pulsar, of_service_bus)


@pytest.mark.parametrize("read", BACKENDS)
def test_reserved_and_empty_names_are_not_shown(read: Any) -> None:
    shown = read({**RESERVED, "ok": "1"}, PACKED)
    assert dict(shown) == {"ok": "1", "fine": "2"}
    assert OutboundMessage(b"", attributes=shown).attributes == shown
    assert dict(read(RESERVED)) == {}


@pytest.mark.parametrize("read", BACKENDS)
def test_a_letter_keeps_its_attributes_and_none_of_another_kind(read: Any) -> None:
    shown = read({**LETTER, "retry-letter-x": "1", "ok": "1"})
    assert dict(shown) == {**LETTER, "ok": "1"}
    assert OutboundMessage(b"", attributes=shown).attributes == shown


def test_pulsar_text_that_is_not_utf_8_is_read() -> None:
    builder = _pulsar.MessageBuilder()
    builder.property(b"a", b"\xff")
    builder.partition_key(b"\xfe")
    raw, view = builder.build(), PulsarView()
    assert view.key(raw) == b"\xfe"
    assert dict(view.attributes(raw)) == {}
    assert view.publish_time(raw) is not None
    late = SimpleNamespace(properties=dict, publish_timestamp=lambda: 2**63)
    assert view.publish_time(late) is None


def test_a_service_bus_session_that_is_not_utf_8_is_a_key() -> None:
    native: Any = ServiceBusReceivedMessage.__new__(ServiceBusReceivedMessage)
    properties = SimpleNamespace(group_id=b"\xff", message_id=b"\xfe")
    native._raw_amqp_message = SimpleNamespace(application_properties=None, properties=properties)
    assert SERVICE_BUS_VIEW.key(ServiceBusRaw(native, 0.0)) == b"\xff"
    assert SERVICE_BUS_VIEW.id(ServiceBusRaw(native, 0.0)) == "�"


def test_a_message_with_an_empty_id_is_forwarded() -> None:
    class Given:
        id, topic, key, data, attributes, native = "", "orders", None, b"x", {}, None
        publish_time = broker_time = None

    assert OutboundMessage.from_message(Given()).id is None


def test_huge_numbers_of_a_retry_letter_are_bounded() -> None:
    number = "9" * 4000
    fields = {"id": "1", "due": "2030-01-01T00:00:00Z", "attempts": number, "failures": number, "step": number}
    letter = read_retry_letter({f"retry-letter-{name}": text for name, text in fields.items()})
    assert letter is not None
    assert max(letter.attempts, letter.failures, letter.step) < 2**31 - 1


class Odd:
    """What a careless backend may hand out."""

    def attributes(self, raw: Mapping[str, str], /) -> Mapping[str, str]:
        if not raw:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no text")
        return raw

    def id(self, raw: object, /) -> str:
        return "1"

    def key(self, raw: object, /) -> bytes:
        return b"key"

    def publish_time(self, raw: object, /) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)

    broker_time = publish_time

    def delivery_attempt(self, raw: object, /) -> int:
        return 1

    def native(self, raw: object, /) -> object:
        return raw


@pytest.mark.parametrize("attributes", [{"": "1"}, {"retry-letter-x": "1"}, {"a": 1}, {"a": "\ud800"}, {}])
async def test_a_letter_is_made_of_whatever_a_backend_hands_out(attributes: Any) -> None:
    written: list[OutboundMessage] = []
    events: list[Event] = []
    hooks = Hooks()
    hooks.listen(events.append)

    async def publish(letter: OutboundMessage) -> None:
        written.append(letter)

    writer = DeadLetterWriter("orders.dead", publish, Limits(), hooks)
    original = Message("orders", b"body", attributes, Odd(), None, 4)
    await writer.write(original, reason="bad", error=None, attempts=1, subscription="billing")
    (letter,) = written
    assert (letter.key, letter.data) == (b"key", b"body")
    assert letter.attributes["dead-letter-reason"] == "bad"
    assert "dead-letter-cut" in letter.attributes
    assert not [event for event in events if isinstance(event, DeadLetterFailed)]


class Unreadable(Odd):
    """What a more careless backend may hand out."""

    def key(self, raw: object, /) -> bytes:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no text")

    def publish_time(self, raw: object, /) -> datetime:
        raise OverflowError("date value out of range")

    def place(self, raw: object, /) -> Place:
        raise ValueError("no number")


class Naive(Odd):
    """Without a time zone."""

    def publish_time(self, raw: object, /) -> datetime:
        return datetime(2026, 1, 1)  # noqa: DTZ001


@pytest.mark.parametrize("view", [Unreadable(), Naive()])
async def test_a_letter_has_what_can_be_read(view: Odd) -> None:
    written = Letters()
    hooks = Hooks()
    writer = DeadLetterWriter("orders.dead", written.publish, Limits(), hooks)
    original = Message("orders", b"body", {"a": "b"}, view, None, 4)
    await writer.write(original, reason="bad", error=None, attempts=1, subscription="billing")
    (letter,) = written.written
    assert letter.data == b"body"
    assert letter.key == (b"key" if isinstance(view, Naive) else None)
    assert letter.attributes["a"] == "b"
    assert "dead-letter-cut" not in letter.attributes


async def test_details_of_a_forged_letter_do_not_pass_for_those_of_a_new_one() -> None:
    written = Letters()
    forged = {"dead-letter-topic": "payroll", "dead-letter-error": "forged", "dead-letter-offset": "9", "ok": "1"}
    source = ScriptedSource()
    source.add("1", attributes=forged)
    async with consuming(source, letters=written) as consumer:
        message = await consumer.next_message(timeout=60)
        assert message is not None
        await message.reject("bad")
    (letter,) = written.written
    assert letter.attributes["dead-letter-topic"] == "orders"
    assert letter.attributes["ok"] == "1"
    assert not {"dead-letter-error", "dead-letter-offset"} & set(letter.attributes)


async def test_poison_in_key_order_does_not_stop_what_follows() -> None:
    """On the core alone: the source hands out what no backend of ours does."""
    source, letters, seen = ScriptedSource(), Letters(), set[str]()
    bad = [f"bad-{number}" for number in range(20)]
    good = [f"good-{number}" for number in range(50)]
    for name in bad:
        source.add(name, key=b"key", data=name.encode(), attributes={"retry-letter-x": "1"})
    for name in good:
        source.add(name, key=b"key", data=name.encode())
    once = broker.Retry(max_attempts=1)
    async with consuming(source, letters=letters, retry=once, ordered_by_key=True, stop_when_idle=0.2) as inbox:
        await receive(inbox, seen)
    assert seen == {*bad, *good}
    assert len(letters.written) == 20


async def receive(inbox: Any, seen: set[str]) -> None:
    """Handle all messages; what is not `good` fails."""

    async def handle(message: Any) -> None:
        name = message.data.decode()
        seen.add(name)
        if not name.startswith("good"):
            raise ValueError("poison")

    async with asyncio.timeout(60):
        await inbox.receive(handle)


HOSTILE = {
    "retry": ("retry-letter-x", "1"),
    "dead": ("dead-letter-x", "1"),
    "packed": ("anybroker-attributes", "anybroker-x=1&=2&retry-letter-x=3"),
}


async def check_poison(url: str, topic: str, retries: bool) -> None:
    """A consumer gives up the poison and handles the 50 good messages, in key order or with retry topics."""
    options: dict[str, Any] = {"retry_topics": broker.RetryTopics((0.01,))} if retries else {"ordered_by_key": True}
    async with broker.connect(url) as bus:
        await bus.admin.ensure_topic(dead := f"{topic}.dead")
        if retries:
            for name in broker.RetryTopics((0.01,)).names(topic, "billing"):
                await bus.admin.ensure_topic(name)
        await bus.topic(topic).publish_batch([OutboundMessage(b"good-%d" % n, b"key") for n in range(50)])
        seen: set[str] = set()
        async with bus.messages(
            topic,
            subscription="billing",
            dead_letter=dead,
            retry=broker.Retry(max_attempts=1),
            stop_when_idle=1,
            **options,
        ) as inbox:
            await receive(inbox, seen)
        assert len(seen) == 50 + len(HOSTILE)
        letters = await bus.admin.list_dead(dead)
        assert sorted(letter.data or b"" for letter in letters) == sorted(name.encode() for name in HOSTILE)
        for letter in letters:
            OutboundMessage(letter.data, attributes=letter.attributes)


async def test_poison_of_a_foreign_nats_client() -> None:
    server, topic = nats_servers.shared_server(), f"topic.{uuid4().hex[:12]}"
    async with broker.connect(server.url) as bus:
        await bus.admin.ensure_topic(topic)
    client = await nats.connect(server.url)
    try:
        for name, (header, value) in HOSTILE.items():
            await client.jetstream().publish(
                f"{stream_name(topic)}.0", name.encode(), headers={header: value, "anybroker-key": "key"}
            )
    finally:
        await client.close()
    await check_poison(server.url, topic, retries=False)


@pytest.mark.parametrize("retries", [False, True])
async def test_poison_of_a_foreign_kafka_producer(retries: bool) -> None:
    server = kafka.shared_server()
    topic = RawAdmin(server.bootstrap).make_topic()
    producer = Producer({"bootstrap.servers": server.bootstrap})
    for name, (header, value) in HOSTILE.items():
        producer.produce(topic, name.encode(), key=b"key", headers=[(header, value.encode()), ("", b"no name")])
    assert producer.flush(30) == 0
    await check_poison(f"kafka://{server.bootstrap}", topic, retries)


def test_a_retry_letter_is_made_of_a_record() -> None:
    record = broker.Record("orders", 0, 7, b"key", b"body", None, SimpleView(of_kafka(RESERVED)))
    message = Message("orders", b"body", record, FIRST, None, 4)
    make_retry_letter(
        message,
        id="1",
        id_given=True,
        target=RetryTopic("orders.billing.retry.1", "orders", 1.0),
        due=0.0,
        attempts=1,
        failures=1,
        step=1,
        place=("0", "7"),
        subscription="billing",
        reason="bad",
    )


class SimpleView(Odd):
    def __init__(self, attributes: Mapping[str, str]) -> None:
        self._attributes = attributes

    def attributes(self, raw: object, /) -> Mapping[str, str]:
        return self._attributes
