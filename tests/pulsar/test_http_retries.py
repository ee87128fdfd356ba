"""Retries of requests to Pulsar's HTTP API: after transient refusals of the broker, and broken connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest

import broker
from broker.bus import Bus
from broker.errors import Closed, ConnectionFailed, NotFound, TopicNotFound
from broker.testing.harness import unique
from broker.testing.waiting import bodies, eventually, numbered, once, until_seen
from tests.servers.proxy import Proxy
from tests.servers.pulsar import PulsarServer

pytestmark = pytest.mark.xdist_group("pulsar")

PATIENCE = 60.0
NO_BOOKIE = "Not enough non-faulty bookies"


@pytest.fixture
async def through(pulsar_server: PulsarServer, web: Proxy) -> AsyncIterator[Bus]:
    """A bus whose HTTP requests go through the proxy."""
    async with broker.connect(
        f"{pulsar_server.service_url}?admin_url=http://127.0.0.1:{web.port}&request_timeout=60"
    ) as bus:
        yield bus


@asynccontextmanager
async def unwritable(server: PulsarServer) -> AsyncGenerator[None]:
    """Make the bookie read-only: topics can be created, and are opened with their first subscription."""
    await asyncio.to_thread(server.read_only)
    try:
        yield
    finally:
        await asyncio.to_thread(server.read_only, is_so=False)


async def test_a_request_is_retried_while_the_bookie_cannot_write(pulsar_server: PulsarServer) -> None:
    topic = unique("own")
    async with broker.connect(f"{pulsar_server.url}&request_timeout=60") as bus:
        async with unwritable(pulsar_server):
            await bus.admin.ensure_topic(topic)
            refusals = pulsar_server.log.count(NO_BOOKIE)
            creating = asyncio.ensure_future(bus.admin.ensure_subscription(topic, "readers"))
            await eventually(lambda: pulsar_server.log.count(NO_BOOKIE) > refusals, PATIENCE, "a refusal of the broker")
        await creating
        assert await bus.admin.subscriptions(topic) == ["readers"]
        await bus.admin.delete_topic(topic)


async def test_retries_end_at_the_request_timeout(pulsar_server: PulsarServer, bus: Bus) -> None:
    topic = unique("own")
    async with broker.connect(f"{pulsar_server.url}&request_timeout=2") as impatient, unwritable(pulsar_server):
        await bus.admin.ensure_topic(topic)
        with pytest.raises(ConnectionFailed, match=r"tried [0-9]+ times in [0-9.]+ seconds") as caught:
            await impatient.admin.ensure_subscription(topic, "readers")
    await bus.admin.delete_topic(topic)
    assert caught.value.retriable
    assert NO_BOOKIE in str(caught.value)


async def test_a_request_is_retried_while_connections_are_refused(through: Bus, web: Proxy, topic: str) -> None:
    web.refuse()
    request = asyncio.ensure_future(through.admin.topics())
    await eventually(lambda: web.refusals > 1, PATIENCE, "a second attempt")
    web.refuse(False)
    assert topic in await request


async def test_a_request_is_retried_after_its_connection_broke(through: Bus, web: Proxy, topic: str) -> None:
    web.hold()
    request = asyncio.ensure_future(through.admin.topics())
    await eventually(lambda: web.held, PATIENCE, "a request in flight")
    web.cut()
    web.hold(False)
    assert topic in await request


async def test_an_incomplete_answer_is_never_used(through: Bus, web: Proxy, topic: str) -> None:
    await through.admin.ensure_subscription(topic, "readers")
    for size in range(1, 500, 13):
        web.cut(after_bytes=size)
        assert await through.admin.subscriptions(topic) == ["readers"], size


async def test_a_subscription_starts_at_its_time_if_the_answer_was_lost(through: Bus, web: Proxy, topic: str) -> None:
    await through.topic(topic).publish_batch(numbered(5, "old"))
    await asyncio.sleep(0.05)  # publish times have milliseconds
    moment = datetime.now(UTC)
    await asyncio.sleep(0.05)
    await through.topic(topic).publish_batch(numbered(5, "new"))
    before = web.passed
    assert not await through.admin.subscriptions(topic)
    # After the list of names, the answer to the creation is lost.
    web.cut(after_bytes=web.passed - before + 1)
    cuts = web.cuts
    await through.admin.ensure_subscription(topic, "late", start=moment)
    assert web.cuts == cuts + 1
    async with through.messages(topic, subscription="late") as inbox:
        assert bodies(await until_seen(inbox, numbered(5, "new"), PATIENCE)) == once(numbered(5, "new"))


async def test_closing_ends_the_retries(through: Bus, web: Proxy) -> None:
    web.refuse()
    request = asyncio.ensure_future(through.admin.topics())
    await eventually(lambda: web.refusals > 1, PATIENCE, "a second attempt")
    await through.close()
    with pytest.raises(Closed):
        await asyncio.wait_for(request, 60)


async def test_cancelling_ends_the_retries(through: Bus, web: Proxy, topic: str) -> None:
    web.refuse()
    request = asyncio.ensure_future(through.admin.topics())
    await eventually(lambda: web.refusals > 1, PATIENCE, "a second attempt")
    request.cancel()
    done, _ = await asyncio.wait({request}, timeout=60)
    assert done
    assert request.cancelled()
    web.refuse(False)
    assert topic in await through.admin.topics()


async def test_a_missing_namespace_is_named(pulsar_server: PulsarServer) -> None:
    url = pulsar_server.url.replace("?", "/public/missing?")
    async with broker.connect(url) as bus:
        for call in (bus.admin.ensure_topic("orders"), bus.admin.topics(), bus.topic("orders").publish(b"x")):
            with pytest.raises(NotFound, match=r"'public/missing'.*pulsar-admin namespaces create") as caught:
                await call
            assert not isinstance(caught.value, TopicNotFound)


async def test_a_missing_topic_is_not_retried(through: Bus) -> None:
    began = time.monotonic()
    with pytest.raises(TopicNotFound) as caught:
        await through.admin.describe_topic("own-missing")
    assert "tried" not in str(caught.value)
    assert time.monotonic() - began < 30
