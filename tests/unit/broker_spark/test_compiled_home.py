"""The home of Spark's JVM: its contents, and when none is created."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pyspark.find_spark_home import _find_spark_home

from broker_spark.runtime.local import compiled_home, home_without_archive


def test_a_home_is_created_once_and_has_no_python_of_its_own(tmp_path: Path) -> None:
    real = Path(_find_spark_home())
    caches = tmp_path / "not" / "yet"
    home = home_without_archive(real, caches)
    assert home is not None
    assert (home / "bin" / "spark-submit").is_file()
    assert list((home / "jars").glob("spark-core*.jar"))
    assert not (home / "python").exists()
    assert home_without_archive(real, caches) == home
    assert list(caches.iterdir()) == [home]


def test_no_home_is_created_of_another_spark_or_without_write_access(tmp_path: Path) -> None:
    assert home_without_archive(tmp_path, tmp_path / "caches") is None
    (tmp_path / "file").touch()
    assert home_without_archive(Path(_find_spark_home()), tmp_path / "file" / "caches") is None


def test_the_environment_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.delenv("SPARK_HOME", raising=False)
    before = _find_spark_home()
    with compiled_home():
        assert Path(_find_spark_home()).is_relative_to(tmp_path)
    assert _find_spark_home() == before
    monkeypatch.setenv("PYSPARK_PYTHON", "python-of-another-place")
    with compiled_home():
        assert _find_spark_home() == before
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("SPARK_HOME", before)
    with compiled_home():
        assert _find_spark_home() == before
