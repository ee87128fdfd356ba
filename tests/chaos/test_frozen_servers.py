"""Servers of Pub/Sub, Service Bus and Pulsar that freeze for longer than a lease; every message is accounted for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

import broker
from broker.consuming.consumer import MessageConsumer
from broker.errors import LeaseLost, PublishError
from broker.testing.harness import unique
from broker.testing.waiting import eventually, let_pass, numbered
from tests.servers.pubsub import PubSubServer, new_server
from tests.servers.pulsar import PulsarServer
from tests.servers.server_process import ServerProcess
from tests.servers.servicebus import ServiceBusDouble, missing

pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("pulsar")]

COUNT = 400
HELD = 50
LEASE_SECONDS = 1.0
FROZEN_SECONDS = 3.0
PATIENCE = 90.0
CASES = {
    "pubsub": f"&lease_seconds={LEASE_SECONDS:g}",
    "pubsub-stream": f"&lease_seconds={LEASE_SECONDS:g}&pull_mode=stream",
    "servicebus": f"&lease_seconds={LEASE_SECONDS:g}",
    "servicebus-sessions": f"&lease_seconds={LEASE_SECONDS:g}&session_idle=0.1",
    "servicebus-public": f"&lease_seconds={LEASE_SECONDS:g}&private_calls=false",
    "pulsar": "",
}
DEEP = {"pubsub-stream", "servicebus-public", "servicebus-sessions"}


@contextmanager
def running(case: str) -> Generator[tuple[ServerProcess, str]]:
    """A server for one test, and its URL."""
    server: PubSubServer | ServiceBusDouble | PulsarServer
    if case.startswith("pubsub"):
        server = new_server()
    elif case.startswith("servicebus"):
        if (reason := missing()) is not None:
            pytest.skip(reason)
        server = ServiceBusDouble()
    else:
        server = PulsarServer()
    try:
        server.start()
        yield server, f"{server.url}{CASES[case]}"
    finally:
        server.close()


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.deep) if case in DEEP else case for case in CASES]
)
async def test_a_server_frozen_past_a_lease_loses_nothing(case: str):
    sessions = case.endswith("sessions")
    bodies, topic = numbered(COUNT), unique("frozen")
    handled, acked, lost, sent = Counter[bytes | None](), set[bytes | None](), set[bytes | None](), set[bytes]()
    with running(case) as (server, url):
        async with broker.connect(url) as bus, broker.connect(url) as publisher:
            await bus.admin.ensure_topic(topic)
            options: dict[str, Any] = {"requires_session": True} if sessions else {}
            await bus.admin.ensure_subscription(topic, "readers", **options)

            async def publish() -> None:
                for start in range(0, COUNT, 10):
                    part = bodies[start : start + 10]
                    try:
                        await publisher.topic(topic).publish_batch(
                            [broker.OutboundMessage(body, key=f"key-{number}") for number, body in enumerate(part)]
                        )
                        sent.update(part)
                    except PublishError as error:
                        sent.update(body for body, end in zip(part, error.outcomes, strict=True) if not _failed(end))

            async def consume(inbox: MessageConsumer[bytes]) -> None:
                async for message in inbox:
                    handled[message.data] += 1
                    await let_pass(0.005)
                    try:
                        await message.ack()
                        acked.add(message.data)
                    except LeaseLost:
                        lost.add(message.data)

            async with bus.messages(
                topic, subscription="readers", ordered_by_key=sessions, max_outstanding=HELD
            ) as inbox:
                consuming = asyncio.ensure_future(consume(inbox))
                publishing = asyncio.ensure_future(publish())
                await eventually(lambda: len(acked) > 40, PATIENCE, "the first acks")
                server.pause()
                await let_pass(FROZEN_SECONDS)
                server.resume()
                await publishing
                await eventually(lambda: sent <= acked or consuming.done(), PATIENCE, "what was sent")
                # Unconfirmed acks that reached the server too late had no effect.
                await eventually(lambda: _is_drained(bus, topic), PATIENCE, "nothing more to be there")
                inbox.stop()
                await consuming
    assert sent <= set(handled) <= set(bodies)
    # Only messages held or in flight during the freeze may be redelivered.
    again = {body for body, number in handled.items() if number > 1}
    assert len(again) <= 2 * HELD, f"{len(again)} arrived again, {len(again - lost)} of them not reported as lost"


def _failed(outcome: object) -> bool:
    return isinstance(outcome, Exception)


async def _is_drained(bus: broker.Bus, topic: str) -> bool:
    return (await bus.admin.lag(topic, "readers")).waiting == 0
