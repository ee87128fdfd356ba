"""Servers of the tests end with the process that started them, also when that is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.kafka_client import wait_for

NATS = """
from tests.servers.nats import shared_server
print(shared_server().process_id)
"""
POSTGRES = """
import os, pathlib
from tests.servers.postgres import postgres_url
postgres_url()
print(pathlib.Path(os.environ["XDG_RUNTIME_DIR"], "data", "postmaster.pid").read_text().split()[0])
"""
WAIT = "import sys; sys.stdout.flush(); sys.stdin.read()"


def running(pid: str) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere no kernel ends a child with its parent")
@pytest.mark.parametrize("how", ["killed", "ended"])
@pytest.mark.parametrize("code", [NATS, POSTGRES], ids=["nats", "postgres"])
def test_a_server_ends_with_its_owner(code: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with subprocess.Popen(
        [sys.executable, "-c", code + WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    ) as owner:
        try:
            assert owner.stdout is not None
            pid = owner.stdout.readline().strip()
            assert running(pid)
            if how == "killed":
                owner.kill()
            owner.communicate(timeout=20)
        finally:
            owner.kill()
    wait_for(lambda: not running(pid))
