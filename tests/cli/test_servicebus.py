"""Commands on a broker without a log and without history: the double of Service Bus."""

from __future__ import annotations

import asyncio

import pytest

from broker.bus import connect
from broker.consuming.retry.policy import DROP
from tests.cli.conftest import InnerCli
from tests.servers.servicebus import missing, shared_double


@pytest.fixture(scope="module")
def bus() -> InnerCli:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    return InnerCli(shared_double().url)


def test_messages_go_to_existing_subscriptions(bus: InnerCli):
    topic = bus.topic("--retention", "7d")
    bus("publish", topic, "lost")
    bus("subscriptions", "create", topic, "billing")
    bus("publish", topic, "-k", "key", "-a", "type=created", "one", "two", "three")
    [lag] = bus("lag", topic, "--json").json
    assert (lag["subscription"], lag["waiting"], lag["unsettled"]) == ("billing", 3, None)
    peeked = bus("peek", topic, "-s", "billing", "-n", "2", "--json").lines
    assert [message["data"] for message in peeked] == ["one", "two"]
    came = bus("consume", topic, "-s", "billing", "-n", "2", "--json").lines
    assert [(message["data"], message["key"], message["attributes"]) for message in came] == [
        (body, "key", {"type": "created"}) for body in ("one", "two")
    ]
    assert bus("lag", topic, "billing", "--json").json[0]["waiting"] == 1
    assert bus("topics", "purge", topic, "--yes", "--json").json == {"purged": topic, "messages": 1}
    assert topic in bus("topics", "list").text
    bus("topics", "delete", topic, "--yes")
    assert "does not exist" in bus("topics", "describe", topic, code=3).err


def test_commands_on_a_log_are_refused(bus: InnerCli):
    topic = bus.topic()
    assert "servicebus" in bus("peek", topic, code=2).err
    assert "servicebus" in bus("doctor", "--json").text


def test_dead_letters_are_shown_and_redriven(bus: InnerCli):
    topic, dead = bus.topic(), bus.topic()

    async def bury() -> None:
        async with connect(bus.url) as own, own.messages(topic, subscription="billing", dead_letter=dead) as inbox:
            await own.topic(topic).publish_batch([b"one", b"two"])
            for _ in range(2):
                message = await inbox.next_message(timeout=60)
                assert message is not None
                await message.reject("no such article")

    asyncio.run(bury())
    letters = bus("dead", "list", dead, "--json").lines
    assert sorted((letter["data"], letter["reason"], letter["topic"]) for letter in letters) == [
        (body, "no such article", topic) for body in ("one", "two")
    ]
    assert bus("dead", "redrive", dead, "--to", topic, "--json").json["by_topic"] == {topic: 2}
    assert bus("lag", topic, "billing", "--json").json[0]["waiting"] == 2


def test_a_dead_letter_queue_is_a_topic(bus: InnerCli):
    topic = bus.topic()

    async def bury() -> None:
        async with connect(bus.url) as own, own.messages(topic, subscription="billing", dead_letter=DROP) as inbox:
            await own.topic(topic).publish(b"one")
            message = await inbox.next_message(timeout=60)
            assert message is not None
            await message.reject("worthless")

    asyncio.run(bury())
    dead = f"{topic}/Subscriptions/billing/$DeadLetterQueue"
    [letter] = bus("dead", "list", dead, "--json").lines
    assert (letter["data"], letter["reason"], letter["topic"]) == ("one", "worthless", topic)
    assert bus("dead", "redrive", dead, "--json").json["by_topic"] == {topic: 1}
