"""`Metrics` on a real broker."""

from __future__ import annotations

import pytest

import broker
from tests.kafka.conftest import MakeTopic
from tests.metrics_scenario import check_metrics
from tests.servers.kafka import KafkaServer


@pytest.mark.parametrize("queue", ["offsets", "markers"])
async def test_metrics(kafka: KafkaServer, make_topic: MakeTopic, queue: str) -> None:
    async with broker.connect(f"{kafka.url}?queue={queue}") as bus:
        await check_metrics(bus, make_topic(partitions=2), make_topic())
