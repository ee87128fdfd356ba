"""A blocking bus on a private in-memory broker, with the topic `orders`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import broker.blocking
from broker_inmem import Broker
from tests.unit.broker.blocking.common import TOPIC


@pytest.fixture
def bus(inmem_broker: Broker) -> Iterator[broker.blocking.Bus]:
    with broker.blocking.connect(inmem_broker.url) as bus:
        bus.admin.ensure_topic(TOPIC, partitions=1)
        yield bus
        inmem_broker.faults.clear()
