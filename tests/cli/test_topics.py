"""`broker topics`, `broker subscriptions` and `broker lag`."""

from __future__ import annotations

import pytest

from broker.admin import AdminFacade
from tests.cli.conftest import InnerCli


def test_a_topic_from_creation_to_deletion(cli):
    topic = cli.topic("--partitions", "2", "--retention", "7d")
    assert topic in {info["name"] for info in cli("topics", "list", "--json").json}
    assert topic in cli("topics", "list").text
    cli("topics", "create", topic, "--partitions", "2", "--retention", "7d")
    cli("publish", topic, "one", "two")
    info = cli("topics", "describe", topic, "--json").json
    assert (info["name"], info["partitions"], info["messages"], info["subscriptions"]) == (topic, 2, 2, [])
    assert "partitions" in cli("topics", "describe", topic).text
    assert cli("topics", "purge", topic, "--yes", "--json").json == {"purged": topic, "messages": 2}
    assert cli("topics", "describe", topic, "--json").json["messages"] == 0
    assert cli("topics", "delete", topic, "--yes").text == f"Deleted topic '{topic}'\n"
    assert topic not in {info["name"] for info in cli("topics", "list", "--json").json}


def test_a_description_in_a_pipe_is_a_row_per_entry_without_padding(cli):
    topic = cli.topic()
    cli("subscriptions", "create", topic, "billing")
    for command in (("topics", "describe", topic), ("subscriptions", "describe", topic, "billing")):
        rows = cli(*command).text.splitlines()
        assert len(rows) > 3
        for row in rows:
            assert row == row.rstrip()
            assert len(row) < 160
            assert "{'" not in row


def test_deleting_needs_confirmation(cli):
    topic = cli.topic()
    cli("subscriptions", "create", topic, "billing")
    for command in (
        ("topics", "delete", topic),
        ("topics", "purge", topic),
        ("subscriptions", "delete", topic, "billing"),
    ):
        assert "--yes" in cli(*command, code=2).err
    assert cli("subscriptions", "list", topic, "--json").json[0]["subscription"] == "billing"


def test_subscriptions_and_lag(cli):
    topic = cli.topic()
    cli("subscriptions", "create", topic, "early")
    cli("publish", topic, "one", "two", "three")
    cli("subscriptions", "create", topic, "late", "--start", "latest")
    cli("consume", topic, "-s", "early", "-n", "1")
    listed = {entry["subscription"]: entry["waiting"] for entry in cli("subscriptions", "list", topic, "--json").json}
    assert listed == {"early": 2, "late": 0}
    lags = {entry["subscription"]: entry["waiting"] for entry in cli("lag", topic, "--json").json}
    assert lags == {"early": 2, "late": 0}
    [lag] = cli("lag", topic, "early", "--json").json
    assert (lag["topic"], lag["waiting"]) == (topic, 2)
    assert "WAITING" in cli("lag", topic).text
    assert cli("subscriptions", "describe", topic, "early", "--json").json["subscription"] == "early"
    cli("subscriptions", "delete", topic, "early", "--yes")
    assert [entry["subscription"] for entry in cli("subscriptions", "list", topic, "--json").json] == ["late"]


@pytest.mark.parametrize(
    "command",
    [
        ("topics", "describe", "no-such-topic"),
        ("topics", "delete", "no-such-topic", "--yes"),
        ("topics", "purge", "no-such-topic", "--yes"),
        ("subscriptions", "list", "no-such-topic"),
        ("subscriptions", "create", "no-such-topic", "name"),
        ("publish", "no-such-topic", "x"),
        ("consume", "no-such-topic", "-s", "name"),
        ("peek", "no-such-topic"),
        ("lag", "no-such-topic"),
        ("dead", "list", "no-such-topic"),
        ("dead", "redrive", "no-such-topic", "--to", "orders"),
    ],
    ids=" ".join,
)
def test_a_topic_that_does_not_exist(memory, command):
    result = memory(*command, code=3)
    assert "no-such-topic" in result.err
    assert "broker topics create" in result.err
    assert not result.out


def test_a_subscription_that_does_not_exist(cli):
    topic = cli.topic()
    for command in (
        ("lag", topic, "missing"),
        ("consume", topic, "-s", "missing", "--no-create"),
        ("peek", topic, "-s", "missing"),
        ("subscriptions", "delete", topic, "missing", "--yes"),
        ("subscriptions", "describe", topic, "missing"),
    ):
        assert "missing" in cli(*command, code=3).err
    assert cli("subscriptions", "list", topic, "--json").json == []


def test_a_new_topic_needs_a_portable_name(memory):
    error = memory("topics", "create", "x", code=2).err
    assert "'x' is not portable. Use a letter" in error
    assert "native_name" not in error


def test_a_topic_that_is_deleted_meanwhile_is_left_out(memory: InnerCli, monkeypatch: pytest.MonkeyPatch) -> None:
    topics = AdminFacade.topics

    async def with_a_gone_one(admin: AdminFacade) -> list[str]:
        return [*await topics(admin), "gone"]

    monkeypatch.setattr(AdminFacade, "topics", with_a_gone_one)
    assert "gone" not in memory("topics", "list", "--json").text
