"""Helpers of the tests of `broker.blocking`."""

from __future__ import annotations

import broker.blocking
from broker.outbound import OutboundMessage

TOPIC = "orders"


def publish(bus: broker.blocking.Bus, count: int, *, topic: str = TOPIC) -> None:
    bus.topic(topic).publish_batch([OutboundMessage(b"%d" % n, key="k") for n in range(count)])


def waiting(bus: broker.blocking.Bus) -> tuple[int, int | None]:
    lag = bus.admin.lag(TOPIC, "billing")
    return lag.waiting, lag.unsettled
