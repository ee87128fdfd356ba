"""`connect` and `Bus` without `await`: one connection to one broker, on an event loop in a thread of its own.

*Concurrency.* A bus and all that it makes may be used from several threads, and from one that runs an event loop of
its own. Hooks, and callbacks of futures, run on the bus's loop: they return at once and make no blocking calls.

*Cancellation.* KeyboardInterrupt ends a waiting call and gives back what was not handed over.

*Processes.* A bus is for the process that opened it. It cannot be pickled, and in a forked child its calls raise
`Closed`: send the settings, or the URL, and connect there.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, overload

from typing_extensions import ParamSpec, TypeVar, Unpack

from broker import bus as asynchronous
from broker.blocking.admin import Admin
from broker.blocking.consumer import MessageConsumer
from broker.blocking.handler_threads import in_thread
from broker.blocking.log_reader import LogReader
from broker.blocking.portal import Portal
from broker.blocking.record_consumer import RecordConsumer
from broker.blocking.topic import Topic
from broker.blocking.transactions import TransactionalPublisher
from broker.capabilities import Capabilities
from broker.checks import check_callable
from broker.consuming.options import MessageOptions
from broker.driver.contract import TopicPartition
from broker.errors import ConfigurationError, PublishError
from broker.hooks import Hooks
from broker.names import Ephemeral
from broker.protocols import Codec
from broker.publishing.topic import codec_key
from broker.reading.options import AnyRecordOptions

if TYPE_CHECKING:
    from broker.driver.settings import BackendSettings

__all__ = ["Bus", "MessageOptions", "OnRevoking", "RecordOptions", "connect"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

OnRevoking = Callable[[Sequence[TopicPartition]], object]
"""Called with the partitions that are about to be given up."""


class RecordOptions(AnyRecordOptions, total=False):
    """The options of `bus.records(...)`, described at `broker.Bus.records`."""

    on_revoking: OnRevoking | None


def connect(target: str | BackendSettings | None = None) -> Bus:
    """Choose a broker: `with broker.blocking.connect("nats://localhost:4222") as bus:`. No I/O before the block.

    :param target: a URL, a settings object of a backend, or None for the environment variable BROKER_URL.
    :raises UnknownScheme, UnknownSetting, InvalidSetting, MissingClient: what is wrong and how to mend it.
    """
    return Bus(asynchronous.connect(target))


class Bus:
    """One connection to one broker.

    :ivar hooks: where observers of this bus register.
    :ivar url: the URL it was made from, with secrets masked; only the scheme if it was made from settings.
    """

    def __init__(self, bus: asynchronous.Bus) -> None:
        self.hooks: Hooks = bus.hooks
        self.url: str = bus.url
        self._bus = bus
        self._portal = Portal()
        self._lock = threading.Lock()
        self._topics: dict[tuple[str, object], Topic[Any]] = {}

    # -- life --------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect; `with` does it.

        :raises ConnectionFailed: the server cannot be reached.
        :raises AuthenticationFailed: it refused the credentials.
        :raises Closed: it was closed before.
        """
        with self._lock:
            started = not self._portal.running
            if started:
                self._portal.start()
            try:
                self._portal.call(self._bus.open)
            except BaseException:
                if started:
                    self._portal.stop()
                raise

    def close(self) -> None:
        """Close consumers, flush and close topics, disconnect, end the thread. May be called twice.

        :raises PublishError: something enqueued was not published and nobody looked at its future.
        """
        if not self._portal.running:
            return
        try:
            self._portal.call(self._bus.close)
        finally:
            self._portal.stop()
        failures: list[PublishError] = []
        for topic in self._topics.values():
            try:
                topic.raise_failures()
            except PublishError as error:
                failures.append(error)
        if failures:
            raise PublishError([outcome for error in failures for outcome in error.outcomes])

    def __repr__(self) -> str:
        return repr(self._bus)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("A bus cannot be pickled: send its settings object, or its URL, and connect there")

    def health(self) -> asynchronous.Health:
        """One round trip to the server; raises only `Closed`, where the bus is not open."""
        return self._portal.call(self._bus.health)

    def call(self, function: Callable[P, Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs) -> R:
        """Await a coroutine function on the bus's loop, for what only asynchronous code can do there.

        :raises Closed: the bus is not open.
        """
        return self._portal.call(function, *args, **kwargs)

    @property
    def capabilities(self) -> Capabilities:
        """What this broker can do."""
        return self._bus.capabilities

    # -- publishing --------------------------------------------------------------------------------------

    @overload
    def topic(self, name: str) -> Topic[bytes]: ...
    @overload
    def topic(self, name: str, codec: Codec[T]) -> Topic[T]: ...
    def topic(self, name: str, codec: Codec[Any] | None = None) -> Topic[Any]:
        """A topic to publish to, without I/O; a missing one shows at the first publish.

        The same object for the same name and an equal codec until it is closed, at the latest with the bus.

        :raises InvalidName: the name is not portable.
        :raises Closed: the bus is not open.
        """
        key = (name, codec_key(codec))
        topic = self._topics.get(key)
        if topic is None or topic.closed:
            with self._lock:
                topic = self._topics.get(key)
                if topic is None or topic.closed:
                    topic = self._topics[key] = Topic(self._made("topic", name, codec), self._portal)
        return topic

    def transactional_publisher(self, transactional_id: str) -> TransactionalPublisher:
        """A publisher whose transactions carry this id; opening it fences an older one of the same id.

        :raises Unsupported: the broker has no transactions.
        """
        publisher = self._portal.run(self._bus.transactional_publisher, transactional_id)
        return TransactionalPublisher(publisher, self._portal)

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
        **options: Unpack[MessageOptions],
    ) -> MessageConsumer[Any]:
        """A consumer of individually settled messages; opened by `with`, without I/O before.

        :param topics: one or several; `max_outstanding` is shared evenly between them.
        :param subscription: consumers of one subscription share its messages; each subscription gets all.
            It persists after the close; `ephemeral()` gives this consumer one of its own.
        :param options: as for `broker.Bus.messages`.
        :raises ConfigurationError: a name or an option cannot be used.
        :raises Unsupported: the broker cannot honour an option.
        :raises Closed: the bus is not open.
        """
        consumer = self._made("messages", topics, subscription=subscription, codec=codec, **options)
        return MessageConsumer(consumer, self._portal, self.hooks)

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
        **options: Unpack[RecordOptions],
    ) -> RecordConsumer[Any]:
        """A consumer of an ordered, partitioned log; opened by `with`, without I/O before.

        :param group: its members share the partitions; its committed positions persist.
        :param options: as for `broker.Bus.records`; `on_revoking` is called in a thread, and may commit there.
        :raises ConfigurationError: a name or an option cannot be used.
        :raises Unsupported: the broker has no log, or cannot honour an option.
        :raises Closed: the bus is not open.
        """
        inner: dict[str, Any] = {**options}
        if (on_revoking := options.get("on_revoking")) is not None:
            check_callable("on_revoking", on_revoking)
            if inspect.iscoroutinefunction(on_revoking):
                raise ConfigurationError(
                    "on_revoking is a coroutine function", advice="Use a plain function here, or broker.connect"
                )
            inner["on_revoking"] = in_thread(on_revoking)
        consumer = self._made("records", topics, group=group, codec=codec, **inner)
        return RecordConsumer(consumer, self._portal, self.hooks)

    @cached_property
    def log(self) -> LogReader:
        """Reads of a topic's log without a group.

        :raises Unsupported: the broker has no log that can be read so.
        """
        return LogReader(self._bus.log, self._portal)

    @cached_property
    def admin(self) -> Admin:
        """Provisioning and operations."""
        return Admin(self._bus.admin, self._portal)

    def _made(self, maker: str, *args: Any, **options: Any) -> Any:
        """What the asynchronous bus makes, made on its own loop."""
        return self._portal.run(getattr(self._bus, maker), *args, **options)
