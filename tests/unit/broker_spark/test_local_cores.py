"""The cores of a local master, by which a session sets its shuffle partitions."""

from __future__ import annotations

import os

import pytest

from broker_spark.session import cores_of


@pytest.mark.parametrize(
    ("master", "cores"),
    [
        ("local", 1),
        ("local[4]", 4),
        ("local[2,3]", 2),
        ("local[*]", os.cpu_count()),
        ("local[*,3]", os.cpu_count()),
        ("local[ 2 ]", 2),
        ("local[0]", 1),
        ("local-cluster[3,2,1024]", 6),
    ],
)
def test_a_local_master_has_its_cores(master: str, cores: int) -> None:
    assert cores_of(master) == cores
