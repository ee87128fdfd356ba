"""`connect` and `Bus`: a connection to a broker, with its topics, consumers and administration.

A bus belongs to the event loop that opened it; tasks of that loop may share the bus and its objects. On another loop
every call raises `WrongEventLoop` at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload
from weakref import WeakSet

from typing_extensions import TypeVar

from broker.admin import AdminFacade
from broker.capabilities import Capabilities, RecordCapabilities, unsupported
from broker.checks import check_codec
from broker.consuming.consumer import MessageConsumer
from broker.consuming.factory import ConsumerFactory, check_topics
from broker.consuming.options import ConsumerOptions, MessageOptions
from broker.consuming.retry.policy import Drop, Retry
from broker.consuming.retry.topics import RetryTopics
from broker.driver.concurrency import check_loop
from broker.driver.contract import Backend, PublishTarget, RecordSubscription, Start, check_start
from broker.errors import BrokerError, Closed, InvalidMessage, Unsupported
from broker.hooks import Hooks
from broker.names import Ephemeral, check_name
from broker.outbound import OutboundMessage
from broker.partitioners import Partitioner, check_partitioner
from broker.protocols import AnyCodec, TableWriter, TransactionalPublisher
from broker.publishing.partitioning import PartitionedTarget, Partitions
from broker.publishing.tables import open_table_writer
from broker.publishing.topic import TopicFacade, codec_key
from broker.publishing.transactions import open_transactional_publisher
from broker.reading.log_follower import LogFollower
from broker.reading.log_reader import LogReaderFacade
from broker.reading.options import RecordOptions
from broker.reading.rebalance_callbacks import OnPartitions
from broker.reading.record_consumer import RecordConsumer
from broker.registry import read_target
from broker.topic_patterns import TopicPattern

if TYPE_CHECKING:  # pydantic is loaded with the backend, by those who connect
    from broker.driver.settings import BackendSettings

__all__ = ["Bus", "Health", "connect"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Health:
    """The result of `bus.health()`: `seconds` is the round trip, None if it failed."""

    ok: bool
    seconds: float | None
    detail: str


def connect(target: str | BackendSettings | None = None) -> Bus:
    """Create a bus: `async with connect("nats://localhost:4222") as bus:`. Connects when the block is entered.

    :param target: a URL, the settings object of a backend, or None for the URL in the environment variable BROKER_URL.
    :raises UnknownScheme, UnknownSetting, InvalidSetting, MissingClient: the error says what to correct.
    """
    backend_type, settings = read_target(target)
    hooks = Hooks()
    return Bus(backend_type(settings, hooks), hooks, url=settings.url)


class Bus:
    """A connection to a broker.

    :ivar hooks: the listeners and interceptors of this bus.
    :ivar url: the URL, with secrets masked; only the scheme if the bus was created from a settings object.
    """

    def __init__(self, backend: Backend, hooks: Hooks, *, url: str = "") -> None:
        self.hooks = hooks
        self.url = url
        self._backend = backend
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop that opened the bus."""
        self._opening = asyncio.Lock()
        self._opened = False
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._topics: dict[tuple[str, object, object], TopicFacade[Any]] = {}
        self._partitions = Partitions(backend)
        self._partitioning: set[bool] = set()
        """Whether the backend's own partitioner (True), or another (False), was found to be supported."""
        self._admin = AdminFacade(self, self.check_open, changed=self._partitions.forget)
        self._log: LogReaderFacade | None = None
        self._consumer_factory = ConsumerFactory(self, backend)
        # Weak: the application holds its open consumers, and only those need a close.
        self._consumers: WeakSet[MessageConsumer[Any] | RecordConsumer[Any] | LogFollower] = WeakSet()

    # -- life --------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect; `async with` calls this.

        :raises ConnectionFailed: the server cannot be reached.
        :raises AuthenticationFailed: the server rejected the credentials.
        :raises WrongEventLoop: another event loop opened the bus.
        """
        self._check_not_closing()
        check_loop(self._loop)
        async with self._opening:
            if not self._opened:
                self._loop = asyncio.get_running_loop()
                try:
                    await self._backend.open()
                except BaseException:
                    await self._backend.close()
                    self._loop = None
                    raise
                self._opened = True

    async def close(self) -> None:
        """Close all consumers, flush and close all topics, then disconnect.

        Consumers close concurrently, each waiting for its running handlers up to `close_timeout`; handlers may still
        publish. Cancelling the call does not stop the close; a second call waits for the first. A call from a handler
        does not wait.

        :raises PublishError: queued messages failed, and the outcomes of their futures were not retrieved.
        :raises WrongEventLoop: another event loop opened the bus.
        """
        check_loop(self._loop)
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="broker-bus-close")
        task = asyncio.current_task()
        if not any(isinstance(one, MessageConsumer) and one.runs_in(task) for one in self._consumers):
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            ends = await asyncio.gather(*(one.close() for one in tuple(self._consumers)), return_exceptions=True)
            self._closed = True
            ends += await asyncio.gather(*(topic.close() for topic in self._topics.values()), return_exceptions=True)
        finally:
            self._closed = True
            await self._backend.close()
            # From now on every call raises Closed, on any loop.
            self._loop = None
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def connected(self) -> bool:
        """Whether the bus is open and the connection up, by the last event of the client; makes no call."""
        return self.is_open and self.hooks.connected

    async def health(self) -> Health:
        """Make one round trip to the server, and look at the latest writes if the backend knows them.

        Raises no `BrokerError`.
        """
        try:
            self.check_open()
            seconds = await self._backend.check_health()
        except BrokerError as error:
            return Health(False, None, str(error))
        return Health(True, seconds, f"{self.capabilities.backend} answered in {seconds * 1000:.1f} ms")

    def check_open(self) -> None:
        """Check that the bus can be used here; for objects that belong to it.

        :raises Closed: the bus is not open.
        :raises WrongEventLoop: another event loop opened the bus.
        """
        if self._closed:
            raise Closed("The bus is closed", advice="Create a new one with connect(...)")
        if not self._opened:
            raise Closed("The bus is not open", advice="Use it as `async with connect(...) as bus:`")
        check_loop(self._loop)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._opened else "not open"
        return f"<Bus {self.url or self.capabilities.backend}, {state}>"

    @property
    def is_open(self) -> bool:
        """Whether the bus is open."""
        return self._opened and not self._closed

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of this broker."""
        return self._backend.capabilities

    @property
    def backend(self) -> Backend:
        """The backend, for features that only this broker has."""
        return self._backend

    # -- publishing --------------------------------------------------------------------------------------

    @overload
    def topic(self, name: str, *, partitioner: Partitioner = "broker") -> TopicFacade[bytes]: ...
    @overload
    def topic(self, name: str, codec: AnyCodec[T], *, partitioner: Partitioner = "broker") -> TopicFacade[T]: ...
    def topic(
        self, name: str, codec: AnyCodec[Any] | None = None, *, partitioner: Partitioner = "broker"
    ) -> TopicFacade[Any]:
        """A topic to publish to. Does no I/O: a missing topic raises at the first publish.

        Calls with the same name, partitioner and an equal codec return the same object until it is closed. A codec that
        you create for each call needs `__eq__` and `__hash__`; otherwise each call creates a new topic.

        :param partitioner: how a key selects the partition. "broker" leaves that to the backend; "murmur2" (Kafka's
            Java client), "crc32" (librdkafka's `consistent`), "fnv1a" (Sarama, goka) and a function, called with topic,
            key and number of partitions, are the same on every backend with `capabilities.publish.partitions`. Messages
            without a key, or with a partition of their own, are not affected.
        :raises InvalidName: the name is not portable.
        :raises ConfigurationError: `codec` is not a codec, or `partitioner` is none.
        :raises Unsupported: the backend does not let publishers choose the partition.
        """
        check_name(name, "topic")
        key = (name, codec_key(codec), codec_key(partitioner))
        topic = self._topics.get(key)
        if topic is None or topic.closed:
            check_codec(codec)
            check_partitioner(partitioner)
            if partitioner != "broker":
                self._check_partitioning(partitioner)
            topic = TopicFacade(
                name,
                partial(self._target, name, partitioner),
                codec,
                self.capabilities,
                self.hooks,
                on_close=partial(self._forget_topic, key),
            )
            self._topics[key] = topic
        return topic

    async def partition_of(self, topic: str, key: bytes | str, *, partitioner: Partitioner = "broker") -> int:
        """The partition to which `bus.topic(topic, partitioner=partitioner)` publishes messages with this key.

        The number of partitions is read once, again after 30 seconds, and after this bus has changed the topic. When a
        topic grows, most keys change their partition.

        :raises TopicNotFound: the topic does not exist.
        :raises Unsupported: the backend, or its settings, cannot tell where the key goes.
        :raises InvalidMessage: `key` is no key; or the partitioner raised, or returned no partition of the topic.
        :raises ConfigurationError: `partitioner` is none.
        """
        self.check_open()
        check_name(topic, "topic")
        if not callable(partitioner):
            check_partitioner(partitioner)
        if type(key) is not bytes:
            message = OutboundMessage(None, key)
            if message.key is None:
                raise InvalidMessage("key is None", advice="A message without a key goes to any partition")
            key = message.key
        self._check_partitioning(partitioner)
        return await self._partitions.of_key(topic, key, partitioner)

    def transactional_publisher(self, transactional_id: str) -> AbstractAsyncContextManager[TransactionalPublisher]:
        """A transactional publisher, for `async with`. Opening it fences an older publisher with the same id.

        :raises Unsupported: the broker has no transactions.
        """
        if not self.capabilities.publish.transactions:
            raise self._unsupported("transactions", "publish.transactions")
        return open_transactional_publisher(
            transactional_id, self._backend, self.capabilities, self.hooks, self.check_open
        )

    def table_writer(self, topic: str, partition: int) -> AbstractAsyncContextManager[TableWriter]:
        """The writer of one partition of a table, for `async with`. Opening it fences an older writer of the partition.

        :param topic: a topic made by `ensure_topic(compacted=True)`.
        :raises Unsupported: the broker has no tables. On entering: the topic is not compacted, or was made without what
            tables need.
        :raises NotFound: on entering; the topic or partition does not exist.
        """
        if not self.capabilities.publish.tables:
            raise self._unsupported("tables", "publish.tables")
        return open_table_writer(topic, partition, self._backend, self.capabilities, self.hooks, self.check_open)

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
        retry: Retry | None = None,
        retry_topics: RetryTopics | None = None,
        dead_letter: str | Drop | None = None,
        ordered_by_key: bool = False,
        start: Start = "earliest",
        create: bool = True,
        max_outstanding: int = 1000,
        max_outstanding_bytes: int = 64 * 1024 * 1024,
        prefetch: int | None = None,
        max_rate: float | None = None,
        max_lease: float = 3600.0,
        confirm_acks: bool | None = None,
        stop_when_idle: float | None = None,
        close_timeout: float = 30.0,
        blocked_after: float = 30.0,
    ) -> MessageConsumer[Any]:
        """A consumer of messages that are settled one by one. Does no I/O: `async with` opens the consumer.

        :param topics: one or several topics, or a `TopicPattern` where `capabilities.messages.topic_patterns` says so;
            they share `max_outstanding` evenly. A new topic that matches is read from its first message on, within 10
            seconds.
        :param subscription: consumers of a subscription share its messages; every subscription receives all messages.
            The subscription persists after the close; `ephemeral()` is one for this consumer only.
        :param retry: how failed messages are retried; None is `Retry()`.
        :param retry_topics: existing topics on which failed messages wait durably for their next attempt.
        :param dead_letter: the existing topic for exhausted, rejected and undecodable messages. `DROP` acks them
            instead; None redelivers them at the longest backoff.
        :param ordered_by_key: deliver the messages of a key one at a time, in order; different keys in parallel.
        :param start: where a new subscription begins: "earliest", "latest" or a timezone-aware time.
        :param create: create a missing subscription; False raises SubscriptionNotFound at open.
        :param max_outstanding: maximum number of fetched and unsettled messages, including buffered ones.
        :param max_outstanding_bytes: maximum size of these messages in bytes; one message may exceed it.
        :param prefetch: maximum number of buffered messages; by default about two seconds of work.
        :param max_rate: maximum number of messages handed over per second, retries included; None is no limit. A batch
            is not split for it: the next one waits.
        :param max_lease: seconds from delivery for which the consumer renews the lease of a message.
        :param confirm_acks: wait for the broker to confirm acks; None does so if it costs nothing.
        :param stop_when_idle: end after this many seconds without new and without unsettled messages.
        :param close_timeout: seconds that running handlers have to end when the consumer closes or fails.
        :param blocked_after: seconds without fetching, because of `max_outstanding`, before a FlowBlocked event.
        :raises ConfigurationError: a name or an option is invalid.
        :raises Unsupported: the broker does not support an option.
        """
        self._check_not_closing()
        consumer = self._consumer_factory.make(
            check_topics(topics),
            subscription=subscription,
            codec=codec,
            retry=retry,
            retry_topics=retry_topics,
            dead_letter=dead_letter,
            start=start,
            create=create,
            options=ConsumerOptions(
                max_outstanding=max_outstanding,
                max_outstanding_bytes=max_outstanding_bytes,
                prefetch=prefetch,
                max_rate=max_rate,
                max_lease=max_lease,
                ordered_by_key=ordered_by_key,
                confirm_acks=confirm_acks,
                stop_when_idle=stop_when_idle,
                close_timeout=close_timeout,
                blocked_after=blocked_after,
            ),
        )
        self._remember(consumer)
        return consumer

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
        start: Start = "earliest",
        isolation: Literal["read_committed", "read_uncommitted"] = "read_committed",
        on_decode_error: str = "raise",
        copartitioned: bool = False,
        on_assigned: OnPartitions | None = None,
        on_revoking: OnPartitions | None = None,
        on_lost: OnPartitions | None = None,
        assign_timeout: float | None = 300.0,
        max_buffered: int = 10_000,
        max_rate: float | None = None,
        stop_when_idle: float | None = None,
        close_timeout: float = 30.0,
    ) -> RecordConsumer[Any]:
        """A consumer of records of a partitioned log. Does no I/O: `async with` joins the group.

        :param topics: one or several topics, or a `TopicPattern` where `capabilities.records.topic_patterns` says so: a
            new topic that matches is read from its first record on.
        :param group: its members share the partitions; its committed positions persist. `ephemeral()` is a group for
            this consumer only.
        :param start: where a partition without a committed position begins: "earliest", "latest" or a time.
        :param isolation: "read_uncommitted" also returns records of open and aborted transactions.
        :param on_decode_error: "raise", or the name of a topic to which undecodable records are dead-lettered.
        :param copartitioned: partition n of all topics belongs to one member at every moment, where
            `capabilities.records.copartitioned` says so. All members of the group must say so and name the same topics,
            which have equal numbers of partitions.
        :param on_assigned: awaited with new partitions before their first record is delivered or buffered; may `seek`
            them to positions of your own. An exception ends the consumer, which raises it.
        :param on_revoking: awaited with the partitions that are about to be revoked, while delivered records can still
            be committed; bounded by the broker's deadline.
        :param on_lost: awaited with partitions that went to another member before they could be released; nothing of
            them can be committed. The next `on_assigned` waits for it.
        :param assign_timeout: seconds that `on_assigned` may take, or the consumer ends with OperationTimeout; None is
            no limit.
        :param max_buffered: maximum number of buffered records.
        :param max_rate: maximum number of records handed over per second; None is no limit. A batch is not split for
            it: the next one waits.
        :param stop_when_idle: end after this many seconds without records.
        :param close_timeout: seconds that pending commits have to end at the close.
        :raises ConfigurationError: a name or an option is invalid.
        :raises Unsupported: the broker has no log, or does not support an option.
        """
        self._check_not_closing()
        check_start(start)
        names = check_topics(topics)
        family = self._record_family()
        if not isinstance(group, Ephemeral):
            check_name(group, "group")
        if not isinstance(start, str) and not family.start_time:
            raise self._unsupported("a start time for records", "records.start_time")
        pattern = names if isinstance(names, TopicPattern) else None
        if pattern is not None and not family.topic_patterns:
            raise self._unsupported("patterns of topics for records", "records.topic_patterns")
        if copartitioned is True and not family.copartitioned:
            raise self._unsupported("copartitioned topics", "records.copartitioned")
        wanted = RecordSubscription(
            topics=() if isinstance(names, TopicPattern) else names,
            pattern=pattern,
            group=group,
            start=start,
            isolation=isolation,
            copartitioned=copartitioned,
        )
        consumer: RecordConsumer[Any] = RecordConsumer(
            self._backend,
            wanted,
            hooks=self.hooks,
            codec=codec,
            on_decode_error=on_decode_error,
            on_assigned=on_assigned,
            on_revoking=on_revoking,
            on_lost=on_lost,
            assign_timeout=assign_timeout,
            max_buffered=max_buffered,
            max_rate=max_rate,
            stop_when_idle=stop_when_idle,
            close_timeout=close_timeout,
            make_messages=self._make_over,
            check_bus=self.check_open,
        )
        self._remember(consumer)
        return consumer

    @property
    def log(self) -> LogReaderFacade:
        """Reads topics by position, without a group.

        :raises Unsupported: the broker has no readable log.
        :raises Closed: the bus is not open.
        """
        if not self._record_family().log_reader:
            raise self._unsupported("reading the log", "records.log_reader")
        self.check_open()
        if self._log is None:
            self._log = LogReaderFacade(
                self._backend.log_reader(),
                self._record_family(),
                self.check_open,
                hooks=self.hooks,
                identity=self._admin.topic_identity,
                remember=self._remember,
            )
        return self._log

    @property
    def admin(self) -> AdminFacade:
        """Provisioning and operations."""
        return self._admin

    # -- inside ------------------------------------------------------------------------------------------

    def _record_family(self) -> RecordCapabilities:
        family = self.capabilities.records
        if family is None:
            raise self._unsupported("the Record family", "records")
        return family

    def _make_over(self, *sources: Any, **options: Any) -> MessageConsumer[Any]:
        consumer = self._consumer_factory.make_over(*sources, **options)
        self._remember(consumer)
        return consumer

    def _remember(self, consumer: MessageConsumer[Any] | RecordConsumer[Any] | LogFollower) -> None:
        self._consumers.add(consumer)

    def _target(self, name: str, partitioner: Partitioner) -> PublishTarget:
        self.check_open()
        target = self._backend.publish_target(name)
        return target if partitioner == "broker" else PartitionedTarget(name, target, partitioner, self._partitions)

    def _check_partitioning(self, partitioner: Partitioner) -> None:
        """:raises Unsupported: the backend does not tell where keys go, or takes no partitioner."""
        own = partitioner == "broker"
        if own in self._partitioning:
            return
        # Some backends make their capabilities at each access, which takes longer than the hash of a key.
        able = self.capabilities.publish
        if not own and not able.partitions:
            raise self._unsupported("a partitioner", "publish.partitions")
        if own and not able.partition_of:
            error = self._unsupported("telling the partition of a key", "publish.partition_of")
            if able.partitions:
                error.advice += '; or publish with a partitioner and pass it here: partitioner="murmur2"'
            raise error
        self._partitioning.add(own)

    def _forget_topic(self, key: tuple[str, object, object], topic: TopicFacade[Any]) -> None:
        if self._topics.get(key) is topic:
            del self._topics[key]

    def _check_not_closing(self) -> None:
        if self._closing is not None:
            raise Closed("The bus is closed", advice="Create a new one with connect(...)")

    def _unsupported(self, what: str, capability: str) -> Unsupported:
        return unsupported(self.capabilities, what, capability)
