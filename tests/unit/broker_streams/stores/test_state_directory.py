"""`StateDirectory`: locks, owners, names, stores that cannot be read, and full disks."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from broker import Closed, ConfigurationError
from broker_streams.stores import lmdb as lmdb_module
from broker_streams.stores.directory import StateDirectory, default_state_dir, instances
from broker_streams.stores.lmdb import Lmdb
from broker_streams.stores.memory import Memory
from broker_streams.stores.sqlite import Sqlite
from broker_streams.stores.store import StoreCorrupt, StoreFactory, StoreLocked
from tests.unit.broker_streams.stores.kinds import PERSISTENT, every_persistent_kind

HERE = "tests.unit.broker_streams.stores"


@contextmanager
def another_process(path: Path, *instance: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    """A process that holds an instance, and the name of that."""
    command = [sys.executable, "-m", f"{HERE}.lock_process", str(path), *instance]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def data_file(directory: StateDirectory, factory: StoreFactory) -> Path:
    suffix = {"lmdb": "data.mdb", "sqlite": "*.sqlite", "rocksdb": "*.sst"}[factory.format]
    (file,) = (directory.path / f"table.0.{factory.format}").glob(suffix)
    return file


# -- locks ---------------------------------------------------------------------------------------------------


def test_another_process_has_the_instance(tmp_path: Path) -> None:
    with another_process(tmp_path, "a") as (process, _):
        with pytest.raises(StoreLocked, match=rf"{tmp_path}.*process {process.pid} on ") as locked:
            StateDirectory(tmp_path, "group", "a")
        assert locked.value.process == process.pid
        assert locked.value.directory == tmp_path / "group" / "a"
        assert locked.value.retriable
        with StateDirectory(tmp_path, "group", "b"), StateDirectory(tmp_path, "group2", "a"):
            pass
        process.kill()
        process.wait()
        with StateDirectory(tmp_path, "group", "a") as directory:
            assert directory.instance == "a"


def test_without_a_name_an_instance_takes_the_first_free_number(tmp_path: Path) -> None:
    with another_process(tmp_path) as (process, name), StateDirectory(tmp_path, "group") as second:
        assert (name, second.instance) == ("0", "1")
        with StateDirectory(tmp_path, "group") as third:
            assert third.instance == "2"
        process.communicate("")
        with StateDirectory(tmp_path, "group") as first:
            assert first.instance == "0"
    assert instances(tmp_path, "group") == ["0", "1", "2"]
    assert instances(tmp_path, "unknown") == []


def test_the_same_process_has_the_instance(tmp_path: Path) -> None:
    with StateDirectory(tmp_path, "group", "a"):
        with pytest.raises(StoreLocked) as locked:
            StateDirectory(tmp_path, "group", "a")
        assert locked.value.process == os.getpid()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", f"{HERE}.fork_process", str(tmp_path)], check=True)


@every_persistent_kind
def test_a_store_is_open_already(factory: StoreFactory, tmp_path: Path) -> None:
    with StateDirectory(tmp_path, "group") as directory:
        store = directory.open(factory, "table.0")
        with pytest.raises(StoreLocked, match=r"table\.0"):
            directory.open(factory, "table.0")
        directory.open(factory, "table.1")
        store.close()
        directory.open(factory, "table.0").write({"rows": {b"a": b"1"}})


def test_closing_the_directory_closes_its_stores(tmp_path: Path) -> None:
    with StateDirectory(tmp_path, "group") as directory:
        stores = [directory.open(factory, "table.0") for factory in (Memory(),)]
        stores.append(directory.open(Lmdb(), "table.1"))
    assert [store.closed for store in stores] == [True, True]
    directory.close()
    with pytest.raises(Closed):
        directory.open(Lmdb(), "table.1")


# -- places --------------------------------------------------------------------------------------------------


def test_directories_are_private(tmp_path: Path) -> None:
    shared = tmp_path / "group"
    shared.mkdir()
    shared.chmod(0o755)
    with StateDirectory(tmp_path, "group", "a") as directory:
        directory.open(Lmdb(), "table.0")
        made = [directory.path, shared, directory.path / "table.0.lmdb"]
        assert [path.stat().st_mode & 0o777 for path in made] == [0o700] * 3


def test_a_directory_that_others_can_write_to(tmp_path: Path) -> None:
    (tmp_path / "group").mkdir()
    (tmp_path / "group").chmod(0o777)
    with pytest.raises(ConfigurationError, match="writable for other users"):
        StateDirectory(tmp_path, "group")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "group").mkdir()
    os.chown(tmp_path / "group", 12345, 12345)
    if (tmp_path / "group").stat().st_uid == os.geteuid():
        pytest.skip("the file system has no owners")
    with pytest.raises(ConfigurationError, match=r"12345.*state_dir"):
        StateDirectory(tmp_path, "group")


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"file.*state_dir"):
        StateDirectory(tmp_path / "file", "group")


def test_the_default_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/var/lib/somebody")
    assert default_state_dir() == Path("/var/lib/somebody/anybroker/streams")
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_STATE_HOME", ignored)
        monkeypatch.setenv("HOME", "/home/somebody")
        assert default_state_dir() == Path("/home/somebody/.local/state/anybroker/streams")


@pytest.mark.parametrize("temporary", ["/tmp", "/tmp/state", "/var/tmp/x", "/dev/shm"])
def test_the_default_place_is_never_temporary(temporary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", temporary)
    with pytest.raises(ConfigurationError, match=f"{temporary}.*state_dir"):
        StateDirectory(None, "group")


def test_any_name_is_a_file_name(tmp_path: Path) -> None:
    names = ["persistent://public/default/clicks.3", "..", ".hidden", "a.lmdb", "ü b", "a.lmdb.corrupt-1"]
    for instance in ("..", "a/b"):
        with StateDirectory(tmp_path, "../group", instance) as directory:
            assert directory.path.parent.parent == tmp_path
            for name in names:
                directory.open(Sqlite(), name)
            assert sorted(found.name for found in directory.stores()) == sorted(names)
    assert instances(tmp_path, "../group") == ["..", "a/b"]
    with pytest.raises(ConfigurationError, match="150 characters"):
        StateDirectory(tmp_path, "g" * 200)


# -- what lies there -----------------------------------------------------------------------------------------


def test_stores_are_listed_and_removed(tmp_path: Path) -> None:
    with StateDirectory(tmp_path, "group") as directory:
        for name in ("table.0", "table.1"):
            directory.open(Lmdb(), name).write({"rows": {b"a": b"1"}})
        directory.open(Sqlite(), "join.0")
        assert [(found.name, found.format) for found in directory.stores()] == [
            ("join.0", "sqlite"),
            ("table.0", "lmdb"),
            ("table.1", "lmdb"),
        ]
        assert all(found.size > 4096 for found in directory.stores())
        assert [found.path for found in directory.remove("table.0")] == [directory.path / "table.0.lmdb"]
        assert directory.remove("table.0") == []
        assert directory.open(Lmdb(), "table.0").count("rows") == 0
        assert len(directory.clear()) == 3
        assert directory.stores() == []


def test_a_removal_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    with StateDirectory(tmp_path, "group") as directory:
        directory.open(Sqlite(), "table.0").close()
        (directory.path / "table.0.sqlite").rename(directory.path / "table.0.sqlite.removed")
        assert directory.stores() == []
        assert not (directory.path / "table.0.sqlite.removed").exists()


def test_a_store_of_another_format_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with StateDirectory(tmp_path, "group") as directory:
        directory.open(Sqlite(), "table.0").close()
        with caplog.at_level(logging.WARNING, "broker_streams"):
            directory.open(Lmdb(), "table.0")
        assert "table.0 is opened as lmdb; its store as sqlite stays in" in caplog.text


# -- stores that cannot be read ------------------------------------------------------------------------------


@every_persistent_kind
def test_a_store_full_of_rubbish_is_set_aside(
    factory: StoreFactory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with StateDirectory(tmp_path, "group") as directory:
        for number in (1, 2):
            store = directory.open(factory, "table.1")
            store.close()
            place = directory.path / f"table.1.{factory.format}"
            for file in place.iterdir():
                if file.name in {"data.mdb", "rows.sqlite", "CURRENT"}:
                    file.write_bytes(b"rubbish" * 5000)
            with caplog.at_level(logging.WARNING, "broker_streams"):
                store = directory.open(factory, "table.1")
            assert store.count("rows") == 0
            store.write({"rows": {b"a": b"1"}})
            store.close()
            assert f"table.1.{factory.format}.corrupt-{number}" in caplog.text
            aside = [found for found in directory.stores() if found.corrupt]
            assert [found.name for found in aside] == ["table.1"] * number


@pytest.mark.parametrize("left", [3, 50])
def test_a_file_of_lmdb_that_was_cut_off(left: int, tmp_path: Path) -> None:
    """Reading a page beyond the end of the file would kill the process."""
    with StateDirectory(tmp_path, "group") as directory:
        store = directory.open(Lmdb(), "table.0")
        store.write({"rows": {b"%d" % number: bytes(500) for number in range(2000)}})
        store.close()
        os.truncate(data_file(directory, Lmdb()), left * 4096)
        assert directory.open(Lmdb(), "table.0").count("rows") == 0
        assert [found.corrupt for found in directory.stores()] == [False, True]


@pytest.mark.parametrize("boot", [b"another boot\n", b""])
def test_a_store_of_lmdb_that_was_not_synced_when_the_machine_stopped(
    boot: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StateDirectory(tmp_path, "group") as directory:
        store = directory.open(Lmdb(), "table.0")
        store.write({"rows": {b"a": b"1"}}, durable=False)
        mark = directory.path / "table.0.lmdb" / "unsynced"
        assert mark.exists()
        store.write({"rows": {b"b": b"1"}})
        assert not mark.exists()
        store.write({"rows": {b"c": b"1"}}, durable=False)
        left = mark.read_bytes()
        store.close()
        assert not mark.exists()
        # As after a kill, then as after a loss of power.
        mark.write_bytes(left)
        assert directory.open(Lmdb(), "table.0").count("rows") == 3
        directory.close()
    mark.write_bytes(left)
    monkeypatch.setattr(lmdb_module, "_boot", lambda: boot)
    with StateDirectory(tmp_path, "group") as directory:
        assert directory.open(Lmdb(), "table.0").count("rows") == 0


def test_rows_of_rocksdb_in_a_broken_block_are_not_passed_over(tmp_path: Path) -> None:
    factory = PERSISTENT["rocksdb"]
    with StateDirectory(tmp_path, "group") as directory:
        store = directory.open(factory, "table.0")
        store.write({"rows": {b"%06d" % number: os.urandom(200) for number in range(5000)}})
        store._rows.flush()  # pyright: ignore[reportAttributeAccessIssue]
        store.close()
        with data_file(directory, factory).open("r+b") as file:
            file.seek(300_000)
            file.write(b"\xaa" * 5000)
        store = directory.open(factory, "table.0")
        for reverse in (False, True):
            with pytest.raises(StoreCorrupt, match=r"table\.0"):
                list(store.items("rows", reverse=reverse))
        with pytest.raises(StoreCorrupt) as corrupt:
            store.count("rows")
        directory.set_aside(corrupt.value)
        assert directory.open(factory, "table.0").count("rows") == 0


# -- disks ---------------------------------------------------------------------------------------------------


@every_persistent_kind
def test_a_full_disk(factory: StoreFactory, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"{HERE}.full_disk_process", str(tmp_path), factory.format]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_file_of_lmdb_shrinks_when_it_is_opened(tmp_path: Path) -> None:
    rows: dict[bytes, bytes | None] = {b"%d" % number: bytes(1000) for number in range(20_000)}
    with StateDirectory(tmp_path, "group") as directory:
        store = directory.open(Lmdb(), "table.0")
        store.write({"rows": rows}, {"position": b"1"})
        store.write({"rows": dict.fromkeys([*rows][100:])})
        size = store.size()
        store.close()
        store = directory.open(Lmdb(), "table.0")
        assert store.size() < size / 10
        assert dict(store.items("rows")) == dict([*rows.items()][:100])
        assert store.meta("position") == b"1"
        store.write({"rows": rows})
        assert store.count("rows") == 20_000


@pytest.mark.parametrize("durable", [False, True])
def test_a_store_of_lmdb_that_changes_to_writes_without_sync_is_open(durable: bool, tmp_path: Path) -> None:
    """LMDB has to be opened again for that, while other threads may ask for the size."""
    store: Any = Lmdb().open(tmp_path, "table.0")
    if durable:
        store.write({"rows": {b"a": b"1"}}, durable=False)
    seen: list[tuple[bool, bool]] = []
    open_again = store._open

    def opening(*, sync: bool) -> None:
        seen.append((store.closed, store.size() > 0))
        open_again(sync=sync)

    store._open = opening
    store.write({"rows": {b"a": b"2"}}, durable=durable)
    assert seen == [(False, True)]
    assert store.get("rows", b"a") == b"2"
    store.close()


PAGES = """
import sys
from pathlib import Path
from broker_streams.stores.lmdb import Lmdb
from broker_streams.stores.store import StoreCorrupt

path, needle, rubbish = Path(sys.argv[1]), sys.argv[2].encode(), sys.argv[3] == "rubbish"
store = Lmdb().open(path, "table")
store.write({"rows": {b"key-%d" % n: b"x" * 100 for n in range(60)}}, {"position.0": b"60"})
store.close()
file = path / "table.lmdb" / "data.mdb"
data = bytearray(file.read_bytes())
page = bytes(range(1, 256)) * 16 + bytes(16) if rubbish else bytes(4096)
for start in range(2 * 4096, len(data), 4096):
    if needle in data[start : start + 4096]:
        data[start : start + 4096] = page
file.write_bytes(data)
try:
    store = Lmdb().open(path, "table")
    store.meta("position.0"), store.count("rows"), store.get("rows", b"key-1"), list(store.items("rows"))
except StoreCorrupt as error:
    print(error)
"""


@pytest.mark.parametrize("page", ["zeros", "rubbish"])
@pytest.mark.parametrize("needle", ["position.0", "key-1"])
def test_a_spoiled_page_of_lmdb_makes_the_store_corrupt(tmp_path: Path, needle: str, page: str) -> None:
    # In a process of its own, which LMDB might end.
    done = subprocess.run(
        [sys.executable, "-c", PAGES, tmp_path, needle, page], capture_output=True, text=True, check=False, timeout=60
    )
    assert "table.lmdb' cannot be read: " in done.stdout, done.stderr
