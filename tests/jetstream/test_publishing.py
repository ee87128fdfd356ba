"""Publishing: receipts, deduplication, batches, schedule, errors."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from zlib import crc32

import pytest

from broker.errors import BackendError, BrokerError, Closed, InvalidMessage, MessageTooLarge, TopicNotFound, Unsupported
from broker.messages import Outcome
from broker.names import native_name
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from broker_jetstream.backend import JetStreamBackend
from tests.jetstream.support import make_topic, publish, receive, settle_all, subscribe

NAMES = "".join(map(chr, range(128)))
HOSTILE: list[tuple[str, str]] = [
    ("plain", "value"),
    ("Plain", "other"),
    ("PLAIN", ""),
    ("empty", ""),
    ("blank", " "),
    ("lead", "  x"),
    ("trail", "x  "),
    ("colon", "a:b: c"),
    ("a:b", "colon in the name"),
    (" lead", "x"),
    ("trail ", "x"),
    ("in side", "x"),
    ("lines", "a\r\nb\nc\rd"),
    ("inject", "x\r\nNats-Msg-Id: stolen\r\n\r\nPUB x 0\r\n"),
    ("line\r\nbreak", "x"),
    ("emoji", "🎉 ünïcödé"),
    ("🎉", "name"),
    ("\u00a0", "\u00a0\u3000\u2028"),
    ("percent", "100%25 %41 %"),
    ("%41", "A?"),
    ("amp&eq=", "a&b=c"),
    ("Nats-TTL", "1s"),
    ("nats-msg-id", "mine"),
    ("Status", "404"),
    ("Description", "x"),
    (NAMES, NAMES),
    ("tab", "\tx\t"),
]


async def test_publish_returns_id_partition_and_offset(both_ways: JetStreamBackend, topic: str) -> None:
    await make_topic(both_ways, topic, partitions=3)
    receipts = await publish(both_ways, topic, *(OutboundMessage(b"x", key=f"k{n}") for n in range(6)))
    assert [receipt.offset for receipt in receipts] == [1, 2, 3, 4, 5, 6]
    assert [receipt.partition for receipt in receipts] == [crc32(f"k{n}".encode()) % 3 for n in range(6)]
    source = await subscribe(both_ways, topic)
    assert [message.id for message in await receive(source, 6)] == [receipt.id for receipt in receipts]


async def test_attributes_round_trip(both_ways: JetStreamBackend, topic: str) -> None:
    await make_topic(both_ways, topic)
    single = [{name: value} for name, value in HOSTILE] + [{chr(n): chr(n)} for n in range(128)]
    wanted: list[dict[str, str]] = [dict(HOSTILE), {}, *single]
    await publish(both_ways, topic, *(OutboundMessage(b"x", attributes=each) for each in wanted))
    source = await subscribe(both_ways, topic)
    found = await receive(source, len(wanted))
    assert [dict(message.attributes) for message in found] == wanted


@pytest.mark.parametrize("bound", [{"max_messages": 3}, {"max_bytes": 2000}])
async def test_a_full_topic_is_reported_and_not_retried(
    both_ways: JetStreamBackend, topic: str, bound: dict[str, int]
) -> None:
    await make_topic(both_ways, topic, discard="new", **bound)
    outcomes = await both_ways.publish_target(topic).publish([OutboundMessage(bytes(500)) for _ in range(5)])
    assert isinstance(outcomes[0], Receipt)
    last = outcomes[-1]
    assert isinstance(last, BackendError)
    assert not last.retriable
    assert topic in last.message
    assert "the topic is full" in last.message
    assert "max_messages" in last.advice


async def test_a_repeated_id_is_dropped_and_reported_as_duplicate(both_ways: JetStreamBackend, topic: str) -> None:
    await make_topic(both_ways, topic, partitions=4)
    receipts = await publish(both_ways, topic, *(OutboundMessage(b"x", id="order-1") for _ in range(3)))
    assert [receipt.duplicate for receipt in receipts] == [False, True, True]
    assert len({(receipt.partition, receipt.offset) for receipt in receipts}) == 1
    source = await subscribe(both_ways, topic)
    (message,) = await receive(source, 1)
    assert message.id == "order-1"
    assert await receive(source, 1, 0.3) == []


@pytest.mark.parametrize("text", [" lead", "a\nb", "🎉", "anybroker-64:YQ==", "a:b", "x" * 500])
async def test_ids_round_trip(both_ways: JetStreamBackend, topic: str, text: str) -> None:
    await make_topic(both_ways, topic)
    at = datetime.now(UTC) + timedelta(seconds=0.1)
    (receipt, _) = await publish(
        both_ways, topic, OutboundMessage(b"x", id=text), OutboundMessage(b"y", id=f"{text}2", deliver_at=at)
    )
    found = await receive(await subscribe(both_ways, topic), 2)
    assert receipt.id == text
    assert [message.id for message in found] == [text, f"{text}2"]


async def test_a_large_batch_keeps_its_order(both_ways: JetStreamBackend, topic: str) -> None:
    await make_topic(both_ways, topic)
    target = both_ways.publish_target(topic)
    batches = [[OutboundMessage(b"%d" % (batch * 3000 + n)) for n in range(3000)] for batch in range(3)]
    outcomes = await asyncio.gather(*(target.publish(batch) for batch in batches))
    offsets = [outcome.offset for each in outcomes for outcome in each if isinstance(outcome, Receipt)]
    assert offsets == list(range(1, 9001))
    found = await receive(await subscribe(both_ways, topic), 9000)
    assert [int(message.data or b"") for message in found] == list(range(9000))


async def test_an_invalid_message_does_not_fail_its_batch(both_ways: JetStreamBackend, topic: str) -> None:
    await make_topic(both_ways, topic, partitions=2)
    messages = [
        OutboundMessage(b"a"),
        OutboundMessage(b"x" * 1024 * 1024),
        OutboundMessage(b"b", partition=7),
        OutboundMessage(b"d", attributes={str(n): "x" * 16_000 for n in range(5)}),
        OutboundMessage(b"e", partition=1),
    ]
    outcomes = await both_ways.publish_target(topic).publish(messages)
    kinds = [type(outcome) for outcome in outcomes]
    assert kinds == [Receipt, MessageTooLarge, InvalidMessage, MessageTooLarge, Receipt]
    source = await subscribe(both_ways, topic)
    assert len(await receive(source, 2)) == 2
    assert await receive(source, 1, 0.3) == []


async def test_scheduled_delivery(both_ways: JetStreamBackend, topic: str) -> None:
    await make_topic(both_ways, topic, partitions=2)
    at = datetime.now(UTC) + timedelta(seconds=1.2)
    message = OutboundMessage(b"later", key="k", attributes={"a": "b"}, id="job-1", deliver_at=at)
    receipt, again, _ = await publish(both_ways, topic, message, message, OutboundMessage(b"now"))
    assert (receipt.id, receipt.offset, receipt.duplicate, again.duplicate) == ("job-1", None, False, True)
    source = await subscribe(both_ways, topic)
    found = {message.data: message for message in await receive(source, 2)}
    assert found.keys() == {b"now", b"later"}
    later = found[b"later"]
    assert later.broker_time is not None
    assert later.broker_time >= at - timedelta(seconds=0.05)
    assert (later.key, dict(later.attributes), later.id) == (b"k", {"a": "b"}, "job-1")
    assert await receive(source, 1, 0.3) == []


async def test_a_delivery_time_in_the_past_delivers_at_once(both_ways: JetStreamBackend, topic: str) -> None:
    await make_topic(both_ways, topic)
    await publish(both_ways, topic, OutboundMessage(b"x", deliver_at=datetime.now(UTC) - timedelta(seconds=5)))
    assert len(await receive(await subscribe(both_ways, topic), 1)) == 1


async def test_a_missing_topic_is_reported(both_ways: JetStreamBackend, topic: str) -> None:
    target = both_ways.publish_target(topic)
    with pytest.raises(TopicNotFound, match="does not exist"):
        await target.publish([OutboundMessage(b"x")])
    await make_topic(both_ways, topic)
    await target.publish([OutboundMessage(b"x")])
    await both_ways.admin().delete_topic(topic)
    with pytest.raises(TopicNotFound):
        await target.publish([OutboundMessage(b"x")])


async def test_a_closed_target_raises(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic)
    target = backend.publish_target(topic)
    await target.close()
    with pytest.raises(Closed):
        await target.publish([OutboundMessage(b"x")])


async def test_a_cancelled_call_disturbs_no_other(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic)
    target = backend.publish_target(topic)
    first = asyncio.create_task(target.publish([OutboundMessage(b"a")] * 2000))
    second = asyncio.create_task(target.publish([OutboundMessage(b"b")] * 2000))
    await asyncio.sleep(0)
    first.cancel()
    outcomes = await second
    assert all(isinstance(outcome, Receipt) for outcome in outcomes)
    assert first.cancelled() or first.done()


async def test_foreign_streams(backend: JetStreamBackend, topic: str) -> None:
    connection = backend._connection
    one, many = f"one-{topic[6:]}", f"many-{topic[6:]}"
    await connection.api(f"STREAM.CREATE.{one}", {"name": one, "subjects": [f"{one}.in"]}, what="x")
    await connection.api(f"STREAM.CREATE.{many}", {"name": many, "subjects": [f"{many}.*.x"]}, what="x")
    (receipt,) = await publish(backend, native_name(one), OutboundMessage(b"x", key="k"))
    assert (receipt.partition, receipt.offset) == (0, 1)
    (outcome,) = await backend.publish_target(native_name(many)).publish([OutboundMessage(b"x")])
    assert isinstance(outcome, Unsupported)
    assert "subjects" in str(outcome)
    block = b"NATS/1.0\r\nTrace: a\r\nTrace: b\r\npercent: 100%25\r\n\xff: x\r\nbin: \xff\xfe\r\n\r\n"
    await _write_raw(backend, f"{many}.7.x", block, b"foreign")
    source = await subscribe(backend, native_name(many))
    (message,) = await receive(source, 1)
    assert (message.key, message.data) == (None, b"foreign")
    assert dict(message.attributes) == {"Trace": "b", "percent": "100%25"}
    assert message.native.headers["Trace"] == ("a", "b")
    assert message.native.subject == f"{many}.7.x".encode()
    assert message.id == f"{many}:1"
    assert message.publish_time is None
    assert await source.settle(settle_all([message], Outcome.ACK)) == [None]


async def test_headers_of_a_foreign_producer_are_forwarded(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic)
    await make_topic(backend, f"{topic}.next")
    block = b"NATS/1.0\r\nTrace: a\r\nTrace: b\r\nbin: \xff\xfe\r\n\r\n"
    await _write_raw(backend, f"{topic.replace('.', '=')}.0", block, b"x")
    (message,) = await receive(await subscribe(backend, topic), 1)
    await publish(backend, f"{topic}.next", OutboundMessage.from_message(message))
    (forwarded,) = await receive(await subscribe(backend, f"{topic}.next"), 1)
    assert forwarded.native.headers["Trace"] == ("a", "b")
    assert b"bin: \xff\xfe\r\n" in forwarded.native.block
    assert (message.given_id, forwarded.given_id) == (None, None)


async def test_ids_of_older_versions_and_foreign_programs_are_told_apart(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic)
    subject, made = f"{topic.replace('.', '=')}.0", b"0123456789abcdef-17"
    blocks = {
        b"NATS/1.0\r\nNats-Msg-Id: %b\r\nanybroker-time: 1\r\n\r\n" % made: None,
        b"NATS/1.0\r\nNats-Msg-Id: order-1\r\nanybroker-time: 1\r\n\r\n": "order-1",
        b"NATS/1.0\r\nNats-Msg-Id: 1%b\r\n\r\n" % made: f"1{made.decode()}",
        b"NATS/1.0\r\nNats-Msg-Id: a%b\r\n\r\n" % made[1:]: f"a{made[1:].decode()}",
        b"NATS/1.0\r\nOther: 1\r\n\r\n": None,
    }
    for block in blocks:
        await _write_raw(backend, subject, block, b"x")
    found = await receive(await subscribe(backend, topic), len(blocks))
    assert [message.given_id for message in found] == list(blocks.values())


async def test_a_scheduled_message_keeps_which_id_was_made(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic)
    due = datetime.now(UTC) + timedelta(seconds=1)
    made, _ = await publish(
        backend, topic, OutboundMessage(b"a", deliver_at=due), OutboundMessage(b"b", id="b", deliver_at=due)
    )
    found = await receive(await subscribe(backend, topic), 2)
    assert {(message.id, message.given_id) for message in found} == {(made.id, None), ("b", "b")}


async def test_plain_attributes_are_plain_headers(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic)
    await publish(backend, topic, OutboundMessage(b"x", key="42", attributes={"type": "created", "note": "a\nb"}))
    (message,) = await receive(await subscribe(backend, topic), 1)
    headers = message.native.headers
    assert headers["type"] == ("created",)
    assert headers["anybroker-key"] == ("42",)
    assert "note" not in headers
    assert headers["anybroker-attributes"] == ("note=a%0Ab",)


async def _write_raw(backend: JetStreamBackend, subject: str, block: bytes, data: bytes) -> None:
    assert await backend._connection.request_once(subject.encode(), block, data, 5)


async def test_a_server_error_is_a_broker_error(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic, max_message_size=100)
    (outcome,) = await backend.publish_target(topic).publish([OutboundMessage(b"x" * 1000)])
    assert isinstance(outcome, BrokerError)
    assert isinstance(outcome, MessageTooLarge)
