"""Commits while the coordinator is away: retries of the client do not undo a confirmed commit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from confluent_kafka import TopicPartition as NativePartition

from broker.driver.contract import TopicPartition
from broker.errors import BrokerError
from broker_kafka.client.consumer import ConsumerThread
from broker_kafka.client.offset_commits import Answer
from broker_kafka.codec.record_run import NativeRun
from tests.kafka.group_members import eventually, new_group
from tests.servers.kafka import PLAIN, KafkaServer, Listener
from tests.servers.kafka_client import RawAdmin
from tests.servers.proxy import Proxy

pytestmark = pytest.mark.deep

ROUNDS = 6
CLASSIC: dict[str, Any] = {"session.timeout.ms": 30_000}


class Host:
    """Assigns partitions at their start, and does nothing else."""

    def __init__(self) -> None:
        self.owned: set[TopicPartition] = set()

    def arrived(self, runs: Sequence[NativeRun]) -> None:
        raise AssertionError("the topic is empty")

    async def assigning(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        return dict.fromkeys(partitions, 0)

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self.owned.update(partitions)

    async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
        self.owned.difference_update(partitions)

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        self.owned.difference_update(partitions)

    def out_of_range(self, partition: TopicPartition, position: int) -> None:
        raise AssertionError("the topic is empty")

    def failed(self, error: BrokerError) -> None:
        assert error.retriable, error


@pytest.fixture(scope="module")
def wired() -> Iterator[tuple[KafkaServer, Proxy]]:
    """A broker that is also reachable through a proxy."""
    server = KafkaServer(listeners=[PLAIN, Listener("WIRE")])
    with Proxy(server.ports["WIRE"]) as proxy:
        server.advertised["WIRE"] = proxy.port
        with server:
            yield server, proxy


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_a_confirmed_commit_is_not_undone_by_an_older_one(
    wired: tuple[KafkaServer, Proxy], protocol: str
) -> None:
    server, proxy = wired
    raw, host, group = RawAdmin(server.bootstrap), Host(), new_group()
    topic = raw.make_topic(partitions=1)
    config = {
        "bootstrap.servers": f"127.0.0.1:{proxy.port}",
        "group.id": group,
        "group.protocol": protocol,
        "enable.auto.commit": False,
        "auto.offset.reset": "error",
        "reconnect.backoff.ms": 20,
        "reconnect.backoff.max.ms": 100,
        **(CLASSIC if protocol == "classic" else {}),
    }
    thread = ConsumerThread(config, host, name="commits", warn=print)
    await thread.start()
    await thread.subscribe([topic])
    await eventually(lambda: host.owned, 30)
    position = 0
    requested: list[asyncio.Task[Answer]] = []

    async def ask(seconds: float) -> None:
        nonlocal position
        until = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until:
            position += 1
            requested.append(asyncio.create_task(thread.commit([NativePartition(topic, 0, position)])))
            await asyncio.sleep(0.005)

    for _ in range(ROUNDS):
        requested.clear()
        begun = position
        await ask(0.05)
        proxy.refuse()
        await ask(0.3 * random.random())
        proxy.refuse(False)
        # The next commits are requested while the client finds its coordinator and repeats the pending ones.
        await ask(0.5)
        answers = await asyncio.wait_for(asyncio.gather(*requested), 60)
        stored = raw.committed(group, topic).offset
        good = [begun + place for place, answer in enumerate(answers, 1) if set(answer.values()) == {None}]
        assert good, answers[-1]
        assert stored >= good[-1], f"{stored} is stored, and {good[-1]} was confirmed; {position} was the last"
    assert await thread.stop(30)
