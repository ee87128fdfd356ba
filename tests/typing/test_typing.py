"""Runs pyright on `facade.py` and `fakes.py`, and checks that each covers every protocol."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from broker import protocols

PROOFS = [Path(__file__).with_name(name) for name in ("facade.py", "fakes.py")]
ALIASES = {
    *("AsyncBatchHandler", "AsyncHandler", "BatchHandler"),
    *("Handler", "OwnPositions", "PlainBatchHandler", "PlainHandler"),
}


def test_facade_and_fakes_satisfy_the_protocols() -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "pyright", *map(str, PROOFS)], capture_output=True, text=True, check=False, timeout=50
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.stem)
def test_every_protocol_is_covered(proof: Path) -> None:
    text = proof.read_text()
    for name in set(protocols.__all__) - ALIASES:
        assert re.search(rf": protocols\.{name}\b", text), f"{name} is not assigned to in {proof.name}"
