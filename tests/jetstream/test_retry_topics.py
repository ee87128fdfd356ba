"""Retry topics on JetStream take the largest message too."""

from __future__ import annotations

import pytest

import broker
from broker import RetryTopics
from broker.errors import MessageTooLarge
from broker.outbound import OutboundMessage
from broker.testing.waiting import take
from tests.servers.nats import NatsServer

PATIENCE = 60.0
TOPICS = RetryTopics((0.2, 0.4))


@pytest.mark.parametrize("character", ["x", "ü", "\n"])
async def test_a_message_with_the_largest_headers_fits_a_retry_topic(
    nats_server: NatsServer, topic: str, character: str
) -> None:
    async with broker.connect(nats_server.url) as bus:
        for name in (topic, *TOPICS.names(topic, "billing")):
            await bus.admin.ensure_topic(name, partitions=1)
        most = 65_535
        while True:
            sent = OutboundMessage(b"body", key="key", attributes={"a": character * most}, id="i" * 100)
            try:
                await bus.topic(topic).publish(sent)
                break
            except MessageTooLarge:
                most -= 50
        async with bus.records(topic, group="billing").as_messages(retry_topics=TOPICS) as inbox:
            for attempt in (1, 2, 3):
                (message,) = await take(inbox, 1, PATIENCE)
                assert (message.id, message.delivery_attempt) == (sent.id, attempt)
                assert message.attributes == sent.attributes
                await (message.nack() if attempt < 3 else message.ack())
