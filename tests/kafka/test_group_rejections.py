"""Settings that the brokers or librdkafka reject raise an InvalidSetting with the setting and advice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import broker
from broker.errors import InvalidName, InvalidSetting
from broker.names import native_name
from tests.kafka.group_members import both_protocols, fill, opened, options_of, take
from tests.servers.kafka import KafkaServer


async def refused(kafka: KafkaServer, topic: str, group: str, **options: Any) -> str:
    with pytest.raises(InvalidSetting) as raised:
        async with opened(kafka, topic, group, **options) as consumer, asyncio.timeout(60):
            await take(consumer, 1)
    return str(raised.value)


@both_protocols
async def test_a_duplicate_instance_id_is_reported(kafka: KafkaServer, topic: str, group: str, protocol: str) -> None:
    await fill(kafka, topic, 1, 3)
    options = {**options_of(protocol), "group_instance_id": "pod"}
    async with opened(kafka, topic, group, **options) as first:
        await take(first, 3)
        if protocol == "consumer":
            text = await refused(kafka, topic, group, **options)
        else:
            async with opened(kafka, topic, group, **options) as second:
                await take(second, 3)
                with pytest.raises(InvalidSetting) as raised:
                    async with asyncio.timeout(60):
                        await take(first, 1)
                text = str(raised.value)
    assert "Give each member of a group its own group_instance_id" in text


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (
            {"group_protocol": "consumer", "group_remote_assignor": "nearest"},
            "Set group_remote_assignor to an assignor",
        ),
        ({"session_timeout_ms": 500, "heartbeat_interval_ms": 100}, "Set session_timeout_ms within"),
        ({"partition_assignment_strategy": ("range", "cooperative-sticky")}, "partition.assignment.strategy is 'range"),
        ({"properties": {"check.crcs": "maybe"}}, "check.crcs is 'maybe'"),
        ({"properties": {"fetch.error.backoff.ms": "-1"}}, "fetch.error.backoff.ms is '-1'"),
    ],
)
async def test_a_rejected_setting_is_named(
    kafka: KafkaServer, topic: str, group: str, options: dict[str, Any], advice: str
) -> None:
    assert advice in await refused(kafka, topic, group, **options)


async def test_members_must_agree_on_a_strategy(kafka: KafkaServer, topic: str, group: str) -> None:
    await fill(kafka, topic, 1, 3)
    async with opened(kafka, topic, group, partition_assignment_strategy=("range",)) as first:
        await take(first, 3)
        text = await refused(kafka, topic, group, partition_assignment_strategy=("cooperative-sticky",))
    assert "Give all members of a group the same partition_assignment_strategy" in text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("g" * 40_000, "has 40000 bytes. Shorten it to 32000 bytes"),
        (" billing", "is ' billing', and librdkafka strips leading white space"),
    ],
)
async def test_an_invalid_group_id_is_rejected_at_once(kafka: KafkaServer, topic: str, name: str, text: str) -> None:
    group = native_name(name)
    async with broker.connect(kafka.url) as bus:
        with pytest.raises(InvalidName, match=text):
            async with bus.records(topic, group=group):
                pass
        with pytest.raises(InvalidName, match=text):
            async with bus.messages(topic, subscription=group):
                pass
        with pytest.raises(InvalidName, match=text):
            await bus.admin.ensure_subscription(topic, group)
        with pytest.raises(InvalidName, match=text):
            async with bus.transactional_publisher(group):
                pass
