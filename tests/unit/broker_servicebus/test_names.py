"""Portable names as entities and back, one to one."""

from __future__ import annotations

import pytest

from broker.errors import InvalidName
from broker.names import native_name
from broker_servicebus.names import entity_name, needs_metadata, split_path, subscription_name, topic_of


@pytest.mark.parametrize("name", ["abc", "A.b_c-d", "a..", "orders_", "x" * 200])
def test_topics_map_back(name: str):
    entity = entity_name(name)
    assert entity[0].isalnum() or "/_" in entity
    assert topic_of(entity) == name


def test_topics_stay_distinct_without_case():
    names = ["abc", "Abc", "aBc", "ABC", "abc.", "Abc.", "abc..", "abc_", "abc-", "abc.-"]
    assert len({entity_name(name).lower() for name in names}) == len(names)


def test_long_subscription_names_are_shortened():
    names = ["abc", "Abc", "A.b_c-d..", "s" * 200, "s" * 199, "s" * 50, "anybroker-" + "0" * 40]
    owns = [subscription_name(name) for name in names]
    assert len({own.lower() for own in owns}) == len(names)
    assert all(len(own) <= 50 and own[-1].isalnum() for own in owns)
    assert [name for name in names if not needs_metadata(name)] == ["abc", "s" * 50]


def test_native_paths_are_split():
    path = native_name("Orders/Subscriptions/billing/$DeadLetterQueue")
    assert split_path(path) == ("Orders", "billing", True)
    assert split_path(native_name("Orders/$deadletterqueue")) == ("Orders", None, True)
    assert split_path(native_name("team/orders")) == ("team/orders", None, False)
    assert split_path("orders.") == ("orders./_0", None, False)
    with pytest.raises(InvalidName):
        split_path("Orders/Subscriptions/billing")
