"""Runs pyright on the proofs; checks that `facade.py` and `fakes.py` cover every protocol."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from broker import protocols

PROOFS = [Path(__file__).with_name(name) for name in ("facade.py", "fakes.py")]
STREAMS = Path(__file__).with_name("streams.py")
ALIASES = {
    *("AnyCodec", "AsyncBatchHandler", "AsyncHandler", "BatchHandler"),
    *("Handler", "OwnPositions", "PlainBatchHandler", "PlainHandler"),
}


def test_facade_and_fakes_satisfy_the_protocols_and_streams_are_typed() -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "pyright", *map(str, [*PROOFS, STREAMS])],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.stem)
def test_every_protocol_is_covered(proof: Path) -> None:
    text = proof.read_text()
    for name in set(protocols.__all__) - ALIASES:
        assert re.search(rf": protocols\.{name}\b", text), f"{name} is not assigned to in {proof.name}"
