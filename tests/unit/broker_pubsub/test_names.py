"""Portable names are paths of a project, one to one."""

from __future__ import annotations

import pytest

from broker.errors import InvalidName
from broker.names import native_name
from broker_pubsub.names import LONGEST, Names

NAMES = Names("my-project")


@pytest.mark.parametrize("name", ["abc", "orders.eu", "google", "goog", "a" * 200, "x-y_z..", "Goog"])
def test_topics_map_back(name: str):
    path = NAMES.topic(name)
    assert not path.rpartition("/")[2].startswith("goog")
    assert len(path.rpartition("/")[2]) <= LONGEST
    assert NAMES.topic_of(path) == name


@pytest.mark.parametrize("topic", ["abc", "google.x", "t" * 200])
@pytest.mark.parametrize("name", ["abc", "goog-s", "s" * 200, "A.b_c-d.."])
def test_subscriptions_map_back_and_differ_by_topic(topic: str, name: str):
    path = NAMES.subscription(topic, name)
    assert 3 <= len(path.rpartition("/")[2]) <= LONGEST
    assert NAMES.subscription_of(topic, path) == name
    assert path != NAMES.subscription(f"{topic[:150]}.other", name)


def test_foreign_subscriptions_are_native():
    path = "projects/my-project/subscriptions/foreign"
    name = NAMES.subscription_of("orders", path)
    assert NAMES.subscription("orders", name) == path
    elsewhere = "projects/other/subscriptions/foreign"
    assert NAMES.subscription("orders", NAMES.subscription_of("orders", elsewhere)) == elsewhere


@pytest.mark.parametrize("name", ["goog-x", "a b", "projects/x/topics", "1abc"])
def test_names_that_pubsub_refuses_are_refused(name: str):
    with pytest.raises(InvalidName, match="Pub/Sub takes"):
        NAMES.topic(native_name(name))


def test_long_topics_have_distinct_purge_marks():
    assert len(NAMES.purge_mark("t" * 200).rpartition("/")[2]) <= LONGEST
    assert NAMES.purge_mark("t" * 200) != NAMES.purge_mark("t" * 199)
