"""Google's `pstest`, a fake of Pub/Sub written apart from its emulator, as a second server for what that does not do.

It is a Go library; `pstest/main.go` serves it. Where it cannot be built, its tests are skipped.
"""

from __future__ import annotations

import pytest

from tests.servers.go_program import GoProgram
from tests.servers.pubsub import PubSubServer
from tests.servers.shared import Shared

__all__ = ["PROGRAM", "make_server", "shared_pstest"]

PROGRAM = GoProgram("pstest", "Google's pstest")


def make_server() -> PubSubServer:
    """A new server, not started."""
    return PubSubServer(lambda port: [str(PROGRAM.path()), f"-port={port}"], "Serving on")


def shared_pstest() -> PubSubServer:
    """The server of this test process; skips the test if it cannot run."""
    if (reason := PROGRAM.missing) is not None:
        pytest.skip(reason)
    return _shared()


_shared = Shared.in_groups(make_server)
