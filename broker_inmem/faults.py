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
    """One kind of failure and how often it is still to happen."""

    operation: Operation
    error: BrokerError | None
    times: int
    topic: str | None
    each: bool = False
    """Whether it meets single messages, not the call."""
    applied: bool = False


class FaultyServer(Protocol):
    """What faults reach of their server; all but `lock` is read and changed under its lock."""

    up: bool

    @property
    def lock(self) -> threading.Lock: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def connections(self) -> list[Connection]:
        """Those that are open."""
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
        """Whether any counted fault is waiting; asked before every operation."""
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
        """Let the next operations fail as a whole, without effect.

        :param error: what they raise; a retriable ConnectionFailed if None.
        :param times: how many fail.
        :param topic: only those on this topic.
        """
        self._add(Failure(operation, error or ConnectionFailed("A fault broke the call"), times, topic))

    def fail_publish(
        self, error: BrokerError | None = None, *, times: int = 1, topic: str | None = None, stored: bool = False
    ) -> None:
        """Let the next messages that are published fail, each on its own.

        :param error: each one's fate; OperationTimeout if None.
        :param times: how many messages.
        :param stored: whether they are on the server all the same.
        """
        self._add(Failure("publish", error or OperationTimeout("A fault kept the receipt"), times, topic, True, stored))

    def lose_acks(
        self, times: int = 1, *, topic: str | None = None, applied: bool = False, reported: bool = True
    ) -> None:
        """Lose the next settlements on their way.

        :param times: how many messages.
        :param applied: whether the server carried them out: only the answer was lost.
        :param reported: whether `settle` raises OperationTimeout; if not, it reports success.
        """
        error = OperationTimeout("A fault lost the settlement") if reported else None
        self._add(Failure("settle", error, times, topic, True, applied))

    def duplicate(self, times: int = 1, *, topic: str | None = None) -> None:
        """Deliver the next messages twice, whatever becomes of the first delivery."""
        server = self._server
        with server.lock:
            self._duplicates.append((topic, times))
            self.armed = True

    def expire(self, messages: Iterable[Message[Any]] | None = None) -> int:
        """End leases now, without telling their consumers: those of these messages, or all.

        :returns: how many leases there were to end.
        """
        server = self._server
        wanted = None if messages is None else {id(message.lease) for message in messages}
        ended = 0
        with server.lock:
            for queue in server.each_queue():
                for member in list(queue.members.values()):
                    held = [d for d in member.leases.values() if wanted is None or id(d) in wanted]
                    ended += queue.drop(member, held)
                    if member.gone:
                        queue.abandon(member)
        return ended

    def slow_fetches(self, seconds: float) -> None:
        """Let every fetch take so much longer, by the server's clock; 0 ends it."""
        self.fetch_delay = seconds

    def restart(self) -> None:
        """Stop the server and start it again: connections break and come back, all leases end."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """Stop the server: every call fails until `start`, and all leases end. What is stored stays."""
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
        """Let a client vanish as if its process were killed: its calls fail for good, nothing is given back.

        :param who: a Bus, a backend or a connection.
        :param drop_leases: end its leases and sessions at once; if not they run out.
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
                        group.silence(number, now)
            connection.sources.clear()

    def isolate(self, who: Any) -> None:
        """Cut a client off: its calls fail until it is healed; meanwhile its leases and sessions run out."""
        server = self._server
        connection = _connection(who)
        with server.lock:
            connection.state = ConnectionState.ISOLATED
            now = server.clock.time()
            for number, source in tuple(connection.sources.items()):
                source.broken(lost=False)
                for group in server.groups.values():
                    group.silence(number, now)

    def heal(self, who: Any) -> None:
        """Let a client that was cut off reach the server again."""
        server = self._server
        connection = _connection(who)
        with server.lock:
            if connection.state is ConnectionState.ISOLATED:
                connection.state = ConnectionState.OPEN
                now = server.clock.time()
                for number in connection.sources:
                    for group in server.groups.values():
                        group.hear(number, now)

    def clear(self) -> None:
        """Forget all faults that were not used up, and let fetches be quick again."""
        with self._server.lock:
            self._failures.clear()
            self._duplicates.clear()
            self.armed = False
            self.fetch_delay = 0.0

    # What follows is for the connections. Callers hold the lock, and ask only if `armed`.

    def check(self, operation: Operation, topic: str | None = None) -> None:
        """:raises BrokerError: this operation is to fail as a whole."""
        for failure in self._failures:
            if failure.operation == operation and not failure.each and failure.topic in (None, topic):
                self._use(failure)
                if failure.error is not None:
                    raise failure.error
                return

    def draw(self, operation: Operation, topic: str, count: int) -> Sequence[Failure | None]:
        """What becomes of each of so many messages."""
        fates: list[Failure | None] = []
        for _ in range(count):
            failure = next(
                (f for f in self._failures if f.each and f.operation == operation and f.topic in (None, topic)), None
            )
            if failure is not None:
                self._use(failure)
            fates.append(failure)
        return fates

    def after_take(self, queue: MessageQueue, deliveries: Sequence[Delivery]) -> None:
        """Deliver again what is to be duplicated."""
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
