"""`Shared`: a server that the tests of one process share, and who ends it.

From the thread of the tests only.
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
    """Made and started at the first call, and closed with the process, or by `end`; the next call starts another."""

    def __init__(self, make: Callable[[], S]) -> None:
        self._make = make
        self._server: S | None = None
        update_wrapper(self, make, updated=())

    @classmethod
    def in_groups(cls, make: Callable[[], S]) -> Shared[S]:
        """One that ends with the group of tests (of pytest-xdist) that uses it, since it costs much even while idle."""
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
    """A group of tests is over.

    :raises ExceptionGroup: some did not end as they should; each was tried.
    """
    errors: list[Exception] = []
    for shared in _of_groups:
        try:
            shared.end()
        except Exception as error:
            errors.append(error)
    if errors:
        raise ExceptionGroup("servers of a group of tests did not end", errors)
