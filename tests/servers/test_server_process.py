"""A server that does not stop in time fails the test that stopped it, and no other test that shares it."""

from __future__ import annotations

import sys
from typing import Self

import pytest

from tests.servers.kafka_client import wait_for
from tests.servers.server_process import ServerProcess

_STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("begun", flush=True)
signal.pause()
"""


class Stubborn(ServerProcess):
    stop_seconds = 0.2

    def start(self) -> Self:
        begun = self.log.count("begun")
        self._launch([sys.executable, "-c", _STUBBORN])
        wait_for(lambda: self.log.count("begun") > begun, 30)
        return self


def test_a_server_that_had_to_be_killed_is_restarted() -> None:
    with Stubborn("stubborn") as server:
        before = server.process_id
        with pytest.raises(RuntimeError, match=f"Process {before} did not end within 0.2 s of SIGTERM"):
            server.restart()
        assert server.running
        assert server.process_id != before
    assert not server.running
