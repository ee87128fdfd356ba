"""Members that a copartitioned group does not take: with them a number could have two owners."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest

from broker import Bus, ConfigurationError, connect
from broker.testing.waiting import eventually
from broker_inmem import Broker, InmemSettings


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with connect(InmemSettings(broker=Broker())) as bus:
        for topic in ("orders", "payments", "refunds"):
            await bus.admin.ensure_topic(topic, partitions=2)
        yield bus


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((["orders", "payments"], True), (["orders", "refunds"], True)),
        ((["orders", "payments"], True), (["orders", "payments"], False)),
        ((["orders", "payments"], False), (["orders", "payments"], True)),
    ],
)
async def test_members_that_differ_are_refused(
    bus: Bus, first: tuple[list[str], bool], second: tuple[list[str], bool]
) -> None:
    (topics, copartitioned), (others, other) = first, second
    text = (
        f"has a member on {', '.join(topics)} with copartitioned={copartitioned}; another on {', '.join(others)} with"
    )
    async with bus.records(topics, group="audit", copartitioned=copartitioned) as log:
        with pytest.raises(ConfigurationError, match=re.escape(text)) as raised:
            async with bus.records(others, group="audit", copartitioned=other):
                pytest.fail("it has joined")
        assert "the same topics" in raised.value.advice
        await eventually(lambda: len(log.assignment()) == 4, 30.0, "the assignment of the first member")


async def test_the_order_of_topics_does_not_count(bus: Bus) -> None:
    async with (
        bus.records(["orders", "payments"], group="audit", copartitioned=True),
        bus.records(["payments", "orders"], group="audit", copartitioned=True) as second,
    ):
        assert not second.closed
