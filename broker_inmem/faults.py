"""Fault injection: `broker.faults`.

Every method may be called from any thread and takes effect at once. Counted faults are used up one by one; `clear`
removes the rest. No fault loses a published message, unless its description says so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from broker import BrokerError, ConnectionFailed, Message, OperationTimeout
from broker_inmem.clock import Clock
from broker_inmem.connection import Connection, ConnectionState
from broker_inmem.entries import Delivery
from broker_inmem.groups import Group
from broker_inmem.message_queue import MessageQueue

__all__ = ["Failure", "Faults", "FaultyServer"]

Operation = Literal["open", "fetch", "publish", "settle", "extend", "commit", "transaction", "admin"]


@dataclass(slots=True)
class Failure:
    """One kind of failure, and its remaining count."""

    operation: Operation
    error: BrokerError | None
    times: int
    topic: str | None
    each: bool = False
    """Whether it meets single messages, not the call."""
    applied: bool = False


class FaultyServer(Protocol):
    """The part of the server that faults use; everything but `lock` is accessed under its lock."""

    up: bool

    @property
    def lock(self) -> threading.Lock: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def connections(self) -> list[Connection]:
        """The open connections."""
        ...

    @property
    def groups(self) -> Mapping[str, Group]: ...
    def each_queue(self) -> Sequence[MessageQueue]: ...


class Faults:
    """The faults of one server."""

    def __init__(self, server: FaultyServer) -> None:
        self._server: Final = server
        self._failures: list[Failure] = []
        self._duplicates: list[tuple[str | None, int]] = []
        self.armed = False
        """Whether a counted fault is pending; checked before every operation."""
        self.fetch_delay = 0.0
        """Seconds of the server's clock that every fetch takes longer; see `slow_fetches`."""

    def fail(
        self,
        operation: Operation,
        error: BrokerError | None = None,
        *,
        times: int = 1,
        topic: str | None = None,
    ) -> None:
        """Fail the next operations as a whole, without effect.

        :param error: the error to raise; None is a retriable ConnectionFailed.
        :param times: number of failures.
        :param topic: only operations on this topic.
        """
        self._add(Failure(operation, error or ConnectionFailed("A fault broke the call"), times, topic))

    def fail_publish(
        self, error: BrokerError | None = None, *, times: int = 1, topic: str | None = None, stored: bool = False
    ) -> None:
        """Fail the next published messages individually.

        :param error: the error of each message; None is OperationTimeout.
        :param times: number of messages.
        :param stored: whether the server stores them nevertheless.
        """
        self._add(Failure("publish", error or OperationTimeout("A fault kept the receipt"), times, topic, True, stored))

    def lose_acks(
        self, times: int = 1, *, topic: str | None = None, applied: bool = False, reported: bool = True
    ) -> None:
        """Lose the next settlements.

        :param times: number of messages.
        :param applied: whether the server carries them out, and only the answer is lost.
        :param reported: whether `settle` raises OperationTimeout; if not, it reports success.
        """
        error = OperationTimeout("A fault lost the settlement") if reported else None
        self._add(Failure("settle", error, times, topic, True, applied))

    def duplicate(self, times: int = 1, *, topic: str | None = None) -> None:
        """Deliver the next messages twice, even if the first delivery is settled."""
        server = self._server
        with server.lock:
            self._duplicates.append((topic, times))
            self.armed = True

    def expire(self, messages: Iterable[Message[Any]] | None = None) -> int:
        """End leases now, without notice to their consumers: those of these messages, or all.

        :returns: the number of ended leases.
        """
        server = self._server
        wanted = None if messages is None else {id(message.lease) for message in messages}
        ended = 0
        with server.lock:
            for queue in server.each_queue():
                for member in list(queue.members.values()):
                    leases = [d for d in member.leases.values() if wanted is None or id(d) in wanted]
                    ended += queue.drop(member, leases)
                    if member.gone:
                        queue.abandon(member)
        return ended

    def slow_fetches(self, seconds: float) -> None:
        """Delay every fetch by `seconds` of the server's clock; 0 ends the delay."""
        self.fetch_delay = seconds

    def restart(self) -> None:
        """Restart the server: connections break and reconnect, all leases end."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """Stop the server: every call fails until `start`, and all leases end. Stored data stays."""
        server = self._server
        with server.lock:
            server.up = False
            for queue in server.each_queue():
                for member in list(queue.members.values()):
                    queue.drop(member, list(member.leases.values()))
                    if member.gone:
                        queue.abandon(member)
            for connection in server.connections:
                for source in tuple(connection.sources.values()):
                    source.broken(lost=True)

    def start(self) -> None:
        """Start the server again."""
        with self._server.lock:
            self._server.up = True

    def kill(self, who: Any, *, drop_leases: bool = False) -> None:
        """Kill a client as if its process had died: its calls fail permanently, and it releases nothing.

        :param who: a Bus, a backend or a connection.
        :param drop_leases: end its leases and sessions at once; otherwise they expire.
        """
        server = self._server
        connection = _connection(who)
        with server.lock:
            connection.state = ConnectionState.KILLED
            if connection in server.connections:
                server.connections.remove(connection)
            now = server.clock.time()
            for number, source in tuple(connection.sources.items()):
                source.broken(lost=False)
                for queue in server.each_queue():
                    member = queue.members.get(number)
                    if member is not None:
                        if drop_leases:
                            queue.drop(member, list(member.leases.values()))
                        queue.abandon(member)
                for group in tuple(server.groups.values()):
                    if drop_leases:
                        group.expel(number, now)
                    else:
                        group.mark_silent(number, now)
            connection.sources.clear()

    def isolate(self, who: Any) -> None:
        """Isolate a client: its calls fail until `heal`; meanwhile its leases and sessions expire."""
        server = self._server
        connection = _connection(who)
        with server.lock:
            connection.state = ConnectionState.ISOLATED
            now = server.clock.time()
            for number, source in tuple(connection.sources.items()):
                source.broken(lost=False)
                for group in server.groups.values():
                    group.mark_silent(number, now)

    def heal(self, who: Any) -> None:
        """End the isolation of a client."""
        server = self._server
        connection = _connection(who)
        with server.lock:
            if connection.state is ConnectionState.ISOLATED:
                connection.state = ConnectionState.OPEN
                now = server.clock.time()
                for number in connection.sources:
                    for group in server.groups.values():
                        group.mark_reachable(number, now)

    def clear(self) -> None:
        """Remove all remaining faults and the delay of fetches."""
        with self._server.lock:
            self._failures.clear()
            self._duplicates.clear()
            self.armed = False
            self.fetch_delay = 0.0

    # For connections. Callers hold the lock, and call these only if `armed`.

    def check(self, operation: Operation, topic: str | None = None) -> None:
        """:raises BrokerError: this operation must fail."""
        for failure in self._failures:
            if failure.operation == operation and not failure.each and failure.topic in (None, topic):
                self._use(failure)
                if failure.error is not None:
                    raise failure.error
                return

    def draw(self, operation: Operation, topic: str, count: int) -> Sequence[Failure | None]:
        """The fault of each of `count` messages, or None."""
        drawn: list[Failure | None] = []
        for _ in range(count):
            failure = next(
                (f for f in self._failures if f.each and f.operation == operation and f.topic in (None, topic)), None
            )
            if failure is not None:
                self._use(failure)
            drawn.append(failure)
        return drawn

    def after_take(self, queue: MessageQueue, deliveries: Sequence[Delivery]) -> None:
        """Deliver messages again that must be duplicated."""
        for delivery in deliveries:
            for index, (topic, times) in enumerate(self._duplicates):
                if topic in (None, queue.topic):
                    queue.redeliver(delivery)
                    if times == 1:
                        del self._duplicates[index]
                    else:
                        self._duplicates[index] = (topic, times - 1)
                    break
            else:
                break
        self._rearm()

    def _add(self, failure: Failure) -> None:
        with self._server.lock:
            self._failures.append(failure)
            self.armed = True

    def _use(self, failure: Failure) -> None:
        failure.times -= 1
        if failure.times <= 0:
            self._failures.remove(failure)
        self._rearm()

    def _rearm(self) -> None:
        self.armed = bool(self._failures or self._duplicates)


def _connection(who: Any) -> Connection:
    if isinstance(who, Connection):
        return who
    backend = getattr(who, "backend", who)
    connection = getattr(backend, "connection", None)
    if not isinstance(connection, Connection):
        raise TypeError(f"{who!r} is not an open connection to an in-memory broker")
    return connection
