"""Errors of the administration endpoint: transient ones are retried, others raised; options that are refused."""

from __future__ import annotations

import asyncio
import re
from datetime import timedelta
from typing import Any

import pytest
from azure.core.exceptions import HttpResponseError

import broker
from broker.bus import Bus
from broker.errors import (
    AuthenticationFailed,
    BackendError,
    ConfigurationError,
    InvalidName,
    InvalidSetting,
    OperationTimeout,
    SubscriptionNotFound,
)
from broker.names import native_name
from broker.redrive import list_dead_letters, redrive
from broker.testing.waiting import take
from tests.servers.proxy import Proxy
from tests.servers.servicebus import ServiceBusDouble
from tests.servicebus.conftest import Open

SECONDS = 30.0
NO_CLAIM = "Manage,EntityRead claims are required for this operation."


async def provisioned(bus: Bus, topic: str) -> None:
    """A subscription with sessions, which a consumer without `ordered_by_key` must look up."""
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_subscription(topic, "billing", requires_session=True)


async def test_dead_letters_of_a_missing_subscription_raise(open_bus: Open, topic: str):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    dead = native_name(f"{topic}/Subscriptions/billing/$DeadLetterQueue")
    name = f"Subscription 'billing' of topic '{topic}'"
    with pytest.raises(SubscriptionNotFound, match=name):
        await list_dead_letters(bus, dead, limit=1)
    with pytest.raises(SubscriptionNotFound, match=name):
        await redrive(bus, dead, to=None)
    assert await bus.admin.subscriptions(topic) == []


@pytest.mark.parametrize("code", [429, 500, 503])
async def test_transient_errors_are_retried(open_bus: Open, topic: str, double: ServiceBusDouble, code: int):
    bus = await open_bus()
    await provisioned(bus, topic)
    double.fault(refuse="admin", times=2, condition="busy", text="The server is busy.", code=code)
    async with bus.messages(topic, subscription="billing") as inbox:
        await bus.topic(topic).publish(b"x", key="k")
        (message,) = await take(inbox, 1, SECONDS)
        await message.ack()


async def test_throttling_that_does_not_end_is_reported(open_bus: Open, topic: str, double: ServiceBusDouble):
    await provisioned(await open_bus(), topic)
    bus = await open_bus(request_timeout=3)
    double.fault(refuse="admin", times=1000, condition="busy", text="The server is busy.", code=429)
    with pytest.raises(BackendError, match=r"busy|429") as raised:
        async with bus.messages(topic, subscription="billing"):
            pass
    assert raised.value.retriable


async def test_no_answer_raises_a_timeout(open_bus: Open, topic: str, double: ServiceBusDouble):
    with Proxy(double.admin_port) as proxy:
        url = double.url.replace(f"127.0.0.1:{double.admin_port}", f"127.0.0.1:{proxy.port}")
        await provisioned(await open_bus(), topic)
        bus = await open_bus(url, request_timeout=1)
        proxy.hold()
        with pytest.raises(OperationTimeout):
            async with bus.messages(topic, subscription="billing"):
                pass
        proxy.hold(False)


async def test_refused_connections_are_retried(open_bus: Open, topic: str, double: ServiceBusDouble):
    with Proxy(double.admin_port) as proxy:
        url = double.url.replace(f"127.0.0.1:{double.admin_port}", f"127.0.0.1:{proxy.port}")
        bus = await open_bus(url)
        await provisioned(bus, topic)
        proxy.refuse()
        opening = asyncio.ensure_future(bus.messages(topic, subscription="billing").__aenter__())
        while proxy.refusals < 2:
            await asyncio.sleep(0.01)
        proxy.refuse(False)
        await (await opening).close()


async def test_refused_credentials_are_reported(open_bus: Open, topic: str, double: ServiceBusDouble):
    bus = await open_bus()
    await provisioned(bus, topic)
    double.fault(refuse="admin", times=1000, condition="refused", text="InvalidSignature", code=401)
    with pytest.raises(AuthenticationFailed):
        async with bus.messages(topic, subscription="billing"):
            pass


async def test_consuming_needs_no_administration_rights(open_bus: Open, topic: str, double: ServiceBusDouble):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_subscription(topic, "billing")
    double.fault(refuse="admin", times=1000, condition="refused", text=NO_CLAIM, code=401)
    async with bus.messages(topic, subscription="billing") as inbox:
        await bus.topic(topic).publish(b"x")
        (message,) = await take(inbox, 1, SECONDS)
        await message.ack()
    with pytest.raises(SubscriptionNotFound):
        async with bus.messages(topic, subscription="shipping") as inbox:
            await inbox.next_message(timeout=SECONDS)


@pytest.mark.parametrize("sessions", [False, True])
async def test_without_rights_ordered_by_key_must_match_the_sessions(
    open_bus: Open, topic: str, double: ServiceBusDouble, sessions: bool
):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    await bus.admin.ensure_subscription(topic, "billing", requires_session=sessions)
    await bus.topic(topic).publish(b"x", key="k")
    double.fault(refuse="admin", times=1000, condition="refused", text=NO_CLAIM, code=401)
    with pytest.raises(ConfigurationError, match=r"sessionful.*ordered_by_key must match"):
        async with bus.messages(topic, subscription="billing", ordered_by_key=not sessions) as inbox:
            await inbox.next_message(timeout=SECONDS)
    async with bus.messages(topic, subscription="billing", ordered_by_key=sessions) as inbox:
        (message,) = await take(inbox, 1, SECONDS)
        await message.ack()


async def test_invalid_options_are_refused(open_bus: Open, topic: str):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    wrong: list[tuple[str, Any]] = [
        ("requires_session", "yes"),
        ("lock_duration", 5),
        ("lock_duration", timedelta(seconds=4.9)),
        ("lock_duration", timedelta(minutes=6)),
        ("lock_duration", "PT6M"),
        ("max_delivery_count", 0),
        ("max_delivery_count", 2001),
        ("forward_to", 5),
        ("auto_delete_on_idle", timedelta(minutes=4)),
        ("auto_delete_on_idle", "P"),
        ("default_message_time_to_live", "Pxyz"),
        ("default_message_time_to_live", "PT"),
        ("default_message_time_to_live", timedelta()),
    ]
    for option, value in wrong:
        with pytest.raises(InvalidSetting, match=re.escape(f"{option} is {value!r}. Use")):
            await bus.admin.ensure_subscription(topic, "billing", **{option: value})
    wrong = [
        ("enable_partitioning", 1),
        ("max_size_in_megabytes", 1000),
        ("max_message_size_in_kilobytes", 1023),
        ("user_metadata", "x" * 1025),
    ]
    for option, value in wrong:
        with pytest.raises(InvalidSetting, match=f"{option} is .*Use"):
            await bus.admin.ensure_topic(f"{topic}.more", **{option: value})
    for span in (timedelta(milliseconds=1), timedelta.max):
        with pytest.raises(InvalidSetting, match=r"retention is .*Use"):
            await bus.admin.ensure_topic(f"{topic}.more", retention=span)
    for name in ("../x", "a b", "-a", "a_", "x" * 51):
        with pytest.raises(InvalidName, match=f"{name}.*not valid in Service Bus"):
            await bus.admin.ensure_subscription(topic, native_name(name))
    assert await bus.admin.subscriptions(topic) == []


async def test_an_invalid_number_of_a_scheduled_message_is_refused(open_bus: Open, topic: str):
    bus = await open_bus()
    with pytest.raises(ConfigurationError, match=r"'a'\. Use the offset of its receipt"):
        await bus.backend.cancel_scheduled(topic, ["a"])


async def test_durations_may_be_text(open_bus: Open, topic: str):
    bus = await open_bus()
    await bus.admin.ensure_topic(topic)
    options = {"lock_duration": "PT1M30S", "default_message_time_to_live": "P1DT2H", "auto_delete_on_idle": "PT300S"}
    await bus.admin.ensure_subscription(topic, "billing", **options)
    native: Any = (await bus.admin.describe_subscription(topic, "billing")).native
    assert native["lock_duration"] == timedelta(seconds=90)
    assert native["default_message_time_to_live"] == timedelta(hours=26)
    assert native["auto_delete_on_idle"] == timedelta(minutes=5)


async def test_the_double_refuses_the_same_options_as_the_service(topic: str):
    with ServiceBusDouble(shortest_lock=5.0) as double:
        async with broker.connect(f"{double.url}&lease_seconds=4") as bus:
            raw = bus.backend._connection.admin  # pyright: ignore[reportAttributeAccessIssue]
            wrong: list[dict[str, Any]] = [
                {"lock_duration": timedelta(seconds=4)},
                {"lock_duration": timedelta(seconds=301)},
                {"max_delivery_count": 0},
                {"max_delivery_count": 2001},
                {"auto_delete_on_idle": timedelta(minutes=4)},
                {"max_size_in_megabytes": 1},
                {"default_message_time_to_live": timedelta()},
                {"default_message_time_to_live": timedelta.max},
                {"user_metadata": "x" * 1025},
                {"duplicate_detection_history_time_window": timedelta(seconds=19)},
            ]
            for options in wrong:
                with pytest.raises(HttpResponseError) as caught:
                    await raw.create_queue(topic, **options)
                assert caught.value.status_code == 400, options
            made = await raw.create_queue(topic, lock_duration=timedelta(seconds=5), max_delivery_count=2000)
            made.lock_duration = timedelta(seconds=301)
            with pytest.raises(HttpResponseError, match="LockDuration"):
                await raw.update_queue(made)
            await bus.admin.ensure_topic(f"{topic}.t")
            with pytest.raises(HttpResponseError, match="subscription name"):
                await raw.create_subscription(f"{topic}.t", "a/b")
            with pytest.raises(BackendError, match="LockDuration"):
                await bus.admin.ensure_subscription(f"{topic}.t", "billing")
