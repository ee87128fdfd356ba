"""No message of a foreign producer is too large to be given up: its letter is cut, says so, and is never redriven."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from uuid import uuid4

import nats
import pytest
from confluent_kafka import Producer

import broker
from broker.bus import Bus
from broker.capabilities import Limits
from broker.cli import main
from broker.consuming.dead_letters import DeadLetterWriter
from broker.driver.limits import message_size
from broker.errors import BrokerError, MessageTooLarge
from broker.hooks import DeadLetterFailed, Event, Hooks
from broker.messages import Message
from broker.outbound import OutboundMessage
from broker.redrive import DeadLetter
from broker_inmem import Broker
from broker_jetstream.names import stream_name
from tests.servers import kafka
from tests.servers import nats as nats_servers
from tests.servers.kafka_client import RawAdmin
from tests.unit.broker.consuming.scripted_source import VIEW, Letters, Raw, ScriptedSource, consuming

ID = "i" * 60_000


class SmallTopic(Letters):
    """A dead-letter topic that takes letters up to a size."""

    def __init__(self, largest: int, longest_key: int = 1 << 30) -> None:
        super().__init__()
        self.largest = largest
        self.longest_key = longest_key

    async def publish(self, message: OutboundMessage) -> object:
        size = message_size(message) + len(message.id or "")
        if size > self.largest or len(message.key or b"") > self.longest_key:
            raise MessageTooLarge(f"The letter has {size} bytes")
        return await super().publish(message)


async def letter_of(
    topic: SmallTopic, limits: Limits, *, key: bytes | None = None, data: bytes | None, **attributes: str
) -> DeadLetter:
    """The letter that the topic takes, as an operator sees it."""
    events: list[Event] = []
    hooks = Hooks()
    hooks.listen(events.append)
    writer = DeadLetterWriter("orders.dead", topic.publish, limits, hooks)
    original = Message("orders", data, Raw(ID, key, 1, attributes), VIEW)
    await writer.write(
        original, reason="reason " * 500, error=ValueError("error " * 500), attempts=3, subscription="billing"
    )
    assert not [event for event in events if isinstance(event, DeadLetterFailed)]
    (written,) = topic.written
    letter = DeadLetter.from_envelope(Written(written))
    assert letter.topic == "orders"
    assert (letter.reason or "").startswith("reason reason ")
    if letter.cut is not None:
        assert letter.attempts == 3
        assert (letter.error or "").startswith("ValueError: error ")
    return letter


class Written:
    """A letter on the topic."""

    topic = "orders.dead"
    publish_time = broker_time = native = None

    def __init__(self, letter: OutboundMessage) -> None:
        self.key, self.data, self.attributes = letter.key, letter.data, letter.attributes


LIMITS = Limits(key=1000, message=10_000, letter_bytes=1024)


async def test_a_letter_above_our_limit_is_whole_where_the_broker_takes_it(caplog: pytest.LogCaptureFixture) -> None:
    letter = await letter_of(SmallTopic(16_000), LIMITS, key=b"key", data=b"x" * 12_000, a="b")
    assert (letter.key, letter.data, letter.attributes) == (b"key", b"x" * 12_000, {"a": "b"})
    assert (letter.cut, letter.key_bytes, letter.data_bytes) == (None, None, None)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("limits", [LIMITS, Limits(body=10_000), Limits(message=10_000)])
async def test_a_body_that_no_letter_can_have_is_cut(limits: Limits, caplog: pytest.LogCaptureFixture) -> None:
    letter = await letter_of(SmallTopic(12_000), limits, key=b"key", data=b"x" * 12_000)
    assert letter.key == b"key"
    assert 8_000 < len(letter.data or b"") < 10_000
    assert (letter.key_bytes, letter.data_bytes) == (None, 12_000)
    assert (letter.cut or "").startswith("Without attributes, end of the body: The letter has 1")
    (logged,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "topic 'orders'" in logged.getMessage()
    assert str(letter.cut) in logged.getMessage()


async def test_a_key_that_no_letter_can_have_is_left_out() -> None:
    letter = await letter_of(SmallTopic(100_000, longest_key=1000), LIMITS, key=b"\x01" * 55_000, data=b"body")
    assert (letter.key, letter.data) == (None, b"body")
    assert (letter.key_bytes, letter.data_bytes) == (55_000, None)
    assert (letter.cut or "").startswith("Without attributes, key: ")


@pytest.mark.parametrize("limits", [Limits(), LIMITS, Limits(message=10**6), Limits(attributes=0, letter_attributes=8)])
@pytest.mark.parametrize("data", [b"x" * 5000, b"", None])
async def test_the_last_shape_fits_everywhere(limits: Limits, data: bytes | None) -> None:
    letter = await letter_of(SmallTopic(1400), limits, key=b"k" * 5000, data=data, a="b" * 5000)
    assert (letter.key, letter.data) == (None, data and b"")
    assert (letter.key_bytes, letter.data_bytes) == (5000, 5000 if data else None)
    assert letter.cut


async def test_poison_that_no_letter_can_hold_does_not_stop_its_key() -> None:
    source, letters, seen = ScriptedSource(), SmallTopic(2000), list[str]()
    source.add("bad", key=b"key", data=b"x" * 10_000)
    source.add("1", "2", "3", key=b"key")

    async def handle(message: Message[Any]) -> None:
        seen.append(message.id)
        if message.id == "bad":
            raise ValueError("poison")

    once = broker.Retry(max_attempts=1)
    async with consuming(source, letters=letters, retry=once, ordered_by_key=True, stop_when_idle=0.2) as inbox:
        async with asyncio.timeout(60):
            await inbox.receive(handle)
    assert seen == ["bad", "1", "2", "3"]
    assert len(letters.written) == 1


# -- redrives -----------------------------------------------------------------------------------------------

CUT = {"dead-letter-topic": "orders", "dead-letter-reason": "bad", "dead-letter-cut": "Without end of the body: why"}


@pytest.fixture
async def bus(broker_bus: Bus) -> Bus:
    for name in ("orders", "orders.dead"):
        await broker_bus.admin.ensure_topic(name)
    sizes = {"dead-letter-data-bytes": "70", "dead-letter-id": "7", "dead-letter-partition": "0"}
    letters = [
        OutboundMessage(b"begin", attributes={**CUT, **sizes, "dead-letter-offset": "41"}),
        OutboundMessage(b"whole", attributes={"dead-letter-topic": "orders", "dead-letter-reason": "bad"}),
    ]
    await broker_bus.topic("orders.dead").publish_batch(letters)
    return broker_bus


async def test_a_redrive_leaves_a_letter_that_lacks_a_part(bus: Bus) -> None:
    for to in (None, ["orders"]):
        report = await bus.admin.redrive("orders.dead", dry_run=True, to=to)
        assert (report.by_topic, report.failed) == ({"orders": 1}, 1)
    report = await bus.admin.redrive("orders.dead", to=["orders"])
    assert (report.moved, report.by_topic, report.failed) == (1, {"orders": 1}, 1)
    error = report.errors["orders"]
    assert "'7', partition 0, offset 41 lacks a part of it: Without end of the body: why" in error.message
    (left,) = await bus.admin.list_dead("orders.dead")
    assert (left.data, left.data_bytes, left.key_bytes, left.cut) == (b"begin", 70, None, CUT["dead-letter-cut"])
    partitions = await bus.log.partitions("orders")
    moved = [record.data for at in partitions async for batch in bus.log.read("orders", at) for record in batch]
    assert moved == [b"whole"]


async def test_the_command_line_shows_what_a_letter_lacks(
    bus: Bus, inmem_broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> int:
        return main(["dead", "list", "orders.dead", "--url", inmem_broker.url, *arguments])

    assert await asyncio.to_thread(run) == 0
    shown = capsys.readouterr()
    assert "begin (of 70 bytes)" in shown.out
    assert "1 letter lacks a part of the message" in shown.err
    assert await asyncio.to_thread(run, "--json") == 0
    assert '"cut": "Without end of the body: why", "key_bytes": null, "data_bytes": 70' in capsys.readouterr().out


# -- brokers ------------------------------------------------------------------------------------------------


async def give_up(url: str, topic: str, caplog: pytest.LogCaptureFixture, **options: Any) -> DeadLetter:
    """Consume a foreign message and five good ones: return the letter of the first, after an attempt to redrive it."""
    seen: list[bytes] = []
    failures: list[Event] = []

    async def handle(message: Message[bytes]) -> None:
        seen.append((message.data or b"")[:4])
        if seen[-1] != b"good":
            raise ValueError("poison")

    async with broker.connect(url) as bus:
        await bus.admin.ensure_topic(dead := f"{topic}.dead")
        await bus.topic(topic).publish_batch([OutboundMessage(b"good", b"key")] * 5)
        bus.hooks.listen(lambda event: failures.append(event) if isinstance(event, DeadLetterFailed) else None)
        once = broker.Retry(max_attempts=1)
        async with bus.messages(
            topic, subscription="billing", dead_letter=dead, retry=once, stop_when_idle=1, close_timeout=1, **options
        ) as inbox:
            async with asyncio.timeout(60):
                await inbox.receive(handle)
        assert (len(seen), failures) == (6, [])
        (letter,) = await bus.admin.list_dead(dead)
        logged = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert len(logged) == (letter.cut is not None)
        report = await bus.admin.redrive(dead, to=[topic])
        assert (report.moved, report.failed) == (0, 1)
        assert isinstance(report.errors[topic], BrokerError)
    return letter


class TestNats:
    @pytest.mark.parametrize("case", ["body", "key", "binary key"])
    async def test_messages(self, case: str, caplog: pytest.LogCaptureFixture) -> None:
        server, topic = nats_servers.shared_server(), f"topic.{uuid4().hex[:12]}"
        key = {"body": "key", "key": "k" * 65_400, "binary key": "\x01" * 55_000}[case]
        async with broker.connect(server.url) as bus:
            await bus.admin.ensure_topic(topic)
        client = await nats.connect(server.url)
        size = client.max_payload - len(f"NATS/1.0\r\nanybroker-key: {key}\r\n\r\n")
        try:
            await client.jetstream().publish(
                f"{stream_name(topic)}.0", b"x" * (size if case == "body" else 3), headers={"anybroker-key": key}
            )
        finally:
            await client.close()
        letter = await give_up(server.url, topic, caplog, ordered_by_key=True)
        assert letter.offset == 1
        if case == "body":
            assert (letter.key, letter.key_bytes, letter.data_bytes) == (b"key", None, size)
            assert 1_000_000 < len(letter.data or b"") < size
        else:
            assert (letter.key, letter.key_bytes, letter.data, letter.data_bytes) == (None, len(key), b"xxx", None)

    async def test_records(self) -> None:
        server, topic = nats_servers.shared_server(), f"topic.{uuid4().hex[:12]}"
        async with broker.connect(server.url) as bus:
            await bus.admin.ensure_topic(topic)
            await bus.admin.ensure_topic(dead := f"{topic}.dead")
            client = await nats.connect(server.url)
            size = client.max_payload
            try:
                for body in (b"x" * size, b'{"a": 1}', b'{"a": 2}'):
                    await client.jetstream().publish(f"{stream_name(topic)}.0", body)
            finally:
                await client.close()
            codec = broker.Json(dict[str, int])
            async with bus.records(topic, group="audit", start="earliest", codec=codec, on_decode_error=dead) as log:
                found = [await log.next_record(timeout=30) for _ in range(2)]
            assert [record and record.payload for record in found] == [{"a": 1}, {"a": 2}]
            (letter,) = await bus.admin.list_dead(dead)
            assert (letter.topic, letter.offset, letter.data_bytes) == (topic, 1, size)


class TestKafka:
    @pytest.mark.parametrize(("key", "retries"), [(3, False), (3, True), (1_040_000, False)])
    async def test_the_largest_messages(self, key: int, retries: bool, caplog: pytest.LogCaptureFixture) -> None:
        server = kafka.shared_server()
        topic = self.produce(server.bootstrap, key, size := 1_048_588 - 120 - key)
        options: dict[str, Any] = {"ordered_by_key": True}
        if retries:
            options = {"retry_topics": broker.RetryTopics((0.01,))}
            async with broker.connect(f"kafka://{server.bootstrap}") as bus:
                for name in broker.RetryTopics((0.01,)).names(topic, "billing"):
                    await bus.admin.ensure_topic(name)
        letter = await give_up(f"kafka://{server.bootstrap}", topic, caplog, **options)
        assert (letter.partition, letter.offset) == (0, 0)
        if key == 3:
            assert (letter.key, letter.key_bytes, letter.data_bytes) == (b"kkk", None, size)
            assert 900_000 < len(letter.data or b"") < size
        else:
            assert (letter.key, letter.key_bytes) == (None, key)
            assert (letter.data, letter.data_bytes) == (b"x" * size, None)

    async def test_a_message_above_our_limit_has_a_whole_letter(self, caplog: pytest.LogCaptureFixture) -> None:
        server = kafka.shared_server()
        topic = self.produce(server.bootstrap, 3, 998_000)
        letter = await give_up(f"kafka://{server.bootstrap}", topic, caplog, ordered_by_key=True)
        assert (letter.cut, letter.key, letter.data) == (None, b"kkk", b"x" * 998_000)

    def produce(self, bootstrap: str, key: int, size: int) -> str:
        """The topic of one message of a foreign producer."""
        topic = RawAdmin(bootstrap).make_topic()
        producer = Producer({"bootstrap.servers": bootstrap, "message.max.bytes": 2_000_000})
        producer.produce(topic, b"x" * size, key=b"k" * key)
        assert producer.flush(30) == 0
        return topic
