"""Shells complete the names of topics and subscriptions."""

from __future__ import annotations

import pytest

from broker.admin import AdminFacade


@pytest.fixture
def completing(memory, monkeypatch, capsys):
    """Completes words on a broker with two topics, of which one has a subscription."""
    for topic in ("orders", "orders.dead", "other"):
        memory("topics", "create", topic)
    memory("subscriptions", "create", "orders", "billing")
    monkeypatch.setenv("BROKER_URL", memory.url)
    monkeypatch.setenv("_BROKER_COMPLETE", "complete_bash")
    monkeypatch.setattr("broker.cli.completion.SECONDS", 60.0)

    def complete(*words: str) -> list[str]:
        from broker.cli import main

        monkeypatch.setenv("COMP_WORDS", " ".join(["broker", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        with pytest.raises(SystemExit):
            main([])
        shown = capsys.readouterr()
        assert shown.err == ""
        return shown.out.split()

    return complete


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("publish", "or"), ["orders", "orders.dead"]),
        (("consume", ""), ["orders", "orders.dead", "other"]),
        (("topics", "describe", "ot"), ["other"]),
        (("dead", "redrive", "orders.dead", "--to", "or"), ["orders", "orders.dead"]),
        (("tracker", "billing", "--topic", "ot"), ["other"]),
        (("consume", "orders", "--subscription", ""), ["billing"]),
        (("consume", "orders", "-s", "b"), ["billing"]),
        (("peek", "orders", "-s", ""), ["billing"]),
        (("peek", "orders", "-s", "x"), []),
        (("lag", "orders", ""), ["billing"]),
        (("subscriptions", "delete", "orders", "bi"), ["billing"]),
        (("tracker", "--topic", "orders", "b"), ["billing"]),
        (("lag", "missing", ""), []),
        (("consume", "-s", ""), []),
        (("publi",), ["publish"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_names_are_completed(completing, words, offered):
    assert completing(*words) == offered


def test_the_broker_is_the_one_of_the_command_line(completing, monkeypatch, memory):
    monkeypatch.delenv("BROKER_URL")
    assert completing("publish", "or") == []
    assert completing("publish", "--url", memory.url, "or") == ["orders", "orders.dead"]
    assert completing("--url", memory.url, "publish", "or") == ["orders", "orders.dead"]


@pytest.mark.parametrize("url", ["nats://127.0.0.1:1", "nonsense", "kafka://127.0.0.1:1"])
def test_without_an_answer_nothing_is_offered(completing, monkeypatch, url):
    monkeypatch.setattr("broker.cli.completion.SECONDS", 0.2)
    monkeypatch.setenv("BROKER_URL", url)
    assert completing("publish", "or") == []


def test_a_name_that_a_shell_would_run_is_not_offered(completing, monkeypatch):
    async def topics(admin):
        return ["a$(reboot)", "a;b", "a b", "a`b`", "-rf", "a\x1b[2J", "a'", "projects/p/topics/a", "a-1"]

    monkeypatch.setattr(AdminFacade, "topics", topics)
    assert completing("publish", "") == ["a-1", "projects/p/topics/a"]
