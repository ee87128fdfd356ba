"""Runs pyright on `api.py`, and holds that it speaks of every protocol there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from broker import protocols

API = Path(__file__).with_name("api.py")
ALIASES = {"Handler", "BatchHandler"}


def test_facade_and_fakes_satisfy_the_protocols() -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "pyright", str(API)], capture_output=True, text=True, check=False, timeout=50
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_protocol_is_proven_twice() -> None:
    text = API.read_text()
    facade, fakes = text.split("# -- fakes", 1)
    for name in set(protocols.__all__) - ALIASES:
        for part in (facade, fakes):
            assert re.search(rf": protocols\.{name}\b", part), f"{name} is not assigned to in one half of api.py"
