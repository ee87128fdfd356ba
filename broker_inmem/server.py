"""The in-memory server: topics, groups and transactions, shared by any number of connections.

*Concurrency.* Every public method may be called from any thread and event loop. The server has one lock, held only in
short synchronous sections. Sleeping consumers are woken on their own loops. *Time.* The server has no task and no
timer: what is due is applied at the next call, and the clock wakes those who wait. Nothing survives the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Final
from weakref import WeakValueDictionary

from broker import ConfigurationError, TopicNotFound, TopicPartition, Unsupported
from broker.driver import MessageLimits, Start, not_compacted
from broker_inmem.clock import Clock, SystemClock
from broker_inmem.connection import Connection, ConnectionState
from broker_inmem.entries import TransactionState
from broker_inmem.faults import Faults
from broker_inmem.groups import Claim, Group
from broker_inmem.message_queue import KeyShuffler, MessageQueue
from broker_inmem.options import BrokerOptions
from broker_inmem.topic import Topic, TransactionWork

__all__ = ["Broker", "Producer", "ServerTransaction"]


_names = count(1)
_known: WeakValueDictionary[str, Broker] = WeakValueDictionary()
_named: dict[str, Broker] = {}
"""The servers made by `Broker.named`, which nothing else may reference."""
_registry_lock = threading.RLock()


class Broker:
    """A server in memory.

    Connect to it by `InmemSettings(broker=...)`, or from the same process by its `url`.

    :param options: its behaviour and limits.
    :param clock: its clock; None is the system's.
    :param name: the name in its URL; None draws a unique one.
    :raises ConfigurationError: a server of that name exists.
    """

    def __init__(
        self, options: BrokerOptions | None = None, *, clock: Clock | None = None, name: str | None = None
    ) -> None:
        self.options: Final = options or BrokerOptions()
        self.clock: Final = clock or SystemClock()
        self.name: Final = name or f"private-{next(_names)}"
        self.capabilities: Final = self.options.capabilities()
        self.shuffler: Final = KeyShuffler(self.options.shuffle, self.options.seed)
        self.lock: Final = threading.Lock()
        self.faults: Final = Faults(self)
        self.up = True
        self.topics: Final[dict[str, Topic]] = {}
        self.groups: Final[dict[str, Group]] = {}
        self.producers: Final[dict[str, Producer]] = {}
        self.connections: Final[list[Connection]] = []
        """Open connections, in order of opening."""
        self.handler_raises: Callable[[Exception], bool] | None = None
        """For tests: whether an error of a handler, of any bus on this server, is raised instead of retried."""
        self._limits = MessageLimits(self.capabilities)
        self._numbers = count(1)
        self._deadlines: list[tuple[float, int, ServerTransaction]] = []
        with _registry_lock:
            if self.name in _known:
                raise ConfigurationError(
                    f"An in-memory broker {self.name!r} exists",
                    advice="Choose another name, or call Broker.forget with this one",
                )
            _known[self.name] = self

    @property
    def url(self) -> str:
        """A URL for this process; valid while the object is referenced."""
        return f"inmem://{self.name}"

    @property
    def seed(self) -> int:
        """The random seed of the order between keys; pass it as `seed` to reproduce the order."""
        return self.shuffler.seed

    def compact(self, topic: str) -> None:
        """Compact a topic now; the server does not compact by itself. May be called from any thread.

        The last committed record of each key stays. Tombstones go when they are older than `tombstone_seconds`.

        :raises TopicNotFound: the topic does not exist.
        :raises Unsupported: the topic is not compacted.
        """
        with self.lock:
            now = self.clock.time()
            found = self.topic(topic, now)
            if not found.compacted:
                raise Unsupported(
                    f"Topic {topic!r} is not compacted", advice="Create it with ensure_topic(compacted=True)"
                )
            found.compact(now - self.options.tombstone_seconds)

    def raises_from_handlers(self, error: Exception) -> bool:
        """Whether the error of a handler is raised; see `handler_raises`."""
        return self.handler_raises is not None and self.handler_raises(error)

    @classmethod
    def named(cls, name: str, options: BrokerOptions | None = None) -> Broker:
        """The server of this name in this process, created on first use.

        :param options: options of a new server; None accepts an existing one.
        :raises ConfigurationError: it exists with other options.
        """
        with _registry_lock:
            existing = _known.get(name)
            if existing is None:
                existing = _named[name] = cls(options, name=name)
        if options is not None and options != existing.options:
            raise ConfigurationError(
                f"The in-memory broker {name!r} exists in this process with other settings",
                advice="Pass settings at first use only, or choose another name",
            )
        return existing

    @classmethod
    def forget(cls, name: str) -> None:
        """Remove the server of this name; open connections keep it until they close."""
        with _registry_lock:
            _named.pop(name, None)
            _known.pop(name, None)

    # Called by connections, which hold the lock.

    def number(self) -> int:
        """A number that is unique on this server."""
        return next(self._numbers)

    def topic(self, name: str, now: float) -> Topic:
        """A topic, after applying what is due.

        :raises TopicNotFound: the topic does not exist.
        """
        topic = self.topics.get(name)
        if topic is None:
            raise TopicNotFound(f"Topic {name!r} does not exist on the in-memory broker {self.name!r}")
        if self._deadlines:
            self.expire_transactions(now)
        topic.advance(now)
        return topic

    def ensure_topic(self, name: str, partitions: int | None, *, compacted: bool = False) -> Topic:
        topic = self.topics.get(name)
        if topic is None:
            number = partitions or self.options.partitions
            topic = Topic(name, number, self.options, self._limits, compacted=compacted)
            self.topics[name] = topic
            for group in self.groups.values():
                group.topics_changed(self.clock.time())
        elif compacted and not topic.compacted:
            raise not_compacted(name)
        elif partitions is not None and partitions != len(topic.partitions):
            topic.grow(partitions)
            for group in self.groups.values():
                group.topics_changed(self.clock.time())
        return topic

    def delete_topic(self, name: str) -> None:
        topic = self.topics.pop(name, None)
        if topic is not None:
            topic.delete()
            for group in self.groups.values():
                group.topics_changed(self.clock.time())
            for waker in topic.watchers:
                waker.wake()

    def ensure_queue(self, topic: Topic, name: str, start: Start, *, ephemeral: bool = False) -> MessageQueue:
        queue = topic.queues.get(name)
        if queue is None:
            now = self.clock.time()
            positions = topic.positions(start, now)
            queue = MessageQueue(
                topic.name,
                name,
                native_delay=self.options.native_delay,
                shuffler=self.shuffler,
                start=positions,
                ephemeral=ephemeral,
            )
            topic.queues[name] = queue
            queue.push(topic.since(positions, now))
        return queue

    def ensure_group(self, name: str) -> Group:
        group = self.groups.get(name)
        if group is None:
            group = self.groups[name] = Group(name, self.topics, self.options)
        return group

    def in_group(self, topic: str, name: str) -> bool:
        """Whether a record group of this name reads the topic."""
        group = self.groups.get(name)
        return group is not None and topic in group.topics

    def check_family(self, topic: str, name: str, family: str) -> None:
        """Check that a name is used by one family only.

        :raises ConfigurationError: the other family uses it.
        """
        queue = self.topics[topic].queues.get(name)
        other = "messages" if queue is not None and queue.used else "records" if self.in_group(topic, name) else family
        if other != family:
            raise ConfigurationError(
                f"Subscription {name!r} of topic {topic!r} is consumed as {other}, not as {family}",
                advice="Use another name, or delete it with `bus.admin.delete_subscription(topic, name)`",
            )

    def delete_group(self, topic: str, name: str) -> None:
        """Delete a group's positions on a topic."""
        group = self.groups.get(name)
        if group is not None and topic in group.topics:
            group.forget(topic, self.clock.time())
            if not group.topics:
                del self.groups[name]

    def producer(self, transactional_id: str) -> Producer:
        """The producer state of this id."""
        return self.producers.setdefault(transactional_id, Producer())

    def add_deadline(self, when: float, transaction: ServerTransaction) -> None:
        """Abort a transaction at this time if it is still open."""
        self._drop_ended()
        heappush(self._deadlines, (when, self.number(), transaction))

    def expire_transactions(self, now: float) -> None:
        """Abort transactions whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, transaction = heappop(self._deadlines)
            transaction.expire(now)

    def next_due(self, topics: Sequence[str], other: float | None = None) -> float | None:
        """The next time at which something is due for readers of these topics."""
        due = other
        for name in topics:
            topic = self.topics.get(name)
            when = topic.next_due() if topic is not None else None
            if when is not None and (due is None or when < due):
                due = when
        self._drop_ended()
        if self._deadlines and (due is None or self._deadlines[0][0] < due):
            due = self._deadlines[0][0]
        return due

    def _drop_ended(self) -> None:
        while self._deadlines and not self._deadlines[0][2].state.open:
            heappop(self._deadlines)

    def connect(self) -> Connection:
        """Add a client.

        :raises ConnectionFailed: the server is stopped.
        """
        connection = Connection(self, self.number())
        connection.check()
        self.connections.append(connection)
        return connection

    def disconnect(self, connection: Connection) -> None:
        """Remove a client."""
        if connection in self.connections:
            self.connections.remove(connection)
        if connection.state is not ConnectionState.KILLED:
            connection.state = ConnectionState.CLOSED

    def each_queue(self) -> list[MessageQueue]:
        return [queue for topic in self.topics.values() for queue in topic.queues.values()]


class ServerTransaction:
    """One transaction. The caller holds the server's lock."""

    def __init__(self) -> None:
        self.state: Final = TransactionState()
        self.expired = False
        self.offsets: list[tuple[Group, dict[TopicPartition, Claim]]] = []
        self._work: dict[Topic, TransactionWork] = {}

    def work(self, topic: Topic) -> TransactionWork:
        """The messages published to a topic."""
        work = self._work.get(topic)
        if work is None:
            work = self._work[topic] = TransactionWork(self.state)
        return work

    def end(self, *, committed: bool, now: float) -> None:
        """Commit or abort."""
        if self.state.open:
            self.state.committed = committed
            self.state.open = False
            for topic, work in self._work.items():
                topic.end(work, now)

    def expire(self, now: float) -> None:
        """Abort it if it is still open: its deadline has passed."""
        if self.state.open:
            self.expired = True
            self.end(committed=False, now=now)


class Producer:
    """The producers of one id; only the newest is valid."""

    def __init__(self) -> None:
        self.epoch = 0
        self.current: ServerTransaction | None = None
