"""All stores keep the same promises; see `broker_streams.stores.store`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, Final

import pytest

from broker import Closed, ConfigurationError, MissingClient
from broker_streams.stores.rocksdb import RocksDb
from broker_streams.stores.store import Store, StoreFactory, StoreLocked, key_range, successor
from tests.unit.broker_streams.stores.kinds import ALL, every_persistent_kind

KEYS: Final = [
    *(b"", b"\x00", b"\x00\x00", b"a", b"a\x00", b"a\x00b", b"aa"),
    *(b"ab", b"b", b"\xfe\xff", b"\xff", b"\xff\xff"),
]
LONG: Final = [
    *(b"k" * size for size in (447, 448, 449, 478, 479, 480, 481, 510, 511, 512, 4096, 100_000)),
    # Their order is not the order of their digests.
    *(b"k" * 500 + bytes((n,)) for n in range(20)),
    *(b"k" * 448 + bytes((n,)) for n in range(0, 256, 17)),
    *(b"\xff" * size for size in (447, 448, 480, 600)),
    b"k" * 447 + b"\x00",
    b"k" * 447 + b"l",
    b"k" * 447 + b"l" * 100,
]


@pytest.fixture(params=[*ALL.values()], ids=[*ALL])
def factory(request: pytest.FixtureRequest) -> StoreFactory:
    return request.param


@pytest.fixture
def store(factory: StoreFactory, tmp_path: Path) -> Iterator[Store]:
    store = factory.open(tmp_path, "store")
    yield store
    store.close()


def numbered(*numbers: int) -> dict[bytes, bytes | None]:
    return {b"%06d" % number: b"value %d" % number for number in numbers}


def keys(store: Store, start: bytes | None = None, stop: bytes | None = None, prefix: bytes = b"") -> list[bytes]:
    """The keys of a range, after a look at both directions."""
    forward = list(store.items("rows", start=start, stop=stop, prefix=prefix))
    assert list(store.items("rows", start=start, stop=stop, prefix=prefix, reverse=True)) == forward[::-1]
    assert store.get_many("rows", [key for key, _ in forward]) == [value for _, value in forward]
    return [key for key, _ in forward]


# -- rows ----------------------------------------------------------------------------------------------------


def test_o1_a_row_is_written_changed_and_deleted(store: Store) -> None:
    store.write({"rows": {b"a": b"1", b"b": b"2"}})
    assert store.get("rows", b"a") == b"1"
    store.write({"rows": {b"a": b"3", b"b": None, b"missing": None}})
    assert store.get_many("rows", [b"b", b"a", b"missing", b"a"]) == [None, b"3", None, b"3"]
    assert list(store.items("rows")) == [(b"a", b"3")]


def test_a_namespace_that_was_never_written_is_empty(store: Store) -> None:
    assert store.get("other", b"a") is None
    assert store.get_many("other", [b"a", b"b"]) == [None, None]
    assert store.get_many("rows", []) == []
    assert list(store.items("other", prefix=b"a")) == []
    assert store.count("other") == 0


def test_namespaces_are_apart(store: Store) -> None:
    store.write({"rows": {b"a": b"1"}, "due": {b"a": b"2", b"b": b"3"}, "ro": {b"ws": b"4"}})
    assert (store.get("rows", b"a"), store.get("due", b"a"), store.get("ro", b"a")) == (b"1", b"2", None)
    assert list(store.items("rows")) == [(b"a", b"1")]
    assert list(store.items("due", reverse=True)) == [(b"b", b"3"), (b"a", b"2")]
    assert [store.count(name) for name in ("rows", "due", "ro", "r")] == [1, 2, 1, 0]
    store.write({"due": {b"a": None}})
    assert store.get("rows", b"a") == b"1"


def test_o1_rows_are_ordered_by_the_bytes_of_their_keys(store: Store) -> None:
    store.write({"rows": {key: b"value of " + key for key in reversed(KEYS)}})
    assert keys(store) == sorted(KEYS)
    assert store.get_many("rows", KEYS) == [b"value of " + key for key in KEYS]
    for start in KEYS:
        assert keys(store, start=start) == [key for key in sorted(KEYS) if key >= start]
        assert keys(store, stop=start) == [key for key in sorted(KEYS) if key < start]
        assert keys(store, prefix=start) == [key for key in sorted(KEYS) if key.startswith(start)]
        for stop in KEYS:
            assert keys(store, start=start, stop=stop) == [key for key in sorted(KEYS) if start <= key < stop]
            expected = [key for key in sorted(KEYS) if key.startswith(b"a") and start <= key < stop]
            assert keys(store, prefix=b"a", start=start, stop=stop) == expected


def test_keys_of_any_length(store: Store) -> None:
    rows = {key: key[-3:] + b"%d" % len(key) for key in LONG}
    store.write({"rows": {**rows, **dict.fromkeys(KEYS, b"")}})
    everything = sorted({*LONG, *KEYS})
    assert keys(store) == everything
    assert store.count("rows") == len(everything)
    for bound in LONG:
        assert store.get("rows", bound) == rows[bound]
        assert keys(store, start=bound) == [key for key in everything if key >= bound]
        assert keys(store, stop=bound) == [key for key in everything if key < bound]
        assert keys(store, prefix=bound) == [key for key in everything if key.startswith(bound)]
    store.write({"rows": dict.fromkeys(LONG[::2])})
    assert keys(store) == sorted({*LONG[1::2], *KEYS})
    assert store.get("rows", LONG[0]) is None


def test_values_of_any_size(store: Store) -> None:
    values = [b"", b"\x00", bytes(range(256)) * 40, b"large" * 1_000_000]
    store.write({"rows": {b"%d" % number: value for number, value in enumerate(values)}})
    assert store.get_many("rows", [b"0", b"1", b"2", b"3"]) == values
    assert [value for _, value in store.items("rows")] == values
    store.write({"rows": {b"3": b"small", b"0": b"large" * 100_000}})
    assert [len(value) for _, value in store.items("rows", reverse=True)] == [5, 10240, 1, 500_000]


def test_many_rows_are_iterated_in_both_directions(store: Store) -> None:
    store.write({"rows": numbered(*range(0, 6000, 2))})
    store.write({"rows": numbered(*range(1, 6000, 2))})
    assert keys(store) == list(numbered(*range(6000)))
    assert keys(store, start=b"001000", stop=b"004500") == list(numbered(*range(1000, 4500)))
    assert store.count("rows") == 6000


def test_bounds_that_hold_nothing(store: Store) -> None:
    store.write({"rows": numbered(1, 2, 3)})
    assert keys(store, start=b"000003", stop=b"000001") == []
    assert keys(store, start=b"000002", stop=b"000002") == []
    assert keys(store, prefix=b"9") == []
    assert keys(store, prefix=b"000001", start=b"000002") == []


# -- writes --------------------------------------------------------------------------------------------------


def test_o1_named_values_are_no_rows(store: Store) -> None:
    assert store.meta("position") is None
    store.write({}, {"position": b"1", "identity": b""})
    store.write({"rows": {b"position": b"row"}}, {"position": b"2"})
    assert (store.meta("position"), store.meta("identity")) == (b"2", b"")
    assert store.count("rows") == 1


@every_persistent_kind
def test_a_write_that_fails_leaves_nothing(factory: StoreFactory, tmp_path: Path) -> None:
    store = factory.open(tmp_path, "store")
    store.write({"rows": {b"a": b"1"}}, {"position": b"1"})
    bad: dict[bytes, Any] = {b"a": b"2", b"b": b"3", b"c": object()}
    with pytest.raises(Exception, match=r".") as failed:
        store.write({"due": {b"a": b"1"}, "rows": bad}, {"position": b"2"})
    assert not isinstance(failed.value, Closed)
    assert list(store.items("rows")) == [(b"a", b"1")]
    assert store.count("due") == 0
    assert store.meta("position") == b"1"
    store.write({"rows": {b"a": b"2"}})
    assert list(store.items("rows")) == [(b"a", b"2")]
    store.close()


def test_clear_deletes_rows_and_named_values(store: Store) -> None:
    store.write({"rows": numbered(*range(100)), "due": numbered(1)}, {"position": b"1"})
    store.clear()
    assert (store.count("rows"), store.count("due"), store.meta("position")) == (0, 0, None)
    assert keys(store) == []
    store.write({"rows": numbered(5)}, {"position": b"2"})
    assert keys(store) == list(numbered(5))


def test_the_size_grows(store: Store) -> None:
    before = store.size()
    store.write({"rows": {b"%d" % number: bytes(10_000) for number in range(20)}})
    assert store.size() - before > 10_000


def test_writes_without_sync_and_with_it(store: Store) -> None:
    for number in range(20):
        store.write({"rows": numbered(number), f"space {number}": numbered(1)}, durable=number % 5 == 0)
    assert keys(store) == list(numbered(*range(20)))
    assert store.count("space 19") == 1


# -- iterating while others write ----------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
def test_iterating_while_writing(store: Store, reverse: bool) -> None:
    """Rows that stay are returned once, in order, whatever else is written."""
    stay = numbered(*range(0, 4000, 2))
    store.write({"rows": stay | numbered(*range(1, 4000, 4))})
    seen: list[bytes] = []
    for number, (key, value) in enumerate(store.items("rows", reverse=reverse)):
        seen.append(key)
        assert value == b"value %d" % int(key)
        if number % 50 == 0:
            store.write({"rows": numbered(number + 3, 3999 - 4 * number) | {b"%06d" % (number * 2 + 1): None}})
        if number % 500 == 0:
            store.write({"rows": {b"large": b"x" * 2_000_000}}, durable=False)
            store.write({"rows": {b"large": None}})
    assert seen == sorted(set(seen), reverse=reverse)
    assert set(stay) <= set(seen)


def test_rows_may_be_deleted_while_they_are_iterated(store: Store) -> None:
    store.write({"rows": numbered(*range(3000))})
    for key, _ in store.items("rows"):
        store.write({"rows": {key: None}}, durable=False)
    assert store.count("rows") == 0


def test_an_abandoned_iterator_holds_nothing(store: Store) -> None:
    store.write({"rows": numbered(*range(3000))})
    abandoned = [store.items("rows", reverse=reverse) for reverse in (False, True)]
    assert [next(iterator)[0] for iterator in abandoned] == [b"000000", b"002999"]
    for _ in range(5):
        store.write({"rows": {b"large": b"x" * 20_000_000}})
    store.close()
    with pytest.raises(Closed):
        list(abandoned[0])


def test_o1_another_thread_sees_whole_writes(store: Store) -> None:
    """Reads of one call are of one moment, also while LMDB moves its map and changes its mode."""
    names = [b"first", b"k" * 600, b"last"]
    store.write({"rows": dict.fromkeys(names, b"0"), "due": dict.fromkeys(names, b"0")})
    ended = Event()

    def read() -> int:
        latest = 0
        while not ended.is_set():
            values = store.get_many("rows", names)
            assert values[0] == values[1] == values[2]
            number = int((values[0] or b"").rstrip(b"."))
            assert number >= latest
            latest = number
            single = int((store.get("due", b"last") or b"").rstrip(b"."))
            assert single >= latest
            assert [key for key, _ in store.items("rows")] == sorted(names)
        return latest

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            for number in range(1, 120):
                value = b"%d" % number + b"." * (number * 3000)
                rows = dict.fromkeys(names, value)
                store.write({"rows": rows, "due": rows}, durable=number % 10 == 0)
        finally:
            ended.set()
        assert all(reader.result() <= 119 for reader in readers)


# -- opening and closing -------------------------------------------------------------------------------------


def test_a_closed_store(store: Store) -> None:
    store.write({"rows": numbered(1)})
    iterator = store.items("rows")
    assert not store.closed
    store.close()
    store.close()
    assert store.closed
    for call in (
        lambda: store.get("rows", b"a"),
        lambda: store.get_many("rows", [b"a"]),
        lambda: store.write({"rows": numbered(1)}),
        lambda: list(store.items("rows")),
        lambda: next(iterator),
        lambda: store.count("rows"),
        lambda: store.meta("position"),
        store.size,
        store.clear,
    ):
        with pytest.raises(Closed, match="store"):
            call()


@every_persistent_kind
def test_o1_a_store_opened_again_has_everything(factory: StoreFactory, tmp_path: Path) -> None:
    rows = {key: key[:5] for key in {*KEYS, *LONG}}
    for durable in (True, False):
        store = factory.open(tmp_path, f"store-{durable}")
        store.write({"rows": rows, "due": numbered(1)}, {"position": b"7"}, durable=durable)
        store.close()
        store = factory.open(tmp_path, f"store-{durable}")
        assert dict(store.items("rows")) == rows
        assert list(store.items("due")) == list(numbered(1).items())
        assert store.meta("position") == b"7"
        store.close()


@every_persistent_kind
def test_stores_of_one_directory_are_apart(factory: StoreFactory, tmp_path: Path) -> None:
    first, second = factory.open(tmp_path, "table.0"), factory.open(tmp_path, "table.1")
    first.write({"rows": numbered(1)})
    assert second.count("rows") == 0
    first.close()
    second.close()


@pytest.mark.parametrize("name", ["lmdb", "rocksdb"])
def test_a_store_that_is_open_already(name: str, tmp_path: Path) -> None:
    first = ALL[name].open(tmp_path, "store")
    with pytest.raises(StoreLocked, match="store"):
        ALL[name].open(tmp_path, "store")
    first.write({"rows": numbered(1)})
    first.close()


def test_stores_in_memory_are_gone_when_closed() -> None:
    store = ALL["memory"].open(None, "store")
    store.write({"rows": numbered(1)})
    store.close()
    assert ALL["memory"].open(None, "store").count("rows") == 0


@pytest.mark.parametrize(
    ("name", "module", "extra"), [("lmdb", "lmdb", "streams"), ("rocksdb", "rocksdict", "rocksdb")]
)
def test_a_package_that_is_not_installed(
    name: str, module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingClient, match=rf"{module}.*anybroker\[{extra}\]"):
        ALL[name].open(tmp_path, "store")
    assert list(tmp_path.iterdir()) == []


@every_persistent_kind
def test_a_store_on_disk_needs_a_directory(factory: StoreFactory) -> None:
    with pytest.raises(ValueError, match="directory"):
        factory.open(None, "store")


@pytest.mark.parametrize("options", [{"cache": 0}, {"write_buffer": "16"}, {"write_buffer": 1.5}])
def test_refused_options_of_rocksdb(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        RocksDb(**options)


# -- ranges --------------------------------------------------------------------------------------------------


def test_the_key_after_a_prefix() -> None:
    assert successor(b"a") == b"b"
    assert successor(b"a\xff\xff") == b"b"
    assert successor(b"\xff") is None
    assert successor(b"") is None


def test_a_prefix_narrows_a_range() -> None:
    assert key_range(None, None, b"") == (None, None)
    assert key_range(None, None, b"ab") == (b"ab", b"ac")
    assert key_range(b"aa", b"b", b"ab") == (b"ab", b"ac")
    assert key_range(b"abc", b"abd", b"ab") == (b"abc", b"abd")
    assert key_range(None, None, b"\xff") == (b"\xff", None)
    assert key_range(None, b"\xff\x01", b"\xff") == (b"\xff", b"\xff\x01")
