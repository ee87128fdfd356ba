"""The report of a failed test has the last log lines of its servers, also from an xdist worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.server_logs import excerpt

_FAILING = """
import signal
import time
from types import SimpleNamespace

import pytest

from tests.servers.server_process import ServerProcess


class Server(ServerProcess):
    def start(self):
        self._launch(["/bin/sh", "-c", f"echo {self.kind} cannot write; exec sleep 60"])
        while not self.log:
            time.sleep(0.01)
        return self


@pytest.fixture
def shared():
    with Server("shared") as server:
        yield server


@pytest.fixture
def harness(shared):
    with Server("own") as server:
        yield SimpleNamespace(server=server)


def test_that_fails(harness):
    assert not harness.server.running


def test_that_passes(harness):
    assert harness.server.running
"""


def test_a_failure_is_reported_with_the_logs_of_the_servers(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.server_logs import pytest_runtest_makereport\n")
    (tmp_path / "test_failing.py").write_text(_FAILING)
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
    assert ended.returncode == 1, ended.stdout
    for kind in ("shared", "own"):
        assert f"The end of what {kind} anybroker-test-{kind}-" in ended.stdout
        assert ended.stdout.count(f"\n{kind} cannot write\n") == 1
    assert ended.stdout.count("MB of its disk are free") == 2


def test_an_excerpt_leaves_frames_out() -> None:
    log = (
        "begun\nWARN refused\njava.io.IOException: full\n\tat a.B.c(B.java:1)\n\tat a.B.d(B.java:2)\nCaused by: disk\n"
    )
    assert excerpt(log) == "begun\nWARN refused\njava.io.IOException: full\nCaused by: disk"
    assert excerpt("x" * 1000) == "x" * 300 + "..."
    assert excerpt("\n".join(map(str, range(100)))).splitlines() == [str(number) for number in range(40, 100)]
    assert not excerpt("")
