"""Codecs that see whole messages: `pack`, `unpack`, and `prepare` before the hand-over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

import broker
from broker import ConfigurationError, DecodeError, InvalidMessage, Message, OutboundMessage, OutboundPayload
from broker.errors import ConnectionFailed
from broker.hooks import DeadLettered, Event, Warned
from broker.testing.fakes import make_message, make_record
from broker.testing.harness import unique
from broker.testing.waiting import eventually
from tests.unit.broker.consuming.scripted_source import ScriptedSource, consuming
from tests.unit.broker.consuming.warp import in_jumping_time
from tests.unit.broker.reading.record_bench import bench

LOADED = ConnectionFailed("the registry is away")


class Versioned:
    """Text whose schema is an attribute; `unpack` reads only schemas that `prepare` has fetched."""

    def __init__(self, *failures: Exception) -> None:
        self.known: set[str] = set()
        self.prepared: list[list[str]] = []
        self.failures = list(failures)
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    def pack(self, payload: str, message: OutboundMessage, topic: str) -> OutboundMessage:
        if payload == "unpackable":
            raise ValueError("no schema has this")
        attributes = {**message.attributes, "schema": f"{topic}-2"}
        return message.replace(data=payload.encode(), attributes=attributes)

    def unpack(self, envelope: broker.Envelope) -> str:
        schema = envelope.attributes.get("schema", "none")
        if schema not in self.known:
            raise DecodeError(f"schema {schema} is unknown")
        return f"{schema}: {(envelope.data or b'').decode()}"

    async def prepare(self, envelopes: Sequence[broker.Envelope]) -> None:
        self.prepared.append([(envelope.data or b"").decode() for envelope in envelopes])
        await self.may_go_on.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.known |= {schema for each in envelopes if (schema := each.attributes.get("schema"))}


async def test_every_way_to_publish_packs() -> None:
    codec = Versioned()
    async with broker.connect(f"inmem://{unique('codecs')}") as bus:
        await bus.admin.ensure_topic("orders")
        orders = bus.topic("orders", codec)
        async with bus.messages("orders", subscription="readers", codec=codec) as inbox:
            await orders.publish("one", key="k", attributes={"own": "kept"})
            await orders.publish_batch([OutboundPayload("two", id="given"), "three"])
            await (await orders.enqueue("four"))
            found: dict[str, Message[str]] = {}
            while len(found) < 4:
                message = await inbox.next_message(timeout=30)
                assert message is not None
                found[message.payload] = message
    assert found.keys() == {f"orders-2: {name}" for name in ("one", "two", "three", "four")}
    first = found["orders-2: one"]
    assert (first.key, first.attributes["own"], first.data) == (b"k", "kept", b"one")
    assert found["orders-2: two"].id == "given"


async def test_a_payload_that_cannot_be_packed_is_refused_alone() -> None:
    async with broker.connect(f"inmem://{unique('codecs')}") as bus:
        await bus.admin.ensure_topic("orders")
        orders = bus.topic("orders", Versioned())
        with pytest.raises(InvalidMessage, match="no schema has this"):
            await orders.publish("unpackable")
        with pytest.raises(broker.PublishError) as raised:
            await orders.publish_batch(["good", "unpackable"])
        good, bad = raised.value.outcomes
        assert isinstance(good, broker.Receipt)
        assert isinstance(bad, InvalidMessage)


async def test_a_codec_that_packs_something_else_is_named() -> None:
    class Wrong(Versioned):
        def pack(self, payload: str, message: OutboundMessage, topic: str) -> Any:
            return payload.encode()

    async with broker.connect(f"inmem://{unique('codecs')}") as bus:
        await bus.admin.ensure_topic("orders")
        with pytest.raises(InvalidMessage, match=r"pack returned an object of type bytes"):
            await bus.topic("orders", Wrong()).publish("one")


async def test_what_cannot_be_unpacked_is_dead_lettered_alone() -> None:
    codec = Versioned()
    events: list[Event] = []
    async with broker.connect(f"inmem://{unique('codecs')}") as bus:
        bus.hooks.listen(events.append)
        for topic in ("orders", "orders.dead"):
            await bus.admin.ensure_topic(topic)
        await bus.topic("orders").publish(b"foreign", key="k")
        await bus.topic("orders", codec).publish("own", key="k")
        async with bus.messages("orders", subscription="readers", codec=codec, dead_letter="orders.dead") as inbox:
            message = await inbox.next_message(timeout=30)
            assert message is not None
            assert message.payload == "orders-2: own"
            await eventually(lambda: any(isinstance(event, DeadLettered) for event in events), 30)
    (letter,) = [event for event in events if isinstance(event, DeadLettered)]
    assert letter.reason == "cannot be decoded: schema none is unknown"


@in_jumping_time
async def test_nothing_is_handed_over_before_it_is_prepared() -> None:
    codec, source = Versioned(), ScriptedSource()
    codec.may_go_on.clear()
    codec.known.add("none")
    async with consuming(source, codec=codec, lease_seconds=30.0, max_outstanding=2) as consumer:
        source.add("1", "2")
        waiting = asyncio.create_task(consumer.next_batch(2))
        await asyncio.sleep(3600)
        assert not waiting.done()
        assert len(source.extended) >= 2 * 3600 // 30
        codec.may_go_on.set()
        assert len(await waiting) == 2
    assert sum(map(len, codec.prepared)) == 2


@in_jumping_time
async def test_a_preparation_that_fails_is_repeated() -> None:
    codec, source = Versioned(*[LOADED] * 5), ScriptedSource()
    codec.known.add("none")
    events: list[Event] = []
    async with consuming(source, codec=codec, events=events) as consumer:
        source.add("1")
        message = await consumer.next_message(timeout=600)
        assert message is not None
    assert len(codec.prepared) == 6
    texts = [event.text for event in events if isinstance(event, Warned) and "prepare" in event.text]
    assert len(texts) == 5
    assert all("the registry is away" in text for text in texts)


async def test_a_close_ends_a_preparation_and_releases_its_messages() -> None:
    codec = Versioned()
    codec.may_go_on.clear()
    async with broker.connect(f"inmem://{unique('codecs')}") as bus:
        await bus.admin.ensure_topic("orders")
        async with bus.messages("orders", subscription="readers", codec=codec) as inbox:
            await bus.topic("orders", codec).publish("one")
            assert await inbox.next_message(timeout=0.05) is None
        async with bus.messages("orders", subscription="readers") as inbox:
            message = await inbox.next_message(timeout=30)
            assert message is not None
            assert message.data == b"one"


async def test_records_are_prepared_and_unpacked() -> None:
    codec = Versioned(LOADED)
    async with broker.connect(f"inmem://{unique('codecs')}") as bus:
        await bus.admin.ensure_topic("orders", partitions=1)
        await bus.topic("orders", codec).publish_batch(["one", "two", "three"])
        async with bus.records("orders", group="readers", codec=codec) as records:
            payloads: list[str] = []
            while len(payloads) < 3:
                payloads += [record.payload for record in await records.next_batch(2, timeout=30)]
    assert payloads == ["orders-2: one", "orders-2: two", "orders-2: three"]


async def test_a_record_that_cannot_be_unpacked_is_raised_in_its_place() -> None:
    codec = Versioned()
    async with broker.connect(f"inmem://{unique('codecs')}") as bus:
        await bus.admin.ensure_topic("orders", partitions=1)
        await bus.topic("orders", codec).publish("one")
        await bus.topic("orders").publish(b"foreign")
        await bus.topic("orders", codec).publish("two")
        async with bus.records("orders", group="readers", codec=codec) as records:
            assert [record.payload for record in await records.next_batch(timeout=30)] == ["orders-2: one"]
            with pytest.raises(DecodeError, match="schema none is unknown"):
                await records.next_batch(timeout=30)
            assert [record.payload for record in await records.next_batch(timeout=30)] == ["orders-2: two"]


async def test_records_that_come_while_others_are_prepared_are_prepared_later() -> None:
    codec = Versioned()
    codec.known.add("none")
    codec.may_go_on.clear()
    async with bench(0, codec=codec) as b:
        b.source.append(0)
        waiting = asyncio.create_task(b.consumer.next_batch(10))
        await b.until(lambda: len(codec.prepared) == 1)
        b.source.append(1)
        await b.buffered(2)
        codec.may_go_on.set()
        first = await waiting
        second = await b.consumer.next_batch(10, timeout=60)
        assert [record.offset for record in [*first, *second]] == [0, 1]
    assert [len(batch) for batch in codec.prepared] == [1, 1]


def test_fakes_take_such_codecs() -> None:
    codec = Versioned()
    codec.known.add("fake-topic-2")
    assert make_message("one", codec=codec).payload == "fake-topic-2: one"
    assert make_record("one", codec=codec, attributes={"own": "kept"}).attributes["own"] == "kept"


async def test_an_object_that_is_no_codec_is_refused() -> None:
    async with broker.connect(f"inmem://{unique('codecs')}") as bus:
        wrong: Any = object()
        with pytest.raises(ConfigurationError, match="one with pack and unpack"):
            bus.topic("orders", wrong)
        with pytest.raises(ConfigurationError, match=r"codec is the class Versioned.*Pass an instance"):
            bus.messages("orders", subscription="readers", codec=Versioned)  # pyright: ignore[reportArgumentType]
