"""What another user made, or can change, is neither run nor used as a spool or checkpoint."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyspark
import pytest

from broker.driver import check_owner, check_unshared
from broker.errors import ConfigurationError
from broker_spark.common.files import LocalFiles
from broker_spark.runtime.hadoop import protect_directory
from broker_spark.runtime.local import _why_not_private, compiled_home, home_without_archive, socket_settings
from broker_spark.spool.spool import Spool
from tests.security.conftest import STRANGER

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no modes")

METADATA = {"backend": "jetstream", "subscription": "spark", "topics": ["orders"]}
REAL = Path(pyspark.__file__).parent
GiveAway = Callable[[Path], None]


def check_refused(refused: pytest.ExceptionInfo[ConfigurationError], path: Path, setting: str) -> None:
    """The error names the directory, the other user or the mode, and what to do."""
    assert f"{str(path)!r} " in refused.value.message
    assert f"uid {STRANGER}" in refused.value.message or "writable for other users (mode " in refused.value.message
    assert setting in refused.value.advice


def tree(place: Path) -> dict[Path, tuple[int, bytes]]:
    """Modes and contents."""
    return {path: (path.stat().st_mode, path.read_bytes() if path.is_file() else b"") for path in place.rglob("*")}


def caches_of(tmp_path: Path) -> tuple[Path, Path]:
    """A directory of caches, and the home that this library made in it."""
    home = home_without_archive(REAL, tmp_path / "anybroker")
    assert home is not None
    return tmp_path / "anybroker", home


@pytest.mark.parametrize("which", [0, 1], ids=["caches", "home"])
def test_spark_does_not_start_from_a_home_of_another_user(which: int, tmp_path: Path, give_away: GiveAway) -> None:
    foreign = caches_of(tmp_path)[which]
    give_away(foreign)
    with pytest.raises(ConfigurationError) as refused:
        home_without_archive(REAL, tmp_path / "anybroker")
    check_refused(refused, foreign, "XDG_CACHE_HOME")


@pytest.mark.parametrize("which", [0, 1], ids=["caches", "home"])
@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777], ids=oct)
def test_spark_does_not_start_from_a_home_that_others_can_change(which: int, mode: int, tmp_path: Path) -> None:
    shared = caches_of(tmp_path)[which]
    shared.chmod(mode)
    with pytest.raises(ConfigurationError) as refused:
        home_without_archive(REAL, tmp_path / "anybroker")
    check_refused(refused, shared, "XDG_CACHE_HOME")
    assert "chmod go-w" in refused.value.advice


@pytest.mark.parametrize("planted", ["link", "directory"])
def test_a_home_with_something_else_in_it_is_not_used(planted: str, tmp_path: Path) -> None:
    caches, home = caches_of(tmp_path)
    (home / "bin").unlink()
    (tmp_path / "bin").mkdir()
    (home / "bin").symlink_to(tmp_path / "bin") if planted == "link" else (home / "bin").mkdir()
    assert home_without_archive(REAL, caches) is None


def test_caches_of_another_user_get_no_home(tmp_path: Path, give_away: GiveAway) -> None:
    caches = tmp_path / "anybroker"
    caches.mkdir(0o777)
    give_away(caches)
    with pytest.raises(ConfigurationError) as refused:
        home_without_archive(REAL, caches)
    check_refused(refused, caches, "XDG_CACHE_HOME")
    assert list(caches.iterdir()) == []


def test_a_session_runs_no_planted_program(
    tmp_path: Path, give_away: GiveAway, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches, home = caches_of(tmp_path)
    (home / "bin").unlink()
    (home / "bin").mkdir()
    (home / "bin" / "spark-submit").touch(0o755)
    for path in (caches, home, home / "bin"):
        give_away(path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.delenv("SPARK_HOME", raising=False)
    with pytest.raises(ConfigurationError) as refused, compiled_home():
        pytest.fail("a JVM would start here")
    check_refused(refused, caches, "XDG_CACHE_HOME")
    assert "SPARK_HOME" not in os.environ


def test_sockets_of_spark_are_not_made_in_a_directory_of_another_user(
    give_away: GiveAway, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="sockets-") as short:
        place = Path(short, f"anybroker-{os.getuid()}")
        place.mkdir(0o700)
        give_away(place)
        assert _why_not_private(str(place)) == "others can use it"
        monkeypatch.setattr(tempfile, "tempdir", short)
        assert socket_settings({}).get("spark.python.unix.domain.socket.dir") != str(place)


def spool_at(place: Path) -> Spool:
    return Spool.open(LocalFiles(str(place)), str(place), METADATA)


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """A spool with a file in each of its directories."""
    place = tmp_path / "orders"
    spool_at(place).release()
    for name in ("segments/planted.arrow", "doubts/planted.half"):
        LocalFiles(str(place)).write(name, lambda file: file.write(b"planted"))
    return place


@pytest.mark.parametrize(
    "name", ["", "owners", "spool.json", "segments", "segments/planted.arrow", "doubts/planted.half"]
)
def test_a_spool_of_another_user_is_refused(name: str, spool: Path, give_away: GiveAway) -> None:
    give_away(spool / name)
    before = tree(spool)
    with pytest.raises(ConfigurationError) as refused:
        spool_at(spool)
    check_refused(refused, spool / name, "option spool")
    assert tree(spool) == before


def test_an_empty_directory_of_another_user_becomes_no_spool(tmp_path: Path, give_away: GiveAway) -> None:
    (tmp_path / "orders").mkdir(0o777)
    give_away(tmp_path / "orders")
    with pytest.raises(ConfigurationError) as refused:
        spool_at(tmp_path / "orders")
    check_refused(refused, tmp_path / "orders", "option spool")
    assert list((tmp_path / "orders").iterdir()) == []


def test_a_spool_through_a_link_of_another_user_is_refused(spool: Path, tmp_path: Path, give_away: GiveAway) -> None:
    (tmp_path / "link").symlink_to(spool)
    spool_at(tmp_path / "link").release()
    give_away(tmp_path / "link")
    with pytest.raises(ConfigurationError) as refused:
        spool_at(tmp_path / "link")
    check_refused(refused, tmp_path / "link", "option spool")


@pytest.mark.parametrize("mode", [0o775, 0o1777], ids=oct)
def test_a_shared_directory_with_other_files_becomes_no_spool(mode: int, tmp_path: Path) -> None:
    """It is not narrowed, since others use it. A directory of the spool's own in it may be used."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "notes.txt").touch()
    shared.chmod(mode)
    with pytest.raises(ConfigurationError) as refused:
        spool_at(shared)
    check_refused(refused, shared, "option spool")
    spool_at(shared / "orders").release()
    assert shared.stat().st_mode & 0o7777 == mode


@pytest.mark.deep
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["", "offsets"])
def test_a_checkpoint_of_another_user_is_refused(name: str, tmp_path: Path, give_away: GiveAway) -> None:
    # Importing it prepares the process for Spark.
    from tests.spark.conftest import shared_session

    spark: Any = shared_session()
    place = tmp_path / "checkpoint"
    (place / "offsets").mkdir(parents=True)
    # As Spark makes them where the umask is 002.
    (place / "offsets").chmod(0o775)
    protect_directory(spark, place.as_uri())
    give_away(place / name)
    with pytest.raises(ConfigurationError) as refused:
        protect_directory(spark, place.as_uri())
    check_refused(refused, place / name, "checkpoint")


def test_root_and_missing_files_are_no_strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (Path("/"), Path("/etc/passwd"), tmp_path, tmp_path / "missing"):
        check_unshared(path, "x")
    (tmp_path / "dangling").symlink_to(tmp_path / "missing")
    check_owner(tmp_path / "dangling", "x")
    check_owner(Path("/tmp"), "x")
