"""Offsets of message ids, names of topics, and the check for removed records."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import BackendError, InvalidName, OffsetOutOfRange
from broker.names import EPHEMERAL, native_name
from broker_pulsar.log_stats import removed
from broker_pulsar.message_ids import LARGEST, first_chunk, is_beyond, next_position, pack, unpack
from broker_pulsar.names import subscription_name, topic_path

places = st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**20 - 1), st.integers(0, 4095))


@given(places, places)
def test_offsets_sort_as_ids_do(one: tuple[int, int, int], two: tuple[int, int, int]) -> None:
    assert (pack(*one) < pack(*two)) == (one < two)
    assert unpack(pack(*one)) == one
    assert 0 <= pack(*one) <= LARGEST < 2**63


@pytest.mark.parametrize("place", [(2**31, 0, 0), (0, 2**20, 0), (0, 0, 4096), (-1, 0, 0), (0, -1, 0)])
def test_parts_that_do_not_fit_are_refused(place: tuple[int, int, int]) -> None:
    with pytest.raises(BackendError, match="does not fit"):
        pack(*place)


@pytest.mark.parametrize("offset", [-1, LARGEST + 1])
def test_offsets_out_of_range_are_refused(offset: int) -> None:
    with pytest.raises(OffsetOutOfRange, match=str(offset)):
        unpack(offset)


class Id:
    """As the client's id, which exposes the batch size and the first chunk only in its serialized form."""

    def __init__(self, slot: int, serialized: str) -> None:
        self._slot, self._serialized = slot, serialized

    def ledger_id(self) -> int:
        return 300

    def entry_id(self) -> int:
        return 2

    def batch_index(self) -> int:
        return self._slot

    def serialize(self) -> bytes:
        return bytes.fromhex(self._serialized)


def test_the_next_position_is_in_the_batch_or_in_the_next_entry() -> None:
    assert next_position(Id(-1, "08ac021002")) == pack(300, 3, 0)
    assert next_position(Id(0, "08ac021002 2000 3003")) == pack(300, 2, 2)
    assert next_position(Id(2, "08ac021002 2002 3003")) == pack(300, 3, 0)


def test_the_first_chunk_of_a_message_is_another_entry() -> None:
    assert first_chunk(Id(-1, "08ac021002")) == pack(300, 2, 0)
    assert first_chunk(Id(-1, "08ac021002 3a05 08ab021009")) == pack(299, 9, 0)


def test_names_map_one_to_one() -> None:
    assert topic_path("orders.eu", "public", "default").url == "persistent://public/default/orders.eu"
    assert topic_path(native_name("persistent://t/n/a b"), "public", "default").path == "/persistent/t/n/a%20b"
    assert topic_path(native_name("t/n/x"), "public", "default").url == "persistent://t/n/x"
    assert topic_path("orders", "t", "n").partition(2).url == "persistent://t/n/orders-partition-2"
    assert subscription_name("billing") == "billing"
    assert subscription_name(EPHEMERAL) != subscription_name(EPHEMERAL)


@pytest.mark.parametrize("name", ["orders-partition-0", native_name("a/b"), native_name("http://a/b/c")])
def test_names_that_pulsar_cannot_have_are_refused(name: str) -> None:
    with pytest.raises(InvalidName):
        topic_path(name, "public", "default")


def ledgers(**entries: int) -> dict[str, Any]:
    found = [{"ledgerId": int(name[1:]), "entries": number} for name, number in entries.items()]
    return {"ledgers": [*found[:-1], {**found[-1], "entries": 0}], "currentLedgerEntries": found[-1]["entries"]}


@pytest.mark.parametrize(
    ("now", "start", "stop", "is_removed"),
    [
        # No record was removed, or none that was unread.
        (ledgers(_1=10, _2=10, _3=5), pack(1, 4, 0), pack(2, 0, 0), False),
        (ledgers(_2=10, _3=5), pack(2, 0, 0), pack(2, 1, 0), False),
        (ledgers(_2=10, _3=5), pack(1, 10, 0), pack(2, 0, 0), False),
        (ledgers(_3=5), pack(1, 10, 0), pack(2, 0, 0), False),
        # The rest of the first ledger, or a whole ledger.
        (ledgers(_2=10, _3=5), pack(1, 9, 0), pack(2, 0, 0), True),
        (ledgers(_3=5), pack(1, 10, 0), pack(3, 0, 0), True),
        # The ledger that was open then: its final size is unknown.
        (ledgers(_4=5), pack(3, 5, 0), pack(4, 0, 0), True),
        ({}, pack(3, 5, 0), pack(4, 0, 0), True),
    ],
)
def test_records_removed_before_they_were_read(now: dict[str, Any], start: int, stop: int, is_removed: bool) -> None:
    assert removed(ledgers(_1=10, _2=10, _3=5), now, start, stop) is is_removed


@pytest.mark.parametrize("slot", [0, 1, 5])
def test_the_start_of_the_next_entry_is_the_end_of_the_log(slot: int) -> None:
    end, following = pack(3, 2, slot), pack(3, 3, 0)
    assert [is_beyond(end + step, end) for step in (-1, 0, 1)] == [False, False, True]
    assert [is_beyond(following + step, end) for step in (-1, 0, 1)] == [True, False, True]
