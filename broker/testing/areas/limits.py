"""Conformance tests of limits: the largest message arrives, one byte more is refused."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import pytest

from broker.capabilities import Limits as BrokerLimits
from broker.consuming.retry.policy import Retry
from broker.envelopes import DEAD_LETTER_PREFIX, RESERVED_PREFIX
from broker.errors import InvalidMessage, MessageTooLarge
from broker.messages import Message
from broker.outbound import OutboundMessage
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness
from broker.testing.promises import promise, requires
from broker.testing.waiting import nothing_more, take

__all__ = ["Limits"]


class Limits(ConformanceCase):
    """The largest accepted message, and one byte more."""

    @requires("publish.limits.body")
    @promise(
        "limits.largest-body",
        "The largest body arrives complete; one byte more raises MessageTooLarge, and nothing is sent.",
    )
    async def test_largest_body(self, harness: Harness) -> None:
        limit = (await harness.bus()).capabilities.publish.limits.body
        assert limit is not None
        body = bytes(range(256)) * (limit // 256) + bytes(limit % 256)
        await _largest_and_more(harness, OutboundMessage(body), OutboundMessage(body + b"x"))

    @requires("publish.limits.message")
    @promise(
        "limits.largest-message",
        "The largest message arrives; one byte more raises MessageTooLarge.",
    )
    async def test_largest_message(self, harness: Harness) -> None:
        limits = (await harness.bus()).capabilities.publish.limits
        assert limits.message is not None
        attributes = {"name": "value" * 20}
        rest = len("key") + len("name") + 100
        size = limits.message - rest
        largest = OutboundMessage(bytes(size), key="key", attributes=attributes, id="id-1")
        more = OutboundMessage(bytes(size + 1), key="key", attributes=attributes, id="id-2")
        await _largest_and_more(harness, largest, more)

    @requires("publish.limits.key")
    @promise("limits.largest-key", "The longest key arrives; one byte more raises MessageTooLarge.")
    async def test_largest_key(self, harness: Harness) -> None:
        limit = (await harness.bus()).capabilities.publish.limits.key
        assert limit is not None
        await _largest_and_more(harness, OutboundMessage(b"x", b"k" * limit), OutboundMessage(b"x", b"k" * (limit + 1)))

    @requires("publish.limits.id")
    @promise("limits.largest-id", "The longest id arrives; one character more raises MessageTooLarge.")
    async def test_largest_id(self, harness: Harness) -> None:
        limit = (await harness.bus()).capabilities.publish.limits.id
        assert limit is not None
        await _largest_and_more(
            harness, OutboundMessage(b"x", id="i" * limit), OutboundMessage(b"x", id="i" * (limit + 1))
        )

    @requires("publish.limits.attribute_key")
    @promise(
        "limits.largest-attribute-name",
        "The longest attribute name arrives, also in UTF-8; one byte more raises MessageTooLarge.",
    )
    async def test_largest_attribute_name(self, harness: Harness) -> None:
        limit = (await harness.bus()).capabilities.publish.limits.attribute_key
        assert limit is not None
        name = "ä" * (limit // 2) + "x" * (limit % 2)
        await _largest_and_more(
            harness, OutboundMessage(b"x", attributes={name: ""}), OutboundMessage(b"x", attributes={name + "x": ""})
        )

    @requires("publish.limits.attribute_value")
    @promise(
        "limits.largest-attribute-value",
        "The longest attribute value arrives, also in UTF-8; one byte more raises MessageTooLarge.",
    )
    async def test_largest_attribute_value(self, harness: Harness) -> None:
        limit = (await harness.bus()).capabilities.publish.limits.attribute_value
        assert limit is not None
        value = "ä" * (limit // 2) + "x" * (limit % 2)
        await _largest_and_more(
            harness,
            OutboundMessage(b"x", attributes={"a": value}),
            OutboundMessage(b"x", attributes={"a": value + "x"}),
        )

    @requires("publish.limits.attributes")
    @promise("limits.most-attributes", "The maximum number of attributes arrives; one more raises InvalidMessage.")
    async def test_most_attributes(self, harness: Harness) -> None:
        limit = (await harness.bus()).capabilities.publish.limits.attributes
        assert limit is not None
        most = {f"a{number}": str(number) for number in range(limit)}
        await _largest_and_more(
            harness, OutboundMessage(b"x", attributes=most), OutboundMessage(b"x", attributes={**most, "b": ""})
        )

    @promise(
        "limits.wrong-types-are-refused",
        "A field of a wrong type, a reserved or empty name, and invalid UTF-8 raise when the message is created.",
    )
    async def test_wrong_types_are_refused(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        wrong: list[dict[str, Any]] = [
            {"attributes": {"a": 1}},
            {"attributes": {"a": None}},
            {"attributes": {"a": b"bytes"}},
            {"attributes": {1: "a"}},
            {"attributes": {"": "a"}},
            {"attributes": {"a": "\ud800"}},
            {"attributes": {"\udfff": "a"}},
            {"attributes": {f"{RESERVED_PREFIX}x": "a"}},
            {"attributes": {f"{DEAD_LETTER_PREFIX}office": "a"}},
            {"key": 1},
            {"id": ""},
            {"deliver_at": datetime(2030, 1, 1)},  # noqa: DTZ001
            {"ttl": 0},
            {"partition": -1},
        ]
        for fields in wrong:
            with pytest.raises(InvalidMessage):
                OutboundMessage(b"x", **fields)
        untyped: Any = bus.topic(topic)
        async with bus.messages(topic, subscription="readers") as inbox:
            for body in ("text", 1, ["list"], {"a": "dict"}):
                with pytest.raises(InvalidMessage):
                    await untyped.publish(body)
            await nothing_more(inbox, harness.quiet)

    @promise(
        "limits.largest-can-be-dead-lettered",
        "A message that fills a limit of the broker can still be dead-lettered and redriven.",
    )
    async def test_largest_can_be_dead_lettered(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(), await harness.topic()
        largest = _largest(bus.capabilities.publish.limits)

        async def handle(_: Message[bytes]) -> None:
            raise ValueError("\n".join(["a long error text"] * 150))

        once_only = Retry(max_attempts=1)
        # Without history, only letters written after the subscription arrive.
        async with (
            bus.messages(topic, subscription="billing", retry=once_only, dead_letter=dead) as inbox,
            bus.messages(dead, subscription="readers") as letters,
        ):
            for message in largest:
                await bus.topic(topic).publish(message)
            work = asyncio.ensure_future(inbox.receive(handle))
            for letter in await take(letters, len(largest), 2 * harness.patience):
                assert letter.attributes["dead-letter-topic"] == topic
                assert letter.attributes["dead-letter-reason"]
            await inbox.close()
            await work
        # A letter may be written twice.
        moved = (await bus.admin.redrive(dead, to=[topic])).moved
        assert moved >= len(largest)
        async with bus.messages(topic, subscription="billing", dead_letter=dead) as inbox:
            back = await take(inbox, moved, 2 * harness.patience)
            assert {_content(message) for message in back} == {_content(message) for message in largest}


def _content(message: Message[bytes] | OutboundMessage) -> tuple[bytes, bytes, tuple[tuple[str, str], ...]]:
    return message.data or b"", message.key or b"", tuple(sorted(message.attributes.items()))


async def _largest_and_more(harness: Harness, largest: OutboundMessage, more: OutboundMessage) -> None:
    bus, topic = await harness.bus(), await harness.topic()
    async with bus.messages(topic, subscription="readers") as inbox:
        with pytest.raises(InvalidMessage) as refused:
            await bus.topic(topic).publish(more)
        assert isinstance(refused.value, MessageTooLarge) or len(more.attributes) > len(largest.attributes)
        await bus.topic(topic).publish(largest)
        (message,) = await take(inbox, 1, harness.patience)
        assert (message.data, message.key) == (largest.data, largest.key)
        assert dict(message.attributes) == dict(largest.attributes)
        if largest.id is not None:
            assert message.id == largest.id
        await message.ack()
        await nothing_more(inbox, harness.quiet)


def _largest(limits: BrokerLimits) -> list[OutboundMessage]:
    """For each limit of the broker, a message that reaches it."""
    found = [OutboundMessage(bytes(min(limits.body or 100_000, limits.message or limits.body or 100_000)))]
    if limits.key is not None:
        found.append(OutboundMessage(b"key", b"k" * limits.key))
    if limits.id is not None:
        found.append(OutboundMessage(b"id", id="i" * limits.id))
    if limits.attributes is not None:
        found.append(
            OutboundMessage(b"many", attributes={f"name-{number}": "v" for number in range(limits.attributes)})
        )
    if limits.attribute_value is not None:
        found.append(OutboundMessage(b"long", attributes={"name": "v" * limits.attribute_value}))
    if limits.message is not None:
        rest = len("key") + len("name") + 100
        found.append(
            OutboundMessage(bytes(limits.message - rest), "key", {"name": "v" * 100}, id="l" * (limits.id or 1))
        )
    return found
