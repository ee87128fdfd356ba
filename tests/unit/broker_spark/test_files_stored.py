"""Files on a file system that renames to unused names only, or deletes the target first, as pyarrow does on HDFS."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from pyarrow import fs

from broker_spark.common.files import StoredFiles
from broker_spark.spool.spool import Spool
from tests.unit.broker_spark.test_files import METADATA

NAME = "owners/one"
Handler: type[Any] = getattr(fs, "FileSystemHandler")  # noqa: B009 - the stubs do not have it


class Died(BaseException):
    """The process ends here."""


class Renaming(Handler):
    """A local directory in which `move` refuses an existing name, or deletes it and then renames.

    :ivar before: called before each step that changes something.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.local: Any = fs.LocalFileSystem()
        self.before: Callable[[], None] = lambda: None

    def get_type_name(self) -> str:
        return "renaming"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: Any) -> Any:
        return self.local.get_file_info(paths)

    def get_file_info_selector(self, selector: Any) -> Any:
        return self.local.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self.local.create_dir(path, recursive=recursive)

    def delete_file(self, path: str) -> None:
        self.before()
        self.local.delete_file(path)

    def move(self, src: str, dest: str) -> None:
        self.before()
        if Path(dest).exists():
            if self.kind == "refusing":
                raise FileExistsError(dest)
            self.local.delete_file(dest)
            self.before()
        self.local.move(src, dest)

    def open_input_file(self, path: str) -> Any:
        return self.local.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        self.before()
        return self.local.open_output_stream(path)

    def _never(self, *_: Any) -> Any:
        raise NotImplementedError

    open_input_stream = open_append_stream = copy_file = delete_dir = _never
    delete_dir_contents = delete_root_dir_contents = _never


@pytest.fixture(params=["refusing", "clobbering"])
def handler(request: pytest.FixtureRequest) -> Renaming:
    """Each kind."""
    return Renaming(request.param)


def files_of(handler: Renaming, root: Path) -> StoredFiles:
    return StoredFiles(cast("Any", fs).PyFileSystem(handler), str(root))


def put(files: StoredFiles, text: bytes) -> None:
    files.write(NAME, lambda file: file.write(text))


def test_a_file_is_complete_at_each_step_of_its_replacement(handler: Renaming, tmp_path: Path) -> None:
    files, other = files_of(handler, tmp_path), files_of(Renaming(handler.kind), tmp_path)
    put(files, b"old")
    seen: list[bytes] = []

    def look() -> None:
        assert other.names("owners") == ["one"]
        assert other.age(NAME) < 60
        seen.append(other.read(NAME))

    handler.before = look
    put(files, b"new")
    assert seen == sorted(seen, reverse=True)
    assert set(seen) == {b"old", b"new"}
    assert other.read(NAME) == b"new"
    assert [path.name for path in (tmp_path / "owners").iterdir()] == ["one"]


def test_a_process_that_ends_at_any_step_leaves_one_of_two_files(handler: Renaming, tmp_path: Path) -> None:
    steps = 0
    for last in range(1, 20):
        root = tmp_path / str(last)
        put(files_of(handler, root), b"old")
        left = [last]

        def die(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] <= 0:
                raise Died

        handler.before = die
        try:
            put(files_of(handler, root), b"new")
        except Died:
            steps += 1
        handler.before = lambda: None
        files = files_of(handler, root)
        assert files.names("owners") == ["one"]
        assert files.read(NAME) in {b"old", b"new"}
        # The next process starts with what is left.
        put(files, b"last")
        assert files.read(NAME) == b"last"
        files.sweep("owners")
        assert [path.name for path in (root / "owners").iterdir()] == ["one"]
        put(files, b"again")
        files.delete(NAME)
        assert files.names("owners") == []
        with pytest.raises(FileNotFoundError):
            files.read(NAME)
        if left[0] > 0:
            break
    assert steps > 3


def test_a_spool_lies_in_s3(handler: Renaming, tmp_path: Path) -> None:
    for identity in ("a", "b"):
        spool = Spool.open(files_of(handler, tmp_path), str(tmp_path), METADATA)
        spool.check_topics({f"orders-{identity}": identity})
        spool.beat()
        spool.release()
    assert len(list((tmp_path / "owners").iterdir())) == 1
