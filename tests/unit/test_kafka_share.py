"""What a share group's client makes of trouble that no broker can be made to cause at will."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import AcknowledgeType

from broker.errors import BackendError, BrokerError, ConnectionFailed, NotAuthorized, SettleError
from broker.hooks import Hooks
from broker.spi import MessageSubscription
from broker_kafka.connection import Connection
from broker_kafka.settings import KafkaSettings
from broker_kafka.share.member import Acknowledgement, ShareMember
from broker_kafka.share.messages import ShareMessageSource

AWAY = "127.0.0.1:1"


def new_member(host: Any = None) -> ShareMember:
    """One whose thread does not run."""
    return ShareMember({"bootstrap.servers": AWAY}, host, topic="orders", name="member", watches=False, timeout=1.0)


def new_source() -> ShareMessageSource:
    listener: Any = None
    return ShareMessageSource(
        Connection(KafkaSettings(servers=(AWAY,)), Hooks()),
        MessageSubscription(topic="orders", subscription="billing"),
        listener,
        group="billing",
        lock=30.0,
        limit=None,
        partitions=1,
        on_close=lambda _: None,
    )


@pytest.mark.parametrize("call", ["acknowledge_offset", "commit_sync"])
async def test_what_the_client_refuses_is_told_of_each_message(call: str) -> None:
    class Client:
        def acknowledge_offset(self, *_: object) -> None: ...
        def commit_sync(self, _: float) -> dict[Any, Any]:
            return {}

    def refuse(*_: object) -> None:
        raise RuntimeError("The client is in no state for this")

    client: Any = Client()
    setattr(client, call, refuse)
    acks = [Acknowledgement(0, offset, AcknowledgeType.ACCEPT) for offset in range(2)]
    answers = new_member()._settle(client, acks)
    assert [type(answer) for answer in answers] == [SettleError, SettleError]
    assert all("in no state" in str(answer) for answer in answers)


async def test_what_members_tell_while_nobody_fetches_is_kept_once() -> None:
    source = new_source()
    member = new_member(source)
    away = ConnectionFailed("No broker")
    refused: list[BrokerError] = [NotAuthorized("Not yours"), BackendError("No more of it")]
    for error in (away, *refused, away, *refused, *refused):
        source.failed(member, error)
    assert len(source._failures) == 2
    for error in (away, refused[0]):
        with pytest.raises(type(error)) as raised:
            await source.fetch(1, 1000, 0.0)
        assert raised.value is error
    await source.close()
