"""Redo records: what is in them, and who reads them."""

from __future__ import annotations

import pytest

from broker import DecodeError
from broker_streams import keys
from broker_streams.redo import pack, redo_rows, stored_redo
from broker_streams.stores.memory import Memory

ROWS = {b"a": b"1", b"b": None, b"\xff\x00": b"", b"c": b"x" * 200}


def test_rows_are_spread_over_records_of_a_size() -> None:
    records = pack(ROWS, "token", most_bytes=60)
    assert list(records) == [keys.redo_key(0), keys.redo_key(1)]
    assert len(records[keys.redo_key(0)]) < 60
    assert redo_rows(records.values(), "token") == ROWS
    assert pack({}, "token", most_bytes=60) == {}


def test_records_of_another_checkpoint_are_left_out() -> None:
    store = Memory().open(None, "test")
    earlier, later = pack(ROWS, "earlier", most_bytes=60), pack({b"a": b"2"}, "later", most_bytes=60)
    store.write({keys.ROWS: {**earlier, **later, b"a": b"3"}})
    assert stored_redo(store, "later") == {b"a": b"2"}
    assert stored_redo(store, "earlier") == {b"c": b"x" * 200}
    assert stored_redo(store, "unknown") == {}


def test_their_keys_are_reserved() -> None:
    assert keys.is_reserved(keys.redo_key(0))
    assert keys.user_key(keys.redo_key(0)) is None


def test_other_bytes_are_refused() -> None:
    with pytest.raises(DecodeError, match="redo record cannot be read"):
        redo_rows([b"{}"], "token")
