"""The command line on Pulsar and Pub/Sub: publish, consume, lag, dead letters and redrive."""

from __future__ import annotations

import asyncio
import json

import pytest

from broker.bus import connect
from broker.consuming.retry.policy import Retry
from tests.cli.conftest import Cli, InnerCli
from tests.servers import pubsub, pulsar


@pytest.fixture(params=[pytest.param("pulsar", marks=pytest.mark.xdist_group("pulsar")), "pubsub"])
def cli(request: pytest.FixtureRequest) -> Cli:
    """In this process."""
    server = pulsar.shared_server() if request.param == "pulsar" else pubsub.shared_server()
    return InnerCli(f"{server.url}&lease_seconds=2" if request.param == "pubsub" else server.url)


def waiting(cli: Cli, topic: str) -> int:
    (lag,) = cli("lag", topic, "--json").json
    assert lag["subscription"] == "billing"
    return lag["waiting"]


def test_publish_lag_and_consume(cli: Cli) -> None:
    topic = cli.topic()
    cli("subscriptions", "create", topic, "billing")
    given = [{"data": f"{number}", "key": "k", "attributes": {"a": "1"}, "id": f"id-{number}"} for number in range(3)]
    assert "Published 3 messages" in cli("publish", topic, "--jsonl", stdin="\n".join(map(json.dumps, given))).err
    assert waiting(cli, topic) == 3
    came = sorted(cli("consume", topic, "-s", "billing", "-n", "3", "--json").lines, key=lambda line: line["id"])
    assert [{name: line[name] for name in given[0]} for line in came] == given
    assert waiting(cli, topic) == 0
    assert topic in cli("topics", "list").text


def test_letters_are_listed_and_redriven(cli: Cli) -> None:
    topic, dead = cli.topic(), cli.topic()

    async def bury() -> None:
        async with (
            connect(cli.url) as bus,
            bus.messages(topic, subscription="billing", retry=Retry(max_attempts=1), dead_letter=dead) as inbox,
        ):
            await bus.topic(topic).publish(b"one", key="k")
            message = await inbox.next_message(timeout=60)
            assert message is not None
            async with message:
                raise ValueError("no price")

    asyncio.run(bury())
    (letter,) = cli("dead", "list", dead, "--json").lines
    assert (letter["data"], letter["key"], letter["topic"], letter["subscription"]) == ("one", "k", topic, "billing")
    assert "no price" in letter["error"]
    assert cli("dead", "redrive", dead, "--to", topic, "--json").json["moved"] == 1
    (back,) = cli("consume", topic, "-s", "billing", "-n", "1", "--json").lines
    assert (back["data"], back["key"]) == ("one", "k")
