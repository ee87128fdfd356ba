"""`broker dead`: letters with their reasons, and redrives."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from broker.bus import connect
from broker.consuming.retry.policy import Retry
from broker.names import REDRIVE_SUBSCRIPTION


@pytest.fixture
def orders(cli):
    """A topic whose three messages were dead-lettered, and its dead-letter topic."""
    topic, dead = cli.topic(), cli.topic()
    cli("publish", topic, "-k", "key", "-a", "type=created", "one", "two", "three")

    async def bury() -> None:
        async with (
            connect(cli.url) as bus,
            bus.messages(topic, subscription="billing", retry=Retry(max_attempts=1), dead_letter=dead) as inbox,
        ):
            for _ in range(3):
                message = await inbox.next_message(timeout=60)
                assert message is not None
                async with message:
                    raise ValueError(f"no price for {message.data!r}")

    asyncio.run(bury())
    return topic, dead


def test_letters_show_reason_and_origin(cli, orders):
    topic, dead = orders
    letters = cli("dead", "list", dead, "--json").lines
    assert sorted(letter["data"] for letter in letters) == ["one", "three", "two"]
    for letter in letters:
        assert (letter["topic"], letter["subscription"], letter["key"]) == (topic, "billing", "key")
        assert letter["attributes"] == {"type": "created"}
        assert letter["attempts"] == 1
        assert isinstance(letter["offset"], int)
        assert letter["reason"]
        assert "no price for" in letter["error"]
        assert letter["time"]
    assert len(cli("dead", "list", dead, "--json", "-n", "2").lines) == 2
    text = cli("dead", "list", dead).text
    # JetStream messages have no partition.
    assert re.search(rf"{topic}(\[\d+\])?@\d+/billing", text)
    assert "no price for" in text


def test_messages_that_are_not_dead_letters_are_not_listed(cli, orders):
    _, dead = orders
    plain = cli.topic()
    cli("publish", plain, "hello", "world")
    listed = cli("dead", "list", plain)
    assert not listed.out
    assert f"There are no dead letters in '{plain}'" in listed.err
    assert "2 messages carry no dead-letter reason" in listed.err
    assert f"`broker peek {plain}`" in listed.err
    as_json = cli("dead", "list", plain, "--json")
    assert not as_json.out
    assert json.loads(as_json.err)["not_dead_letters"] == 2
    cli("publish", dead, "hello")
    mixed = cli("dead", "list", dead)
    assert "no price for" in mixed.text
    assert "hello" not in mixed.text
    assert "1 message carries no dead-letter reason" in mixed.err
    assert len(cli("dead", "list", dead, "--json").lines) == 3


def test_redrive_moves_each_letter_once(cli, orders):
    topic, dead = orders
    report = cli("dead", "redrive", dead, "--to", topic, "--limit", "1", "--json").json
    assert (report["moved"], report["by_topic"], report["failed"]) == (1, {topic: 1}, 0)
    assert f"2 moved to '{topic}'" in cli("dead", "redrive", dead, "--to", topic).text
    assert "None moved" in cli("dead", "redrive", dead, "--to", topic).text
    assert cli("dead", "list", dead, "--json").lines == []
    assert "no dead letters" in cli("dead", "list", dead).err
    again = cli("consume", topic, "-s", "billing", "-n", "3", "--stop-when-idle", "5", "--json").lines
    assert sorted(line["data"] for line in again) == ["one", "three", "two"]
    assert all(line["attributes"] == {"type": "created"} for line in again)


def test_letters_that_cannot_be_moved_stay(cli, orders):
    topic, dead = orders
    cli("topics", "delete", topic, "--yes")
    result = cli("dead", "redrive", dead, "--to", topic, code=1)
    assert "3 could not be moved and stay" in result.text
    assert topic in result.err
    cli("topics", "create", topic)
    assert cli("dead", "redrive", dead, "--to", topic, "--json").json["moved"] == 3


def test_letters_held_by_another_redrive_are_reported(cli, orders):
    topic, dead = orders

    async def hold() -> str:
        async with (
            connect(cli.url) as bus,
            bus.messages(dead, subscription=REDRIVE_SUBSCRIPTION, max_outstanding=3) as another,
        ):
            assert len(await another.next_batch(3, timeout=60)) == 3
            return await asyncio.to_thread(lambda: cli("dead", "redrive", dead, "--to", topic, code=1).text)

    assert "None moved, 3 are held by another redrive" in asyncio.run(hold())
    assert cli("dead", "redrive", dead, "--to", topic, "--json").json["moved"] == 3


def test_letters_of_topics_that_are_not_named_stay(cli, orders):
    topic, dead = orders
    missing = cli("dead", "redrive", dead, code=2).err
    assert "does not know which topics its letters come from" in missing
    assert f"3 would move to '{topic}'" in cli("dead", "redrive", dead, "--dry-run").text
    assert cli("dead", "redrive", dead, "--dry-run", "--json").json["by_topic"] == {topic: 3}
    refused = cli("dead", "redrive", dead, "--to", "payroll", code=1).text
    assert f"None moved, 3 from topics that --to does not name stay: {topic} (3)" in refused
    assert cli("dead", "redrive", dead, "--to", "payroll", "--json", code=1).json["not_allowed"] == {topic: 3}
    assert f"3 moved to '{topic}'" in cli("dead", "redrive", dead, "--to", "payroll", "--to", topic).text
