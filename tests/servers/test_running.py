"""Setup programs of the tests: a failure reports their output, and a timeout kills them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.servers.running import run_to_end


def _python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_a_program_runs_in_the_given_directory_and_environment(tmp_path: Path) -> None:
    program = "import os, pathlib; pathlib.Path('made').write_text(os.environ['WHAT'])"
    run_to_end(_python(program), "no", seconds=30, folder=tmp_path, variables={"WHAT": "this"})
    assert (tmp_path / "made").read_text() == "this"


def test_the_output_of_a_failed_program_is_reported() -> None:
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    with pytest.raises(RuntimeError, match=r"(?s)It cannot be had \(.* ended with 3\): .*out.*") as raised:
        run_to_end(_python(program), "It cannot be had", seconds=30)
    assert "err" in str(raised.value)


def test_a_program_that_does_not_end_is_killed_and_reported() -> None:
    program = "import threading; print('begun', flush=True); threading.Event().wait()"
    with pytest.raises(RuntimeError, match=r"It hangs \(.* did not end within 1 s\): begun"):
        run_to_end(_python(program), "It hangs", seconds=1)
