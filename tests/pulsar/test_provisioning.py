"""Provisioning: start positions, concurrent creation, ephemeral subscriptions, retention, names."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import broker
from broker.bus import Bus
from broker.driver.contract import Start
from broker.errors import BrokerError, InvalidName, InvalidSetting
from broker.names import ephemeral, native_name
from broker.outbound import OutboundMessage
from broker.testing.waiting import bodies, eventually, numbered, once, take, until_seen
from broker_pulsar import ephemeral_cleanup
from broker_pulsar.subscriptions import require
from tests.servers.proxy import Proxy
from tests.servers.pulsar import PulsarServer

pytestmark = pytest.mark.xdist_group("pulsar")

PATIENCE = 60.0


@pytest.fixture
async def through(pulsar_server: PulsarServer, web: Proxy) -> AsyncIterator[Bus]:
    """A bus whose HTTP requests go through the proxy, with a short timeout."""
    async with broker.connect(
        f"{pulsar_server.service_url}?admin_url=http://127.0.0.1:{web.port}&request_timeout=2"
    ) as bus:
        yield bus


async def subscriptions(server: PulsarServer, topic: str) -> bytes:
    path = f"/admin/v2/persistent/public/default/{topic}/subscriptions"
    return (await asyncio.to_thread(server.request, "GET", path))[1]


@pytest.mark.deep
async def test_an_interrupted_creation_is_completed_at_its_time(bus: Bus, through: Bus, web: Proxy, topic: str) -> None:
    await bus.admin.ensure_topic(topic, partitions=2)
    await bus.topic(topic).publish_batch([OutboundMessage(body, partition=0) for body in numbered(5, "old")])
    await asyncio.sleep(0.05)  # publish times have milliseconds
    moment = datetime.now(UTC)
    await asyncio.sleep(0.05)
    await bus.topic(topic).publish_batch([OutboundMessage(body, partition=0) for body in numbered(5, "new")])
    for size in range(1, 1600, 100):
        # The connection breaks after this many bytes from the broker, so during any of the requests.
        name, cuts = f"late{size}", web.cuts
        web.cut(after_bytes=size, for_good=True)
        making = asyncio.ensure_future(through.admin.ensure_subscription(topic, name, start=moment))
        await eventually(lambda making=making, cuts=cuts: making.done() or web.cuts > cuts, PATIENCE, "the end")
        making.cancel()
        await asyncio.wait({making})
        web.refuse(False)
        await bus.admin.ensure_subscription(topic, name, start=moment)
        async with bus.messages(topic, subscription=name) as inbox:
            assert bodies(await until_seen(inbox, numbered(5, "new"), PATIENCE)) == once(numbered(5, "new")), size


async def test_processes_create_and_grow_a_topic_concurrently(pulsar_server: PulsarServer, topic: str) -> None:
    async with AsyncExitStack() as stack:
        buses = [await stack.enter_async_context(broker.connect(pulsar_server.url)) for _ in range(4)]
        for number in range(5):
            for partitions in (2, 6):
                wanted = [bus.admin.ensure_topic(f"{topic}.{number}", partitions=partitions) for bus in buses]
                assert [info.partitions for info in await asyncio.gather(*wanted)] == [partitions] * 4


@pytest.mark.deep
@pytest.mark.parametrize("start", ["earliest", datetime(2020, 1, 1, tzinfo=UTC)])
async def test_two_processes_create_a_subscription_concurrently(
    pulsar_server: PulsarServer, bus: Bus, topic: str, start: Start
) -> None:
    await bus.admin.ensure_topic(topic, partitions=2)
    sent = numbered(20, "job")
    await bus.topic(topic).publish_batch([OutboundMessage(body, key=body) for body in sent])
    async with broker.connect(pulsar_server.url) as other:

        async def consume(one: Bus, name: str) -> list[bytes | None]:
            async with one.messages(topic, subscription=name, start=start, stop_when_idle=1) as inbox:
                seen: list[bytes | None] = []
                async for message in inbox:
                    seen.append(message.data)
                    await message.ack()
                return seen

        for turn in range(5):
            # One of them creates it; the other is refused while the broker moves it to its start.
            parts = await asyncio.gather(consume(bus, f"at-once-{turn}"), consume(other, f"at-once-{turn}"))
            assert sorted(body for part in parts for body in part if body is not None) == sorted(sent)


async def test_a_cancelled_opening_deletes_its_ephemeral_subscription(
    pulsar_server: PulsarServer, through: Bus, web: Proxy, topic: str
) -> None:
    for consumer in (through.messages(topic, subscription=ephemeral()), through.records(topic, group=ephemeral())):
        web.hold()
        opening = asyncio.ensure_future(consumer.__aenter__())
        await eventually(lambda: web.held, PATIENCE, "a request in flight")
        opening.cancel()
        await asyncio.sleep(0)
        web.hold(False)
        await asyncio.wait({opening})
        assert opening.cancelled()
        assert await subscriptions(pulsar_server, topic) == b"[]"


@pytest.mark.deep
async def test_a_failed_opening_deletes_its_ephemeral_subscription(pulsar_server: PulsarServer, topic: str) -> None:
    with Proxy(pulsar_server.ports["broker"]) as way:
        url = f"pulsar://127.0.0.1:{way.port}?admin_url={pulsar_server.admin_url}&request_timeout=2"
        async with broker.connect(url) as bus:
            way.refuse()
            for consumer in (bus.messages(topic, subscription=ephemeral()), bus.records(topic, group=ephemeral())):
                with pytest.raises(BrokerError):
                    await consumer.__aenter__()
                assert await subscriptions(pulsar_server, topic) == b"[]"


async def test_ephemeral_subscriptions_of_dead_processes_are_deleted(
    pulsar_server: PulsarServer, bus: Bus, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ephemeral_cleanup, "CHECK_SECONDS", 0.2)
    monkeypatch.setattr(ephemeral_cleanup, "ABANDONED_SECONDS", 1.5)
    client = bus.backend.client  # pyright: ignore[reportAttributeAccessIssue]
    url = f"persistent://public/default/{topic}"
    # One of a process that died, one that is durable, and one with a consumer.
    for name in ("anybroker-ephemeral-dead", "kept"):
        client.subscribe(url, name).close()
    living = client.subscribe(url, "anybroker-ephemeral-living")
    async with bus.messages(topic, subscription=ephemeral()), bus.records(topic, group=ephemeral()):

        async def is_gone() -> bool:
            return b"dead" not in await subscriptions(pulsar_server, topic)

        await eventually(is_gone, PATIENCE, "the end of what was left behind")
        left = await subscriptions(pulsar_server, topic)
        assert left.count(b"ephemeral") == 3
        assert b"living" in left
        assert b"kept" in left
    await asyncio.to_thread(living.close)


async def test_retention_by_time_and_by_size_are_independent(bus: Bus, topic: str) -> None:
    connection = bus.backend.connection  # pyright: ignore[reportAttributeAccessIssue]

    async def kept() -> tuple[int, int]:
        found: Mapping[str, Any] = await connection.http.get(f"{connection.topic(topic).path}/retention", "")
        return found["retentionTimeInMinutes"], found["retentionSizeInMB"]

    await bus.admin.ensure_topic(topic, retention=timedelta(hours=1))
    assert await kept() == (60, -1)
    await bus.admin.ensure_topic(topic, retention_mb=100)
    assert await kept() == (60, 100)
    await bus.admin.ensure_topic(topic, retention=timedelta(hours=2))
    assert await kept() == (120, 100)
    await bus.admin.ensure_topic(topic, retention_mb=-1)
    assert await kept() == (120, -1)
    with pytest.raises(InvalidSetting):
        await bus.admin.ensure_topic(topic, retention_mb=0)


async def test_values_out_of_range_are_refused(bus: Bus, topic: str) -> None:
    another = f"{topic}.another"
    with pytest.raises(InvalidSetting, match=r"retention is 24856 days.*at most 24855 days"):
        await bus.admin.ensure_topic(another, retention=timedelta(days=24_856))
    assert another not in await bus.admin.topics()
    await bus.admin.ensure_topic(topic, retention=timedelta(days=24_855))
    with pytest.raises(InvalidSetting, match="'message_ttl' is 2147483648"):
        await bus.admin.ensure_topic(topic, message_ttl=2**31)


async def test_listed_foreign_names_can_be_used(bus: Bus, topic: str) -> None:
    foreign = f"{topic} t1"
    await bus.admin.ensure_topic(native_name(foreign))
    (list_names,) = [name for name in await bus.admin.topics() if name == foreign]
    assert (await bus.admin.describe_topic(list_names)).partitions == 1
    await bus.admin.ensure_subscription(list_names, native_name("s1"))
    (subscription,) = await bus.admin.subscriptions(list_names)
    assert (await bus.admin.lag(list_names, subscription)).waiting == 0
    await bus.admin.delete_topic(list_names)


async def test_redriven_letters_are_no_longer_listed(bus: Bus, topic: str) -> None:
    dead = f"{topic}.dead"
    await bus.admin.ensure_topic(dead)
    await bus.topic(topic).publish_batch([b"one", b"two"])
    async with bus.messages(topic, subscription="billing", dead_letter=dead) as inbox:
        for message in await take(inbox, 2, 20):
            await message.reject("no good")
    assert len(await bus.admin.list_dead(dead)) == 2
    assert (await bus.admin.redrive(dead, to=[topic], limit=1)).moved == 1
    assert len(await bus.admin.list_dead(dead)) == 1
    assert (await bus.admin.redrive(dead, to=[topic])).moved == 1
    assert await bus.admin.list_dead(dead) == []
    await bus.admin.delete_topic(dead)


async def test_require_finds_an_ephemeral_subscription(bus: Bus, pulsar_server: PulsarServer, topic: str) -> None:
    """A disconnected consumer checks this, and ends if its subscription is missing."""
    async with bus.messages(topic, subscription=ephemeral()):
        (name,) = json.loads(await subscriptions(pulsar_server, topic))
        await require(bus.backend.connection, topic, name)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", ["a%20b", "a+b", "100%"])
async def test_names_that_the_http_api_would_change_are_refused(bus: Bus, topic: str, name: str) -> None:
    """The broker would create the subscription `a b`, which has no consumer."""
    with pytest.raises(InvalidName, match=re.escape(name)):
        await bus.admin.ensure_subscription(topic, native_name(name))
    with pytest.raises(InvalidName, match=re.escape(name)):
        async with bus.messages(topic, subscription=native_name(name)):
            pass
    assert await bus.admin.subscriptions(topic) == []
    await bus.admin.ensure_subscription(topic, native_name("a b/ü?&#"))
    assert await bus.admin.subscriptions(topic) == ["a b/ü?&#"]
