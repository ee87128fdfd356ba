"""A holder that stands still while its ack is written."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from broker.bus import connect
from broker.errors import BrokerError, LeaseLost, SettleError
from broker.messages import SettleState
from broker.testing.waiting import nothing_more, take
from broker_kafka.queue.marker_producer import MarkerProducer, Placed
from broker_kafka.queue.wire import Kind, read_markers
from tests.servers.kafka import KafkaServer


async def test_an_ack_that_was_in_time_is_not_told_as_lost(
    kafka: KafkaServer, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = MarkerProducer.write

    async def stand_still(
        producer: MarkerProducer, markers: Sequence[Placed], **more: float
    ) -> list[BrokerError | None]:
        outcomes = await write(producer, markers, **more)
        ((marker, _),) = read_markers(markers[0].data)
        if marker is not None and marker.kind is Kind.END:
            time.sleep(1.2)  # noqa: ASYNC251
        return outcomes

    monkeypatch.setattr(MarkerProducer, "write", stand_still)
    async with (
        connect(f"{kafka.url}?queue=markers&lease_seconds=1") as bus,
        bus.messages(topic, subscription=group, confirm_acks=True) as inbox,
    ):
        await bus.topic(topic).publish(b"once")
        (message,) = await take(inbox, 1, 20.0)
        with pytest.raises(SettleError) as raised:
            await message.ack()
        # LeaseLost would promise that it comes again, and it was done.
        assert not isinstance(raised.value, LeaseLost)
        assert message.state is SettleState.UNKNOWN
        await nothing_more(inbox, 1.5)
        assert (await bus.admin.lag(topic, group)).unsettled == 0
