"""Administration without a running broker."""

from __future__ import annotations

import asyncio

import pytest

import broker
from broker.errors import BrokerError, ConnectionFailed, OperationTimeout
from tests.servers.kafka import KafkaServer

pytestmark = pytest.mark.deep


async def test_groups_without_a_broker_raise_a_connection_error() -> None:
    with KafkaServer() as server:
        # A broker that has just started answers its first requests late.
        async with broker.connect(server.url) as patient:
            assert await patient.admin.groups() == []
        async with broker.connect(f"{server.url}?request_timeout=2") as bus:
            assert await bus.admin.groups() == []
            await asyncio.to_thread(server.kill)
            for _ in range(2):
                with pytest.raises(BrokerError) as raised:
                    await bus.admin.groups()
                assert isinstance(raised.value, (ConnectionFailed, OperationTimeout)), raised.value
                assert raised.value.retriable
