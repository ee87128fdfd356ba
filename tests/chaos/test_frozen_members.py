"""A member that is frozen while another owns its partitions, and wakes when they are free again."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

import broker
from broker.outbound import OutboundMessage
from broker.testing.waiting import eventually, numbered, read
from tests.chaos.member_process import MemberProcess
from tests.servers import nats, pulsar

pytestmark = pytest.mark.deep

PATIENCE = 120.0
URLS: dict[str, Callable[[], str]] = {
    "jetstream": lambda: f"{nats.shared_server().url}?owner_timeout=1",
    "pulsar": lambda: pulsar.shared_server().url,
}


@pytest.mark.parametrize(
    ("name", "copartitioned"),
    [
        pytest.param("jetstream", False, id="jetstream"),
        pytest.param("jetstream", True, id="jetstream-copartitioned"),
        pytest.param("pulsar", False, id="pulsar", marks=pytest.mark.xdist_group("pulsar")),
        pytest.param("pulsar", True, id="pulsar-copartitioned", marks=pytest.mark.xdist_group("pulsar")),
    ],
)
async def test_a_frozen_member_loses_what_another_has_owned(name: str, copartitioned: bool) -> None:
    url, group = URLS[name](), f"frozen-{uuid.uuid4().hex[:8]}"
    # The second topic stays empty.
    topics = [f"chaos-{uuid.uuid4().hex[:12]}" for _ in range(2)]
    async with broker.connect(url) as bus:
        for topic in topics:
            await bus.admin.ensure_topic(topic, partitions=2)
        messages = [OutboundMessage(body, key=f"key-{n}") for n, body in enumerate(numbered(40))]
        await bus.topic(topics[0]).publish_batch(messages)
        arguments = (url, ",".join(topics), group, "40", str(copartitioned))
        member = MemberProcess("tests.chaos.callbacks_process", *arguments)

        def about() -> dict[str, list[str]]:
            calls: dict[str, list[str]] = {f"{topic}/{number}": [] for topic in topics for number in (0, 1)}
            for said in tuple(member.heard):
                if "partition" in said:
                    calls[said["partition"]].append(said["say"])
            return calls

        def all_said(words: list[str]) -> bool:
            return all(each == words for each in about().values())

        try:
            await eventually(lambda: {"say": "read"} in member.heard, PATIENCE, "the records")
            await eventually(lambda: all_said(["assigned"]), PATIENCE, "the first assignment")
            member.freeze()
            options: dict[str, Any] = {"group": group, "copartitioned": copartitioned}
            async with bus.records(topics, **options) as other:
                # The frozen member continues where the other one has committed: the positions do not tell.
                await read(other, 40, PATIENCE)
                await other.commit()
                await eventually(lambda: len(other.assignment()) == 4, PATIENCE, "the take-over")
            member.thaw()
            await eventually(lambda: all(len(each) >= 3 for each in about().values()), PATIENCE, "the return")
            assert all_said(["assigned", "lost", "assigned"]), about()
        finally:
            await member.kill()
            for topic in topics:
                await bus.admin.delete_topic(topic)
