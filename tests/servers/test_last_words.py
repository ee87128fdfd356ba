"""The death of a worker is reported with its signal and output, even if no Python handler ran."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_DYING = """
import ctypes, os, signal, threading

def test_of_before():
    print("of before")

def test_that_dies():
    print("about to die")
    os.write(2, b"Assertion failed: of the library")

    def die():
        # As the threads of a client library do, so that the process ends without a word of Python's.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        ctypes.string_at(0)

    thread = threading.Thread(target=die)
    thread.start()
    thread.join()
"""


def test_a_worker_that_dies_in_a_native_thread(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.last_words import pytest_testnodedown, pytest_testnodeready\n")
    (tmp_path / "test_dying.py").write_text(_DYING)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", "1", "--rootdir", tmp_path, tmp_path],
        # Loading plugins would take both processes longer than the test.
        env={**os.environ, "PYTHONPATH": str(root), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ended.returncode == 1
    assert "[gw0] ended by SIGSEGV" in ended.stdout
    if sys.platform.startswith("linux"):
        assert "said last:\nAssertion failed: of the library" in ended.stdout
        assert "said last:\nabout to die" in ended.stdout
    assert "of before" not in ended.stdout
