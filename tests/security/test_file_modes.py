"""What the library writes is for its user alone, whatever the umask was."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from broker.driver import create_private_file, make_private_directory, narrow_mode
from broker.errors import InvalidSetting
from broker_kafka.offsets import SqlOffsetStore
from broker_pulsar.connection import _check_log
from broker_spark.common.files import LocalFiles
from broker_spark.runtime.hadoop import protect_directory
from broker_spark.runtime.local import _why_not_private, home_without_archive, socket_settings
from broker_spark.spool.spool import Spool

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no modes")

METADATA = {"backend": "jetstream", "subscription": "spark", "topics": ["orders"]}


@pytest.fixture(params=[0o000, 0o022, 0o377], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def check_private(place: Path) -> None:
    found = {path: mode(path) for path in (place, *place.rglob("*"))}
    assert {path: 0o700 if path.is_dir() else 0o600 for path in found} == found


def check_private_files(place: Path) -> None:
    assert {mode(path) for path in place.iterdir()} == {0o600}


def test_a_spool(tmp_path: Path, umask: int) -> None:
    place = tmp_path / "spools" / "orders"
    spool = Spool.open(LocalFiles(str(place)), str(place), METADATA)
    LocalFiles(str(place)).write("segments/000000000001-a-1-1.arrow", lambda file: file.write(b"rows"))
    spool.beat()
    check_private(tmp_path / "spools")
    assert len(list(place.rglob("*"))) == 5
    spool.release()


def test_a_wider_spool_is_narrowed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = tmp_path / "orders"
    spool = Spool.open(LocalFiles(str(place)), str(place), METADATA)
    spool.release()
    for path in (place, place / "owners", place / "spool.json"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    caplog.clear()
    Spool.open(LocalFiles(str(place)), str(place), METADATA).release()
    check_private(place)
    assert [record.getMessage() for record in caplog.records if "gave other users access" in record.getMessage()] == [
        f"{path} had the mode {was}, which gave other users access; it has {now} now"
        for path, was, now in sorted(
            [(place / "owners", "755", "700"), (place / "spool.json", "644", "600"), (place, "755", "700")],
            key=lambda each: caplog.text.index(f"{each[0]} had"),
        )
    ]
    caplog.clear()
    Spool.open(LocalFiles(str(place)), str(place), METADATA).release()
    assert "access" not in caplog.text


def test_a_directory_with_other_files_is_not_narrowed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data").chmod(0o755)
    (tmp_path / "data" / "mine.txt").touch()
    Spool.open(LocalFiles(str(tmp_path / "data")), "data", METADATA).release()
    assert mode(tmp_path / "data") == 0o755
    check_private(tmp_path / "data" / "owners")
    assert mode(tmp_path / "data" / "spool.json") == 0o600


def test_the_log_of_the_client_of_pulsar(tmp_path: Path, umask: int) -> None:
    log = tmp_path / "client.log"
    for _ in range(2):
        _check_log(log)
        assert mode(log) == 0o600
    log.chmod(0o640)
    _check_log(log)
    assert mode(log) == 0o640


def test_the_log_of_the_client_of_pulsar_is_not_created_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "client.log").symlink_to(tmp_path / "target")
    with pytest.raises(InvalidSetting, match="client_log"):
        _check_log(tmp_path / "client.log")
    assert not (tmp_path / "target").exists()


def test_directories_that_all_may_use_and_links_stay(tmp_path: Path) -> None:
    shared, target = tmp_path / "tmp", tmp_path / "target"
    shared.mkdir()
    shared.chmod(0o1777)
    target.touch()
    target.chmod(0o644)
    (tmp_path / "link").symlink_to(target)
    for each in (shared, tmp_path / "link", tmp_path / "missing"):
        narrow_mode(each)
    assert (mode(shared), mode(target)) == (0o1777, 0o644)


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / "new").symlink_to(target)
    with pytest.raises(FileExistsError):
        create_private_file(tmp_path / "new")
    half = tmp_path / f"spool.json.{os.getpid()}.half"
    half.symlink_to(target)
    LocalFiles(str(tmp_path)).write("spool.json", lambda file: file.write(b"{}"))
    assert target.read_bytes() == b"precious"
    assert not half.exists()


def test_new_directories_are_listed_from_the_outermost(tmp_path: Path, umask: int) -> None:
    assert make_private_directory(tmp_path / "a" / "b") == [tmp_path / "a", tmp_path / "a" / "b"]
    assert make_private_directory(tmp_path / "a" / "b") == []
    check_private(tmp_path / "a")


async def test_a_database_of_sqlite(tmp_path: Path, umask: int) -> None:
    database = tmp_path / "positions.db"
    engine = create_engine(f"sqlite:///{database}")
    await SqlOffsetStore(engine).create_table()
    with engine.begin() as tx:
        tx.execute(text("PRAGMA user_version = 1"))
        check_private_files(tmp_path)
    engine.dispose()
    assert mode(database) == 0o600


async def test_a_database_of_the_application_keeps_its_mode(tmp_path: Path) -> None:
    database = tmp_path / "results.db"
    database.touch()
    database.chmod(0o640)
    engine = create_engine(f"sqlite:///{database}")
    await SqlOffsetStore(engine).create_table()
    engine.dispose()
    assert mode(database) == 0o640
    memory = create_engine("sqlite://")
    await SqlOffsetStore(memory).create_table()
    memory.dispose()


@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(600)
def test_the_checkpoint_of_a_pipeline(tmp_path: Path, umask: int) -> None:
    # Importing it prepares the process for Spark.
    from tests.spark.conftest import shared_session

    spark: Any = shared_session()
    for place in (tmp_path / "checkpoints" / "shop", tmp_path / "wider"):
        if place.name == "wider":
            place.mkdir()
            place.chmod(0o755)
        for _ in range(2):
            protect_directory(spark, place.as_uri())
        assert mode(place) == 0o700
        assert mode(place.parent) == 0o700


def test_the_sockets_of_spark_are_ours(umask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Any process that connects to such a socket can run code.
    with tempfile.TemporaryDirectory(prefix="sockets-") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        Path(short).chmod(0o1777)
        found = Path(socket_settings({})["spark.python.unix.domain.socket.dir"])
        assert mode(found) == 0o700
        assert found.parent == Path(short)
        for before in (0o700, 0o777):
            found.chmod(before)
            assert socket_settings({})["spark.python.unix.domain.socket.dir"] == str(found)
            assert mode(found) == 0o700


def test_sockets_of_spark_are_not_made_where_another_user_waits() -> None:
    with tempfile.TemporaryDirectory(prefix="sockets-") as short:
        place, target = Path(short, "link"), Path(short, "target")
        target.mkdir()
        place.symlink_to(target)
        assert _why_not_private(str(place)) == "others can use it"
        place.unlink()
        place.touch(0o600)
        assert _why_not_private(str(place)) == "others can use it"


def test_a_home_of_spark_is_ours(tmp_path: Path, umask: int) -> None:
    import pyspark

    home = home_without_archive(Path(pyspark.__file__).parent, tmp_path / "caches")
    assert home is not None
    assert mode(home) == 0o700
    assert mode(tmp_path / "caches") == 0o700
