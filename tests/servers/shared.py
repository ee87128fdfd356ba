"""`Shared`: a server that the tests of one process share.

For the thread of the tests only.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from functools import update_wrapper
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
        update_wrapper(self, make, updated=())

    @classmethod
    def in_groups(cls, make: Callable[[], S]) -> Shared[S]:
        """A server that ends with its xdist group of tests, since it is costly even while idle."""
        shared = cls(make)
        _of_groups.append(shared)
        return shared

    def __call__(self) -> S:
        if self._server is None:
            self._server = self._make().__enter__()
            atexit.register(self._server.close)
        return self._server

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
