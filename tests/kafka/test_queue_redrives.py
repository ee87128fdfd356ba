"""A redrive of a Kafka queue while others hold letters, or died with them."""

from __future__ import annotations

import pytest

from broker.bus import connect
from broker.names import REDRIVE_SUBSCRIPTION
from broker.testing.waiting import eventually, numbered, take
from broker.testing.worker import Worker
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import produce

PATIENCE = 60.0
QUICK = "queue=markers&session_timeout_ms=6000&heartbeat_interval_ms=300"


@pytest.mark.deep
async def test_letters_held_by_another_redrive_are_counted(kafka: KafkaServer, make_topic: MakeTopic) -> None:
    topic, dead = make_topic(), make_topic()
    produce(kafka.bootstrap, dead, numbered(2), headers={"dead-letter-topic": topic})
    async with connect(f"{kafka.url}?queue=markers") as bus:
        async with bus.messages(dead, subscription=REDRIVE_SUBSCRIPTION) as another:
            await take(another, 2, PATIENCE)
            report = await bus.admin.redrive(dead, to=[topic])
            assert (report.moved, report.failed, report.elsewhere) == (0, 0, 2)
        report = await bus.admin.redrive(dead, to=[topic])
        assert (report.moved, report.elsewhere) == (2, 0)


@pytest.mark.parametrize("queue", ["offsets", "markers"])
async def test_a_redrive_runs_beside_one_with_another_assignor(
    kafka: KafkaServer, make_topic: MakeTopic, queue: str
) -> None:
    topic, dead = make_topic(), make_topic()
    produce(kafka.bootstrap, dead, numbered(2), headers={"dead-letter-topic": topic})
    url = f"{kafka.url}?queue={queue}"
    async with connect(f"{url}&partition_assignment_strategy=range") as other, connect(url) as bus:
        async with other.messages(dead, subscription=REDRIVE_SUBSCRIPTION) as another:
            await take(another, 1, PATIENCE)
            moved = (await bus.admin.redrive(dead, to=[topic])).moved
        assert moved + (await bus.admin.redrive(dead, to=[topic])).moved >= 2


@pytest.mark.deep
async def test_letters_of_a_killed_redrive_are_counted_until_redelivered(
    kafka: KafkaServer, make_topic: MakeTopic
) -> None:
    topic, dead = make_topic(), make_topic()
    url = f"{kafka.url}?{QUICK}&lease_seconds=12"
    produce(kafka.bootstrap, dead, numbered(5), headers={"dead-letter-topic": topic})
    worker = await Worker.start(url, dead, REDRIVE_SUBSCRIPTION, 0)
    await worker.until_holding(PATIENCE)
    await worker.kill()
    async with connect(url) as bus:
        first = await bus.admin.redrive(dead, to=[topic])
        assert first.elsewhere > 0
        assert first.moved + first.elsewhere == 5
        moved = first.moved

        async def all_moved() -> bool:
            nonlocal moved
            report = await bus.admin.redrive(dead, to=[topic])
            moved += report.moved
            return report.elsewhere == 0

        await eventually(all_moved, PATIENCE)
        assert moved == 5
