"""Dead letters of messages whose headers are nearly full: the attributes are kept, the texts are cut."""

from __future__ import annotations

import asyncio
import uuid

import pytest

import broker
from broker.consuming.retry.policy import Retry
from broker.errors import MessageTooLarge
from broker.messages import Message
from broker.outbound import OutboundMessage
from broker_jetstream.codec import encode_headers, encode_id
from tests.servers.nats import NatsServer


def fullest() -> OutboundMessage:
    """A message with the longest id, whose headers are full."""
    fits, too_long = 0, 1 << 14
    while too_long - fits > 1:
        length = (fits + too_long) // 2
        message = _with_attributes(length)
        try:
            encode_headers(message, encode_id(message.id or ""), 1 << 50)
            fits = length
        except MessageTooLarge:
            too_long = length
    return _with_attributes(fits)


def _with_attributes(length: int) -> OutboundMessage:
    return OutboundMessage(b"x", "k", {f"a{number}": "v" * length for number in range(4)}, id="1" * 1024)


@pytest.mark.parametrize("text", ["\U0001f600", "\x00\n", "ä\n", "plain"])
async def test_a_message_with_full_headers_keeps_its_attributes(nats_server: NatsServer, text: str) -> None:
    async def fail(_: Message[bytes]) -> None:
        raise ValueError(text * 3000)

    unique = uuid.uuid4().hex
    topic, dead = f"t{unique}.".ljust(200, "t"), f"d{unique}.".ljust(200, "d")
    original = fullest()
    async with broker.connect(nats_server.url) as bus:
        for name in (topic, dead):
            await bus.admin.ensure_topic(name, partitions=1)
        once_only = Retry(max_attempts=1)
        async with (
            bus.messages(topic, subscription="s" * 200, retry=once_only, dead_letter=dead) as inbox,
            bus.messages(dead, subscription="readers") as letters,
        ):
            work = asyncio.create_task(inbox.receive(fail))
            await bus.topic(topic).publish(original)
            letter = await letters.next_message(timeout=60)
            assert letter is not None
            await inbox.close()
            await work
    added = {name: value for name, value in letter.attributes.items() if name.startswith("dead-letter-")}
    kept = {name: value for name, value in letter.attributes.items() if name not in added}
    assert kept == dict(original.attributes)
    assert added["dead-letter-topic"] == topic
    assert added["dead-letter-error"].startswith(f"ValueError: {text}")
    assert "dead-letter-cut" not in added
