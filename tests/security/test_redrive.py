"""Redrives trust no letter: any program that may write to a dead-letter topic can forge one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import nats
import pytest
from azure.servicebus import ServiceBusReceivedMessage

import broker
from broker.bus import Bus
from broker.cli import main
from broker.driver.contract import MessageSubscription
from broker.errors import ConfigurationError
from broker.hooks import Hooks
from broker.messages import Message
from broker.names import REDRIVE_SUBSCRIPTION, native_name
from broker.outbound import OutboundMessage
from broker.redrive import redriven_message
from broker.registry import create_backend
from broker.testing.faults import Wrapped
from broker_inmem import Broker
from broker_jetstream.names import stream_name
from broker_kafka.queue.markers.lease import Lease
from broker_kafka.queue.markers.redelivery import dead_letter
from broker_kafka.queue.markers.wire import Content, MessageId
from broker_servicebus.admin import ServiceBusAdmin
from broker_servicebus.codec import VIEW, Raw
from tests.servers.nats import shared_server

DEAD = "orders.dead"


@pytest.fixture
async def bus(broker_bus: Bus) -> Bus:
    for name in ("orders", "payroll", DEAD):
        await broker_bus.admin.ensure_topic(name)
    return broker_bus


def letter_of(topic: str, body: bytes = b"x", **attributes: str) -> OutboundMessage:
    return OutboundMessage(body, attributes={"dead-letter-topic": topic, "dead-letter-reason": "bad", **attributes})


async def bodies(bus: Bus, topic: str) -> list[bytes | None]:
    partitions = await bus.log.partitions(topic)
    found = [record.data for at in partitions async for batch in bus.log.read(topic, at) for record in batch]
    return sorted(found, key=str)


async def test_a_letter_for_another_topic_stays_and_is_counted(bus: Bus) -> None:
    await bus.topic(DEAD).publish_batch([letter_of("payroll", b"forged"), letter_of("orders", b"ours")])
    report = await bus.admin.redrive(DEAD, to=["orders"])
    assert (report.moved, report.by_topic, report.failed, report.not_allowed) == (1, {"orders": 1}, 1, {"payroll": 1})
    assert await bodies(bus, "payroll") == []
    assert await bodies(bus, "orders") == [b"ours"]
    assert [letter.data for letter in await bus.admin.list_dead(DEAD)] == [b"forged"]


async def test_without_topics_nothing_moves_and_a_dry_run_shows_them(bus: Bus) -> None:
    await bus.topic(DEAD).publish_batch([letter_of("payroll"), letter_of("orders"), OutboundMessage(b"no letter")])
    with pytest.raises(ConfigurationError, match=r"no `to`, and inmem does not know .* dry run"):
        await bus.admin.redrive(DEAD)
    for _ in range(2):
        report = await bus.admin.redrive(DEAD, dry_run=True)
        assert (report.by_topic, report.skipped, report.failed) == ({"payroll": 1, "orders": 1}, 1, 0)
        report = await bus.admin.redrive(DEAD, dry_run=True, to=["orders"], limit=1)
        assert (report.moved, report.not_allowed) == (1, {"payroll": 1})
        assert await bodies(bus, "orders") == []
        # Once more by the subscription of redrives, in place of the log.
        await bus.admin.ensure_subscription(DEAD, REDRIVE_SUBSCRIPTION)
    assert (await bus.admin.lag(DEAD, REDRIVE_SUBSCRIPTION)).waiting == 3


async def test_a_dry_run_ends_however_many_letters_there_are(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.redrive._MOST_LEFT", 10)
    await bus.topic(DEAD).publish_batch([letter_of(f"topic-{number}") for number in range(50)])
    for _ in range(2):
        assert len((await bus.admin.redrive(DEAD, dry_run=True)).by_topic) == 10
        await bus.admin.ensure_subscription(DEAD, REDRIVE_SUBSCRIPTION)


class Foreign(Wrapped):
    """A view of what a foreign producer wrote, on a backend that filters nothing."""

    def attributes(self, raw: Any) -> Any:
        found = self.inner.attributes(raw)
        return {**found, "retry-letter-x": "1"} if "forged" in found else found


class ForeignSource(Wrapped):
    async def fetch(self, *arguments: Any) -> Sequence[Message[Any]]:
        messages = await self.inner.fetch(*arguments)
        for message in messages:
            message.view = Foreign(message.view)
        return messages


class ForeignBackend(Wrapped):
    async def subscribe(self, subscription: MessageSubscription, listener: Any) -> Any:
        return ForeignSource(await self.inner.subscribe(subscription, listener))


async def test_a_letter_that_is_no_message_does_not_stop_the_others(bus: Bus, inmem_broker: Broker) -> None:
    letters = [letter_of("orders", b"1"), letter_of("orders", b"2", forged="1"), letter_of("orders", b"3")]
    await bus.topic(DEAD).publish_batch(letters)
    hooks = Hooks()
    backend: Any = ForeignBackend(create_backend(inmem_broker.url, hooks))
    async with Bus(backend, hooks) as foreign:
        report = await foreign.admin.redrive(DEAD, to=["orders"])
    assert (report.moved, report.failed) == (2, 1)
    assert "retry-letter-x" in report.errors["orders"].message
    assert await bodies(bus, "orders") == [b"1", b"3"]


async def test_forged_letters_of_a_foreign_nats_client() -> None:
    server, topic = shared_server(), f"topic.{uuid4().hex[:12]}"
    async with broker.connect(server.url) as bus:
        await bus.admin.ensure_topic(topic)
        await bus.admin.ensure_topic(dead := f"{topic}.dead")
        client = await nats.connect(server.url)
        try:
            for more in ({}, {"retry-letter-x": "1"}, {"anybroker-attributes": "=1&anybroker-x=1&retry-letter-y=1"}):
                headers = {"dead-letter-topic": topic, "dead-letter-attempts": "9" * 5000, **more}
                await client.jetstream().publish(f"{stream_name(dead)}.0", b"x", headers=headers)
        finally:
            await client.close()
        assert len(await bus.admin.list_dead(dead)) == 3
        report = await bus.admin.redrive(dead, to=[topic])
        assert (report.moved, report.failed, report.errors) == (3, 0, {})


TIMES = ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00", "9" * 5000)
NUMBERS = ("9" * 40, "9" * 5000, "-1", "1e400", "\u0663")


async def test_forged_times_and_numbers_do_not_stop_a_list(
    bus: Bus, inmem_broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = [
        {f"dead-letter-{name}": number for name in ("attempts", "partition", "offset", "key-bytes", "data-bytes")}
        for number in NUMBERS
    ]
    forged = [{"dead-letter-time": time} for time in TIMES] + numbers
    await bus.topic(DEAD).publish_batch([letter_of("orders", b"x", **attributes) for attributes in forged])
    for arguments in (["list"], ["list", "--json"], ["redrive", "--dry-run"], ["redrive", "--to", "orders"]):
        name, *options = arguments
        assert await asyncio.to_thread(main, ["dead", name, DEAD, "--url", inmem_broker.url, *options]) == 0
        shown = capsys.readouterr().out
        if arguments == ["list", "--json"]:
            letters = [json.loads(line) for line in shown.splitlines()]
            assert len(letters) == len(forged)
            assert [letter["time"] for letter in letters].count(None) == len(letters) - 1


def test_a_dead_letter_queue_of_service_bus_names_its_own_topic() -> None:
    native: Any = ServiceBusReceivedMessage.__new__(ServiceBusReceivedMessage)
    properties = {b"dead-letter-topic": b"payroll", b"DeadLetterReason": b"worthless"}
    native._raw_amqp_message = SimpleNamespace(
        application_properties=properties, properties=None, header=None, annotations=None
    )
    assert VIEW.attributes(Raw(native, 0.0, dead_of="orders"))["dead-letter-topic"] == "orders"
    admin = ServiceBusAdmin(cast("Any", None))
    assert admin.dead_letter_origins(native_name("orders/Subscriptions/billing/$DeadLetterQueue")) == ["orders"]
    assert admin.dead_letter_origins("orders.dead") is None


def test_a_redriven_message_has_nothing_of_its_letter() -> None:
    class View:
        def attributes(self, raw: Any, /) -> Any:
            return raw

        def id(self, raw: Any, /) -> str:
            return "letter-1"

        def key(self, raw: Any, /) -> None: ...
        def publish_time(self, raw: Any, /) -> None: ...
        def native(self, raw: Any, /) -> None: ...

    attributes = {"dead-letter-topic": "orders", "dead-letter-id": "x" * 10_000, "ok": "1"}
    message: Message[bytes] = Message(DEAD, b"x", attributes, View(), None, 1)  # pyright: ignore[reportArgumentType]
    redriven = redriven_message(message)
    assert dict(redriven.attributes) == {"ok": "1"}
    assert len(redriven.id or "") < 200


def test_a_letter_of_a_tracker_has_no_forged_details() -> None:
    lease = Lease(
        id=MessageId("orders", 0, 7, "billing"),
        pin=0,
        pinned=0,
        after_ms=1,
        deadline=1,
        attempt=5,
        data=b"",
        released=False,
        touched=0,
        started=0,
    )
    forged = (("dead-letter-error", b"forged"), ("dead-letter-x", b"forged"), ("ok", b"1"))
    headers = dict(dead_letter(lease, Content(headers=forged, dead_letter=DEAD), "bad").headers)
    assert headers["ok"] == b"1"
    assert headers["dead-letter-topic"] == b"orders"
    assert b"forged" not in headers.values()
