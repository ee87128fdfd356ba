"""Requests to Pulsar's HTTP API that are refused for a moment: by a bookie that cannot write, by a way that is cut."""

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

PATIENCE = 20.0
NO_BOOKIE = "Not enough non-faulty bookies"


@pytest.fixture
async def through(pulsar_server: PulsarServer, web: Proxy) -> AsyncIterator[Bus]:
    """A bus whose HTTP requests go that way."""
    async with broker.connect(
        f"{pulsar_server.service_url}?admin_url=http://127.0.0.1:{web.port}&request_timeout=60"
    ) as bus:
        yield bus


@asynccontextmanager
async def unwritable(server: PulsarServer) -> AsyncGenerator[None]:
    """While its bookie writes nothing: a topic can be made then, and is not opened before a subscription is."""
    await asyncio.to_thread(server.read_only)
    try:
        yield
    finally:
        await asyncio.to_thread(server.read_only, is_so=False)


async def test_a_bookie_that_cannot_write_for_a_moment(pulsar_server: PulsarServer) -> None:
    topic = unique("own")
    async with broker.connect(f"{pulsar_server.url}&request_timeout=60") as bus:
        async with unwritable(pulsar_server):
            await bus.admin.ensure_topic(topic)
            refusals = pulsar_server.log.count(NO_BOOKIE)
            making = asyncio.ensure_future(bus.admin.ensure_subscription(topic, "readers"))
            await eventually(lambda: pulsar_server.log.count(NO_BOOKIE) > refusals, PATIENCE, "a refusal of the broker")
        await making
        assert await bus.admin.subscriptions(topic) == ["readers"]
        await bus.admin.delete_topic(topic)


async def test_a_bookie_that_cannot_write_for_long(pulsar_server: PulsarServer, bus: Bus) -> None:
    topic = unique("own")
    async with broker.connect(f"{pulsar_server.url}&request_timeout=2") as hasty, unwritable(pulsar_server):
        await bus.admin.ensure_topic(topic)
        with pytest.raises(ConnectionFailed, match=r"tried [0-9]+ times in [0-9.]+ seconds") as caught:
            await hasty.admin.ensure_subscription(topic, "readers")
    await bus.admin.delete_topic(topic)
    assert caught.value.retriable
    assert NO_BOOKIE in str(caught.value)


async def test_an_api_that_cannot_be_reached_for_a_moment(through: Bus, web: Proxy, topic: str) -> None:
    web.refuse()
    asking = asyncio.ensure_future(through.admin.topics())
    await eventually(lambda: web.refusals > 1, PATIENCE, "a second try")
    web.refuse(False)
    assert topic in await asking


async def test_what_was_cut_in_the_middle_is_asked_again(through: Bus, web: Proxy, topic: str) -> None:
    web.hold()
    asking = asyncio.ensure_future(through.admin.topics())
    await eventually(lambda: web.held, PATIENCE, "a request on its way")
    web.cut()
    web.hold(False)
    assert topic in await asking


async def test_an_answer_that_was_cut_anywhere_is_none(through: Bus, web: Proxy, topic: str) -> None:
    await through.admin.ensure_subscription(topic, "readers")
    for next_position in range(1, 500, 13):
        web.cut(after_bytes=next_position)
        assert await through.admin.subscriptions(topic) == ["readers"], next_position


async def test_a_subscription_whose_making_was_not_heard_of_begins_at_its_time(
    through: Bus, web: Proxy, topic: str
) -> None:
    await through.topic(topic).publish_batch(numbered(5, "old"))
    await asyncio.sleep(0.05)  # The log's clock ticks in milliseconds.
    moment = datetime.now(UTC)
    await asyncio.sleep(0.05)
    await through.topic(topic).publish_batch(numbered(5, "new"))
    before = web.passed
    assert not await through.admin.subscriptions(topic)
    # The broker is asked for the names again, and then carries out a request whose answer is lost.
    web.cut(after_bytes=web.passed - before + 1)
    cuts = web.cuts
    await through.admin.ensure_subscription(topic, "late", start=moment)
    assert web.cuts == cuts + 1
    async with through.messages(topic, subscription="late") as inbox:
        assert bodies(await until_seen(inbox, numbered(5, "new"), PATIENCE)) == once(numbered(5, "new"))


async def test_closing_ends_the_tries(through: Bus, web: Proxy) -> None:
    web.refuse()
    asking = asyncio.ensure_future(through.admin.topics())
    await eventually(lambda: web.refusals > 1, PATIENCE, "a second try")
    await through.close()
    with pytest.raises(Closed):
        await asyncio.wait_for(asking, 10)


async def test_cancelling_ends_the_tries(through: Bus, web: Proxy, topic: str) -> None:
    web.refuse()
    asking = asyncio.ensure_future(through.admin.topics())
    await eventually(lambda: web.refusals > 1, PATIENCE, "a second try")
    asking.cancel()
    done, _ = await asyncio.wait({asking}, timeout=10)
    assert done
    assert asking.cancelled()
    web.refuse(False)
    assert topic in await through.admin.topics()


async def test_a_missing_namespace_is_named(pulsar_server: PulsarServer) -> None:
    url = pulsar_server.url.replace("?", "/public/missing?")
    async with broker.connect(url) as bus:
        for call in (bus.admin.ensure_topic("orders"), bus.admin.topics(), bus.topic("orders").publish(b"x")):
            with pytest.raises(NotFound, match=r"'public/missing'.*pulsar-admin namespaces create") as caught:
                await call
            assert not isinstance(caught.value, TopicNotFound)


async def test_what_is_missing_is_reported_at_once(through: Bus) -> None:
    began = time.monotonic()
    with pytest.raises(TopicNotFound) as caught:
        await through.admin.describe_topic("own-missing")
    assert "tried" not in str(caught.value)
    assert time.monotonic() - began < 30
