"""Differences of Google's emulator and Google's pstest from the service, as docs/backends/pubsub.md lists them.

Each server's behaviour is pinned, so a test fails when a newer one differs from that page.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

import broker
from broker.errors import LeaseLost, Unsupported
from broker.testing.waiting import bodies, eventually, nothing_more, numbered, once, take, until_seen
from broker_pubsub.errors import is_status
from broker_pubsub.names import Names
from broker_pubsub.protocol import (
    AcknowledgeRequest,
    Methods,
    ModifyAckDeadlineRequest,
    PublishRequest,
    PubsubMessage,
    PullRequest,
)
from tests.pubsub.conftest import Connect
from tests.servers.pstest import shared_pstest
from tests.servers.pubsub import PROJECT, PubSubServer, shared_server

pytestmark = pytest.mark.deep

PATIENCE = 60.0
PULL_SECONDS = 2.0
"""The emulator sends an empty answer a second before the deadline, pstest after half a second."""


@pytest.fixture(params=["emulator", pytest.param("pstest", marks=pytest.mark.xdist_group("pstest"))])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def server(kind: str) -> PubSubServer:
    return shared_pstest() if kind == "pstest" else shared_server()


class Raw:
    """A subscription, called without the backend."""

    def __init__(self, bus: broker.Bus, topic: str, name: str = "readers") -> None:
        self._channel = bus.backend.channel  # pyright: ignore[reportAttributeAccessIssue]
        self._path = Names(PROJECT).subscription(topic, name)

    async def pull(self, number: int = 100) -> Sequence[Any]:
        """Available messages, or none."""
        try:
            found = await self._call(Methods.PULL, PullRequest(subscription=self._path, max_messages=number))
        except grpc.aio.AioRpcError as error:
            if not is_status(error, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
            return []
        return found.received_messages

    async def pull_some(self) -> Sequence[Any]:
        async with asyncio.timeout(PATIENCE):
            while not (found := await self.pull()):
                pass
        return found

    async def acknowledge(self, *ids: str) -> None:
        await self._call(Methods.ACKNOWLEDGE, AcknowledgeRequest(subscription=self._path, ack_ids=ids))

    async def release(self, *ids: str) -> None:
        request = ModifyAckDeadlineRequest(subscription=self._path, ack_ids=ids, ack_deadline_seconds=0)
        await self._call(Methods.MODIFY_ACK_DEADLINE, request)

    async def _call(self, method: Any, request: Any) -> Any:
        call = self._channel.unary_unary(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        return await call(request, timeout=PULL_SECONDS)


def _data(received: Sequence[Any]) -> list[bytes]:
    return [each.message.data for each in received]


async def test_only_pstest_applies_filters(bus: broker.Bus, topic: str, kind: str):
    await bus.admin.ensure_subscription(topic, "readers", filter='attributes.kind = "paid"')
    for number, body in enumerate(numbered(6)):
        await bus.topic(topic).publish(body, key="k", attributes={"kind": "paid" if number % 2 else "open"})
    wanted = numbered(6) if kind == "emulator" else numbered(6)[1::2]
    async with bus.messages(topic, subscription="readers") as inbox:
        assert bodies(await until_seen(inbox, wanted, PATIENCE)) == once(wanted)
        await nothing_more(inbox, 0.7)


async def test_only_pstest_refuses_invalid_filters(bus: broker.Bus, topic: str, kind: str):
    if kind == "emulator":
        await bus.admin.ensure_subscription(topic, "readers", filter="kind ===")
        return
    with pytest.raises(broker.BrokerError, match="bad filter"):
        await bus.admin.ensure_subscription(topic, "readers", filter="kind ===")


async def test_only_the_emulator_delivers_history(bus: broker.Bus, topic: str, kind: str):
    messages = bus.capabilities.messages
    assert messages is not None
    assert messages.history is (kind == "emulator")
    assert not [name for name in await bus.admin.topics() if "~" in name]
    await bus.topic(topic).publish(b"before")
    async with bus.messages(topic, subscription="readers", start="earliest") as inbox:
        await bus.topic(topic).publish(b"after")
        wanted = [b"before", b"after"] if kind == "emulator" else [b"after"]
        assert bodies(await until_seen(inbox, wanted, PATIENCE)) == once(wanted)
        await nothing_more(inbox, 0.7)


async def test_only_the_emulator_delivers_in_the_order_of_publishing(bus: broker.Bus, topic: str, kind: str):
    await bus.admin.ensure_subscription(topic, "readers")
    await bus.topic(topic).publish_batch(numbered(40))
    raw, seen = Raw(bus, topic), list[bytes]()
    while len(seen) < 40:
        seen += _data(await raw.pull_some())
    assert sorted(seen) == numbered(40)
    assert (seen == numbered(40)) is (kind == "emulator")


async def test_a_nacked_message_precedes_its_key_on_pstest_and_follows_it_on_the_emulator(connect: Connect, kind: str):
    bus = await connect("ordering=on&lease_seconds=1")
    topic = f"topic.{uuid.uuid4().hex[:12]}"
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_subscription(topic, "readers")
    await bus.topic(topic).publish_batch([broker.OutboundMessage(body, key="k") for body in numbered(3)])
    raw = Raw(bus, topic)
    first = await raw.pull_some()
    assert _data(first) == (numbered(3) if kind == "emulator" else numbered(1))
    await raw.release(first[0].ack_id)
    seen: list[bytes] = []
    while len(seen) < 3:
        found = await raw.pull_some()
        seen += _data(found)
        await raw.acknowledge(*(each.ack_id for each in found))
    assert seen == (numbered(3) if kind == "pstest" else [*numbered(3)[1:], *numbered(1)])


async def test_both_accept_an_exactly_once_ack_after_the_deadline(connect: Connect):
    bus = await connect("lease_seconds=1")
    topic = f"topic.{uuid.uuid4().hex[:12]}"
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_subscription(topic, "readers", exactly_once=True)
    await bus.topic(topic).publish_batch(numbered(2))
    raw = Raw(bus, topic)
    held: list[Any] = []
    async with bus.messages(topic, subscription="readers", confirm_acks=True, max_lease=0.5) as inbox:
        late = await take(inbox, 1, PATIENCE)
        await eventually(lambda: late[0].lease_lost, PATIENCE, "the end of its lease")
        # The server would accept it, so the client's clock decides.
        with pytest.raises(LeaseLost):
            await late[0].ack()
    while len(held) < 2:
        held += await raw.pull_some()
    await asyncio.sleep(1.3)  # the deadline is over, and no pull has redelivered the messages
    await raw.acknowledge(held[0].ack_id)
    assert _data(await raw.pull_some()) == _data(held[1:2])


async def test_an_ack_of_a_message_that_was_redelivered(connect: Connect, bus: broker.Bus, topic: str, kind: str):
    await bus.admin.ensure_subscription(topic, "readers", exactly_once=True)
    await bus.topic(topic).publish_batch(numbered(3))
    raw = Raw(await connect(), topic)
    async with bus.messages(topic, subscription="readers", confirm_acks=True, max_outstanding=3) as inbox:
        held: list[broker.Message[bytes]] = []
        while len(held) < 3:
            held += await take(inbox, 1, PATIENCE)
        lost = held[1]
        await raw.release(lost.native.ack_id)
        (again,) = await raw.pull_some()
        assert again.message.data == lost.data
        outcomes = await asyncio.gather(*(message.ack() for message in held), return_exceptions=True)
        if kind == "emulator":
            assert [type(outcome) for outcome in outcomes] == [type(None), LeaseLost, type(None)]
            assert "PERMANENT_FAILURE_INVALID_ACK_ID" in str(outcomes[1])
        else:
            # The ack is accepted, and has no effect.
            assert outcomes == [None] * 3
        await raw.release(again.ack_id)
        assert bodies(await take(inbox, 1, PATIENCE)) == once([again.message.data])


async def test_only_the_emulator_applies_a_retry_policy_from_the_second_nack_on(bus: broker.Bus, topic: str, kind: str):
    await bus.admin.ensure_subscription(topic, "readers", min_backoff=3, max_backoff=3)
    await bus.topic(topic).publish(b"x")
    raw, waits = Raw(bus, topic), list[float]()
    (held,) = await raw.pull_some()
    for _ in range(2):
        await raw.release(held.ack_id)
        began = time.monotonic()
        (held,) = await raw.pull_some()
        waits.append(time.monotonic() - began)
    assert waits[0] < 2
    assert (waits[1] > 2) is (kind == "emulator")


async def test_only_the_emulator_ends_a_dead_letter_policy(bus: broker.Bus, topic: str, kind: str):
    dead = f"{topic}.dead"
    await bus.admin.ensure_topic(dead)
    await bus.admin.ensure_subscription(dead, "readers")
    await bus.admin.ensure_subscription(topic, "readers", dead_letter_topic=dead, max_delivery_attempts=5)
    await bus.topic(topic).publish(b"x", key="k")
    async with bus.messages(topic, subscription="readers") as inbox:
        for attempt in range(1, 6):
            (message,) = await take(inbox, 1, PATIENCE)
            assert message.delivery_attempt == attempt
            await message.nack(delay=0)
        async with bus.messages(dead, subscription="readers") as letters:
            (letter,) = await take(letters, 1, 2 * PATIENCE)
            assert (letter.data, letter.key) == (b"x", b"k")
            is_marked = "CloudPubSubDeadLetterSourceSubscription" in letter.native.message.attributes
            assert is_marked is (kind == "emulator")
            if kind == "emulator":
                await nothing_more(letters, 0.7)
            else:
                # pstest publishes the letter again and again.
                await take(letters, 2, PATIENCE)


async def test_only_the_emulator_counts_attempts_per_subscription(bus: broker.Bus, topic: str, kind: str):
    await bus.admin.ensure_topic(f"{topic}.dead")
    await bus.admin.ensure_subscription(topic, "readers")
    await bus.admin.ensure_subscription(topic, "counting", dead_letter_topic=f"{topic}.dead")
    await bus.topic(topic).publish(b"x")
    await Raw(bus, topic).pull_some()
    (first,) = await Raw(bus, topic, "counting").pull_some()
    assert first.delivery_attempt == (1 if kind == "emulator" else 2)


async def test_pstest_has_no_snapshots_hence_no_lag_and_no_purge(bus: broker.Bus, topic: str, kind: str):
    await bus.admin.ensure_subscription(topic, "readers")
    await bus.topic(topic).publish_batch(numbered(3))
    if kind == "emulator":
        assert (await bus.admin.lag(topic, "readers")).waiting == 3
        await bus.admin.purge(topic)
    else:
        for call in (bus.admin.lag(topic, "readers"), bus.admin.purge(topic)):
            with pytest.raises(Unsupported, match="UNIMPLEMENTED"):
                await call
    # Also deletes the snapshot of a purge, if there is one.
    await bus.admin.delete_topic(topic)
    assert topic not in await bus.admin.topics()


async def test_neither_checks_the_size_limits_of_the_service(bus: broker.Bus, topic: str):
    request = PublishRequest(
        topic=Names(PROJECT).topic(topic),
        messages=[PubsubMessage(data=b"x", ordering_key="k" * 1025, attributes={"n" * 257: "v" * 1025})],
    )
    method = Methods.PUBLISH
    call = bus.backend.channel.unary_unary(  # pyright: ignore[reportAttributeAccessIssue]
        method.path,
        request_serializer=method.request.SerializeToString,
        response_deserializer=method.response.FromString,
    )
    assert len((await call(request, timeout=PATIENCE)).message_ids) == 1
