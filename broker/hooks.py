"""Events and interceptors, for logs, metrics and tracing. Without listeners an event costs one truth test.

Callbacks run on the event loop, synchronously, and must return at once. The bus logs and swallows their exceptions.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self

from broker.checks import check_accepts, is_async
from broker.errors import ConfigurationError
from broker.receipts import Receipt, count_duplicates

if TYPE_CHECKING:
    from broker.exposition import Histogram, Series
    from broker.messages import Message
    from broker.outbound import OutboundMessage

__all__ = [
    "Connected",
    "DeadLetterFailed",
    "DeadLettered",
    "Disconnected",
    "Event",
    "FetchFailed",
    "FlowBlocked",
    "HandedOver",
    "HandlerFailed",
    "Hooks",
    "InFlightMessages",
    "LeaseExpired",
    "LeasesNotRenewed",
    "MetricsSource",
    "NoDeadLetter",
    "Origin",
    "PartitionsAssigned",
    "PartitionsLost",
    "PartitionsRevoked",
    "PositionReset",
    "PositionsCommitted",
    "PublishCall",
    "Published",
    "Received",
    "RecordsReceived",
    "RetryScheduled",
    "RetryWriteFailed",
    "Scope",
    "SettleFailed",
    "Settled",
    "Warned",
    "WritesFailed",
    "publishing_as",
]

logger = logging.getLogger("broker")

_DECORATE: Final = "Decorate a plain function with contextlib.contextmanager"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base class of all events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected(Event):
    """The connection is up; `again` after it broke."""

    server: str
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected(Event):
    """The connection broke and is being restored."""

    server: str
    error: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WritesFailed(Event):
    """The broker cannot store messages any more; `error` says where and why."""

    server: str
    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFailed(Event):
    """A fetch failed with a retriable error; the consumer repeats it after `pause` seconds."""

    topic: str
    error: BaseException
    pause: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Published(Event):
    """A call to publish ended; `outcomes` has a `Receipt`, an error, or None (without receipts) for each message."""

    topic: str
    outcomes: Sequence[Receipt | BaseException | None]
    seconds: float

    @property
    def duplicates(self) -> int:
        """The number of messages that the broker dropped, because it already had their ids."""
        return count_duplicates(self.outcomes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received(Event):
    """Messages arrived: one event per fetch, and one for each message that is retried from the consumer's memory.

    :ivar topic: the topic of the consumer; all its topics, if it serves the records of a group as messages.
    :ivar subscription: what is consumed; None for a group.
    :ivar group: the consumer group whose records are served as messages; else None.
    :ivar bytes: size of the messages that the broker sent; 0 for a retry from memory.
    """

    topic: str
    messages: Sequence[Message[Any]]
    bytes: int
    subscription: str | None = None
    group: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver(Event):
    """`next_message`, `next_batch` or an iteration returned messages to the application; handlers cause none.

    :ivar topic: as in `Received`, like `subscription` and `group`.
    :ivar seconds: how long the call took, its wait included.
    """

    topic: str
    messages: Sequence[Message[Any]]
    seconds: float
    subscription: str | None = None
    group: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsReceived(Event):
    """Records were fetched; one event per topic and fetch."""

    topic: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionsCommitted(Event):
    """The broker stored positions of a group; one event per commit.

    :ivar positions: the next offset to read, by topic and partition.
    """

    positions: Mapping[tuple[str, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerFailed(Event):
    """A handler, or an `async with message` block, raised."""

    message: Message[Any]
    error: BaseException
    failures: int
    """How often the message has failed in this consumer, this time included."""
    retry_in: float | None
    """Seconds until redelivery; None if the message is given up for good, or was settled or lost before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled(Event):
    """Messages were settled; one event per batch. A refused settlement is a `SettleFailed` instead.

    :ivar topic: as in `Received`, like `subscription` and `group`.
    :ivar acked: messages that are not redelivered, including dead-lettered ones and those sent to a retry topic.
    :ivar nacked: messages that are redelivered after a delay, by the broker or from the consumer's memory.
    :ivar released: messages that were given back unhandled.
    :ivar handled: the acked messages that a handler or the application acked.
    :ivar seconds: how long the broker took to settle them.
    """

    topic: str
    acked: int = 0
    nacked: int = 0
    released: int = 0
    handled: Sequence[Message[Any]] = ()
    seconds: float = 0.0
    subscription: str | None = None
    group: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleFailed(Event):
    """A settlement that no call awaits was refused, or got no answer."""

    message: Message[Any]
    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseExpired(Event):
    """The consumer lost a message, because `max_lease` passed or the broker revoked it."""

    message: Message[Any]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesNotRenewed(Event):
    """Leases could not be renewed and may end; the consumer tries again after a third of a lease."""

    messages: Sequence[Message[Any]]
    error: BaseException
    """The error of the first message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLettered(Event):
    """A message was written to the dead-letter topic, or dropped by `DROP` (`target` is None)."""

    message: Message[Any]
    target: str | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterFailed(Event):
    """Writing a dead letter failed; the consumer repeats it after `pause` seconds and does not ack the message."""

    message: Message[Any]
    target: str
    error: BaseException
    pause: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NoDeadLetter(Event):
    """A message is exhausted, rejected or undecodable, and its consumer has no `dead_letter`: it comes again.

    :ivar retry_in: seconds until redelivery.
    """

    message: Message[Any]
    reason: str
    retry_in: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryScheduled(Event):
    """A message was written to a retry topic, where it waits for at least `delay` seconds."""

    message: Message[Any]
    target: str
    delay: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryWriteFailed(Event):
    """Writing to a retry topic failed; the consumer repeats it after `pause` seconds and does not ack the message."""

    message: Message[Any]
    target: str
    error: BaseException
    pause: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowBlocked(Event):
    """Nothing is fetched, because too many messages are unsettled; `oldest` are those held longest."""

    outstanding: int
    oldest: Sequence[Message[Any]]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsAssigned(Event):
    """Partitions were assigned to this member; `current` is its whole assignment."""

    partitions: Sequence[tuple[str, int]]
    current: Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsRevoked(Event):
    """Partitions are being revoked; reported before the member releases them."""

    partitions: Sequence[tuple[str, int]]
    current: Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsLost(Event):
    """Partitions went to another member before this one could release them."""

    partitions: Sequence[tuple[str, int]]
    current: Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionReset(Event):
    """The log did not hold a group's position, and reading continues elsewhere: records may be lost.

    :ivar policy: "earliest" or "latest", as configured.
    """

    partition: tuple[str, int]
    position: int
    to: int
    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned(Event):
    """Any other warning for an operator."""

    text: str


Origin = Literal["application", "dead_letter", "retry", "redrive", "relay"]
"""Who publishes: the application, a consumer that gives up or retries a message, a redrive, or a copy between topics.
"""

_origin: Final[ContextVar[Origin]] = ContextVar("origin", default="application")


@contextmanager
def publishing_as(origin: Origin) -> Generator[None]:
    """Give the calls within the block this origin (`PublishCall.origin`)."""
    token = _origin.set(origin)
    try:
        yield
    finally:
        _origin.reset(token)


class Scope:
    """The context managers of interceptors around one piece of work. Their failures are logged.

    One list instead of an `ExitStack`, which would cost more than most interceptors.
    """

    __slots__ = ("_entered", "_subject", "_what")

    def __init__(
        self, interceptors: Sequence[Callable[[Any], AbstractContextManager[object]]], subject: object, what: str
    ) -> None:
        """Enter the context manager of each interceptor.

        :param subject: what they are called with.
        :param what: the work, for the log.
        """
        self._entered: list[AbstractContextManager[object]] = []
        self._subject = subject
        self._what = what
        for interceptor in tuple(interceptors):
            try:
                manager = interceptor(subject)
                manager.__enter__()
            except Exception:
                # A failing interceptor must not stop the work.
                logger.exception("An interceptor failed before %s %s", what, _shown(subject))
            else:
                self._entered.append(manager)

    def leave(self, error: BaseException | None = None) -> None:
        """Leave them, with the error of the work, which each may hide from those before."""
        while self._entered:
            manager = self._entered.pop()
            try:
                if manager.__exit__(
                    None if error is None else type(error), error, None if error is None else error.__traceback__
                ):
                    error = None
            except Exception as raised:
                if raised is not error:
                    logger.exception("An interceptor failed after %s %s", self._what, _shown(self._subject))


def _shown(subject: Any) -> str:
    """What a scope is around, without the bodies of messages."""
    if isinstance(subject, PublishCall):
        return f"to topic {subject.topic!r}"
    return f"message {subject.id!r}" if hasattr(subject, "id") else f"{len(subject)} messages"


class PublishCall:
    """One call that publishes, for `Hooks.around_publishing`.

    :ivar topic: where to.
    :ivar origin: who publishes.
    :ivar outcomes: of each message when the call has ended: a `Receipt`, an error, or None (without receipts). In a
        transaction a receipt does not mean that the transaction commits.
    """

    __slots__ = ("_messages", "_scope", "origin", "outcomes", "topic")

    def __init__(
        self,
        interceptors: Sequence[Callable[[PublishCall], AbstractContextManager[object]]],
        topic: str,
        messages: Sequence[OutboundMessage],
    ) -> None:
        """Call the interceptors. Use the call as a context manager, and set `outcomes` within."""
        self.topic = topic
        self.origin: Origin = _origin.get()
        self.outcomes: Sequence[Receipt | BaseException | None] = ()
        self._messages = messages
        self._scope = Scope(interceptors, self, "publishing")

    @property
    def messages(self) -> Sequence[OutboundMessage]:
        """What is sent. An interceptor may set as many other messages before it yields.

        :raises ValueError: these are more or fewer messages.
        """
        return self._messages

    @messages.setter
    def messages(self, messages: Sequence[OutboundMessage]) -> None:
        if len(messages) != len(self._messages):
            raise ValueError(f"{len(self._messages)} messages became {len(messages)}")
        self._messages = messages

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.end(self.outcomes if error is None else [error] * len(self._messages))

    def end(self, outcomes: Sequence[Receipt | BaseException | None]) -> None:
        """Leave the interceptors with these outcomes."""
        self.outcomes = outcomes
        self._scope.leave()


class InFlightMessages(Protocol):
    """The fetched and unsettled messages of one source of a consumer; may be read from any thread."""

    @property
    def topic(self) -> str:
        """As in `Received`."""
        ...

    @property
    def count(self) -> int: ...
    @property
    def bytes(self) -> int: ...


class MetricsSource(Protocol):
    """Metrics of something that uses a bus, for the `Metrics` of that bus."""

    @property
    def help(self) -> Mapping[str, str]:
        """The description of each metric by name."""
        ...

    def read(self) -> Mapping[Series, float | Histogram]:
        """The metrics as of now; may be called from any thread. Names that end in `_total` only grow."""
        ...


class Hooks:
    """The listeners and interceptors of a bus.

    Test `hooks.listening` before building an event: without listeners no event is needed, except `Connected` and
    `Disconnected`, which set `connected`.

    :ivar hears_publishes: whether a listener hears `Published`.
    :ivar connected: False from `Disconnected` to the next `Connected`.
    :ivar raises: for tests: whether an error of a handler or an `async with message` block is raised to the caller of
        `receive`, or out of the block, instead of being settled by the retry policy. None never raises.
    """

    __slots__ = (
        "_batches",
        "_handling",
        "_in_flight",
        "_listeners",
        "_metrics",
        "_publishing",
        "connected",
        "hears_publishes",
        "listening",
        "raises",
    )

    def __init__(self) -> None:
        self._listeners: list[tuple[Callable[[Event], object], tuple[type[Event], ...] | None]] = []
        self._publishing: list[Callable[[PublishCall], AbstractContextManager[object]]] = []
        self._handling: list[Callable[[Message[Any]], AbstractContextManager[object]]] = []
        self._batches: list[Callable[[Sequence[Message[Any]]], AbstractContextManager[object]]] = []
        self._in_flight: list[InFlightMessages] = []
        self._metrics: list[MetricsSource] = []
        self.connected = True
        self.listening = self.hears_publishes = False
        self.raises: Callable[[Exception], bool] | None = None

    def listen(
        self, listener: Callable[[Event], object], *, kinds: tuple[type[Event], ...] | None = None
    ) -> Callable[[], None]:
        """Call `listener` with every event, or those of some kinds; returns the function that removes it.

        :raises ConfigurationError: the listener cannot be called with an event, or is a coroutine function.
        """
        check_accepts("listener", listener, "an event")
        _check_plain("listener", listener, "Pass a plain function; it may start a task")
        entry = (listener, kinds)
        self._listeners.append(entry)
        self._heard()

        def remove() -> None:
            self._listeners.remove(entry)
            self._heard()

        return remove

    def _heard(self) -> None:
        self.listening = bool(self._listeners)
        self.hears_publishes = any(kinds is None or Published in kinds for _, kinds in self._listeners)

    def around_publishing(
        self, interceptor: Callable[[PublishCall], AbstractContextManager[object]]
    ) -> Callable[[], None]:
        """Enter the context manager `interceptor(call)` around every call that publishes.

        Before it yields, it may replace `call.messages`, for instance to add trace headers. It is left when each
        message has its outcome, without an exception, and for `enqueue` in another context than it was entered in: set
        no context variables. If it fails, this is logged, and the messages are sent as they are. Returns the function
        that removes the interceptor.

        :raises ConfigurationError: the interceptor cannot be called with a `PublishCall`, or is asynchronous.
        """
        check_accepts("interceptor", interceptor, "a PublishCall")
        _check_plain("interceptor", interceptor, _DECORATE)
        self._publishing.append(interceptor)
        return lambda: self._publishing.remove(interceptor)

    def around_handling(
        self, interceptor: Callable[[Message[Any]], AbstractContextManager[object]]
    ) -> Callable[[], None]:
        """Enter the context manager `interceptor(message)` around every handler of single messages, and every `async
        with message` block.

        If it fails, this is logged, and the message is handled all the same. Returns the function that removes the
        interceptor.

        :raises ConfigurationError: the interceptor cannot be called with a message, or is asynchronous.
        """
        check_accepts("interceptor", interceptor, "a message")
        _check_plain("interceptor", interceptor, _DECORATE)
        self._handling.append(interceptor)
        return lambda: self._handling.remove(interceptor)

    def around_batch(
        self, interceptor: Callable[[Sequence[Message[Any]]], AbstractContextManager[object]]
    ) -> Callable[[], None]:
        """Enter the context manager `interceptor(messages)` around every call of a batch handler.

        If it fails, this is logged, and the batch is handled all the same. Returns the function that removes the
        interceptor.

        :raises ConfigurationError: the interceptor cannot be called with messages, or is asynchronous.
        """
        check_accepts("interceptor", interceptor, "messages")
        _check_plain("interceptor", interceptor, _DECORATE)
        self._batches.append(interceptor)
        return lambda: self._batches.remove(interceptor)

    def show_in_flight(self, messages: InFlightMessages) -> Callable[[], None]:
        """Show the messages that a consumer holds in `in_flight`; returns the function that removes them."""
        self._in_flight.append(messages)
        return lambda: self._in_flight.remove(messages)

    @property
    def in_flight(self) -> Sequence[InFlightMessages]:
        """The messages that open consumers hold, one entry for each source; may be read from any thread."""
        return tuple(self._in_flight)

    def show_metrics(self, source: MetricsSource) -> Callable[[], None]:
        """Show metrics in `metrics_sources`; returns the function that removes them."""
        self._metrics.append(source)
        return lambda: self._metrics.remove(source)

    @property
    def metrics_sources(self) -> Sequence[MetricsSource]:
        """What has metrics of its own, such as processors of streams; may be read from any thread."""
        return tuple(self._metrics)

    @property
    def publishing(self) -> Sequence[Callable[[PublishCall], AbstractContextManager[object]]]:
        return self._publishing

    @property
    def handling(self) -> Sequence[Callable[[Message[Any]], AbstractContextManager[object]]]:
        return self._handling

    @property
    def batches(self) -> Sequence[Callable[[Sequence[Message[Any]]], AbstractContextManager[object]]]:
        return self._batches

    def emit(self, event: Event) -> None:
        """Call every listener with the event."""
        if isinstance(event, Disconnected):
            self.connected = False
        elif isinstance(event, Connected):
            self.connected = True
        for listener, kinds in tuple(self._listeners):
            if kinds is not None and type(event) not in kinds:
                continue
            try:
                listener(event)
            except Exception:
                logger.exception("A hook failed on %s", type(event).__name__)


def _check_plain(what: str, function: object, advice: str) -> None:
    """:raises ConfigurationError: what the function returns would have to be awaited."""
    # `asynccontextmanager` wraps a generator function.
    if is_async(function) or inspect.isasyncgenfunction(getattr(function, "__wrapped__", None)):
        raise ConfigurationError(f"The {what} is asynchronous, and {what}s are not awaited", advice=advice)
