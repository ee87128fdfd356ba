"""The files of a spool's owners."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from broker.errors import ConfigurationError
from broker_spark.common.files import Fill, LocalFiles
from broker_spark.spool.lease import Lease


def halves(place: Path) -> list[str]:
    return sorted(path.name for path in (place / "owners").glob("*.half"))


def left_half_written(files: LocalFiles, name: str) -> None:
    """The file of a process killed in the middle of a write."""

    def fill(file: Any) -> None:
        Path(file.name).with_suffix(".other.half").write_bytes(b"")
        raise InterruptedError

    with pytest.raises(InterruptedError):
        files.write(name, fill)


def test_a_new_owner_deletes_incomplete_files(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path))
    first = Lease.claim(files, "here")
    first.begin([], 0)
    first.release()
    left_half_written(files, "owners/00000001-aaaaaaaaaaaa.json")
    left_half_written(files, "owners/00000009-aaaaaaaaaaaa.json")
    assert len(halves(tmp_path)) == 2
    Lease.claim(files, "here").begin([], 0)
    # A later owner may be writing its file now.
    assert [name[:8] for name in halves(tmp_path)] == ["00000009"]


def test_an_owner_whose_heartbeat_is_deleted_learns_who_took_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = LocalFiles(str(tmp_path))
    first = Lease.claim(files, "here")
    first.begin([], 0)
    first.release()
    write = LocalFiles.write

    def write_late(files: LocalFiles, name: str, fill: Fill) -> None:
        monkeypatch.setattr(LocalFiles, "write", write)

        def fill_late(file: io.BufferedWriter) -> None:
            fill(file)
            Lease.claim(files, "here").begin([], 0)

        write(files, name, fill_late)

    monkeypatch.setattr(LocalFiles, "write", write_late)
    with pytest.raises(ConfigurationError, match="Another query took over this spool"):
        first.beat()
