"""`Metrics` on any broker, for messages that are handled, retried and given up."""

from __future__ import annotations

import asyncio

import broker
from broker.metrics import Metrics
from broker.testing.waiting import eventually
from tests.prometheus_text import read_text

__all__ = ["check_metrics"]

PATIENCE = 30.0
COUNT = 20


async def check_metrics(bus: broker.Bus, topic: str, dead: str) -> None:
    """Publish to the unused topic, consume it, and check the text of a `Metrics`."""
    metrics = Metrics(bus)

    def said(name: str, of: str = topic, **labels: str) -> float:
        family = read_text(metrics.text())[f"anybroker_{name.removesuffix('_count')}"]
        return family.samples[f"anybroker_{name}", frozenset({("topic", of), *labels.items()})]

    await bus.topic(topic).publish_batch([b"%d" % number for number in range(COUNT)])
    assert said("published_messages_total") == COUNT
    tries: dict[bytes, int] = {}

    async def handle(message: broker.Message) -> None:
        data = message.data or b""
        tries[data] = tries.get(data, 0) + 1
        if data == b"0" or (data == b"1" and tries[data] == 1):
            raise ValueError("not now")

    retry = broker.Retry(max_attempts=2, initial=0.05, jitter=0)
    async with bus.messages(topic, subscription="billing", retry=retry, dead_letter=dead) as inbox:
        work = asyncio.create_task(inbox.receive(handle, concurrency=4))
        await eventually(lambda: sum(tries.values()) == COUNT + 2, PATIENCE, "every try")
        await eventually(lambda: said("acked_messages_total") == COUNT, PATIENCE, "the acks")
        assert said("in_flight_messages") == said("in_flight_bytes") == 0
        inbox.stop()
        await work
    assert said("received_messages_total", delivery="first") == COUNT
    assert said("received_messages_total", delivery="redelivery") == 2
    assert said("received_messages_total", delivery="unknown") == 0
    assert said("handler_failures_total") == 3
    assert said("nacked_messages_total") == 2
    assert said("dead_lettered_messages_total") == 1
    assert said("end_to_end_seconds_count") == said("received_to_acked_seconds_count") == COUNT - 1
    assert said("published_messages_total", dead) == 1
    assert said("in_flight_messages") == said("settle_failures_total") == said("lost_leases_total") == 0
    metrics.close()
