"""`bus.admin`: checks before any I/O, and calls to the backend."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from broker.admin import AdminFacade
from broker.bus import Bus
from broker.errors import ConfigurationError, InvalidName, NotFound, SubscriptionNotFound, TopicNotFound, Unsupported
from broker.protocols import Admin


async def test_facade_is_an_admin_with_idempotent_calls(broker_bus: Bus) -> None:
    admin: Admin = broker_bus.admin
    for _ in range(2):
        assert (await admin.ensure_topic("orders", partitions=3)).name == "orders"
        assert (await admin.ensure_subscription("orders", "billing")).name == "billing"
    await admin.ensure_topic("audit", retention=timedelta(days=1))
    await admin.ensure_subscription("orders", "archive", start="latest")
    assert await admin.topics() == ["audit", "orders"]
    assert await admin.subscriptions("orders") == ["archive", "billing"]
    assert (await admin.describe_topic("orders")).partitions == 3
    assert (await admin.describe_subscription("orders", "billing")).topic == "orders"
    await broker_bus.topic("orders").publish_batch([b"1", b"2"])
    assert (await admin.lag("orders", "billing")).waiting == 2
    assert await admin.purge("orders") == 2
    assert (await admin.lag("orders", "billing")).waiting == 0
    for _ in range(2):
        await admin.delete_subscription("orders", "billing")
        await admin.delete_topic("audit")
    assert await admin.subscriptions("orders") == ["archive"]
    assert await admin.topics() == ["orders"]


async def test_missing_topics_and_subscriptions_raise(broker_bus: Bus) -> None:
    admin = broker_bus.admin
    await admin.ensure_topic("orders")
    for call in (
        admin.describe_topic("missing"),
        admin.subscriptions("missing"),
        admin.ensure_subscription("missing", "billing"),
        admin.purge("missing"),
        admin.lag("missing", "billing"),
        admin.redrive("missing", to=["orders"]),
        admin.list_dead("missing"),
    ):
        with pytest.raises(TopicNotFound, match="missing"):
            await call
    for call in (admin.describe_subscription("orders", "missing"), admin.lag("orders", "missing")):
        with pytest.raises(SubscriptionNotFound, match="missing") as raised:
            await call
        assert isinstance(raised.value, NotFound)


@pytest.mark.parametrize(
    "call",
    [
        lambda admin: admin.ensure_topic("x"),
        lambda admin: admin.delete_topic("a/b"),
        lambda admin: admin.describe_topic(""),
        lambda admin: admin.ensure_subscription("orders", "a b"),
        lambda admin: admin.ensure_subscription("a b", "billing"),
        lambda admin: admin.delete_subscription("orders", "1st"),
        lambda admin: admin.subscriptions("-x-"),
        lambda admin: admin.describe_subscription("orders", ""),
        lambda admin: admin.purge("ä" * 5),
        lambda admin: admin.lag("orders", "x" * 201),
        lambda admin: admin.redrive("no topic", to=["orders"]),
        lambda admin: admin.list_dead("no topic"),
    ],
)
async def test_names_that_are_not_portable_are_refused(
    broker_bus: Bus, call: Callable[[AdminFacade], Awaitable[Any]]
) -> None:
    with pytest.raises(InvalidName):
        await call(broker_bus.admin)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda admin: admin.ensure_topic("orders", partitions=0), "partitions is 0"),
        (lambda admin: admin.ensure_topic("orders", retention=timedelta(0)), "retention is 0:00:00"),
        (lambda admin: admin.ensure_subscription("orders", "billing", start="newest"), "start is 'newest'"),
        (
            lambda admin: admin.ensure_subscription("orders", "billing", start=datetime(2026, 1, 1)),  # noqa: DTZ001
            "no timezone",
        ),
        (lambda admin: admin.ensure_topic("orders", partitions="2"), "partitions is '2'. It takes an int of 1 or more"),
        (lambda admin: admin.ensure_topic("orders", partitions=2.0), "partitions is 2.0"),
        (lambda admin: admin.ensure_topic("orders", partitions=True), "partitions is True"),
        (lambda admin: admin.ensure_topic("orders", retention=60), "retention is 60. It takes a timedelta"),
        (lambda admin: admin.redrive("orders.dead", limit="5"), "limit is '5'. It takes an int"),
        (lambda admin: admin.redrive("orders.dead", limit=0), "limit is 0"),
        (lambda admin: admin.redrive("orders.dead"), "no `to`, and inmem does not know"),
        (lambda admin: admin.redrive("orders.dead", to="orders"), "to is 'orders'. It takes a list of topics"),
        (lambda admin: admin.redrive("orders.dead", to=[]), r"to is \(\). It takes a list of topics"),
        (lambda admin: admin.redrive("orders.dead", to=["no topic"]), "topic name 'no topic' is not portable"),
        (lambda admin: admin.redrive("orders.dead", dry_run=1), "dry_run is 1"),
        (lambda admin: admin.list_dead("orders.dead", limit=-1), "limit is -1"),
    ],
)
async def test_invalid_options_are_refused(
    broker_bus: Bus, call: Callable[[AdminFacade], Awaitable[Any]], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        await call(broker_bus.admin)


async def test_a_compacted_topic_has_no_retention_and_stays_compacted(broker_bus: Bus) -> None:
    admin = broker_bus.admin
    assert (await admin.ensure_topic("table", compacted=True)).compacted
    with pytest.raises(ConfigurationError, match="retention is 1:00:00"):
        await admin.ensure_topic("table", compacted=True, retention=timedelta(hours=1))
    with pytest.raises(ConfigurationError, match="retention is 1:00:00 for a compacted topic"):
        await admin.ensure_topic("table", retention=timedelta(hours=1))
    with pytest.raises(ConfigurationError, match="retention_messages is 5 for a compacted topic"):
        await admin.ensure_topic("table", retention_messages=5)
    with pytest.raises(ConfigurationError, match="compacted"):
        await admin.ensure_topic("table", compacted="yes")  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="'table' is compacted"):
        await admin.ensure_topic("table", compacted=False)
    assert not (await admin.ensure_topic("log", compacted=False)).compacted
    with pytest.raises(Unsupported, match="'log' is not compacted"):
        await admin.ensure_topic("log", compacted=True)


async def test_a_backend_without_compaction_refuses_a_compacted_topic(
    broker_bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = broker_bus.capabilities.records
    assert records is not None
    without = replace(broker_bus.capabilities, records=replace(records, compacted_topics=False))
    monkeypatch.setattr(type(broker_bus), "capabilities", without)
    with pytest.raises(Unsupported, match="does not support compacted topics"):
        await broker_bus.admin.ensure_topic("table", compacted=True)
    await broker_bus.admin.ensure_topic("log", compacted=False)
