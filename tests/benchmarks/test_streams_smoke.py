"""The benchmarks of streams run on few messages and report their figures. Speed is not tested here.

`beside` is left out, since it installs packages; `make bench-streams ARGS=--quick` runs all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.streams.__main__ import main
from benchmarks.streams.sections import BENCHMARKS

pytestmark = pytest.mark.deep

EXPECTED = {
    "engine": ("lmdb, row and output, JSON | ≥ 200000 /s", "memory, row and output, JSON", "tumbling window"),
    "processing": ("kafka, processor | ≥ 70000 /s", "jetstream, by hand", "the engine, jetstream | ≤ 5 µs"),
    "recovery": ("kafka, recovery into LMDB", "view.get, lmdb | ≤ 3 µs"),
    "latency": ("p99, jetstream, a checkpoint each 1 s | ≤ 2 intervals", "kafka, each 0.1 s"),
    "rebalance": (
        "classic, 2 inputs: a partition that stays, one joins | ≤ 0.25 s",
        "KIP-848, 1 input: a partition that moves",
    ),
    "memory": ("memory grown over",),
    "stores": ("| rocksdb |", "get_many"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_it_runs_and_writes_its_page(name: str, tmp_path: Path) -> None:
    assert main([name, "--quick", "--output", str(tmp_path)]) == 0
    page = (tmp_path / "performance-streams.md").read_text()
    assert [what for what in EXPECTED[name] if what not in page] == []
    drawn = name != "stores"
    assert (tmp_path / "performance-streams.png").exists() == ("performance-streams.png" in page) == drawn


def test_every_benchmark_is_tried_here_but_the_one_that_installs() -> None:
    assert {*BENCHMARKS} - {*EXPECTED} == {"beside"}
