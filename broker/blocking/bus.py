"""`connect` and `Bus` without `await`: a connection to a broker, with an event loop in a thread.

*Concurrency.* Several threads may share a bus and its objects, including threads that run an event loop. Hooks and
callbacks of futures run on the loop of the bus: they must return at once and make no blocking calls.

*Cancellation.* KeyboardInterrupt ends a waiting call and releases undelivered messages.

*Processes.* A bus belongs to the process that opened it. It cannot be pickled, and in a forked child its calls raise
`Closed`: pass the settings or the URL, and connect in the child.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import cached_property, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, overload

from typing_extensions import ParamSpec, TypeVar, Unpack

from broker import bus as asynchronous
from broker.blocking.admin import Admin
from broker.blocking.messages import MessageConsumer
from broker.blocking.records import LogReader, RecordConsumer
from broker.blocking.tables import TableWriter
from broker.blocking.topic import Topic
from broker.blocking.transactions import TransactionalPublisher
from broker.capabilities import Capabilities
from broker.checks import check_accepts, is_async
from broker.consuming.options import MessageOptions
from broker.driver.contract import TopicPartition
from broker.errors import Closed, ConfigurationError, PublishError
from broker.hooks import Hooks
from broker.names import Ephemeral
from broker.partitioners import Partitioner
from broker.protocols import AnyCodec
from broker.publishing.topic import codec_key
from broker.reading.log_reader import LogReaderFacade
from broker.reading.options import AnyRecordOptions
from broker.threads.handler_threads import in_thread
from broker.threads.portal import Portal
from broker.topic_patterns import TopicPattern

if TYPE_CHECKING:
    from broker.driver.settings import BackendSettings

__all__ = ["Bus", "MessageOptions", "OnPartitions", "RecordOptions", "connect"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

OnPartitions = Callable[[Sequence[TopicPartition]], object]
"""Called with the partitions that were assigned, are about to be revoked, or were lost."""


class RecordOptions(AnyRecordOptions, total=False):
    """The options of `bus.records(...)`; see `broker.Bus.records`."""

    on_assigned: OnPartitions | None
    on_revoking: OnPartitions | None
    on_lost: OnPartitions | None


def connect(target: str | BackendSettings | None = None) -> Bus:
    """Create a bus: `with broker.blocking.connect("nats://localhost:4222") as bus:`. Entering the block connects.

    :param target: a URL, the settings object of a backend, or None for the URL in the environment variable BROKER_URL.
    :raises UnknownScheme, UnknownSetting, InvalidSetting, MissingClient: the error says what to correct.
    """
    return Bus(asynchronous.connect(target))


class Bus:
    """A connection to a broker.

    :ivar hooks: the listeners and interceptors of this bus.
    :ivar url: the URL, with secrets masked; only the scheme if the bus was created from a settings object.
    :ivar asynchronous: the bus behind this one, for what runs on its loop; see `call`.
    """

    def __init__(self, bus: asynchronous.Bus) -> None:
        self.asynchronous = bus
        self.hooks: Hooks = bus.hooks
        self.url: str = bus.url
        self._portal = Portal()
        self._lock = threading.Lock()
        self._topics: dict[tuple[str, object, object], Topic[Any]] = {}

    # -- life --------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect; `with` calls this.

        :raises ConnectionFailed: the server cannot be reached.
        :raises AuthenticationFailed: the server rejected the credentials.
        :raises Closed: the bus was closed before.
        """
        with self._lock:
            started = not self._portal.running
            try:
                self._portal.call(self.asynchronous.open)
            except BaseException:
                if started:
                    self._portal.stop()
                raise

    def close(self) -> None:
        """Close all consumers, flush and close all topics, disconnect, and end the thread. May be called twice.

        :raises PublishError: queued messages failed, and the outcomes of their futures were not retrieved.
        """
        if self._portal.ended:
            return
        try:
            self._portal.call(self.asynchronous.close)
        finally:
            self._portal.close()
        failures: list[PublishError] = []
        for topic in tuple(self._topics.values()):
            try:
                topic.raise_failures()
            except PublishError as error:
                failures.append(error)
        if failures:
            raise PublishError([outcome for error in failures for outcome in error.outcomes])

    def __repr__(self) -> str:
        return repr(self.asynchronous)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("A bus cannot be pickled: pass its settings object or URL, and connect in the other process")

    @property
    def connected(self) -> bool:
        """Whether the connection is up, by the last event of the client; makes no call."""
        return self.asynchronous.connected

    def health(self) -> asynchronous.Health:
        """Make one round trip to the server, and look at the latest writes if the backend knows them.

        Raises no `BrokerError`.
        """
        try:
            return self._portal.call(self.asynchronous.health)
        except Closed as error:
            return asynchronous.Health(False, None, str(error))

    def call(self, function: Callable[P, Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a coroutine function on the loop of the bus, and return its result.

        :raises Closed: the bus is closed.
        """
        return self._portal.call(function, *args, **kwargs)

    @property
    def is_open(self) -> bool:
        """Whether the bus is open."""
        return self.asynchronous.is_open

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of this broker."""
        return self.asynchronous.capabilities

    # -- publishing --------------------------------------------------------------------------------------

    @overload
    def topic(self, name: str, *, partitioner: Partitioner = "broker") -> Topic[bytes]: ...
    @overload
    def topic(self, name: str, codec: AnyCodec[T], *, partitioner: Partitioner = "broker") -> Topic[T]: ...
    def topic(
        self, name: str, codec: AnyCodec[Any] | None = None, *, partitioner: Partitioner = "broker"
    ) -> Topic[Any]:
        """A topic to publish to. Does no I/O: a missing topic raises at the first publish.

        Calls with the same name, partitioner and an equal codec return the same object until it is closed.

        :param partitioner: as for `broker.Bus.topic`; a function is called on the loop of the bus.
        :raises InvalidName: the name is not portable.
        :raises ConfigurationError: `codec` is not a codec, or `partitioner` is none.
        :raises Unsupported: the backend does not let publishers choose the partition.
        """
        key = (name, codec_key(codec), codec_key(partitioner))
        topic = self._topics.get(key)
        if topic is None or topic.closed:
            with self._lock:
                topic = self._topics.get(key)
                if topic is None or topic.closed:
                    inner = self._create("topic", name, codec, partitioner=partitioner)
                    topic = self._topics[key] = Topic(inner, self._portal, partial(self._forget_topic, key))
        return topic

    def partition_of(self, topic: str, key: bytes | str, *, partitioner: Partitioner = "broker") -> int:
        """The partition to which `bus.topic(topic, partitioner=partitioner)` publishes messages with this key.

        :raises TopicNotFound: the topic does not exist.
        :raises Unsupported: the backend, or its settings, cannot tell where the key goes.
        :raises InvalidMessage: `key` is no key; or the partitioner raised, or returned no partition of the topic.
        :raises ConfigurationError: `partitioner` is none.
        """
        return self._portal.call(self.asynchronous.partition_of, topic, key, partitioner=partitioner)

    def transactional_publisher(self, transactional_id: str) -> TransactionalPublisher:
        """A transactional publisher, for `with`. Opening it fences an older publisher with the same id.

        :raises Unsupported: the broker has no transactions.
        """
        publisher = self._portal.run(self.asynchronous.transactional_publisher, transactional_id)
        return TransactionalPublisher(publisher, self._portal)

    def table_writer(self, topic: str, partition: int) -> TableWriter:
        """The writer of one partition of a table, for `with`. Opening it fences an older writer of the partition.

        :param topic: a topic made by `ensure_topic(compacted=True)`.
        :raises Unsupported: the broker has no tables. On entering: the topic is not compacted, or was made without what
            tables need.
        :raises NotFound: on entering; the topic or partition does not exist.
        """
        return TableWriter(self._portal.run(self.asynchronous.table_writer, topic, partition), self._portal)

    # -- consuming ---------------------------------------------------------------------------------------

    @overload
    def messages(
        self,
        topics: str | TopicPattern | Sequence[str],
        *,
        subscription: str | Ephemeral,
        **options: Unpack[MessageOptions],
    ) -> MessageConsumer[bytes]: ...
    @overload
    def messages(
        self,
        topics: str | TopicPattern | Sequence[str],
        *,
        subscription: str | Ephemeral,
        codec: AnyCodec[T],
        **options: Unpack[MessageOptions],
    ) -> MessageConsumer[T]: ...
    def messages(
        self,
        topics: str | TopicPattern | Sequence[str],
        *,
        subscription: str | Ephemeral,
        codec: AnyCodec[Any] | None = None,
        **options: Unpack[MessageOptions],
    ) -> MessageConsumer[Any]:
        """A consumer of messages that are settled one by one. Does no I/O: `with` opens the consumer.

        :param topics: one or several topics, or a `TopicPattern`; they share `max_outstanding` evenly.
        :param subscription: consumers of a subscription share its messages; every subscription receives all messages.
            The subscription persists after the close; `ephemeral()` is one for this consumer only.
        :param options: as for `broker.Bus.messages`.
        :raises ConfigurationError: a name or an option is invalid.
        :raises Unsupported: the broker does not support an option.
        """
        consumer = self._create("messages", topics, subscription=subscription, codec=codec, **options)
        return MessageConsumer(consumer, self._portal, self.hooks, self)

    @overload
    def records(
        self, topics: str | TopicPattern | Sequence[str], *, group: str | Ephemeral, **options: Unpack[RecordOptions]
    ) -> RecordConsumer[bytes]: ...
    @overload
    def records(
        self,
        topics: str | TopicPattern | Sequence[str],
        *,
        group: str | Ephemeral,
        codec: AnyCodec[T],
        **options: Unpack[RecordOptions],
    ) -> RecordConsumer[T]: ...
    def records(
        self,
        topics: str | TopicPattern | Sequence[str],
        *,
        group: str | Ephemeral,
        codec: AnyCodec[Any] | None = None,
        **options: Unpack[RecordOptions],
    ) -> RecordConsumer[Any]:
        """A consumer of records of a partitioned log. Does no I/O: `with` joins the group.

        :param group: its members share the partitions; its committed positions persist. `ephemeral()` is a group for
            this consumer only.
        :param options: as for `broker.Bus.records`; `on_assigned`, `on_revoking` and `on_lost` are called in a thread,
            and may seek and commit there.
        :raises ConfigurationError: a name or an option is invalid.
        :raises Unsupported: the broker has no log, or does not support an option.
        """
        inner: dict[str, Any] = {**options}
        for name in ("on_assigned", "on_revoking", "on_lost"):
            if (callback := inner.get(name)) is not None:
                check_accepts(name, callback, "a list of partitions")
                if is_async(callback):
                    raise ConfigurationError(
                        f"{name} is a coroutine function",
                        advice="Pass a plain function, or use the asynchronous broker.connect",
                    )
                inner[name] = in_thread(callback)
        consumer = self._create("records", topics, group=group, codec=codec, **inner)
        return RecordConsumer(consumer, self._portal, self.hooks, self)

    @cached_property
    def log(self) -> LogReader:
        """Reads topics by position, without a group.

        :raises Unsupported: the broker has no readable log.
        :raises Closed: the bus is not open.
        """
        return LogReader(self._portal.call(self._log), self._portal)

    async def _log(self) -> LogReaderFacade:
        return self.asynchronous.log

    @cached_property
    def admin(self) -> Admin:
        """Provisioning and operations."""
        return Admin(self.asynchronous.admin, self._portal)

    def _forget_topic(self, key: tuple[str, object, object], topic: Topic[Any]) -> None:
        with self._lock:
            if self._topics.get(key) is topic:
                del self._topics[key]

    def _create(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the asynchronous bus on its loop."""
        return self._portal.run(getattr(self.asynchronous, method), *args, **options)
