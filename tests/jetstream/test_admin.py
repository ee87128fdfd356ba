"""Provisioning on the real server."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from broker.errors import (
    BackendError,
    InvalidName,
    InvalidSetting,
    SubscriptionNotFound,
    TopicNotFound,
    UnknownSetting,
    Unsupported,
)
from broker.messages import Outcome
from broker.names import native_name
from broker.outbound import OutboundMessage
from broker_jetstream.backend import JetStreamBackend
from tests.jetstream.conftest import Open
from tests.jetstream.support import make_topic, publish, receive, settle_all, subscribe


async def test_ensure_topic_is_idempotent_and_returns_the_topic(backend: JetStreamBackend, topic: str) -> None:
    admin = backend.admin()
    made = await admin.ensure_topic(topic, partitions=3, retention=timedelta(hours=1), options={})
    assert (made.name, made.partitions, made.messages) == (topic, 3, 0)
    again = await admin.ensure_topic(topic, partitions=None, retention=None, options={})
    assert (again.partitions, again.native["config"]["max_age"]) == (3, 3600 * 10**9)
    await publish(backend, topic, OutboundMessage(b"x" * 100))
    found = await admin.describe_topic(topic)
    assert found.messages == 1
    assert (found.bytes or 0) > 100


async def test_a_recreated_topic_has_another_identity(backend: JetStreamBackend, topic: str) -> None:
    admin = backend.admin()
    made = await admin.ensure_topic(topic, partitions=1, retention=None, options={})
    assert made.identity
    assert (await admin.describe_topic(topic)).identity == made.identity
    await admin.delete_topic(topic)
    again = await admin.ensure_topic(topic, partitions=1, retention=None, options={})
    assert again.identity not in {None, made.identity}


async def test_concurrent_ensures_of_one_topic_agree(open_backend: Open, topic: str) -> None:
    backends = [await open_backend() for _ in range(4)]
    made = await asyncio.gather(
        *(
            each.admin().ensure_topic(topic, partitions=2, retention=None, options={})
            for each in backends
            for _ in range(3)
        )
    )
    assert {info.partitions for info in made} == {2}
    await asyncio.gather(
        *(each.admin().ensure_subscription(topic, "billing", start="earliest", options={}) for each in backends)
    )


async def test_options_reach_the_stream(open_backend: Open, topic: str) -> None:
    backend = await open_backend(storage="memory", deduplication_window=7, partitions=5)
    options: dict[str, Any] = {
        "max_bytes": 1 << 20,
        "max_messages": 100,
        "max_message_size": 1000,
        "discard": "new",
        "compression": "s2",
    }
    info = await backend.admin().ensure_topic(topic, partitions=None, retention=None, options=options)
    config = info.native["config"]
    assert info.partitions == 5
    assert config["storage"] == "memory"
    assert config["duplicate_window"] == 7 * 10**9
    wanted = {"max_bytes": 1 << 20, "max_msgs": 100, "max_msg_size": 1000, "discard": "new"}
    assert {name: config[name] for name in wanted} == wanted
    changed = await backend.admin().ensure_topic(
        topic, partitions=None, retention=timedelta(seconds=3), options={"max_messages": 50}
    )
    assert changed.native["config"]["max_msgs"] == 50
    assert changed.native["config"]["max_age"] == 3 * 10**9
    assert changed.native["config"]["max_bytes"] == 1 << 20


async def test_partitions_can_be_added_and_not_removed(backend: JetStreamBackend, topic: str) -> None:
    admin = backend.admin()
    await make_topic(backend, topic, partitions=2)
    assert (await admin.ensure_topic(topic, partitions=4, retention=None, options={})).partitions == 4
    (receipt,) = await publish(backend, topic, OutboundMessage(b"x", partition=3))
    assert receipt.partition == 3
    with pytest.raises(Unsupported):
        await admin.ensure_topic(topic, partitions=1, retention=None, options={})


@pytest.mark.parametrize(
    ("retention", "options"),
    [
        (timedelta(milliseconds=1), {}),
        (None, {"deduplication_window": 0.01}),
        (None, {"max_message_size": 2**40}),
    ],
)
async def test_durations_and_sizes_out_of_range_are_refused_before_the_request(
    backend: JetStreamBackend, topic: str, retention: timedelta | None, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidSetting):
        await backend.admin().ensure_topic(topic, partitions=None, retention=retention, options=options)


async def test_bad_input_is_reported(backend: JetStreamBackend, topic: str) -> None:
    admin = backend.admin()
    with pytest.raises(UnknownSetting, match="'max_age'"):
        await admin.ensure_topic(topic, partitions=None, retention=None, options={"max_age": 1})
    with pytest.raises(InvalidSetting):
        await admin.ensure_topic(topic, partitions=0, retention=None, options={})
    with pytest.raises(InvalidName):
        await admin.ensure_topic("a b", partitions=None, retention=None, options={})
    with pytest.raises(Unsupported):
        await admin.ensure_topic(native_name("nothing-here"), partitions=None, retention=None, options={})
    for call in (admin.list_subscriptions, admin.purge):
        with pytest.raises(TopicNotFound):
            await call(topic)
    await make_topic(backend, topic)
    with pytest.raises(UnknownSetting, match="'color'"):
        await admin.ensure_subscription(topic, "billing", start="earliest", options={"color": "red"})
    for call in (admin.describe_subscription, admin.lag):
        with pytest.raises(SubscriptionNotFound):
            await call(topic, "absent")
    await admin.delete_subscription(topic, "absent")


async def test_lag_and_purge(backend: JetStreamBackend, topic: str) -> None:
    admin = backend.admin()
    await make_topic(backend, topic)
    await admin.ensure_subscription(topic, "billing", start="earliest", options={})
    await publish(backend, topic, *(OutboundMessage(b"x") for _ in range(10)))
    source = await subscribe(backend, topic)
    found = await receive(source, 4)
    await source.settle(settle_all(found[:1], Outcome.ACK))
    await backend.check_health()
    lag = await admin.lag(topic, "billing")
    assert (lag.waiting, lag.unsettled) == (6, 3)
    assert await admin.purge(topic) == 10
    assert (await admin.lag(topic, "billing")).waiting == 0


async def test_many_topics_are_listed_over_all_pages(open_backend: Open, topic: str) -> None:
    backend = await open_backend(storage="memory")
    names = {f"{topic}.{n}" for n in range(30)}
    for name in names:
        await make_topic(backend, name)
    listed = await backend.admin().list_topics()
    assert names <= set(listed)
    for name in names:
        await backend.admin().delete_topic(name)


async def test_replicas_reach_the_server(open_backend: Open, topic: str) -> None:
    backend = await open_backend(replicas=3)
    with pytest.raises(BackendError, match="replicas"):
        await make_topic(backend, topic)
