"""Patterns of topics: what is refused, and on which backends."""

from __future__ import annotations

from typing import Any

import pytest

import broker
from broker.errors import ConfigurationError, InvalidName, Unsupported


def test_a_pattern_matches_whole_names_and_no_topic_of_the_broker() -> None:
    pattern = broker.TopicPattern(r"orders\..*", exclude=r".*\.dead")
    names = ["orders.eu", "orders.dead", "orders", "all-orders.eu", "__orders.eu"]
    assert [name for name in names if pattern.matches(name)] == ["orders.eu"]
    assert not broker.TopicPattern().matches("__consumer_offsets")


async def test_texts_that_look_like_patterns_are_refused_with_advice() -> None:
    bus: Any = broker.connect("inmem:")
    for topics in ("orders.*", ["^orders"], "orders-(a|b)"):
        for call in (lambda t: bus.messages(t, subscription="s-1"), lambda t: bus.records(t, group="g-1")):
            with pytest.raises(InvalidName, match="not portable") as raised:
                call(topics)
            assert "TopicPattern" in raised.value.advice
    with pytest.raises(ConfigurationError, match="topics"):
        bus.messages([broker.TopicPattern("a")], subscription="s-1")


async def test_a_pattern_excludes_its_dead_letters_and_retry_topics() -> None:
    bus = broker.connect("inmem:")
    pattern = broker.TopicPattern("orders.*")
    with pytest.raises(ConfigurationError, match=r"dead_letter 'orders\.dead' matches the pattern"):
        bus.messages(pattern, subscription="billing", dead_letter="orders.dead")
    with pytest.raises(ConfigurationError, match=r"dead_letter 'orders\.dead' matches the pattern"):
        bus.records(pattern, group="billing").as_messages(dead_letter="orders.dead")
    with pytest.raises(ConfigurationError, match="on_decode_error"):
        bus.records(pattern, group="billing", on_decode_error="orders.dead")
    with pytest.raises(Unsupported, match="Retry topics"):
        bus.records(pattern, group="billing").as_messages(retry_topics=broker.RetryTopics(delays=(1.0,)))


@pytest.mark.parametrize(
    ("url", "messages", "records"),
    [
        ("nats://localhost:1", True, True),
        ("kafka://localhost:1", True, True),
        ("kafka://localhost:1?queue=markers", False, True),
        ("pulsar://localhost:1", True, True),
        ("inmem:", True, True),
        ("pubsub://project?emulator_host=localhost:1", False, False),
        ("servicebus://policy:key@mine.servicebus.windows.net", False, False),
    ],
)
async def test_backends_without_patterns_refuse_them(url: str, messages: bool, records: bool) -> None:
    bus = broker.connect(url)
    pattern = broker.TopicPattern("orders.*")
    assert bus.capabilities.messages is not None
    assert bus.capabilities.messages.topic_patterns is messages
    assert (bus.capabilities.records is not None and bus.capabilities.records.topic_patterns) is records
    if messages:
        bus.messages(pattern, subscription="billing")
    else:
        with pytest.raises(Unsupported, match="patterns of topics"):
            bus.messages(pattern, subscription="billing")
    if records:
        bus.records(pattern, group="billing")
    else:
        with pytest.raises(Unsupported):
            bus.records(pattern, group="billing")
