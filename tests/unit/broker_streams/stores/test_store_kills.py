"""A process that is killed while it writes leaves whole writes only, and all that it reported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from broker_streams.stores.directory import StateDirectory
from broker_streams.stores.store import StoreFactory
from tests.unit.broker_streams.stores.kinds import every_persistent_kind
from tests.unit.broker_streams.stores.store_writer_process import ROWS

WRITER = "tests.unit.broker_streams.stores.store_writer_process"


def kill_a_writer(directory: Path, kind: str, durable: bool, last: str) -> int:
    """Run a writer until it says the last word, kill it, and return the last batch that it reported as written."""
    command = [sys.executable, "-m", WRITER, str(directory), kind, "durable" if durable else "unsynced"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said: list[str] = []
        try:
            for line in process.stdout:
                said.append(line)
                if len([each for each in said if each.startswith(last)]) == 4:
                    break
        finally:
            process.kill()
        # What it wrote between the word and the kill counts too.
        said.extend(process.stdout)
    assert len(said) >= 4, "the writer failed"
    return max(int(line.split()[1]) for line in said if line.startswith("done") and line.endswith("\n"))


@pytest.mark.parametrize("durable", [True, False])
@every_persistent_kind
def test_a_kill_in_the_middle_of_a_write(factory: StoreFactory, durable: bool, tmp_path: Path) -> None:
    for last in ("begin", "done", "begin"):
        reported = kill_a_writer(tmp_path, factory.format, durable, last)
        # The kernel has released the lock.
        with StateDirectory(tmp_path, "group", "only") as directory:
            store = directory.open(factory, "table.0")
            assert [found.corrupt for found in directory.stores()] == [False]
            number = int(store.meta("batch") or b"0")
            assert number in {reported, reported + 1}
            text = b"%d" % number
            rows = dict(store.items("rows"))
            assert rows.pop(b"only of " + text) == text
            assert len(rows) == ROWS
            assert {value.strip() for value in rows.values()} == {text}
            assert list(store.items("due")) == [(b"k" * 600, text)]
            assert (store.count("rows"), store.count("due")) == (ROWS + 1, 1)
