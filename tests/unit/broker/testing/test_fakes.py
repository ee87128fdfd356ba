"""Messages and records of `broker.testing` behave like those of a consumer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import broker
from broker.testing import make_message, make_record


@dataclass
class Order:
    amount: int


async def test_a_message_has_its_fields_and_settles_itself() -> None:
    message = make_message(b"one coffee", key="42", attributes={"type": "created"}, topic="orders", delivery_attempt=2)
    assert (message.topic, message.key, message.data, message.payload) == (
        "orders",
        b"42",
        b"one coffee",
        b"one coffee",
    )
    assert (message.attributes, message.delivery_attempt) == ({"type": "created"}, 2)
    assert message.broker_time is not None
    assert message.publish_time == message.broker_time
    await message.extend(5)
    await message.ack()
    await message.ack()
    assert (message.state, message.outcome) == (broker.SettleState.SETTLED, broker.Outcome.ACK)
    with pytest.raises(broker.AlreadySettled):
        await message.nack()


async def test_a_block_settles_by_how_it_ends() -> None:
    good, bad = make_message(b"1"), make_message(b"2")
    assert good.id != bad.id
    async with good:
        pass
    async with bad:
        raise RuntimeError("sold out")
    assert (good.outcome, bad.outcome) == (broker.Outcome.ACK, broker.Outcome.NACK)


async def test_a_codec_gives_the_payload() -> None:
    message = make_message(Order(3), codec=broker.Json(Order))
    assert (message.payload, message.data) == (Order(3), b'{"amount":3}')
    record = make_record(Order(5), codec=broker.Json(Order), partition=1, offset=7)
    assert (record.payload, record.partition, record.offset) == (Order(5), 1, 7)
    await record.commit()


def test_an_outbound_message_keeps_its_fields() -> None:
    outbound = broker.OutboundMessage(None, key=b"", id="order-1")
    for received in (make_message(outbound), make_record(outbound)):
        assert (received.data, received.key, received.id) == (None, b"", "order-1")
        assert received.native is outbound


def test_an_invalid_message_cannot_be_created() -> None:
    with pytest.raises(broker.InvalidMessage):
        make_message(b"1", attributes={"count": 3})  # pyright: ignore[reportArgumentType]
