"""`connect` and `Bus`: one connection to one broker, and everything that stands on it.

A bus belongs to the event loop in which it was opened; its objects may be shared between the tasks of that loop.
Closing it closes consumers, then flushes and closes topics, then the connection; it may be repeated.
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
from broker.capabilities import Capabilities, RecordCapabilities
from broker.checks import check_codec
from broker.consuming.consumer import MessageConsumer
from broker.consuming.factory import ConsumerFactory, check_topics, unsupported
from broker.consuming.options import ConsumerOptions, MessageOptions
from broker.consuming.retry.policy import Drop, Retry
from broker.consuming.retry.topics import RetryTopics
from broker.driver.contract import Backend, RecordSubscription, Start, check_start
from broker.errors import BrokerError, Closed, Unsupported
from broker.hooks import Hooks
from broker.names import Ephemeral, check_name
from broker.protocols import Codec, TransactionalPublisher
from broker.publishing.topic import TopicFacade, codec_key
from broker.publishing.transactions import open_transactional_publisher
from broker.reading.group_member import OnRevoking
from broker.reading.log_reader import LogReaderFacade
from broker.reading.options import RecordOptions
from broker.reading.record_consumer import RecordConsumer
from broker.registry import read_target

if TYPE_CHECKING:  # pydantic is loaded with the backend, by those who connect
    from broker.driver.settings import BackendSettings

__all__ = ["Bus", "Health", "connect"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Health:
    """The answer of `bus.health()`."""

    ok: bool
    seconds: float | None
    detail: str


def connect(target: str | BackendSettings | None = None) -> Bus:
    """Choose a broker: `async with connect("nats://localhost:4222") as bus:`. No I/O before the block.

    :param target: a URL, a settings object of a backend, or None for the environment variable BROKER_URL.
    :raises UnknownScheme, UnknownSetting, InvalidSetting, MissingClient: what is wrong and how to mend it.
    """
    backend_type, settings = read_target(target)
    hooks = Hooks()
    return Bus(backend_type(settings, hooks), hooks, url=settings.url)


class Bus:
    """One connection to one broker.

    :ivar hooks: where observers of this bus register.
    :ivar url: the URL it was made from, with secrets masked; only the scheme if it was made from settings.
    """

    def __init__(self, backend: Backend, hooks: Hooks, *, url: str = "") -> None:
        self.hooks = hooks
        self.url = url
        self._backend = backend
        self._opening = asyncio.Lock()
        self._opened = False
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._topics: dict[tuple[str, object], TopicFacade[Any]] = {}
        self._admin = AdminFacade(self)
        self._log: LogReaderFacade | None = None
        self._consumer_factory = ConsumerFactory(self, backend)
        # An open consumer is held by who opened it; one that nobody opened is nobody's to close.
        self._consumers: WeakSet[MessageConsumer[Any] | RecordConsumer[Any]] = WeakSet()

    # -- life --------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect; `async with` does it.

        :raises ConnectionFailed: the server cannot be reached.
        :raises AuthenticationFailed: it refused the credentials.
        """
        self._check_not_closing()
        async with self._opening:
            if not self._opened:
                try:
                    await self._backend.open()
                except BaseException:
                    await self._backend.close()
                    raise
                self._opened = True

    async def close(self) -> None:
        """Close consumers, which lets running handlers end; then flush and close topics; then disconnect.

        Consumers are closed side by side, each within its `close_timeout`, and handlers may still publish meanwhile.
        Cancelling the caller does not stop it; a second call waits for the first. A handler that calls it goes on.

        :raises PublishError: something enqueued was not published and nobody looked at its future.
        """
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

    async def health(self) -> Health:
        """One round trip to the server; never raises a BrokerError."""
        try:
            self._check_open()
            seconds = await self._backend.check_health()
        except BrokerError as error:
            return Health(False, None, str(error))
        return Health(True, seconds, f"{self.capabilities.backend} answered in {seconds * 1000:.1f} ms")

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._opened else "not open"
        return f"<Bus {self.url or self.capabilities.backend}, {state}>"

    @property
    def capabilities(self) -> Capabilities:
        """What this broker can do."""
        return self._backend.capabilities

    @property
    def backend(self) -> Backend:
        """The backend itself, for what only it can do."""
        return self._backend

    # -- publishing --------------------------------------------------------------------------------------

    @overload
    def topic(self, name: str) -> TopicFacade[bytes]: ...
    @overload
    def topic(self, name: str, codec: Codec[T]) -> TopicFacade[T]: ...
    def topic(self, name: str, codec: Codec[Any] | None = None) -> TopicFacade[Any]:
        """A topic to publish to, without I/O; a missing one shows at the first publish.

        The same object for the same name and an equal codec until it is closed, at the latest with the bus. A codec
        of your own that is made for each call needs `__eq__` and `__hash__`, or each has a topic of its own.

        :raises InvalidName: the name is not portable.
        :raises ConfigurationError: the codec is none.
        """
        check_name(name, "topic")
        key = (name, codec_key(codec))
        topic = self._topics.get(key)
        if topic is None or topic.closed:
            check_codec(codec)
            topic = TopicFacade(name, partial(self._target, name), codec, self.capabilities, self.hooks)
            self._topics[key] = topic
        return topic

    def transactional_publisher(self, transactional_id: str) -> AbstractAsyncContextManager[TransactionalPublisher]:
        """A publisher whose transactions carry this id; opening it fences an older one of the same id.

        :raises Unsupported: the broker has no transactions.
        """
        if not self.capabilities.publish.transactions:
            raise self._unsupported("transactions", "publish.transactions")
        return open_transactional_publisher(
            transactional_id, self._backend, self.capabilities, self.hooks, self._check_open
        )

    # -- consuming ---------------------------------------------------------------------------------------

    @overload
    def messages(
        self, topics: str | Sequence[str], *, subscription: str | Ephemeral, **options: Unpack[MessageOptions]
    ) -> MessageConsumer[bytes]: ...
    @overload
    def messages(
        self,
        topics: str | Sequence[str],
        *,
        subscription: str | Ephemeral,
        codec: Codec[T],
        **options: Unpack[MessageOptions],
    ) -> MessageConsumer[T]: ...
    def messages(
        self,
        topics: str | Sequence[str],
        *,
        subscription: str | Ephemeral,
        codec: Codec[Any] | None = None,
        retry: Retry | None = None,
        retry_topics: RetryTopics | None = None,
        dead_letter: str | Drop | None = None,
        ordered_by_key: bool = False,
        start: Start = "earliest",
        create: bool = True,
        max_outstanding: int = 1000,
        max_outstanding_bytes: int = 64 * 1024 * 1024,
        prefetch: int | None = None,
        max_lease: float = 3600.0,
        confirm_acks: bool | None = None,
        stop_when_idle: float | None = None,
        close_timeout: float = 30.0,
        blocked_after: float = 30.0,
    ) -> MessageConsumer[Any]:
        """A consumer of individually settled messages; opened by `async with`, without I/O before.

        :param topics: one or several; `max_outstanding` is shared evenly between them.
        :param subscription: consumers of one subscription share its messages; each subscription gets all.
            It persists after the close; `ephemeral()` gives this consumer one of its own.
        :param retry: what happens when a handler raises; `Retry()` if None.
        :param retry_topics: where messages that failed wait for their next try, durably; these topics must exist.
        :param dead_letter: the topic for exhausted, rejected and undecodable messages, which must exist; `DROP`
            acknowledges them; None brings them back at the longest backoff.
        :param ordered_by_key: messages of a key are handed over one after the other, keys in parallel; the next one
            follows when the last is settled and its handler has ended.
        :param start: where a new subscription begins: "earliest", "latest" or a time.
        :param create: create a missing subscription; False raises SubscriptionNotFound at open.
        :param max_outstanding: the most messages fetched and not settled, buffered ones included.
        :param max_outstanding_bytes: likewise in bytes; may be exceeded by one message.
        :param prefetch: bounds the buffer below `max_outstanding`; it holds about two seconds of work in any case.
        :param max_lease: seconds from hand-over for which a message's lease is renewed.
        :param confirm_acks: have the broker answer acks; None takes what it does at no extra price.
        :param stop_when_idle: end after so many seconds in which nothing came and nothing was unsettled.
        :param close_timeout: seconds that running handlers get when the consumer closes or fails.
        :param blocked_after: seconds without room to fetch after which a warning names what was forgotten unsettled.
        :raises ConfigurationError: a name or an option cannot be used.
        :raises Unsupported: the broker cannot honour an option.
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
        self, topics: str | Sequence[str], *, group: str | Ephemeral, **options: Unpack[RecordOptions]
    ) -> RecordConsumer[bytes]: ...
    @overload
    def records(
        self,
        topics: str | Sequence[str],
        *,
        group: str | Ephemeral,
        codec: Codec[T],
        **options: Unpack[RecordOptions],
    ) -> RecordConsumer[T]: ...
    def records(
        self,
        topics: str | Sequence[str],
        *,
        group: str | Ephemeral,
        codec: Codec[Any] | None = None,
        start: Start = "earliest",
        isolation: Literal["read_committed", "read_uncommitted"] = "read_committed",
        on_decode_error: str = "raise",
        on_revoking: OnRevoking | None = None,
        max_buffered: int = 10_000,
        stop_when_idle: float | None = None,
        close_timeout: float = 30.0,
    ) -> RecordConsumer[Any]:
        """A consumer of an ordered, partitioned log; opened by `async with`, without I/O before.

        :param group: its members share the partitions; its committed positions persist.
        :param start: where a group without a committed position begins.
        :param isolation: whether records of open and aborted transactions are seen.
        :param on_decode_error: "raise", or the name of a topic to which undecodable records are dead-lettered.
        :param on_revoking: awaited with the partitions that are about to be given up, while what was handed over of
            them can still be committed; cut off at the broker's deadline.
        :param max_buffered: the most records held ready.
        :raises ConfigurationError: a name or an option cannot be used.
        :raises Unsupported: the broker has no log, or cannot honour an option.
        """
        self._check_not_closing()
        check_start(start)
        names = check_topics(topics)
        family = self._record_family()
        if not isinstance(group, Ephemeral):
            check_name(group, "group")
        if not isinstance(start, str) and not family.start_time:
            raise self._unsupported("a start time for records", "records.start_time")
        wanted = RecordSubscription(topics=names, group=group, start=start, isolation=isolation)
        consumer: RecordConsumer[Any] = RecordConsumer(
            self._backend,
            wanted,
            hooks=self.hooks,
            codec=codec,
            on_decode_error=on_decode_error,
            on_revoking=on_revoking,
            max_buffered=max_buffered,
            stop_when_idle=stop_when_idle,
            close_timeout=close_timeout,
            make_messages=self._make_over,
        )
        self._remember(consumer)
        return consumer

    @property
    def log(self) -> LogReaderFacade:
        """Reads of a topic's log without a group.

        :raises Unsupported: the broker has no log that can be read so.
        """
        if not self._record_family().log_reader:
            raise self._unsupported("reading the log", "records.log_reader")
        if self._log is None:
            self._log = LogReaderFacade(self._backend.log_reader(), self._record_family())
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

    def _remember(self, consumer: MessageConsumer[Any] | RecordConsumer[Any]) -> None:
        self._consumers.add(consumer)

    def _target(self, name: str) -> Any:
        self._check_open()
        return self._backend.publish_target(name)

    def _check_not_closing(self) -> None:
        if self._closing is not None:
            raise Closed("The bus is closed", advice="Make a new one with connect(...)")

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("The bus is closed", advice="Make a new one with connect(...)")
        if not self._opened:
            raise Closed("The bus is not open", advice="Use it as `async with connect(...) as bus:`")

    def _unsupported(self, what: str, capability: str) -> Unsupported:
        return unsupported(self.capabilities.backend, what, capability)
