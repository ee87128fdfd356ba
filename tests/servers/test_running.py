"""Programs that set up what the tests need: what they say is told when they fail, and they do not run for ever."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.servers.running import run_to_end


def _python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_a_program_runs_where_and_with_what_it_is_told(tmp_path: Path) -> None:
    program = "import os, pathlib; pathlib.Path('made').write_text(os.environ['WHAT'])"
    run_to_end(_python(program), "no", seconds=30, folder=tmp_path, variables={"WHAT": "this"})
    assert (tmp_path / "made").read_text() == "this"


def test_what_a_program_that_fails_said_is_told() -> None:
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    with pytest.raises(RuntimeError, match=r"(?s)It cannot be had \(.* ended with 3\): .*out.*") as raised:
        run_to_end(_python(program), "It cannot be had", seconds=30)
    assert "err" in str(raised.value)


def test_a_program_that_does_not_end_is_killed_and_told() -> None:
    program = "import threading; print('begun', flush=True); threading.Event().wait()"
    with pytest.raises(RuntimeError, match=r"It hangs \(.* did not end within 1 s\): begun"):
        run_to_end(_python(program), "It hangs", seconds=1)
