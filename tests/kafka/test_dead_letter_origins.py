"""A dead letter names the first topic and offset of its message, whatever its id and route."""

from __future__ import annotations

import pytest

from broker.bus import connect
from broker.consuming.retry.topics import RetryTopics
from broker.outbound import OutboundMessage
from broker.testing.waiting import take
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import KafkaServer

PATIENCE = 60.0


@pytest.mark.parametrize("queue", ["offsets", "retry topics", "markers", "markers&marker_format=v1", "share"])
async def test_a_dead_letter_names_the_first_origin_of_its_message(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, queue: str
) -> None:
    topic, dead = make_topic(partitions=2), make_topic()
    topics = RetryTopics((0.1,)) if queue == "retry topics" else None
    url = f"{kafka.url}?queue={'offsets' if topics else queue}"
    async with connect(url) as bus:
        for name in topics.names(topic, group) if topics else ():
            await bus.admin.ensure_topic(name)
        await bus.topic(topic).publish_batch([OutboundMessage(b"before", partition=1)] * 3)
        sent = await bus.topic(topic).publish(OutboundMessage(b"x", id="order-1", partition=1))
        assert (sent.partition, sent.offset) == (1, 3)
        async with bus.messages(topic, subscription=group, dead_letter=dead, retry_topics=topics) as inbox:
            for message in await take(inbox, 4, PATIENCE):
                # Of markers and retry topics that is a new record, in another place.
                await (message.nack(0.1) if message.data == b"x" else message.ack())
            (again,) = await take(inbox, 1, PATIENCE)
            assert (again.data, again.id) == (b"x", "order-1")
            await again.reject("no use")
        (letter,) = await bus.admin.list_dead(dead)
        assert (letter.id, letter.topic, letter.partition, letter.offset) == ("order-1", topic, 1, 3)
        assert letter.attributes == {}
        if queue == "offsets":
            # A redrive takes it away again.
            assert (await bus.admin.redrive(dead, to=[topic])).moved == 1
            async with bus.messages(topic, subscription=group) as inbox:
                (redriven,) = await take(inbox, 1, PATIENCE)
                assert (redriven.data, redriven.attributes) == (b"x", {})
                await redriven.ack()
