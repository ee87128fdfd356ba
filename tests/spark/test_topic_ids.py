"""The topic ids beside a checkpoint survive the end of a driver at any step, on Spark's own file system."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from broker.errors import ConfigurationError
from broker_spark.checkpoint.topic_ids import _read
from broker_spark.common.spark_files import replace_bytes
from broker_spark.runtime.hadoop import find_path

CHANGES = frozenset({"create", "delete", "rename"})


class Died(BaseException):
    """The driver ends here."""


class Dying:
    """A Hadoop file system that ends the driver after this many changes; it renames to unused names only, like HDFS."""

    def __init__(self, files: Any, changes: int) -> None:
        self._files = files
        self.left = changes

    def __getattr__(self, name: str) -> Any:
        if name in CHANGES:
            self.left -= 1
            if self.left < 0:
                raise Died
        return getattr(self._files, name)

    def rename(self, old: Any, new: Any) -> bool:
        self.__getattr__("rename")
        return not self._files.exists(new) and bool(self._files.rename(old, new))


def write(path: Any, files: Any, ids: dict[str, Any]) -> None:
    replace_bytes(path, files, json.dumps(ids).encode())


def test_a_driver_that_ends_leaves_the_old_or_the_new_file(spark: SparkSession, tmp_path: Path) -> None:
    old, new, last = ({"orders": {"version": number}} for number in range(3))
    deaths = 0
    for changes in range(20):
        path, files = find_path(spark, f"{tmp_path}/{changes}/anybroker-topics.json")
        assert _read(path, files) == {}
        write(path, Dying(files, 100), old)
        dying = Dying(files, changes)
        try:
            write(path, dying, new)
        except Died:
            deaths += 1
        assert _read(path, files) in (old, new)
        # The next driver starts with what is left.
        write(path, Dying(files, 100), last)
        assert _read(path, files) == last
        assert [each.name for each in (tmp_path / str(changes)).glob("[!.]*")] == ["anybroker-topics.json"]
        if dying.left >= 0:
            break
    assert deaths > 3


def test_a_rename_that_is_refused_is_an_error(spark: SparkSession, tmp_path: Path) -> None:
    path, files = find_path(spark, f"{tmp_path}/anybroker-topics.json")

    class Refusing(Dying):
        def rename(self, old: Any, new: Any) -> bool:
            return False

    with pytest.raises(OSError, match=r"could not be renamed to .*anybroker-topics\.json"):
        write(path, Refusing(files, 100), {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "it is empty"),
        ('{"orders": {"sour', "it ends after 17 characters, in the middle of its JSON"),
        ("[]", "it holds a list instead of an object"),
    ],
)
def test_an_incomplete_file_is_named_with_the_fix(
    spark: SparkSession, tmp_path: Path, text: str, expected: str
) -> None:
    (tmp_path / "anybroker-topics.json").write_text(text)
    path, files = find_path(spark, f"file://{tmp_path}/anybroker-topics.json")
    with pytest.raises(ConfigurationError) as caught:
        _read(path, files)
    assert f"{tmp_path}/anybroker-topics.json is incomplete: {expected}. Restore it from a copy" in str(caught.value)
