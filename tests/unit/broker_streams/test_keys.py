"""Keys, agendas and the index by time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import CHECKPOINT_KEY, DecodeError, InvalidMessage
from broker_streams import keys
from broker_streams.agenda import EVENT, PARTS, WALL, WINDOWS, Agenda, OpenWindow

TIMES = st.integers(-(1 << 62), 1 << 62)
NAMES = st.text(max_size=3)
OPEN = st.builds(OpenWindow, TIMES, TIMES, TIMES, st.binary(max_size=3))
AGENDAS = st.builds(
    Agenda,
    expiry=st.none() | TIMES,
    timers=st.dictionaries(NAMES, TIMES, max_size=3),
    wall_timers=st.dictionaries(NAMES, TIMES, max_size=3),
    windows=st.dictionaries(NAMES, st.lists(OPEN, min_size=1, max_size=3), max_size=2),
)


@given(st.binary())
def test_any_bytes_round_trip(key):
    assert keys.encode(keys.decode(key)) == key


@given(st.text())
def test_any_text_round_trips(key):
    assert keys.decode(keys.encode(key)) == key


def test_a_lone_surrogate_of_no_byte_is_refused():
    with pytest.raises(InvalidMessage, match="surrogate"):
        keys.encode("\ud800")


@pytest.mark.parametrize("key", [CHECKPOINT_KEY, keys.RESERVED, keys.agenda_key(b"a")])
def test_reserved_keys_are_refused(key):
    assert keys.is_reserved(key)
    assert key.startswith(keys.RESERVED_STARTS)
    with pytest.raises(InvalidMessage, match="reserved"):
        keys.check(key)


@pytest.mark.parametrize("key", [b"", b"a", b"\x00", b"\x00anybroker", CHECKPOINT_KEY + b"s"])
def test_other_keys_are_not_reserved(key):
    assert not keys.is_reserved(key)
    keys.check(key)


@given(st.binary())
def test_agendas_have_the_keys_of_their_rows(key):
    row = keys.agenda_key(key)
    assert keys.user_key(row) == key
    assert keys.is_reserved(row)


def test_rows_are_no_agendas():
    assert keys.user_key(b"a") is None
    assert keys.user_key(CHECKPOINT_KEY) is None


@given(st.lists(st.tuples(TIMES, st.binary(max_size=4))), st.sampled_from(PARTS))
def test_entries_sort_by_time_and_key(found, part):
    entries = [keys.due_key(part, *each) for each in found]
    assert [keys.parse_due(each) for each in sorted(entries)] == sorted(found)
    start, stop = keys.due_range(part)
    assert all(start <= each < stop for each in entries)
    for other in PARTS:
        if other != part:
            first, last = keys.due_range(other)
            assert not any(first <= each < last for each in entries)


@given(AGENDAS)
def test_agendas_round_trip(agenda):
    packed = agenda.pack()
    assert Agenda.unpack(packed) == agenda
    assert (packed is None) == (agenda == Agenda())


@pytest.mark.parametrize("data", [b"", b"\xc1", b"nonsense", b"\x93\x01\x02\x03"])
def test_a_row_that_is_no_agenda(data):
    with pytest.raises(DecodeError, match="agenda"):
        Agenda.unpack(data)


@given(st.lists(AGENDAS, max_size=4), st.binary(max_size=3))
def test_the_index_follows_the_agendas(agendas, key):
    """Whatever the history, the index has the earliest time of each part, and nothing else."""
    index: set[bytes] = set()
    old: bytes | None = None
    for agenda in agendas:
        new = agenda.pack()
        for entry, data in keys.due_changes(key, old, new).items():
            if data is None:
                index.remove(entry)
            else:
                assert entry not in index
                index.add(entry)
        old = new
        found: dict[bytes, list[int]] = {
            EVENT: [*agenda.timers.values(), *([] if agenda.expiry is None else [agenda.expiry])],
            WALL: list(agenda.wall_timers.values()),
            WINDOWS: [each.due for opened in agenda.windows.values() for each in opened],
        }
        assert index == {keys.due_key(part, min(times), key) for part, times in found.items() if times}
