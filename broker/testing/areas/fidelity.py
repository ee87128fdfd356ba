"""Conformance tests of fidelity: all parts of a message arrive unchanged, or are refused before sending."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from broker.codecs import Json, Text
from broker.envelopes import RESERVED_PREFIX, Envelope
from broker.errors import DecodeError, InvalidMessage, InvalidName
from broker.messages import Message
from broker.outbound import OutboundMessage
from broker.testing.areas.admin import listed
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness, unique
from broker.testing.promises import promise, requires
from broker.testing.waiting import nothing_more, read, take

__all__ = ["HOSTILE", "Codecs", "Fidelity"]

HOSTILE = (
    "a/b/c",
    "../../etc",
    "./..\\c:\\",
    "back\\slash",
    "quo\"te and 'single'",
    "with  two spaces",
    " leading and trailing ",
    "0digit",
    "semi;colon, comma: colon = equals & ampersand",
    "percent%20%zz%",
    "line\nfeed\r\nand\ttab",
    "bell\x07 nul\x00 delete\x7f",
    "".join(chr(code) for code in range(128)),
    "ümläut ñ ß",
    "emoji 😀👩‍👩‍👧",
    "right-to-left עברית العربية",
    "\u2028line separator\ufeff",
    "\U0010ffff",
    "Case",
    "case",
)
"""Texts that headers, paths, URLs and codecs are known to spoil."""


class Fidelity(ConformanceCase):
    """Round trips of all parts of a message."""

    @promise("fidelity.hostile-attribute-values", "Unusual texts arrive unchanged as attribute values.")
    async def test_hostile_attribute_values(self, harness: Harness) -> None:
        wanted = {f"name-{number}": text for number, text in enumerate((*HOSTILE, ""))}
        (message,) = await _round_trip(harness, [OutboundMessage(b"x", attributes=wanted)])
        assert dict(message.attributes) == wanted

    @promise("fidelity.hostile-attribute-names", "Unusual texts arrive unchanged as attribute names.")
    async def test_hostile_attribute_names(self, harness: Harness) -> None:
        wanted = {text: str(number) for number, text in enumerate(HOSTILE)}
        (message,) = await _round_trip(harness, [OutboundMessage(b"x", attributes=wanted)])
        assert dict(message.attributes) == wanted

    @promise("fidelity.hostile-keys-and-ids", "Unusual texts arrive unchanged as keys and ids.")
    async def test_hostile_keys_and_ids(self, harness: Harness) -> None:
        sent = [
            OutboundMessage(str(n).encode(), key=text, id=f"{unique('id')} {text}") for n, text in enumerate(HOSTILE)
        ]
        got = {message.data: message for message in await _round_trip(harness, sent)}
        for message in sent:
            assert (got[message.data].key, got[message.data].id) == (message.key, message.id)

    @promise("fidelity.binary-bodies", "Bodies of any bytes arrive unchanged.")
    async def test_binary_bodies(self, harness: Harness) -> None:
        wanted = [bytes(range(256)), b"\xff\xfe\x00", b"\x00", *(text.encode() + b"\xc3\x28" for text in HOSTILE)]
        got = {message.data for message in await _round_trip(harness, [OutboundMessage(body) for body in wanted])}
        assert got == set(wanted)

    @promise("fidelity.binary-keys", "Keys of any bytes arrive unchanged.")
    async def test_binary_keys(self, harness: Harness) -> None:
        wanted = [bytes(range(256)), b"\xff\xfe", b"\x00", b"\xc3\x28", b"\r\n"]
        got = {
            message.key for message in await _round_trip(harness, [OutboundMessage(b"x", key=key) for key in wanted])
        }
        assert got == set(wanted)

    @promise(
        "fidelity.no-key-is-not-the-empty-key",
        "A message without a key arrives without a key; an empty key arrives empty.",
    )
    async def test_no_key_is_not_the_empty_key(self, harness: Harness) -> None:
        got = await _round_trip(harness, [OutboundMessage(b"none"), OutboundMessage(b"empty", key=b"")])
        assert {message.data: message.key for message in got} == {b"none": None, b"empty": b""}

    @promise("fidelity.empty-body", "An empty body arrives empty, with its key and attributes.")
    async def test_empty_body(self, harness: Harness) -> None:
        (message,) = await _round_trip(harness, [OutboundMessage(b"", key="k", attributes={"a": "b"})])
        assert (message.data, message.key, dict(message.attributes)) == (b"", b"k", {"a": "b"})

    @requires("publish.tombstones")
    @promise(
        "fidelity.tombstone-is-not-empty",
        "A tombstone (`data=None`) arrives as None, an empty body as empty bytes.",
    )
    async def test_tombstone_is_not_empty(self, harness: Harness) -> None:
        sent = [OutboundMessage(None, key="gone"), OutboundMessage(b"", key="empty")]
        got = await _round_trip(harness, sent)
        assert {message.key: message.data for message in got} == {b"gone": None, b"empty": b""}

    @promise("fidelity.str-key-is-utf-8", "A str key arrives as its UTF-8 bytes.")
    async def test_str_key_is_utf_8(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish(b"x", key="schlüssel", attributes={"a": "b"})
            (message,) = await take(inbox, 1, harness.patience)
            assert (message.key, dict(message.attributes)) == ("schlüssel".encode(), {"a": "b"})

    @promise("fidelity.many-attributes", "Twenty attributes arrive with none added, lost or renamed.")
    async def test_many_attributes(self, harness: Harness) -> None:
        wanted = {f"attribute.{number}": "v" * number for number in range(20)}
        (message,) = await _round_trip(harness, [OutboundMessage(b"x", attributes=wanted)])
        assert dict(message.attributes) == wanted
        assert not any(name.startswith(RESERVED_PREFIX) for name in message.attributes)

    @requires("harness.publish_foreign")
    @promise(
        "fidelity.last-of-repeated-names",
        "Of the values that another client gives to one attribute, the last is shown, also after forwarding.",
    )
    async def test_last_of_repeated_names(self, harness: Harness) -> None:
        bus, topic, onward = await harness.bus(), await harness.topic(), await harness.topic()
        async with (
            bus.messages(topic, subscription="readers") as inbox,
            bus.messages(onward, subscription="readers") as copies,
        ):
            await harness.publish_foreign(topic, b"x", [("name", "first"), ("other", "1"), ("name", "last")])
            (message,) = await take(inbox, 1, harness.patience)
            assert dict(message.attributes) == {"name": "last", "other": "1"}
            await bus.topic(onward).publish(OutboundMessage.from_message(message))
            (copy,) = await take(copies, 1, harness.patience)
            assert dict(copy.attributes) == {"name": "last", "other": "1"}

    @promise(
        "fidelity.times-are-correct",
        "`publish_time` is the producer's time, given or set; `broker_time` is close to it; both are in UTC.",
    )
    async def test_times_are_correct(self, harness: Harness) -> None:
        given = datetime(2024, 2, 29, 12, 30, 15, 123000, tzinfo=UTC)
        before = datetime.now(UTC)
        sent = [OutboundMessage(b"given", publish_time=given), OutboundMessage(b"set")]
        got = {message.data: message for message in await _round_trip(harness, sent)}
        assert got[b"given"].publish_time == given
        for message in got.values():
            for moment in (message.publish_time, message.broker_time):
                assert moment is None or moment.utcoffset() == timedelta(0)
            assert message.broker_time is None or abs(message.broker_time - before) < timedelta(minutes=1)
        published = got[b"set"].publish_time
        assert published is not None
        assert abs(published - before) < timedelta(minutes=1)

    @promise(
        "fidelity.forwarding-is-lossless",
        "A message forwarded with `from_message` keeps its body, key, attributes, time, and the id that was given.",
    )
    async def test_forwarding_is_lossless(self, harness: Harness) -> None:
        bus, onward = await harness.bus(), await harness.topic()
        sent = OutboundMessage(b"\x00body", key=b"\xffkey", attributes={"ä": "\x00", "b": ""}, id=unique("id"))
        (first,) = await _round_trip(harness, [sent])
        async with bus.messages(onward, subscription="readers") as inbox:
            await bus.topic(onward).publish(OutboundMessage.from_message(first))
            (second,) = await take(inbox, 1, harness.patience)
        assert (second.id, second.key, second.data) == (sent.id, sent.key, sent.data)
        assert dict(second.attributes) == dict(sent.attributes)
        assert second.publish_time == first.publish_time

    @promise(
        "fidelity.copies-to-the-same-topic-arrive",
        "A copy made with `from_message` arrives on the topic of the original, and so does a copy of the copy: "
        "no id that was made for a message is copied.",
    )
    async def test_copies_to_the_same_topic_arrive(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            receipt = await bus.topic(topic).publish(b"job", key="k", attributes={"a": "b"})
            seen: set[str] = set()
            for _ in range(3):
                (message,) = await take(inbox, 1, harness.patience)
                assert (message.given_id, message.key, message.data) == (None, b"k", b"job")
                assert message.id == receipt.id
                assert message.id not in seen
                seen.add(message.id)
                receipt = await bus.topic(topic).publish(OutboundMessage.from_message(message))
                assert not receipt.duplicate
                await message.ack()
            (message,) = await take(inbox, 1, harness.patience)
            assert message.id == receipt.id

    @requires("records")
    @promise(
        "fidelity.copied-records-arrive",
        "A copy of a record made with `from_message` arrives on the topic of the original.",
    )
    async def test_copied_records_arrive(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        async with bus.records(topic, group="readers") as log:
            await bus.topic(topic).publish(b"entry", key="k")
            for _ in range(3):
                (record,) = await read(log, 1, harness.patience)
                assert (record.given_id, record.data) == (None, b"entry")
                receipt = await bus.topic(topic).publish(OutboundMessage.from_message(record))
                assert not receipt.duplicate

    @promise("fidelity.given-id-is-told", "`given_id` is the id that the publisher gave, whatever it looks like.")
    async def test_given_id_is_told(self, harness: Harness) -> None:
        given = [unique("id"), uuid4().hex, str(uuid4()), f"{uuid4().hex[:16]}-7", "17"]
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch([OutboundMessage(b"x", id=each) for each in given])
            messages = await take(inbox, len(given), harness.patience)
            assert sorted(message.given_id or "" for message in messages) == sorted(given)

    @promise(
        "fidelity.portable-names",
        "Every portable name of 3 to 200 characters works for topics and subscriptions.",
    )
    async def test_portable_names(self, harness: Harness) -> None:
        bus = await harness.bus()
        longest = unique("long") + "x" * 200
        for topic in (f"T{unique('t')[-2:]}", longest[:200], f"{unique('a')}._-.B-_", f"{unique('a')}.."):
            await harness.create_topic(topic)
            for subscription in ("abc", "A.b_c-d..", "s" * 200):
                async with bus.messages(topic, subscription=subscription) as inbox:
                    await bus.topic(topic).publish(b"x")
                    await (await take(inbox, 1, harness.patience))[0].ack()
            assert topic in await bus.admin.topics()
            assert await listed(bus, topic) in (sorted(("abc", "A.b_c-d..", "s" * 200)), None)

    @promise(
        "fidelity.unportable-names-are-refused",
        "A name that is not portable raises InvalidName before any I/O.",
    )
    async def test_unportable_names_are_refused(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        for name in ("", "ab", "1abc", "a b c", "äöü", "a/b", "a*b", "abc>", "x" * 201, "abc\n"):
            with pytest.raises(InvalidName):
                bus.topic(name)
            with pytest.raises(InvalidName):
                bus.messages(topic, subscription=name)


@dataclass
class _Order:
    number: int
    note: str | None = None


class _Stamped:
    """Text that is stamped with its topic in an attribute; reads only what it has prepared."""

    def __init__(self) -> None:
        self._prepared: set[str] = set()

    def pack(self, payload: str, message: OutboundMessage, topic: str) -> OutboundMessage:
        return message.replace(data=payload.encode(), attributes={**message.attributes, "stamp": topic})

    async def prepare(self, envelopes: Sequence[Envelope]) -> None:
        await asyncio.sleep(0)
        self._prepared |= {envelope.attributes["stamp"] for envelope in envelopes}

    def unpack(self, envelope: Envelope) -> str:
        stamp = envelope.attributes["stamp"]
        if stamp not in self._prepared:
            raise DecodeError(f"The stamp {stamp} was not prepared")
        key, data = (envelope.key or b"").decode(), (envelope.data or b"").decode()
        return f"{stamp}:{key}:{envelope.attributes['own']}:{data}"


class Codecs(ConformanceCase):
    """Typed payloads."""

    @promise(
        "codecs.json-round-trip-is-typed",
        "A payload of `Json(T)` arrives as an equal T; the body is exactly the published JSON.",
    )
    async def test_json_round_trip_is_typed(self, harness: Harness) -> None:
        bus, topic, codec = await harness.bus(), await harness.topic(), Json(_Order)
        async with bus.messages(topic, subscription="readers", codec=codec) as inbox:
            await bus.topic(topic, codec=codec).publish(_Order(7, "ä\x00😀"), key="k")
            message = await inbox.next_message(harness.patience)
            assert message is not None
            assert message.payload == _Order(7, "ä\x00😀")
            assert message.data == codec.encode(message.payload)
            assert json.loads(message.data or b"") == {"number": 7, "note": "ä\x00😀"}

    @promise("codecs.text-round-trip", "A payload of `Text` arrives as the same text.")
    async def test_text_round_trip(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers", codec=Text()) as inbox:
            await bus.topic(topic, codec=Text()).publish_batch(list(HOSTILE))
            seen: set[str] = set()
            while len(seen) < len(HOSTILE):
                message = await inbox.next_message(harness.patience)
                assert message is not None
                seen.add(message.payload)
        assert seen == set(HOSTILE)

    @promise(
        "codecs.envelope-codec-sees-attributes",
        "A codec that packs into attributes gets them back, also in records, after it has prepared the batch.",
    )
    async def test_envelope_codec_sees_attributes(self, harness: Harness) -> None:
        bus, topic, codec = await harness.bus(), await harness.topic(), _Stamped()
        async with bus.messages(topic, subscription="readers", codec=codec) as inbox:
            await bus.topic(topic, codec=codec).publish("a", key="k", attributes={"own": "kept"})
            message = await inbox.next_message(harness.patience)
            assert message is not None
            assert message.payload == f"{topic}:k:kept:a"
            await message.ack()
        if bus.capabilities.records is not None:
            async with bus.records(topic, group="auditors", codec=codec) as records:
                record = await records.next_record(harness.patience)
                assert record is not None
                assert record.payload == f"{topic}:k:kept:a"

    @promise("codecs.no-codec-returns-bytes", "Without a codec the payload is the body.")
    async def test_no_codec_returns_bytes(self, harness: Harness) -> None:
        (message,) = await _round_trip(harness, [OutboundMessage(b"\x00\xff")])
        assert message.payload == message.data == b"\x00\xff"

    @promise(
        "codecs.unencodable-is-refused",
        "A payload that its codec cannot encode raises, and nothing is sent.",
    )
    async def test_unencodable_is_refused(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        typed: Any = bus.topic(topic, codec=Json(dict[str, Any]))
        async with bus.messages(topic, subscription="readers") as inbox:
            with pytest.raises(InvalidMessage):
                await typed.publish({"a": object()})
            await nothing_more(inbox, harness.quiet)


async def _round_trip(harness: Harness, sent: list[OutboundMessage]) -> list[Message[bytes]]:
    """Publish messages to a new topic, and return the received ones."""
    bus, topic = await harness.bus(), await harness.topic()
    async with bus.messages(topic, subscription="readers") as inbox:
        await bus.topic(topic).publish_batch(sent)
        messages = await take(inbox, len(sent), harness.patience)
        for message in messages:
            await message.ack()
        return messages
