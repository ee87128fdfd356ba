"""`broker groups`, and the commands of topics and subscriptions, on a real Kafka broker."""

from __future__ import annotations

import os
from uuid import uuid4

import pytest
from confluent_kafka import Consumer

from tests.cli.conftest import InnerCli
from tests.servers.kafka import shared_server
from tests.servers.kafka_client import RawAdmin


@pytest.fixture
def kafka() -> InnerCli:
    """This process on the shared Kafka broker."""
    return InnerCli(f"kafka://{shared_server().bootstrap}")


def test_publish_counts_lines_with_old_publish_times(kafka: InnerCli) -> None:
    topic = kafka.topic()
    line = '{"data":"x","publish_time":"2020-01-01T00:00:00Z"}\n'
    lines = 3 * line + '{"data":"y"}\n'
    err = kafka("publish", topic, "--jsonl", stdin=lines).err
    assert "Published 4 messages" in err
    assert "3 messages were published" in err
    assert "the oldest 2020-01-01T00:00:00Z" in err
    kept = kafka("publish", topic, "--jsonl", "--publish-time-as", "published", stdin=lines).err
    assert kept.strip() == f"Published 4 messages to {topic!r}"
    [*_, shown] = kafka("peek", topic, "-n", "2", "--json").lines[:1]
    assert shown["attributes"] == {"published": "2020-01-01T00:00:00Z"}


@pytest.fixture
def topic(kafka: InnerCli) -> str:
    """Two partitions, with ten messages in one of them."""
    name = f"t{os.getpid()}-{uuid4().hex[:8]}"
    kafka("topics", "create", name, "--partitions", "2")
    kafka("publish", name, *map(str, range(10)), "--key", "same")
    return name


@pytest.fixture
def group(kafka: InnerCli, topic: str) -> str:
    name = f"g{uuid4().hex[:8]}"
    kafka("subscriptions", "create", topic, name)
    return name


def moved(kafka: InnerCli, group: str, *options: str) -> dict[int, tuple[int | None, int]]:
    changes = kafka("groups", "reset", group, *options, "--json").json
    return {change["partition"]: (change["before"], change["after"]) for change in changes}


def test_topics_and_subscriptions(kafka: InnerCli, topic: str, group: str):
    info = kafka("topics", "describe", topic, "--json").json
    assert (info["partitions"], info["messages"], info["subscriptions"]) == (2, 10, [group])
    assert "native.config.retention.ms" in kafka("topics", "describe", topic).text
    (lag,) = kafka("lag", topic, "--json").json
    assert (lag["subscription"], lag["waiting"], sorted(lag["partitions"].values())) == (group, 10, [0, 10])
    assert kafka("subscriptions", "list", topic, "--json").json[0]["waiting"] == 10
    assert kafka("topics", "purge", topic, "--yes", "--json").json == {"purged": topic, "messages": 10}
    kafka("subscriptions", "delete", topic, group, "--yes")
    assert kafka("subscriptions", "list", topic, "--json").json == []
    kafka("topics", "delete", topic, "--yes")


def test_list_and_describe(kafka: InnerCli, topic: str, group: str):
    listed = {each["group"]: each["state"] for each in kafka("groups", "list", "--json").json}
    assert listed[group] == "empty"
    assert group in kafka("groups", "list").text
    info = kafka("groups", "describe", group, "--json").json
    assert (info["group"], info["state"], info["members"]) == (group, "empty", [])
    assert sorted((each["position"], each["lag"]) for each in info["positions"]) == [(0, 0), (0, 10)]
    text = kafka("groups", "describe", group).text
    assert "position 0, 10 behind" in text


def test_a_dry_run_changes_nothing(kafka: InnerCli, topic: str, group: str):
    before = kafka("groups", "describe", group, "--json").json
    changes = kafka("groups", "reset", group, "--to", "latest", "--dry-run", "--json").json
    assert [change["dry_run"] for change in changes] == [True, True]
    assert sorted((change["before"], change["after"]) for change in changes) == [(0, 0), (0, 10)]
    table = kafka("groups", "reset", group, "--to", "latest", "--dry-run").text
    assert "+10" in table
    assert "dry run" in table
    assert kafka("groups", "describe", group, "--json").json == before


def test_reset(kafka: InnerCli, topic: str, group: str):
    (full,) = [n for n, (_, after) in moved(kafka, group, "--to", "latest", "--yes").items() if after == 10]
    assert moved(kafka, group, "--shift", "-4", "--yes")[full] == (10, 6)
    assert moved(kafka, group, "--to", "3", "-p", str(full), "-t", topic, "--yes") == {full: (6, 3)}
    assert moved(kafka, group, "--to", "2000-01-01T00:00:00Z", "--yes")[full] == (3, 0)
    assert moved(kafka, group, "--to", "earliest", "--yes")[full] == (0, 0)
    assert "done" in kafka("groups", "reset", group, "--to", "latest", "--yes").text
    # Standard input is not a terminal.
    assert "--yes" in kafka("groups", "reset", group, "--to", "earliest", code=2).err
    assert moved(kafka, group, "--to", "latest", "--dry-run")[full] == (10, 10)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 2, "--to or --shift"),
        (("--to", "latest", "--shift", "1"), 2, "--to or --shift"),
        (("--to", "yesterday"), 2, "'yesterday'"),
        (("--to", "11", "--yes"), 1, "0 to 0"),
        (("--to", "latest", "-t", "no-such-topic"), 3, "no-such-topic"),
        (("--to", "latest", "-p", "9"), 3, "no partition 9"),
    ],
)
def test_invalid_resets(kafka: InnerCli, group: str, arguments: tuple[str, ...], code: int, text: str):
    result = kafka("groups", "reset", group, *arguments, code=code)
    assert text in result.err
    assert not result.out


def test_a_missing_group(kafka: InnerCli, topic: str):
    for command in (("describe",), ("delete", "--yes"), ("reset", "--to", "latest")):
        error = kafka("groups", command[0], "missing", *command[1:], code=3).err
        assert "missing" in error
        assert "subscriptions create" not in error, "which makes no group over all topics"
    assert "groups list" in kafka("groups", "delete", "missing", code=3).err
    assert "Name the topic" in kafka("groups", "reset", "missing", "--to", "latest", code=3).err
    assert moved(kafka, f"new-{topic}", "--to", "latest", "-t", topic, "--yes").keys() == {0, 1}


def test_native_names_of_other_applications(kafka: InnerCli):
    """Native Kafka names of other applications are listed, and every command accepts them."""
    topic, group = RawAdmin(shared_server().bootstrap).make_topic(f"_{uuid4().hex[:8]}"), f"team/{uuid4().hex[:8]} 1"
    assert topic in [each["name"] for each in kafka("topics", "list", "--json").json]
    assert moved(kafka, group, "--to", "latest", "-t", topic, "--yes") == {0: (None, 0)}
    assert group in [each["group"] for each in kafka("groups", "list", "--json").json]
    for arguments in ((topic,), (topic, group)):
        assert [each["subscription"] for each in kafka("lag", *arguments, "--json").json] == [group]
    assert kafka("topics", "describe", topic, "--json").json["subscriptions"] == [group]
    assert kafka("groups", "describe", group, "--json").json["positions"][0]["topic"] == topic
    assert kafka("peek", topic, "--json").text == ""
    assert kafka("groups", "delete", group, "--yes", "--json").json == {"deleted": group}
    assert kafka("topics", "delete", topic, "--yes", "--json").json == {"deleted": topic}


def test_a_group_with_members_is_not_changed(kafka: InnerCli, topic: str, group: str):
    client = Consumer(
        {"bootstrap.servers": shared_server().bootstrap, "group.id": group, "client.id": "worker-7", "log_level": 3}
    )
    client.subscribe([topic])
    while not client.assignment():
        client.poll(0.05)
    info = kafka("groups", "describe", group, "--json").json
    assert [(member["client"], len(member["partitions"])) for member in info["members"]] == [("worker-7", 2)]
    for command in (("reset", group, "--to", "latest", "--yes"), ("delete", group, "--yes")):
        error = kafka("groups", *command, code=1).err
        assert "1 member (worker-7 at 127.0.0.1)" in error
        assert "Stop its consumers" in error
    client.close()
    assert "--yes" in kafka("groups", "delete", group, code=2).err
    assert kafka("groups", "delete", group, "--yes", "--json").json == {"deleted": group}
    assert group not in {each["group"] for each in kafka("groups", "list", "--json").json}


def test_a_broker_without_group_administration(memory: InnerCli):
    for command in (("list",), ("describe", "name"), ("reset", "name", "--to", "latest"), ("delete", "name")):
        result = memory("groups", *command, code=2)
        assert "has no group administration. Use `broker subscriptions list TOPIC`\n" in result.err
        assert not result.out
