"""`Metrics` on a real server."""

from __future__ import annotations

import broker
from tests.metrics_scenario import check_metrics
from tests.servers.nats import NatsServer


async def test_metrics(nats_server: NatsServer, topic: str) -> None:
    async with broker.connect(nats_server.url) as bus:
        for name in (topic, f"{topic}.dead"):
            await bus.admin.ensure_topic(name)
        await check_metrics(bus, topic, f"{topic}.dead")
