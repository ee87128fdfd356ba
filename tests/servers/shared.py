"""`Shared`: a server that the tests of one process, or of all workers of a run, share, and who ends it.

For the thread of the tests only.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import pickle
import tempfile
from collections.abc import Callable
from functools import update_wrapper
from pathlib import Path
from typing import Any, Generic, TypeVar

from tests.servers.server_process import Servers

__all__ = ["Shared", "end_those_of_groups"]


S = TypeVar("S", bound=Servers)
_of_groups: list[Shared[Any]] = []


class Shared(Generic[S]):
    """Created and started by the first call, closed with the process or by `end`; the next call starts another."""

    def __init__(self, make: Callable[[], S]) -> None:
        self._make = make
        self._server: S | None = None
        self._by_all_workers = False
        update_wrapper(self, make, updated=())

    @classmethod
    def in_groups(cls, make: Callable[[], S]) -> Shared[S]:
        """A server that ends with its xdist group of tests, since it is costly even while idle."""
        shared = cls(make)
        _of_groups.append(shared)
        return shared

    @classmethod
    def by_all_workers(cls, make: Callable[[], S]) -> Shared[S]:
        """One for all workers of pytest-xdist: no test may disturb the server, or count on being alone on it.

        The worker that needs it first starts it. That process lives as long as the run; the others get a copy of the
        object that can be asked where the server is, and cannot end it.
        """
        shared = cls(make)
        shared._by_all_workers = True
        return shared

    def __call__(self) -> S:
        if self._server is None:
            run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
            self._server = self._start() if run is None or not self._by_all_workers else self._join(run)
        return self._server

    def _start(self) -> S:
        server = self._make().__enter__()
        atexit.register(server.close)
        return server

    def _join(self, run: str) -> S:
        path = Path(tempfile.gettempdir()) / f"anybroker-run-{run}-{self._make.__module__}.{self._make.__name__}"
        with path.open("a+b") as file:
            # Held while the server starts, so that the other workers wait for it.
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if started := file.read():
                copy: S = pickle.loads(started)  # noqa: S301 - written by another worker of this run
                return copy
            server = self._start()
            atexit.register(path.unlink, missing_ok=True)
            file.write(pickle.dumps(server))
            return server

    def end(self) -> None:
        """Close it if it was started."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            atexit.unregister(server.close)


def end_those_of_groups() -> None:
    """End the servers of groups; called at the end of a group of tests.

    :raises ExceptionGroup: some failed to end; all were tried.
    """
    errors: list[Exception] = []
    for shared in _of_groups:
        try:
            shared.end()
        except Exception as error:
            errors.append(error)
    if errors:
        raise ExceptionGroup("servers of a group of tests did not end", errors)
