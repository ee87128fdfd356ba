"""How a share consumer handles errors that no broker causes on demand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import AcknowledgeType
from confluent_kafka import Message as NativeMessage

from broker.driver.contract import MessageSubscription, Settlement
from broker.driver.fetching import lease_time
from broker.errors import BackendError, BrokerError, ConnectionFailed, LeaseLost, NotAuthorized, SettleError
from broker.hooks import Hooks
from broker.messages import Message, Outcome
from broker_kafka.cluster.connection import Connection
from broker_kafka.settings import KafkaSettings
from broker_kafka.share.member import Acknowledgement, ShareMember
from broker_kafka.share.messages import ShareMessageSource

AWAY = "127.0.0.1:1"
Record: Any = NativeMessage


def new_member(host: Any = None) -> ShareMember:
    """One whose thread does not run."""
    return ShareMember(
        {"bootstrap.servers": AWAY}, host, topic="orders", name="member", reports_joined=False, timeout=1.0
    )


def new_source(listener: Any = None) -> ShareMessageSource:
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
async def test_an_error_of_the_client_is_returned_for_each_message(call: str) -> None:
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


async def test_an_error_between_fetches_is_kept_once() -> None:
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


async def test_a_lock_counts_from_before_a_suspension(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("broker_kafka.share.member.lease_time", lambda: now)
    record = Record(topic="orders", partition=0, offset=7)
    polls = iter([[], [record]])
    client: Any = SimpleNamespace(poll=lambda _: next(polls))
    host: Any = SimpleNamespace(arrived="arrived")
    member = new_member(host)
    posted: list[Any] = []
    monkeypatch.setattr(member, "_post", lambda *what: posted.append(what))
    member._begin_fetch(client)
    now = 101.0
    member._turn(client)
    now = 200.0
    member._turn(client)
    assert posted == [("arrived", member, [record], 101.0)]


async def test_messages_that_arrive_after_their_lock_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[Message[Any]] = []
    source = new_source(SimpleNamespace(lost=lost.extend))
    given_up: list[Any] = []
    member = new_member(source)
    monkeypatch.setattr(member, "release", given_up.extend)
    monkeypatch.setattr(member, "fetch", lambda: None)
    source._members[member] = None
    source._scheduler.add(member, 0.0)
    now = lease_time()
    source.arrived(member, [Record(topic="orders", partition=0, offset=7)], now - 40.0)
    assert await source.fetch(10, 10**6, 0.0) == []
    assert [message.native.offset() for message in lost] == [7]
    assert given_up == [(0, 7)]
    source.arrived(member, [Record(topic="orders", partition=0, offset=8)], now)
    (message,) = await source.fetch(10, 10**6, 0.0)
    assert message.native.offset() == 8


async def test_locks_end_while_the_machine_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[Message[Any]] = []
    source = new_source(SimpleNamespace(lost=lost.extend))
    member = new_member(source)
    monkeypatch.setattr(member, "release", lambda _: None)
    monkeypatch.setattr(member, "fetch", lambda: None)
    source._members[member] = None
    source._scheduler.add(member, 0.0)
    source.arrived(member, [Record(topic="orders", partition=0, offset=offset) for offset in range(2)], lease_time())
    messages = list(await source.fetch(10, 10**6, 0.0))
    source.expire_leases(messages)
    assert lost == []
    assert 28.5 < source.lease_left(messages[0]) < 29.5
    # The loop's clock stood still meanwhile, and its timers with it.
    monkeypatch.setattr("broker_kafka.share.messages.lease_time", lambda: lease_time() + 40)
    assert source.lease_left(messages[0]) < 0
    (refused,) = await source.settle([Settlement(messages[0], Outcome.ACK)])
    assert isinstance(refused, LeaseLost)
    source.expire_leases(messages[:1])
    assert lost == messages
