"""The server's view of one client: its state and its open consumers.

A connection belongs to the event loop that opened it; the server reads it under its lock, from any thread.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final, Protocol

from broker import BrokerError, Closed, ConnectionFailed

__all__ = ["Connection", "ConnectionState", "Server", "Source"]


class ConnectionState(Enum):
    """The state of a connection."""

    OPEN = "open"
    ISOLATED = "isolated"
    """Cut off in both directions until it is healed."""
    KILLED = "killed"
    """As if the client's process had died."""
    CLOSED = "closed"


class Server(Protocol):
    """The server as a connection sees it."""

    @property
    def name(self) -> str: ...
    @property
    def up(self) -> bool:
        """Whether it runs."""
        ...


class Source(Protocol):
    """A consumer that is notified when its connection breaks."""

    def broken(self, *, lost: bool) -> None:
        """The connection broke; called under the server's lock, from any thread.

        :param lost: whether the leases of the consumer ended with it.
        """
        ...


class Connection:
    """One client of one server."""

    def __init__(self, server: Server, number: int) -> None:
        self._server: Final = server
        self.number: Final = number
        self.state = ConnectionState.OPEN
        self.sources: dict[int, Source] = {}
        """Open consumers, by member number."""
        self.owner: Any = None
        """The backend that opened it."""

    @property
    def usable(self) -> bool:
        """Whether calls reach the server."""
        return self.state is ConnectionState.OPEN and self._server.up

    def check(self) -> None:
        """Check that calls reach the server.

        :raises ConnectionFailed: they do not; retriable unless the connection was killed.
        :raises Closed: it was closed.
        """
        if self.state is not ConnectionState.OPEN or not self._server.up:
            raise self.error()

    def error(self) -> BrokerError:
        """The error if calls do not reach the server."""
        if self.state is ConnectionState.CLOSED:
            return Closed("The connection to the in-memory broker was closed")
        if self.state is ConnectionState.KILLED:
            return ConnectionFailed(
                "This connection was killed", retriable=False, advice="An injected fault; open another connection"
            )
        if self.state is ConnectionState.ISOLATED:
            return ConnectionFailed("This connection is isolated", advice="An injected fault; call faults.heal")
        return ConnectionFailed(f"The in-memory broker {self._server.name!r} is stopped", advice="Call faults.start")

    def __repr__(self) -> str:
        return f"<Connection {self.number} of {self._server.name!r}, {self.state.value}>"
