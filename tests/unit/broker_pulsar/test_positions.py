"""Pulsar's message ids as offsets: they sort the same, come back, and never wrap."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import BackendError, InvalidName, OffsetOutOfRange
from broker.names import EPHEMERAL, native_name
from broker_pulsar.log_stats import removed
from broker_pulsar.membership import Change, PartitionState, detect_change
from broker_pulsar.message_ids import LARGEST, next_position, pack, unpack
from broker_pulsar.names import partition_number, subscription_name, topic_path

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
        ("me", "here", False, Change.ASSIGNED),
        ("me", "here", True, Change.NONE),
        ("me", "anew", True, Change.NONE),
        ("other", "here", False, Change.NONE),
        ("other", "here", True, Change.REVOKED),
        ("other", "anew", True, Change.LOST),
        ("other", "", True, Change.LOST),
        ("", "", True, Change.NONE),
        ("", "here", False, Change.NONE),
    ],
)
def test_what_a_look_at_the_group_means(active: str, connection: str, owned: bool, change: Change) -> None:
    standing = PartitionState(active, connection, others=True, sent=0)
    assert detect_change(standing, "me", owned=owned, connection="here") is change


def test_what_follows_a_message_is_in_its_batch_or_in_the_next_entry() -> None:
    class Id:
        """As the client's, which shows the size of its batch in its bytes alone."""

        def __init__(self, slot: int, serialized: bytes) -> None:
            self.batch_index, self.serialize = (lambda: slot), (lambda: serialized)
            self.ledger_id, self.entry_id = (lambda: 300), (lambda: 2)

    fields = bytes.fromhex("08ac021002")
    assert next_position(Id(-1, fields)) == pack(300, 3, 0)
    assert next_position(Id(0, fields + bytes.fromhex("20003003"))) == pack(300, 2, 2)
    assert next_position(Id(2, fields + bytes.fromhex("20023003"))) == pack(300, 3, 0)


def ledgers(**entries: int) -> dict[str, Any]:
    found = [{"ledgerId": int(name[1:]), "entries": number} for name, number in entries.items()]
    return {"ledgers": [*found[:-1], {**found[-1], "entries": 0}], "currentLedgerEntries": found[-1]["entries"]}


@pytest.mark.parametrize(
    ("now", "start", "stop", "is_gone"),
    [
        # Nothing was removed, or nothing that was not read.
        (ledgers(_1=10, _2=10, _3=5), pack(1, 4, 0), pack(2, 0, 0), False),
        (ledgers(_2=10, _3=5), pack(2, 0, 0), pack(2, 1, 0), False),
        (ledgers(_2=10, _3=5), pack(1, 10, 0), pack(2, 0, 0), False),
        (ledgers(_3=5), pack(1, 10, 0), pack(2, 0, 0), False),
        # The rest of the first ledger, or a whole one.
        (ledgers(_2=10, _3=5), pack(1, 9, 0), pack(2, 0, 0), True),
        (ledgers(_3=5), pack(1, 10, 0), pack(3, 0, 0), True),
        # What was the open ledger then is gone, and with it how much came into it.
        (ledgers(_4=5), pack(3, 5, 0), pack(4, 0, 0), True),
        ({}, pack(3, 5, 0), pack(4, 0, 0), True),
    ],
)
def test_what_was_removed_before_a_read_came_to_it(now: dict[str, Any], start: int, stop: int, is_gone: bool) -> None:
    assert removed(ledgers(_1=10, _2=10, _3=5), now, start, stop) is is_gone
