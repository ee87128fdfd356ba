"""Random histories of calls: a store holds what a dict of dicts would."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from broker_streams.stores.memory import Memory
from broker_streams.stores.store import StoreFactory
from tests.unit.broker_streams.stores.kinds import ALL

NAMESPACES = st.sampled_from(["rows", "due", "rows2"])
SHORT = st.binary(max_size=3)
LONG = st.builds(
    lambda fill, size, rest: fill * size + rest,
    st.sampled_from([b"k", b"\xff", b"\x00"]),
    st.sampled_from([445, 447, 448, 449, 479, 480, 481, 700]),
    st.binary(max_size=2),
)
KEYS = SHORT | LONG
CHANGES = st.dictionaries(NAMESPACES, st.dictionaries(KEYS, st.none() | st.binary(max_size=4), max_size=12), max_size=2)
META = st.dictionaries(st.sampled_from(["position", "identity"]), st.binary(max_size=3), max_size=2)
BOUND = st.none() | KEYS


class StoreHistory(RuleBasedStateMachine):
    factory: ClassVar[StoreFactory]

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="store-history-"))
        self.store = self.factory.open(self.directory, "store")
        self.rows: dict[str, dict[bytes, bytes]] = {}
        self.named: dict[str, bytes] = {}

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory)

    @rule(changes=CHANGES, meta=META, durable=st.booleans())
    def write(
        self, changes: Mapping[str, Mapping[bytes, bytes | None]], meta: Mapping[str, bytes], durable: bool
    ) -> None:
        self.store.write(changes, meta, durable=durable)
        for namespace, rows in changes.items():
            merged = self.rows.get(namespace, {}) | dict(rows)
            self.rows[namespace] = {key: value for key, value in merged.items() if value is not None}
        self.named.update(meta)

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.rows.clear()
        self.named.clear()

    @rule()
    def open_again(self) -> None:
        if not isinstance(self.factory, Memory):
            self.store.close()
            self.store = self.factory.open(self.directory, "store")

    @rule(namespace=NAMESPACES, keys=st.lists(KEYS, max_size=5))
    def get(self, namespace: str, keys: list[bytes]) -> None:
        rows = self.rows.get(namespace, {})
        asked = [*keys, *rows]
        assert self.store.get_many(namespace, asked) == [rows.get(key) for key in asked]
        assert [self.store.get(namespace, key) for key in asked] == [rows.get(key) for key in asked]

    @rule(namespace=NAMESPACES, start=BOUND, stop=BOUND, prefix=st.just(b"") | KEYS, reverse=st.booleans())
    def iterate(self, namespace: str, start: bytes | None, stop: bytes | None, prefix: bytes, reverse: bool) -> None:
        expected = sorted(
            row
            for row in self.rows.get(namespace, {}).items()
            if row[0].startswith(prefix) and (start is None or row[0] >= start) and (stop is None or row[0] < stop)
        )
        found = list(self.store.items(namespace, start=start, stop=stop, prefix=prefix, reverse=reverse))
        assert found == (expected[::-1] if reverse else expected)

    @rule(namespace=NAMESPACES)
    def count(self, namespace: str) -> None:
        assert self.store.count(namespace) == len(self.rows.get(namespace, {}))

    @rule()
    def look_at_named_values(self) -> None:
        assert {name: self.store.meta(name) for name in ("position", "identity")} == {
            "position": self.named.get("position"),
            "identity": self.named.get("identity"),
        }


@pytest.mark.parametrize("kind", ALL)
def test_a_store_is_a_dict_of_dicts(kind: str) -> None:
    history = type("History", (StoreHistory,), {"factory": ALL[kind]})
    run_state_machine_as_test(history, settings=settings(stateful_step_count=25, deadline=None))
