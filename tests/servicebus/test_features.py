"""Features that only Service Bus has: cancellable schedules, queues, typed values, rules, forwarding and more."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import pytest
from azure.servicebus import ServiceBusMessage, ServiceBusReceivedMessage
from azure.servicebus.amqp import AmqpAnnotatedMessage
from pydantic import SecretStr

import broker
from broker.bus import Bus
from broker.driver.contract import MessageSubscription
from broker.errors import (
    BackendError,
    BrokerError,
    InvalidMessage,
    NotAuthorized,
    NotFound,
    PublishError,
    SubscriptionNotFound,
    Unsupported,
)
from broker.messages import Message
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from broker.testing.waiting import let_pass, nothing_more, numbered, take
from broker_servicebus import ServiceBusSettings
from broker_servicebus.codec import VIEW, Raw
from broker_servicebus.messages import take_locked
from tests.servers.servicebus import ServiceBusDouble
from tests.servicebus.conftest import NAMESPACE, Listener, Open

SECONDS = 30.0
QUIET = 3.0 if NAMESPACE else 0.3


async def test_scheduled_messages_can_be_cancelled(open_bus: Open, topic: str):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    async with bus.messages(topic, subscription="billing") as inbox:
        due = datetime.now(UTC) + timedelta(seconds=1)
        # A busy machine must not deliver the message before the cancellation.
        later = due + timedelta(hours=1)
        receipts = await bus.topic(topic).publish_batch(
            [OutboundMessage(b"kept", deliver_at=due), OutboundMessage(b"cancelled", deliver_at=later)]
        )
        assert all(receipt.offset for receipt in receipts)
        await bus.backend.cancel_scheduled(topic, [receipts[1].offset])
        with pytest.raises(BrokerError):
            await bus.backend.cancel_scheduled(topic, [receipts[1].offset])
        for number in (2**63, -1, True, None):
            with pytest.raises(broker.ConfigurationError, match="number of a scheduled message"):
                await bus.backend.cancel_scheduled(topic, [number])
        (message,) = await take(inbox, 1, SECONDS)
        assert message.data == b"kept"
        assert message.broker_time is not None
        assert message.broker_time >= due - timedelta(milliseconds=100)
        await message.ack()
        await nothing_more(inbox, QUIET)


async def test_a_queue_is_a_topic_with_one_subscription(open_bus: Open, topic: str):
    bus = await open_bus()
    info = await bus.admin.ensure_topic(topic, kind="queue")
    assert info.native["kind"] == "queue"
    assert await bus.admin.subscriptions(topic) == ["queue"]
    await bus.topic(topic).publish_batch(numbered(3))
    assert (await bus.admin.lag(topic, "queue")).waiting == 3
    async with bus.messages(topic, subscription="queue") as inbox:
        for message in await take(inbox, 3, SECONDS):
            await message.ack()
    with pytest.raises(SubscriptionNotFound, match="is a queue"):
        async with bus.messages(topic, subscription="billing"):
            pass
    with pytest.raises(Unsupported):
        await bus.admin.ensure_topic(topic, kind="topic")


async def test_receive_and_delete(open_bus: Open, topic: str):
    bus = await open_bus(receive_and_delete=True)
    await bus.admin.ensure_topic(topic)
    async with bus.messages(topic, subscription="billing") as inbox:
        await bus.topic(topic).publish_batch(numbered(30))
        messages = await take(inbox, 30, SECONDS)
        assert (await bus.admin.lag(topic, "billing")).waiting == 0
        await messages[0].ack()


async def test_buffered_messages_outlive_the_lock_with_receive_and_delete(open_bus: Open, topic: str):
    lock = 5.0 if NAMESPACE else 0.2
    bus = await open_bus(receive_and_delete=True, lease_seconds=lock)
    await bus.admin.ensure_topic(topic)
    source = await bus.backend.subscribe(MessageSubscription(topic=topic, subscription="billing"), Listener())
    # Each is larger than the assumed size of a message, so more messages arrive than a fetch may return.
    await bus.topic(topic).publish_batch([bytes([number]) * 6000 for number in range(3)])
    seen: list[Message[bytes]] = []
    while len(seen) < 3:
        found = await source.fetch(3, 6200, SECONDS)
        assert found, "the buffered messages were dropped"
        seen += found
        await let_pass(1.1 * lock)
    assert [message.data[0] for message in seen if message.data] == [0, 1, 2]
    await source.close()


async def test_native_keeps_typed_values(open_bus: Open, topic: str):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    onward = f"{topic}.onward"
    await bus.admin.ensure_topic(onward)
    await bus.admin.ensure_subscription(onward, "billing")
    async with bus.messages(topic, subscription="billing") as inbox:
        async with bus.backend.client.get_topic_sender(topic) as sender:
            properties: dict[Any, Any] = {"number": 7, "large": {"TYPE": "LONG", "VALUE": 2**40}, "yes": True}
            await sender.send_messages(
                ServiceBusMessage(b"x", subject="made", session_id="foreign", application_properties=properties)
            )
            await sender.send_messages(AmqpAnnotatedMessage(value_body={"a": 1}))
        plain, value = await take(inbox, 2, SECONDS)
        assert dict(plain.attributes) == {"number": "7", "large": str(2**40), "yes": "True"}
        assert plain.key == b"foreign"
        assert plain.native.application_properties[b"large"] == 2**40
        assert value.native.body_type.value == "value"
        assert value.native.body == {b"a": 1}
        await bus.topic(onward).publish(OutboundMessage.from_message(plain))
        await plain.ack()
        await value.ack()
    async with bus.messages(onward, subscription="billing") as inbox:
        (message,) = await take(inbox, 1, SECONDS)
        assert message.native.application_properties[b"number"] == 7
        assert message.native.application_properties[b"large"] == 2**40
        assert message.native.application_properties[b"yes"] is True
        assert message.native.subject == "made"


VALUES: dict[str, Any] = {
    "text": "ä",
    "number": 7,
    "yes": True,
    "half": 0.5,
    "binary": b"\xff\x00",
    "map": {"a": 1, "large": {"TYPE": "LONG", "VALUE": 2**40}, "huge": {"TYPE": "ULONG", "VALUE": 2**63}},
    "a map that looks like a type": {"TYPE": {"TYPE": "INT", "VALUE": 1}},
    "binary keys": {b"k": 1},
    "list": [1.5, None, True, 0, "", [uuid4()]],
    "map with a time": {"time": datetime(2026, 1, 1, tzinfo=UTC)},
}
"""Bodies of AMQP values."""
UNWRITABLE: dict[str, Any] = {"time": datetime(2026, 1, 1, tzinfo=UTC), "empty map": {}}
"""The client cannot write them again, so their text is forwarded."""


def client_of(bus: Bus) -> Any:
    backend: Any = bus.backend
    return backend.client


def bodies_of(messages: Sequence[Message[Any]]) -> dict[bytes, Any]:
    """Type and content of the AMQP bodies, by the property `name`."""
    found: dict[bytes, Any] = {}
    for message in messages:
        native = message.native
        kind = native.body_type.value
        found[native.application_properties[b"name"]] = kind, native.body if kind == "value" else list(native.body)
    return found


async def test_amqp_bodies_and_properties_outlive_a_dead_letter_and_a_redrive(both_ways: Bus, topic: str):
    bus = both_ways
    dead = f"{topic}.dead"
    await bus.admin.ensure_topic(topic, kind="queue")
    await bus.admin.ensure_topic(dead)
    typed = {
        "when": datetime(2026, 1, 1, tzinfo=UTC),
        "huge": {"TYPE": "ULONG", "VALUE": 2**63},
        "binary": {"TYPE": "BINARY", "VALUE": b"\xff"},
        "uuid": uuid4(),
        "half": 0.5,
    }
    sent = [
        AmqpAnnotatedMessage(value_body=value, application_properties={"name": name, **typed})
        for name, value in (VALUES | UNWRITABLE).items()
    ]
    sequence = [[1, "two"], [{"three": 3}]]
    sent.append(AmqpAnnotatedMessage(sequence_body=sequence, application_properties={"name": "seq", **typed}))
    async with client_of(bus).get_queue_sender(topic) as sender:
        for message in sent:
            await sender.send_messages(message)
    async with bus.messages(topic, subscription="queue", dead_letter=dead) as inbox:
        first = await take(inbox, len(sent), SECONDS)
        before = bodies_of(first)
        properties = dict(first[0].native.application_properties)
        for message in first:
            await message.reject("bad")
        letters = {letter.attributes["name"]: letter for letter in await bus.admin.list_dead(dead)}
        assert {letter.cut for letter in letters.values()} == {None}
        assert (await bus.admin.redrive(dead, to=[topic])).moved == len(sent)
        again = await take(inbox, len(sent), SECONDS)
        for message in again:
            await message.ack()
    after = bodies_of(again)
    for name in UNWRITABLE:
        assert before.pop(name.encode())[0] == "value"
        assert after.pop(name.encode())[0] == "data"
    assert after == before
    for message in again:
        kept = {
            name: value for name, value in message.native.application_properties.items() if b"anybroker" not in name
        }
        assert {**kept, b"name": b""} == {**properties, b"name": b""}
    assert before[b"map"] == ("value", {b"a": 1, b"large": 2**40, b"huge": 2**63})
    assert before[b"seq"] == ("sequence", [[1, b"two"], [{b"three": 3}]])
    shown = {message.attributes["name"]: message.data for message in again}
    assert shown["text"] == "ä".encode()
    assert shown["time"] == b"1767225600000"
    assert shown["map"] == b'{"a": 1, "large": 1099511627776, "huge": 9223372036854775808}'
    assert shown["seq"] == b'[1, "two", {"three": 3}]'
    assert shown["binary"] == b"\xff\x00"


async def test_a_changed_message_is_forwarded_with_its_changes(both_ways: Bus, topic: str):
    bus = both_ways
    await bus.admin.ensure_topic(topic, kind="queue")
    async with client_of(bus).get_queue_sender(topic) as sender:
        await sender.send_messages(AmqpAnnotatedMessage(value_body={"a": 1}, application_properties={"number": 7}))
    async with bus.messages(topic, subscription="queue") as inbox:
        (message,) = await take(inbox, 1, SECONDS)
        await message.ack()
        copy = OutboundMessage.from_message(message)
        await bus.topic(topic).publish(copy.replace(data=b"changed", attributes={"number": "eight"}))
        (changed,) = await take(inbox, 1, SECONDS)
        await changed.ack()
    assert (changed.data, dict(changed.attributes)) == (b"changed", {"number": "eight"})
    assert changed.native.body_type.value == "data"


async def test_a_message_that_the_client_cannot_encode_fails_alone(both_ways: Bus, topic: str):
    bus = both_ways
    await bus.admin.ensure_topic(topic)
    async with bus.messages(topic, subscription="billing") as inbox:
        await bus.topic(topic).publish(b"x", attributes={"number": "1"})
        (foreign,) = await take(inbox, 1, SECONDS)
        foreign.native.application_properties[b"number"] = 2**64
        foreign.raw.attributes = None
        unsent = OutboundMessage.from_message(foreign)
        await foreign.ack()
        with pytest.raises(PublishError) as raised:
            await bus.topic(topic).publish_batch([b"before", unsent, b"after", b"later"])
        assert [isinstance(outcome, Receipt) for outcome in raised.value.outcomes] == [True, False, True, True]
        assert isinstance(raised.value.outcomes[1], InvalidMessage)
        assert [message.data for message in await take(inbox, 3, SECONDS)] == [b"before", b"after", b"later"]


async def test_a_message_that_the_client_cannot_encode_is_dead_lettered(both_ways: Bus, topic: str):
    bus = both_ways
    dead = f"{topic}.dead"
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_topic(dead)
    async with bus.messages(topic, subscription="billing", dead_letter=dead) as inbox:
        await bus.topic(topic).publish(b"x", attributes={"number": "1"})
        (foreign,) = await take(inbox, 1, SECONDS)
        foreign.native.application_properties[b"number"] = 2**64
        await foreign.reject("bad")
    (letter,) = await bus.admin.list_dead(dead)
    assert (letter.data, letter.reason) == (b"x", "bad")
    assert (letter.cut or "").startswith("Without attributes: Service Bus's client cannot encode the message: ")


async def test_without_a_window_duplicates_are_not_dropped(open_bus: Open):
    bus = await open_bus(deduplication_window=0)
    assert not bus.capabilities.publish.deduplication


async def test_batches_are_split_by_size(open_bus: Open, topic: str, double: ServiceBusDouble):
    bus = await open_bus(deduplication_window=0)
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_subscription(topic, "billing")
    double.fault()
    await bus.topic(topic).publish_batch([OutboundMessage(bytes(60_000), id=f"id-{number}") for number in range(10)])
    # Four of these fit into the 256 KiB of a batch.
    assert double.requests()["send"] == 3
    async with bus.messages(topic, subscription="billing") as inbox:
        assert [message.id for message in await take(inbox, 10, SECONDS)] == [f"id-{number}" for number in range(10)]


async def test_scheduled_messages_are_split_by_size(open_bus: Open, topic: str, double: ServiceBusDouble):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    later = datetime.now(UTC) + timedelta(hours=1)
    double.fault()
    receipts = await bus.topic(topic).publish_batch([OutboundMessage(bytes(60_000), deliver_at=later)] * 10)
    assert double.requests()["schedule-message"] == 3
    assert len({receipt.offset for receipt in receipts} - {None}) == 10


async def test_a_refused_scheduled_message_fails_alone(open_bus: Open, topic: str, double: ServiceBusDouble):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    later = datetime.now(UTC) + timedelta(hours=1)
    # Refuses the request with all messages, and the first one with a single message.
    double.fault(refuse="schedule-message", times=2, condition="amqp:resource-limit-exceeded", text="It is full.")
    with pytest.raises(PublishError) as raised:
        await bus.topic(topic).publish_batch([OutboundMessage(b"x", deliver_at=later) for _ in range(3)])
    assert [isinstance(outcome, Receipt) for outcome in raised.value.outcomes] == [False, True, True]


@pytest.mark.parametrize("rest", ["", "EntityPath=another;", "entityPath="])
async def test_a_connection_string_is_enough(double: ServiceBusDouble, topic: str, rest: str):
    """A string that was copied from an entity's policy names that entity, which is ignored."""
    settings = ServiceBusSettings(
        connection_string=SecretStr(
            f"Endpoint=sb://127.0.0.1:{double.port};SharedAccessKeyName=RootManageSharedAccessKey;"
            f"SharedAccessKey={double.key};UseDevelopmentEmulator=true;{rest}"
        ),
        admin_endpoint=f"http://127.0.0.1:{double.admin_port}",
    )
    async with broker.connect(settings) as bus:
        await bus.admin.ensure_topic(topic, kind="queue")
        async with bus.messages(topic, subscription="queue") as inbox:
            await bus.topic(topic).publish(b"x")
            assert [message.data for message in await take(inbox, 1, SECONDS)] == [b"x"]


async def test_a_full_entity_is_reported_at_once(open_bus: Open, topic: str, double: ServiceBusDouble):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    double.fault(refuse="send", times=100, address=topic, condition="amqp:resource-limit-exceeded", text="It is full.")
    with pytest.raises(BrokerError, match="full") as raised:
        await bus.topic(topic).publish(b"x")
    assert not raised.value.retriable
    assert double.requests()["send"] <= 2
    double.fault()
    await bus.topic(topic).publish(b"x")


def test_buffered_messages_whose_lock_ended_are_dropped():
    native = ServiceBusReceivedMessage.__new__(ServiceBusReceivedMessage)
    locks = ((b"lost", 0.0), (b"ours", math.inf))
    buffer = deque(Message("orders", name, Raw(native, until), VIEW, None, 1) for name, until in locks)
    assert [message.data for message in take_locked(buffer, 10, 10)] == [b"ours"]
    assert not buffer


async def test_filters_of_rules(open_bus: Open, topic: str):
    from azure.servicebus.management import CorrelationRuleFilter, SqlRuleFilter

    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    rules = {
        "sql": SqlRuleFilter("kind = 'a' AND (size IS NULL OR size IN ('1', '2')) AND NOT name LIKE 'x%'"),
        "same": CorrelationRuleFilter(properties={"kind": "b"}),
    }
    admin = bus.backend._connection.admin
    for name, rule in rules.items():
        await bus.admin.ensure_subscription(topic, name)
        await admin.delete_rule(topic, name, "$Default")
        await admin.create_rule(topic, name, "mine", filter=rule)
        assert [each.name async for each in admin.list_rules(topic, name)] == ["mine"]
    for kind, size, name in (("a", "1", "y"), ("a", "3", "y"), ("a", "1", "xx"), ("b", "1", "y")):
        await bus.topic(topic).publish(
            f"{kind}{size}{name}".encode(), attributes={"kind": kind, "size": size, "name": name}
        )
    for subscription, wanted in (("sql", b"a1y"), ("same", b"b1y")):
        async with bus.messages(topic, subscription=subscription) as inbox:
            (message,) = await take(inbox, 1, SECONDS)
            assert message.data == wanted
            await message.ack()
            await nothing_more(inbox, QUIET)


async def test_forwarding(open_bus: Open, topic: str):
    bus = await open_bus()
    target = f"{topic}.target"
    await bus.admin.ensure_topic(target, kind="queue")
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_subscription(topic, "onward", forward_to=target)
    await bus.topic(topic).publish(b"x", key="k")
    async with bus.messages(target, subscription="queue") as inbox:
        (message,) = await take(inbox, 1, SECONDS)
        assert (message.data, message.key) == (b"x", b"k")
        await message.ack()


async def test_deferred_messages_by_the_client(open_bus: Open, topic: str):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic, kind="queue")
    await bus.topic(topic).publish(b"x")
    async with bus.backend.client.get_queue_receiver(topic) as receiver:
        (native,) = await receiver.receive_messages(1, max_wait_time=SECONDS)
        await receiver.defer_message(native)
        (again,) = await receiver.receive_deferred_messages([native.sequence_number])
        assert b"".join(again.body) == b"x"
        await receiver.complete_message(again)
    assert (await bus.admin.lag(topic, "queue")).waiting == 0


@pytest.mark.deep
async def test_a_purge_retries_throttling_and_raises_other_errors(open_bus: Open, topic: str, double: ServiceBusDouble):
    bus = await open_bus(request_timeout=2)
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_subscription(topic, "billing")
    await bus.topic(topic).publish(b"x")
    double.fault(refuse="open", times=1, condition="com.microsoft:server-busy", text="busy")
    assert await bus.admin.purge(topic) == 1
    for condition, error in (
        ("com.microsoft:server-busy", BackendError),
        ("amqp:unauthorized-access", NotAuthorized),
        ("amqp:not-found", NotFound),
    ):
        double.fault()
        double.fault(refuse="open", times=1000, condition=condition, text="injected")
        with pytest.raises(error, match=f"Purging topic '{topic}'"):
            await bus.admin.purge(topic)


async def test_a_native_subscription_name_is_case_insensitive_in_a_purge(open_bus: Open, topic: str):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    for name in ("billing", "shipping"):
        await bus.admin.ensure_subscription(topic, name)
    await bus.topic(topic).publish_batch(numbered(3))
    assert await bus.admin.purge(broker.native_name(f"{topic}/Subscriptions/BILLING")) == 3
    assert [(await bus.admin.lag(topic, name)).waiting for name in ("billing", "shipping")] == [0, 3]
    with pytest.raises(SubscriptionNotFound, match="'nope'"):
        await bus.admin.purge(broker.native_name(f"{topic}/Subscriptions/nope"))


async def test_a_message_with_an_impossible_time_fails_alone(open_bus: Open, topic: str):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    never = datetime(9999, 12, 31, 23, 59, tzinfo=timezone(timedelta(hours=-14)))
    async with bus.messages(topic, subscription="billing") as inbox:
        with pytest.raises(PublishError) as raised:
            await bus.topic(topic).publish_batch(
                [
                    OutboundMessage(b"first"),
                    OutboundMessage(b"x", ttl=1e300),
                    OutboundMessage(b"x", deliver_at=never),
                    OutboundMessage(b"last", ttl=4_294_967),
                ]
            )
        kinds = [type(outcome) for outcome in raised.value.outcomes]
        assert kinds == [Receipt, InvalidMessage, InvalidMessage, Receipt]
        assert "ttl is 1e+300 s; the maximum is 4294967 s" in str(raised.value.outcomes[1])
        first, last = await take(inbox, 2, SECONDS)
        assert {first.data, last.data} == {b"first", b"last"}


async def test_an_unknown_option_names_the_valid_ones(open_bus: Open, topic: str):
    bus = await open_bus()
    with pytest.raises(broker.ConfigurationError, match="max_size_in_megabytes"):
        await bus.admin.ensure_topic(topic, retentions=1)


async def test_closed_sources_and_targets_are_dropped(open_bus: Open, topic: str):
    bus = await open_bus(session_idle=0.1)
    await bus.admin.ensure_topic(topic)
    for number in range(4):
        async with bus.messages(topic, subscription=f"sub-{number % 2}", ordered_by_key=number % 2 == 0):
            pass
        await bus.topic(topic).publish(b"x")
        await bus.topic(topic).close()
    # The next one drops the last one.
    assert len(bus.backend._sources) <= 1
    assert len(bus.backend._targets) <= 1
