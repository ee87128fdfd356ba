"""Pulsar's message ids as offsets: they sort the same, come back, and never wrap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import BackendError, InvalidName, OffsetOutOfRange
from broker.names import EPHEMERAL, native_name
from broker_pulsar.membership import Change, Standing, change_of
from broker_pulsar.names import partition_number, subscription_name, topic_path
from broker_pulsar.positions import LARGEST, pack, unpack

places = st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**20 - 1), st.integers(0, 4095))


@given(places, places)
def test_offsets_sort_as_ids_do(one: tuple[int, int, int], two: tuple[int, int, int]) -> None:
    assert (pack(*one) < pack(*two)) == (one < two)
    assert unpack(pack(*one)) == one
    assert 0 <= pack(*one) <= LARGEST < 2**63


@pytest.mark.parametrize("place", [(2**31, 0, 0), (0, 2**20, 0), (0, 0, 4096), (-1, 0, 0), (0, -1, 0)])
def test_what_does_not_fit_is_refused(place: tuple[int, int, int]) -> None:
    with pytest.raises(BackendError, match="does not fit"):
        pack(*place)


@pytest.mark.parametrize("offset", [-1, LARGEST + 1])
def test_what_is_no_offset_is_refused(offset: int) -> None:
    with pytest.raises(OffsetOutOfRange, match=str(offset)):
        unpack(offset)


def test_names_map_one_to_one() -> None:
    assert topic_path("orders.eu", "public", "default").url == "persistent://public/default/orders.eu"
    assert topic_path(native_name("persistent://t/n/a b"), "public", "default").path == "/persistent/t/n/a%20b"
    assert topic_path(native_name("t/n/x"), "public", "default").url == "persistent://t/n/x"
    assert topic_path("orders", "t", "n").partition(2).url == "persistent://t/n/orders-partition-2"
    assert partition_number("persistent://t/n/orders-partition-2") == 2
    assert partition_number("persistent://t/n/orders") is None
    assert subscription_name("billing") == "billing"
    assert subscription_name(EPHEMERAL) != subscription_name(EPHEMERAL)


@pytest.mark.parametrize("name", ["orders-partition-0", native_name("a/b"), native_name("http://a/b/c")])
def test_names_that_pulsar_cannot_have_are_refused(name: str) -> None:
    with pytest.raises(InvalidName):
        topic_path(name, "public", "default")


@pytest.mark.parametrize(
    ("active", "connection", "owned", "change"),
    [
        ("me", "here", False, Change.TAKE),
        ("me", "here", True, Change.NONE),
        ("me", "anew", True, Change.NONE),
        ("other", "here", False, Change.NONE),
        ("other", "here", True, Change.GIVE),
        ("other", "anew", True, Change.LOST),
        ("other", "", True, Change.LOST),
        ("", "", True, Change.NONE),
        ("", "here", False, Change.NONE),
    ],
)
def test_what_a_look_at_the_group_means(active: str, connection: str, owned: bool, change: Change) -> None:
    standing = Standing(active, connection, others=True)
    assert change_of(standing, "me", owned=owned, connection="here") is change
