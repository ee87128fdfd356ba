"""Confirmed acks: what the answers mean, and when one answer confirms many acks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import nats
import pytest
from pydantic import SecretStr

from broker.driver.contract import RecordSubscription, Settlement, TopicPartition
from broker.errors import LeaseLost, SettleError
from broker.hooks import Hooks
from broker.messages import Outcome
from broker.outbound import OutboundMessage
from broker_jetstream.backend import JetStreamBackend
from broker_jetstream.settings import JetStreamSettings
from broker_jetstream.transport import is_standalone
from tests.jetstream.support import GroupListener, make_topic, publish, read, receive, settle_all, subscribe
from tests.servers.nats import NatsServer


def bodies(number: int) -> list[OutboundMessage]:
    return [OutboundMessage(b"%d" % each) for each in range(number)]


async def unsettled(backend: JetStreamBackend, topic: str) -> tuple[int, int]:
    """How many messages wait, and how many are unsettled."""
    lag = await backend.admin().lag(topic, "billing")
    return lag.waiting, lag.unsettled or 0


@pytest.mark.parametrize("number", [1, 3])
async def test_acks_that_the_server_refuses_are_reported(topic: str, number: int) -> None:
    forbidden = 'permissions: { publish: { deny: ["$JS.ACK.>"] } }'
    with NatsServer.with_user("ann", "x", forbidden) as server:
        settings = JetStreamSettings(servers=(server.url,), user="ann", password=SecretStr("x"))
        backend = JetStreamBackend(settings, Hooks())
        await backend.open()
        try:
            await make_topic(backend, topic)
            await publish(backend, topic, *bodies(number))
            source = await subscribe(backend, topic, confirm_acks=True)
            found = await receive(source, number)
            errors = await source.settle(settle_all(found, Outcome.ACK))
            assert [type(error) for error in errors] == [SettleError] * number
            assert "$JS.ACK" in str(errors[0])
            assert await unsettled(backend, topic) == (0, number)
        finally:
            await backend.close()


async def test_a_commit_whose_ack_the_server_refuses_goes_into_the_metadata(topic: str) -> None:
    forbidden = 'permissions: { publish: { deny: ["$JS.ACK.>"] } }'
    with NatsServer.with_user("ann", "x", forbidden) as server:
        settings = JetStreamSettings(servers=(server.url,), user="ann", password=SecretStr("x"))
        backend = JetStreamBackend(settings, Hooks())
        await backend.open()
        try:
            await make_topic(backend, topic)
            await publish(backend, topic, *bodies(3))
            source = await backend.join(RecordSubscription(topics=(topic,), group="audit"), GroupListener())
            found = await read(source, 3)
            place = TopicPartition(topic, 0)
            assert await source.commit({place: found[-1].offset + 1}) == {place: None}
            assert await source.committed([place]) == {place: found[-1].offset + 1}
        finally:
            await backend.close()


async def test_the_answer_to_the_last_ack_confirms_the_ones_before_it(both_ways: JetStreamBackend, topic: str) -> None:
    await make_topic(both_ways, topic)
    await publish(both_ways, topic, *bodies(2000))
    source = await subscribe(both_ways, topic, confirm_acks=True)
    found = await receive(source, 2000)
    outcomes = [Outcome.REJECT if place % 7 == 0 else Outcome.ACK for place in range(len(found))]
    settlements = [Settlement(message, outcome) for message, outcome in zip(found, outcomes, strict=True)]
    assert await source.settle(settlements) == [None] * 2000
    assert await unsettled(both_ways, topic) == (0, 0)


async def test_ended_leases_are_reported_beside_confirmed_acks(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic)
    await publish(backend, topic, *bodies(4))
    source = await subscribe(backend, topic, confirm_acks=True)
    found = await receive(source, 4)
    for message in (found[1], found[3]):
        message.raw.lease_until = 0.0
    errors = await source.settle(settle_all(found, Outcome.ACK))
    assert [type(error) for error in errors] == [type(None), LeaseLost, type(None), LeaseLost]
    assert await unsettled(backend, topic) == (0, 2)


async def test_a_deleted_subscription_is_reported_for_all_messages(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic)
    await publish(backend, topic, *bodies(3))
    source = await subscribe(backend, topic, confirm_acks=True)
    found = await receive(source, 3)
    await backend.admin().delete_subscription(topic, "billing")
    errors = await source.settle(settle_all(found, Outcome.ACK))
    assert [type(error) for error in errors] == [LeaseLost] * 3


async def test_concurrent_settle_calls_get_their_own_answers(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic)
    await publish(backend, topic, *bodies(90))
    source = await subscribe(backend, topic, confirm_acks=True)
    found = await receive(source, 90)
    parts = [found[start : start + 30] for start in range(0, 90, 30)]
    answers = await asyncio.gather(*(source.settle(settle_all(part, Outcome.ACK)) for part in parts))
    assert list(answers) == [[None] * 30] * 3
    assert await unsettled(backend, topic) == (0, 0)


STORE = 'jetstream { store_dir: "STORE" }\n'
CLUSTER = 'server_name: a\ncluster { name: c, listen: "127.0.0.1:-1", routes: ["nats://127.0.0.1:9"] }'


@pytest.mark.parametrize(
    ("config", "alone"),
    [(STORE, True), ("", False), (STORE.replace("{", "{ domain: hub,"), False), (STORE + CLUSTER, False)],
    ids=["alone", "without JetStream", "of a domain", "of a cluster"],
)
async def test_standalone_servers_are_recognized(config: str, alone: bool, tmp_path: Path) -> None:
    with NatsServer(config.replace("STORE", str(tmp_path)), jetstream=False) as server:
        client = await nats.connect(server.url)
        try:
            assert is_standalone(client) is alone
        finally:
            await client.close()
